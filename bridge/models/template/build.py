"""The parts of the new file's tensors: the template's tensors, or their matches in the checkpoint."""

import re
from dataclasses import replace

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.gguf_file.reader import StoredTensor
from bridge.gguf_file.tensor_names import without_block
from bridge.models.outline import Fold, OutlineTensor, Part
from bridge.models.template.matrices import Matrices, Run
from bridge.models.template.norms_and_biases import VectorMatch, Vectors
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile


class Builder:
    """The outcome of matching a template with a checkpoint. Raises BridgeError if they are not the same model.

    notes  a line for every tensor that is taken from the template
    """

    def __init__(self, ckpt: Checkpoint, file: GGUFFile) -> None:
        self.ckpt, self.file = ckpt, file
        self._matrices = Matrices(ckpt, file)
        self._matrices.find()
        vectors = Vectors(self._matrices)
        vectors.find()
        self._runs, self._vectors = self._matrices.runs, vectors.matches
        self._all, self._used = self._matrices.all, self._matrices.used
        self.notes: list[str] = []

    def tensors(self) -> list[OutlineTensor]:
        """The new file's tensors in the template's order; those copied from the template get a note."""
        tensors = []
        for name, tensor in self.file.items():
            if name in self._runs:
                parts = tuple(self._matrix(run, tensor.shape[-1]) for run in self._runs[name])
                fixed = "F16" if self._runs[name][0].transposed else None if quantizable(tensor) else "F32"
                tensors.append(OutlineTensor(name, tensor.shape, parts, fixed_type=fixed))
            elif name in self._vectors:
                tensors.append(self._vector(tensor, self._vectors[name]))
            else:
                tensors.append(from_template(tensor))
                reason = self._matrices.reasons.get(name, "no tensor of the checkpoint is this one")
                self.notes.append(f"{name}: taken from the template as {tensor.type}, {reason}")
        return tensors

    def _matrix(self, run: Run, columns: int) -> Part:
        owner = run.owner
        if run.transposed:
            shape, stored = (owner.shape[1], len(run.rows)), owner.shape[::-1]
            return Part(owner.source, shape, columns=run.rows, stored=stored, change="transposed")
        part = _part(owner.source, (len(run.rows), columns), run.rows, (owner.shape[0], columns))
        if part.stored is not None and self._rest_is_zero(run, columns):
            part = Part(part.source, part.shape)
        return replace(part, columns=run.columns, matrix=owner.matrix, change=owner.change)

    def _vector(self, tensor: QuantTensor, match: VectorMatch) -> OutlineTensor:
        if match.offset:
            stored = self.ckpt.read_float(match.parts[0][0].source) + np.float32(match.offset)
            values = np.ascontiguousarray(stored.reshape(tensor.shape), np.float32)
            return OutlineTensor(tensor.name, tensor.shape, data=values, fixed_type="F32")
        parts = [_part(owner.source, rows.shape, rows, (int(np.prod(owner.shape)),)) for owner, rows in match.parts]
        if len(parts) == 1 and parts[0].rows is None:
            parts = [Part(parts[0].source, match.parts[0][0].shape, change=match.change)]  # GGUF has some as columns
        return OutlineTensor(tensor.name, tensor.shape, tuple(parts), fixed_type="F32")

    def _rest_is_zero(self, run: Run, columns: int) -> bool:
        """Whether the rows are the first ones in order, and all others are padding."""
        n = len(run.rows)
        if not np.array_equal(run.rows, np.arange(n)):
            return False
        matrix = self._matrices.of_checkpoint(run.owner, columns)
        return not any(matrix.read(max(a, n), b).any() for a, b in matrix.chunks() if b > n)

    def folds(self) -> list[Fold]:
        """Where act-order of ffn_down can be undone by permuting the rows of the matrices before it."""
        folds = []
        for name, downs in self._runs.items():
            kind = without_block(name)
            if kind == name or kind not in ("ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight"):
                continue
            before = [f"{name.removesuffix(kind)}{kind.replace('ffn_down', part)}" for part in ("ffn_gate", "ffn_up")]
            before = [other for other in before if other in self.file]
            if not self._foldable(name, before):
                continue
            for i, down in enumerate(downs):
                producers = [self._runs[other][i].owner for other in before]
                if down.owner.module and down.columns is None and all(p.module or len(p.shape) == 2 for p in producers):
                    names = tuple(p.source.removesuffix(".weight") for p in producers)
                    folds.append(Fold(down.owner.module, names))
        return folds

    def _foldable(self, down: str, before: list[str]) -> bool:
        """Whether only the rows of `before`, and their biases, depend on the order of ffn_down's columns."""
        inner, downs = self.file[down].shape[-1], self._runs[down]
        for other in before:
            runs = self._runs.get(other, [])
            in_order = all(np.array_equal(run.rows, np.arange(inner)) for run in runs)
            bias = other.removesuffix(".weight") + ".bias"
            if len(runs) != len(downs) or not in_order or (bias in self.file and bias not in self._vectors):
                return False
            if any(run.owner.shape[0] != inner for run in runs):
                return False
        prefix = down.rpartition("ffn_down")[0] + "ffn_"
        known = {f"{prefix}{n}" for n in ("norm.weight", "norm.bias", "gate_inp.weight", "gate_inp_shexp.weight")}
        known |= {other.removesuffix("weight") + "bias" for other in (*before, down)}
        vectors = {n for n, t in self.file.items() if n.startswith(prefix) and len(t.shape) < 2}
        return bool(before) and vectors <= known

    def unused(self) -> list[str]:
        """The checkpoint's tensors that are not in the new file, and not replaced by the template's either."""
        used = {*self.biases_without_place(), *(c.source for c in self._used)}
        from_template = self.file.keys() - self._runs.keys() - self._vectors.keys()
        return sorted({c.source for c in self._all if c.source not in used and c.name not in from_template})

    def biases_without_place(self) -> list[str]:
        """Biases that the template lacks although it has their matrix: they must be zero."""
        return [
            c.source for c in self._all
            if c not in self._used and c.source.endswith(".bias") and c.name is not None
            and c.name not in self.file and c.name.removesuffix("bias") + "weight" in self.file
        ]  # fmt: skip


def from_template(tensor: QuantTensor) -> OutlineTensor:
    """A tensor copied from the template."""
    return OutlineTensor(tensor.name, tensor.shape, data=tensor.raw, origin="template", fixed_type=tensor.type)


def _part(source: str, shape: tuple[int, ...], rows: np.ndarray, stored: tuple[int, ...]) -> Part:
    """Rows of a tensor whose stored shape is `stored`."""
    if np.array_equal(rows, np.arange(stored[0])):
        return Part(source, shape)
    return Part(source, shape, rows, stored=None if len(rows) == stored[0] else stored)


def quantizable(tensor: QuantTensor | StoredTensor) -> bool:
    """Whether llama.cpp's quantizer would quantize it: the exceptions of llama_tensor_get_type.

    A tensor that the converter left in F32 has its reason; in an all-F32 template only usual matrices are quantized.
    """
    kind = tensor.name.rpartition("blk.")[2]
    linear = re.search(r"(^|\.)(token_embd|output|attn_|ffn_)", kind) is not None
    return (
        len(tensor.shape) in (2, 3) and tensor.shape[0] > 1 and tensor.name.endswith(".weight")
        and "_norm" not in kind and "ffn_gate_inp" not in kind and (linear or tensor.type != "F32")
    )  # fmt: skip
