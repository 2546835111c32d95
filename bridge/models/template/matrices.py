"""Finds a template's matrices in the checkpoint.

They are searched by name first. The rest of a layer is searched by rows among the rest of the layer's modules, which
finds q, k and v in one matrix, gate and up in one, and the reverse. Where the rows of a name are in order but the
columns are not (Qwen3.5's linear_attn.out_proj, whose inputs the converter deals anew), these are searched.

Multi-head latent attention (DeepSeek): kv_b_proj has k's and v's rows of one head after another. The converter makes
them attn_v_b [heads, v, rank], whose rows are found, and attn_k_b [heads, rank, k], each head's transposed: its columns
are found, and it becomes F16, for it cannot carry codes.
"""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.errors import BridgeError
from bridge.gguf_file.tensor_names import block_of
from bridge.models.config.rope import interleaved_rows
from bridge.models.template.match import LazyMatrix, find_columns, find_in_several, find_rows, rounding_of
from bridge.models.template.names import Candidate, candidates
from bridge.models.template.template_file import number
from bridge.runtime.cpu.engines import dequantize
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile
from bridge.system.cpu.cpus import usable_cpus

# of the checkpoint's floats
_FLOAT_ROUNDING = {
    "F32": 1e-6, "F16": 1e-6, "BF16": 1e-5, "F8_E4M3": 5e-3, "F8_E5M2": 2e-2, "F8_E4M3FNUZ": 5e-3, "F8_E5M2FNUZ": 2e-2,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Rows of one tensor of the checkpoint that follow each other in the template, where they may be columns."""

    owner: Candidate
    rows: np.ndarray  # int64
    scaled: bool = False
    columns: np.ndarray | None = None  # int64, where the template has them in another order
    transposed: bool = False


class Matrices:
    """The matching of one template's matrices with one checkpoint; `find` does it.

    all      the checkpoint's tensors
    named    those that the name map knows, by their GGUF name
    runs     the rows of each matrix that was found, by GGUF name; experts or transposed heads one after another
    used     the checkpoint's tensors that are in `runs`
    reasons  why a tensor of the template is not the checkpoint's of its name
    """

    def __init__(self, ckpt: Checkpoint, file: GGUFFile) -> None:
        self.ckpt, self.file = ckpt, file
        heads = number(file, "attention.head_count", 0)
        self._heads = (heads, number(file, "attention.head_count_kv", heads))
        self.all = candidates(ckpt, file.arch, number(file, "block_count"), file, number(file, "expert_count", 0))
        self.named: dict[str, list[Candidate]] = {}
        for candidate in self.all:
            self.named.setdefault(candidate.name or "", []).append(candidate)
        self.runs: dict[str, list[Run]] = {}
        self.used: set[Candidate] = set()
        self.reasons: dict[str, str] = {}

    def find(self) -> None:
        """Match everything. Raises BridgeError if the two are not the same model."""
        self._check_vocabulary()
        wanted = [t for t in self.file.values() if is_matrix(t)]
        with ThreadPoolExecutor(max_workers=usable_cpus(), thread_name_prefix="match") as pool:
            for tensor, runs in zip(wanted, pool.map(self._by_name, wanted), strict=True):
                self._record(tensor, runs)
            used = set(self.used)
            left = [t for t in wanted if t.name not in self.runs]
            for tensor, runs in zip(left, pool.map(lambda t: self._by_rows(t, used), left), strict=True):
                self._record(tensor, runs)
        self._check_modules()

    def _record(self, tensor: QuantTensor, runs: list[Run] | None) -> None:
        if runs is not None:
            self.runs[tensor.name] = runs
            self.used.update(run.owner for run in runs)

    def _by_name(self, tensor: QuantTensor) -> list[Run] | None:
        """The tensor's rows, or those of its experts, in the candidates of its name; None if they are not there."""
        offered = self.named.get(tensor.name, [])
        matrices = [candidate for candidate in offered if len(candidate.shape) == 2]
        if len(tensor.shape) == 2:
            if (run := self._find_first(tensor, [c for c in matrices if c.expert is None])) is not None:
                return [run]
            for candidate in offered:
                if candidate.shape == tensor.shape and block_of(tensor.name) is not None:
                    match = find_columns(_of_template(tensor), self.of_checkpoint(candidate, tensor.shape[1]))
                    if match is not None:
                        return [Run(candidate, np.arange(tensor.shape[0]), match.scaled, match.order)]
            if offered:
                self.reasons[tensor.name] = self._difference(tensor, offered[0])
            return None
        runs = []
        for expert in range(tensor.shape[0]):
            matrix, experts = tensor[expert], [c for c in matrices if c.expert == expert]
            if (run := self._find_first(matrix, experts)) is None:
                if experts:
                    self.reasons[tensor.name] = self._difference(matrix, experts[0])
                return None
            runs.append(run)
        return runs

    def _find_first(self, tensor: QuantTensor, pool: Iterable[Candidate]) -> Run | None:
        """The rows of a matrix in the first candidate that has them all."""
        return next((run for candidate in pool if (run := self._find_in(tensor, candidate)) is not None), None)

    def _find_in(self, tensor: QuantTensor, candidate: Candidate) -> Run | None:
        rows, columns = tensor.shape
        if candidate.shape[0] < rows or candidate.shape[1] < columns:
            return None
        match = find_rows(_of_template(tensor), self.of_checkpoint(candidate, columns), self._orders(rows, candidate))
        return None if match is None else Run(candidate, match.order, match.scaled)

    def _by_rows(self, tensor: QuantTensor, used: set[Candidate]) -> list[Run] | None:
        """The tensor's rows among all matrices of its layer that are not taken; each expert's among that expert's."""
        layer = block_of(tensor.name)
        columns = tensor.shape[-1]
        left = [c for c in self.all if c not in used and c.layer == layer and len(c.shape) == 2]
        free = [c for c in left if c.shape[1] == columns]
        if len(tensor.shape) == 2:
            return self._in_pool(tensor, [c for c in free if c.expert is None])
        runs: list[Run] = []
        for expert in range(tensor.shape[0]):
            more = self._in_pool(tensor[expert], [c for c in free if c.expert == expert])
            if more is None:
                return self._by_head(tensor, [c for c in left if c.expert is None])
            runs += more
        return runs

    def _by_head(self, tensor: QuantTensor, pool: Sequence[Candidate]) -> list[Run] | None:
        """The rows of a stack whose matrices, or their transposes, are parts of the heads of one matrix."""
        heads, rows, columns = tensor.shape
        for transposed in (False, True):
            size, width = (columns, rows) if transposed else (rows, columns)
            for candidate in pool:
                if candidate.shape[1] != width or candidate.shape[0] < heads * size:
                    continue
                matrix = self.of_checkpoint(candidate, width)
                template = _transposed(tensor) if transposed else _of_template(tensor)
                match = find_rows(template, matrix, _rows_of_heads(heads, size, candidate.shape[0]))
                if match is not None and transposed:
                    by_head = np.split(match.order, heads)
                    return [Run(candidate, head, match.scaled, transposed=True) for head in by_head]
                if match is not None:
                    return [Run(candidate, match.order, match.scaled)]
        return None

    def _in_pool(self, tensor: QuantTensor, pool: Sequence[Candidate]) -> list[Run] | None:
        template = _of_template(tensor)
        matrices = [self.of_checkpoint(candidate, tensor.shape[1]) for candidate in pool]
        for candidate, matrix in zip(pool, matrices, strict=True):
            match = find_rows(template, matrix, self._orders(tensor.shape[0], candidate))
            if match is not None:
                return [Run(candidate, match.order, match.scaled)]
        several = find_in_several(template, matrices) if len(pool) > 1 else None
        return None if several is None else [Run(pool[which], rows) for which, rows in several]

    def _orders(self, rows: int, candidate: Candidate) -> list[np.ndarray]:
        """The orders of q's and k's rows in llama's GGUF, and the last rows: up's in a matrix of gate and up."""
        orders = [interleaved_rows(n, rows // n) for n in dict.fromkeys(self._heads) if n and rows % (2 * n) == 0]
        return [*orders, *([np.arange(candidate.shape[0] - rows, candidate.shape[0])] * (candidate.shape[0] > rows))]

    def of_checkpoint(self, candidate: Candidate, columns: int) -> LazyMatrix:
        """The first `columns` columns of a candidate; the others are padding, which is checked when it is read."""
        rows = candidate.shape[0]
        if candidate.module is not None:
            t = self.ckpt.read_module(candidate.module)
            return LazyMatrix(
                (rows, columns),
                lambda a, b: t.dequantize(slice(a, b))[:, :columns],
                lambda order: t.take_rows(order).dequantize()[:, :columns],
                noise=t.noise() / math.prod(t.shape),
            )
        rounding = _FLOAT_ROUNDING.get(self.ckpt.tensors[candidate.source].dtype, 1e-6)
        if candidate.matrix is not None:
            (held,) = self.ckpt.read_float(candidate.source, (candidate.matrix, candidate.matrix + 1))
            held = held.T if candidate.change == "transposed" else held
            return LazyMatrix((rows, columns), lambda a, b: held[a:b, :columns], rounding=rounding)

        def read(start: int, stop: int) -> np.ndarray:
            stored = self.ckpt.read_float(candidate.source, (start, stop))
            return stored.reshape(stop - start, -1)[:, :columns]

        return LazyMatrix((rows, columns), read, rounding=rounding)

    def _difference(self, tensor: QuantTensor, candidate: Candidate) -> str:
        """The reason why a candidate of the right name is not the tensor."""
        shape = tuple(tensor.shape)
        if candidate.shape != shape:
            if candidate.shape == shape[::-1]:
                return f"{candidate.source} is stored transposed"
            return f"{candidate.source} has shape {list(candidate.shape)}, not {list(shape)}"
        rows = min(shape[0], 64)
        t = tensor.rows(np.arange(rows))
        w = self.of_checkpoint(candidate, shape[1]).read(0, rows)
        error, signal = (float(np.square(x, dtype=np.float64).sum()) for x in (t - w, t))
        share = error / max(signal, 1e-30)
        return f"its values are not those of {candidate.source} (NMSE {share:.1g})"

    def _check_vocabulary(self) -> None:
        """Refuse embeddings with another number of rows: the vocabulary differs."""
        wanted = self.file["token_embd.weight"].shape
        for candidate in self.named.get("token_embd.weight", []):
            if candidate.shape[0] < wanted[0] or candidate.shape[1:] != wanted[1:]:
                raise BridgeError(
                    f"{self.file.path}: token_embd.weight is {list(wanted)}, but {candidate.source} "
                    f"{list(candidate.shape)}; give a template with the checkpoint's vocabulary"
                )

    def _check_modules(self) -> None:
        """Refuse a template of another model, and one that lacks a tensor."""
        matrices = [c for c in self.all if len(c.shape) == 2 and min(c.shape) > 1]
        wanted = [c for c in matrices if c.module is not None] or matrices
        used = {(c.source, c.matrix) for c in self.used}
        lost = [c for c in wanted if (c.source, c.matrix) not in used]
        if 2 * len(lost) > len(wanted):
            first = next((r for r in self.reasons.values()), f"{lost[0].source} is not in it")
            raise BridgeError(
                f"{self.file.path}: {len(lost)} of {len(wanted)} matrices of {self.ckpt.path} are not in this template "
                f"({first}); give a GGUF of the same model"
            )
        for candidate in lost:
            if candidate.module is not None and candidate.name is not None and candidate.name not in self.file:
                raise BridgeError(
                    f"{self.file.path}: {candidate.name}, the counterpart of {candidate.source}, is missing, and no "
                    "other tensor has its rows; make the template again"
                )


def is_matrix(tensor: QuantTensor) -> bool:
    """Whether a tensor of the template is a matrix, or a stack of them."""
    return len(tensor.shape) in (2, 3) and tensor.shape[0] > 1


def _of_template(tensor: QuantTensor) -> LazyMatrix:
    """A matrix, or a stack's matrices one after another."""
    *outer, columns = tensor.shape
    rows = math.prod(outer)
    raw = tensor.raw.reshape(rows, -1)

    def values(which: slice | np.ndarray) -> np.ndarray:
        return dequantize.rows(tensor.type, raw[which])

    return LazyMatrix((rows, columns), lambda a, b: values(slice(a, b)), values, rounding=rounding_of(tensor.type))


def _transposed(stack: QuantTensor) -> LazyMatrix:
    """A stack's matrices, each transposed, one after another."""
    values = stack.dequantize().swapaxes(1, 2).reshape(-1, stack.shape[1])
    return LazyMatrix(values.shape, lambda a, b: values[a:b], rounding=rounding_of(stack.type))


def _rows_of_heads(heads: int, size: int, rows: int) -> list[np.ndarray]:
    """int64 [heads * size] each: the first and the last `size` rows of each head of a matrix."""
    each = rows // heads
    if rows % heads or each < size:
        return []
    ends = [np.arange(size), np.arange(each - size, each)]
    return [(each * np.arange(heads)[:, None] + end).reshape(-1) for end in ends]
