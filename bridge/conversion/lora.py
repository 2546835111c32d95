"""A PEFT adapter as a GGUF for llama.cpp (`--lora`), in the row orders of the files that `convert` makes.

    blk.0.attn_q.weight.lora_a    float32 [r, in]
    blk.0.attn_q.weight.lora_b    float32 [out, r]      y += adapter.lora.alpha / r * b (a x)
    token_embd.weight.lora_a      float32 [vocab, r]    x += adapter.lora.alpha / r * b a[token]
    token_embd.weight.lora_b      float32 [hidden, r]

Rows of b are those of q and k as GGUF rotates them, and of gate and up in the order that undoes act-order in down; that
order is also of the columns of down's a. Stacks of experts have a third dimension. Other scales than alpha / r (rsLoRA,
alpha_pattern) are multiplied into b. A matrix that replaces the base's is a change of full rank.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.adapter import Adapter, LowRank, TokenRows, read_adapter
from bridge.checkpoint.files.hub import open_by_name
from bridge.conversion.adapter_experts import place_experts
from bridge.conversion.paths import with_checkpoint
from bridge.conversion.planning.checkpoint_outline import outline_of
from bridge.conversion.planning.part_reader import PartReader
from bridge.errors import BridgeError, parameter
from bridge.models.outline import OutlineTensor, Part, tied
from bridge.system.options import checked
from bridge.system.storage.files import disk_errors, put_in_place, sync_folder
from bridge.system.storage.folder_locks import temporary_beside
from bridge.system.storage.outputs import NOTHING, check_outputs

Pair = tuple[np.ndarray, np.ndarray]  # a [r, in] and b [out, r], or stacks of them


@checked
def convert_lora(
    adapter: str | Path,
    out: str | Path,
    *,
    base: str | Path,
    config: str | Path | None = None,
    template: str | Path | None = None,
    force: bool = False,
) -> list[str]:
    """Convert a PEFT adapter (LoRA) to a GGUF for the file that `convert` makes of its base checkpoint.

    adapter   the folder with adapter_config.json and adapter_model.safetensors
    out       the GGUF to write
    base      the checkpoint that the adapter was trained on, quantized or not: a folder, a Hub id, a .pt
    config    the folder with the config.json and tokenizer of a bare .pt
    template  the GGUF that `convert` was given for an architecture that is not known here
    force     whether a file of that name may be replaced

    The file holds float32 a [r, in] and b [out, r] for each changed matrix, with y += alpha / r * b (a x).

    Returns the names of the tensors of the model that it changes. Raises BridgeError for an adapter that is damaged,
    of another model, or that llama.cpp cannot apply: DoRA, norms, biases, tied embeddings, and tokens that the base
    model does not have. `convert` merges these.
    """
    path = Path(out)
    read = read_adapter(adapter)
    files = NOTHING.with_files(read.files)
    check_outputs([path], force, files)
    with open_by_name(base, config, needs_config=template is None) as ckpt:
        protected = with_checkpoint(files, ckpt)
        check_outputs([path], force, protected)
        outline = outline_of(ckpt, template=template)
        names = {*ckpt.tensors, *(f"{module}.weight" for module in ckpt.modules)}
        pairs = _Pairs(ckpt, place_experts(read, outline.tensors).of(names), tied(outline.tensors)).of(outline.tensors)
        arch = outline.metadata["general.architecture"].value
    _write(path, arch, read.config.alpha, pairs)
    return list(pairs)


class _Pairs:
    """The matrices of an adapter for the tensors of a GGUF."""

    def __init__(self, ckpt: Checkpoint, adapter: Adapter, tied_head: bool) -> None:
        self._adapter, self._reader, self._ckpt = adapter, PartReader(ckpt), ckpt
        self._tied = tied_head
        self._used: set[str] = set()

    def of(self, tensors: list[OutlineTensor]) -> dict[str, Pair]:
        """name of the tensor -> a and b; BridgeError if a change has no place."""
        factors = {t.name: t for t in tensors if t.name.endswith(".scale")}
        pairs = {}
        for tensor in tensors:
            if (pair := self._tensor(tensor)) is not None:
                a, b = pair
                if (factor := factors.get(f"{tensor.name.removesuffix('.weight')}.scale")) is not None:
                    (values,) = self._reader.floats(factor.parts[0])  # llama.cpp multiplies by it before the change
                    b = b * values[:, None, None]
                pairs[tensor.name] = a, b
        for name in (*self._adapter.changes, *self._adapter.saved, *self._adapter.tokens):
            if name not in self._used:
                raise self._refused(name, "has no tensor of its own in the GGUF")
        return pairs

    def _refused(self, name: str, why: str) -> BridgeError:
        return BridgeError(
            f"{self._adapter.path}: {name} {why}; llama.cpp cannot apply this to a model: convert the base checkpoint "
            f"with {parameter('merge')} set to this folder"
        )

    def _tensor(self, tensor: OutlineTensor) -> Pair | None:
        changes = [self._part(part, tensor) for part in tensor.parts]
        if all(change is None for change in changes):
            return None
        embeddings = tensor.kind == "token_embd"
        if embeddings and self._tied:
            raise self._refused(tensor.parts[0].module, "is also the head of the base model")
        if len(tensor.shape) == 3:
            rank = max(change.a.shape[0] for change in changes if change is not None)
            each = [self._scaled(c, rank) if c is not None else None for c in changes]
            a, b = np.zeros((len(each), rank, tensor.shape[2])), np.zeros((len(each), tensor.shape[1], rank))
            for i, pair in enumerate(each):
                if pair is not None:
                    a[i, : len(pair[0])], b[i, :, : pair[1].shape[1]] = pair
            return a.astype(np.float32), b.astype(np.float32)
        # parts of a fused matrix have rows and ranks of their own
        rank = sum(change.a.shape[0] for change in changes if change is not None)
        a, b = np.zeros((rank, tensor.shape[1]), np.float32), np.zeros((tensor.shape[0], rank), np.float32)
        row = start = 0
        for part, change in zip(tensor.parts, changes, strict=True):
            if change is not None:
                part_a, part_b = self._scaled(change, rank)
                a[start : start + len(part_a)], b[row : row + len(part_b), start : start + len(part_a)] = part_a, part_b
                start += len(part_a)
            row += part.shape[0]
        return (b, np.ascontiguousarray(a.T)) if embeddings else (a, b)

    def _scaled(self, change: LowRank, rank: int) -> Pair:
        """a and b for llama.cpp's scale alpha / rank."""
        factor = change.scale * rank / self._adapter.config.alpha
        return change.a, change.b if abs(factor - 1) < 1e-9 else change.b * np.float32(factor)

    def _part(self, part: Part, tensor: OutlineTensor) -> LowRank | None:
        """The change of a part, rows and columns as in the GGUF."""
        stack = self._adapter.stacks.get(part.source)
        if stack is not None and part.matrix is not None:
            change = stack.matrices.get(part.matrix)
        else:
            change = self._adapter.changes.get(part.module)
        saved, tokens = self._adapter.saved.get(part.source), self._adapter.tokens.get(part.module)
        if change is None and saved is None and tokens is None:
            return None
        self._used |= {part.module, part.source}
        if len(tensor.shape) == 1 or not (part.change in (None, "conv1d") or stack is not None):
            raise self._refused(part.source, "is not a plain matrix of the GGUF")
        if change is not None and change.magnitude is not None:
            raise self._refused(part.module, "has rows of changed length (DoRA)")
        shape = part.stored or part.shape
        if change is not None and change.shape != shape:
            raise BridgeError(
                f"{self._adapter.path}: {part.module} is a change of shape {list(change.shape)}, the base checkpoint "
                f"has {list(shape)}; give the base model that the adapter was trained on"
            )
        if change is not None:
            change = replace(change, a=np.repeat(change.a, change.alike, axis=1), alike=1)
        if saved is not None or tokens is not None:
            change = self._replaced(part, saved, tokens, change)
        if change is None:
            return None
        rows, columns = self._ckpt.refit(part.module)
        a, b = (
            change.a if columns is None else change.a * columns,
            change.b if rows is None else change.b * rows[:, None],
        )
        b = b if part.factor is None else b * part.factor[:, None]
        a = a if part.columns is None else a[:, part.columns]
        b = b if part.rows is None else b[part.rows]
        return LowRank(np.ascontiguousarray(a), np.ascontiguousarray(b), change.scale)

    def _replaced(
        self, part: Part, saved: np.ndarray | None, tokens: TokenRows | None, change: LowRank | None
    ) -> LowRank | None:
        """The difference between the adapter's matrix, or its rows, and the base's, plus the adapter's own update."""
        shape = part.stored or part.shape
        count = max(len(saved) if saved is not None else 0, 1 + int(tokens.tokens.max()) if tokens is not None else 0)
        columns = saved.shape[1:] if saved is not None else tokens.values.shape[1:] if tokens is not None else ()
        if count > shape[0] and columns == shape[1:]:
            raise self._refused(part.source, f"has {count} rows, the base model {shape[0]}: tokens were added")
        if columns != shape[1:] or (saved is not None and saved.shape != shape):
            raise self._refused(part.source, f"has shape {[count, *columns]}, the base model {list(shape)}")
        if part.module in self._ckpt.modules:
            base = self._ckpt.read_module(part.module).dequantize()
            for factor, axis in zip(self._ckpt.refit(part.module), (1, 0), strict=True):
                base = base if factor is None else base / np.expand_dims(factor, axis)
        else:
            base = self._ckpt.read_float(part.source)
        base = base[: shape[0], : shape[1]]
        values = (base if saved is None else saved).copy()
        if tokens is not None:
            if change is not None:
                raise self._refused(part.source, "is changed by LoRA and by rows of tokens at once")
            values[tokens.tokens] = tokens.values
        difference = values - base
        changed = difference.any(1).nonzero()[0]
        if not len(changed):
            return change
        a, b = np.eye(shape[1], dtype=np.float32), difference
        if len(changed) < shape[1]:  # a row of the matrix for each row of a
            a, b = difference[changed], np.zeros((shape[0], len(changed)), np.float32)
            b[changed, np.arange(len(changed))] = 1
        if change is not None:
            a, b = np.concatenate([a, change.a]), np.concatenate([b, np.float32(change.scale) * change.b], 1)
        return LowRank(a, b, 1.0)


def _write(path: Path, arch: Any, alpha: float, pairs: dict[str, Pair]) -> None:
    """The adapter's GGUF, which appears whole or not at all."""
    with disk_errors(path, "the adapter", "output"), temporary_beside(path) as folder:
        writer = gguf.GGUFWriter(folder / path.name, arch)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
        for name, (a, b) in pairs.items():
            writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(a, np.float32))
            writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(b, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        put_in_place(folder / path.name, path)
        sync_folder(path.parent)
