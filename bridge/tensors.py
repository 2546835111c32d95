"""One tensor of the GGUF from the checkpoint's: rows and columns in the GGUF's order, codes or floats mapped.

Act-order of a fold's consumer (down_proj) is undone by permuting its columns and the rows of its producers
(gate_proj, up_proj) alike; architectures that permute rows of their own do so on top.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.cpus import usable_cpus
from bridge.errors import BridgeError
from bridge.models import ModelSpec, TensorSpec
from bridge.recipe import Recipe, TensorPlace, block_type
from bridge.report import AS_IS, CARRIED, FLOAT, ROUNDED, TensorReport

if TYPE_CHECKING:
    from bridge.checkpoint.grouped import GroupedTensor
    from bridge.mapping.carry import Mapped

_CHUNK_WEIGHTS = 1 << 22  # float rows quantized at a time
_IN_FLIGHT = 1 << 29  # bytes of the checkpoint that are worked on at a time; one tensor may be larger
_FLOAT_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass
class Result:
    """One tensor, ready to be written."""

    data: np.ndarray
    report: TensorReport


@dataclass
class Conversion:
    """What it takes to make any one tensor of the GGUF; `results` makes them all."""

    ckpt: Checkpoint
    spec: ModelSpec
    recipe: Recipe
    importance: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._row_orders: dict[str, np.ndarray] = {}  # by module
        self._column_orders: dict[str, np.ndarray] = {}
        leaves = [leaf for t in self.spec.tensors for leaf in t.leaves]
        widths = {str(leaf.source).removesuffix(".weight"): leaf.shape[-1] for leaf in leaves}
        for fold in self.spec.folds:
            group = self.ckpt.group_order(fold.consumer) if fold.consumer in self.ckpt.modules else None
            if group is not None:
                # columns beyond the model's true width are padding, and will be cropped
                order = np.argsort(group[: widths[fold.consumer]], kind="stable")
                self._column_orders[fold.consumer] = order
                for producer in fold.producers:
                    self._row_orders[producer] = order
        for leaf in leaves:
            self._check_shape(leaf)
        unused = set(self.importance) - {t.name for t in self.spec.tensors}
        if self.importance and len(unused) == len(self.importance):
            raise BridgeError("the imatrix names no tensor of this model; it was made for another one")
        names = [t.name for t in self.spec.tensors if t.quantizable]
        for pattern, name in self.recipe.tensor_types:
            if not any(re.search(pattern, n) for n in names):
                raise BridgeError(
                    f"--tensor-type {pattern}={name}: matches no tensor that can be quantized; "
                    f"they are named as {names[0]}"
                )

    def results(self, threads: int | None = None) -> Iterator[Result]:
        """All tensors in order, made by worker threads a few ahead of the consumer, fewer where they are large."""
        workers = threads or usable_cpus()
        pending: deque[tuple[Future[Result], int]] = deque()
        with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="convert") as pool:
            try:
                for tensor in self.spec.tensors:
                    nbytes = self.source_bytes(tensor)
                    while pending and sum(n for _, n in pending) + nbytes > _IN_FLIGHT:
                        yield pending.popleft()[0].result()
                    pending.append((pool.submit(self.make, tensor), nbytes))
                    if len(pending) > workers + 1:
                        yield pending.popleft()[0].result()
                while pending:
                    yield pending.popleft()[0].result()
            finally:
                for future, _ in pending:
                    future.cancel()

    def make(self, tensor: TensorSpec) -> Result:
        """Read and map one tensor."""
        if tensor.type is not None:
            assert tensor.data is not None
            kept = TensorReport(
                tensor.name, None, tensor.kind, tensor.type, tensor.shape, tensor.data.nbytes, AS_IS
            )  # fmt: skip
            return Result(tensor.data, kept)
        if tensor.data is not None:
            data = np.ascontiguousarray(tensor.data, np.float32)
            return Result(data, TensorReport(tensor.name, None, tensor.kind, "F32", tensor.shape, data.nbytes, AS_IS))
        modules = [self.module_of(leaf) for leaf in tensor.leaves]
        if not any(modules):
            return self._from_floats(tensor)
        if tensor.parts:
            from bridge.stacks import make_stack

            return make_stack(self, tensor)
        return self._from_codes(tensor, str(modules[0]))

    def module_of(self, tensor: TensorSpec) -> str | None:
        """The quantized module that a tensor without parts is; None where the checkpoint has it as floats."""
        if tensor.source is None:
            return None
        module = tensor.source.removesuffix(".weight")
        return module if module in self.ckpt.modules and tensor.source != module else None

    def source_bytes(self, tensor: TensorSpec) -> int:
        """Bytes of the tensor in the checkpoint."""
        total = 0
        for leaf in tensor.leaves:
            if (module := self.module_of(leaf)) is not None:
                total += self.ckpt.modules[module].nbytes
            elif leaf.source is not None:
                info = self.ckpt.tensors[leaf.source]
                total += info.nbytes if leaf.matrix is None else info.nbytes // info.shape[0]
        return total

    def grouped(self, tensor: TensorSpec, module: str) -> GroupedTensor:
        """The tensor's codes with rows and columns as the GGUF has them."""
        t = self.ckpt.read_module(module)
        shape = tensor.stored or tensor.shape
        out, columns = shape if len(shape) == 2 else (1, *shape)
        if t.shape != (out, columns):
            weights = t.dequantize()
            if weights[out:].any() or weights[:, columns:].any():  # more than padding with zeros
                raise self._other_shape(tensor)
            t = t.crop(out, columns)
        if module in self._column_orders:
            t = t.take_columns(self._column_orders[module])
        order = self._order(tensor, module)
        return t if order is None else t.take_rows(order)

    def floats(self, tensor: TensorSpec) -> Iterator[np.ndarray]:
        """A float tensor's rows as the GGUF has them, in chunks of float32."""
        assert tensor.source is not None
        order = self._order(tensor, tensor.source.rpartition(".")[0])
        if tensor.matrix is not None or len(tensor.shape) == 1 or order is not None:
            whole = self._cropped(self._read_whole(tensor), tensor)
            yield whole if order is None else whole[order]
            return
        stored, step = self.ckpt.tensors[tensor.source].shape[0], max(1, _CHUNK_WEIGHTS // tensor.shape[1])
        for start in range(0, stored, step):
            rows = (start, min(start + step, stored))
            part = self._cropped(self.ckpt.read_float(tensor.source, rows), tensor, start)
            if len(part):
                yield part

    def _read_whole(self, tensor: TensorSpec) -> np.ndarray:
        """float32 of a tensor without parts as it is stored, of as many dimensions as it is to have."""
        rows = None if tensor.matrix is None else (tensor.matrix, tensor.matrix + 1)
        stored = self.ckpt.read_float(str(tensor.source), rows)
        return stored.reshape(stored.shape[stored.ndim - len(tensor.shape) :])

    def _cropped(self, x: np.ndarray, tensor: TensorSpec, start: int = 0) -> np.ndarray:
        """Finite rows of a float tensor from `start` on, without zero padding beyond the model's true shape."""
        rows, *columns = tensor.stored or tensor.shape
        inner = tuple(slice(size) for size in (max(0, rows - start), *columns))
        kept = np.ascontiguousarray(x[inner])
        if kept.shape != x.shape and np.count_nonzero(x) > np.count_nonzero(kept):
            raise self._other_shape(tensor)
        if not np.isfinite(kept).all():
            _, file = self._stored(tensor)
            raise BridgeError(
                f"{file}: {tensor.source} holds NaN or infinite values; the checkpoint is damaged, download it again"
            )
        return kept

    def _stored(self, tensor: TensorSpec) -> tuple[tuple[int, ...], Path]:
        """Shape in the checkpoint, and the file. A vector may be stored as a matrix of one row."""
        shape: tuple[int, ...]
        if (module := self.module_of(tensor)) is not None:
            shape, file = self.ckpt.modules[module].shape, self.ckpt.modules[module].file
        else:
            plain = self.ckpt.tensors[str(tensor.source)]
            shape, file = plain.shape if tensor.matrix is None else plain.shape[1:], plain.file
        return shape[1:] if len(tensor.shape) == 1 and shape[:1] == (1,) and len(shape) == 2 else shape, file

    def _check_shape(self, tensor: TensorSpec) -> None:
        """Refuse a tensor that is smaller than the config makes it. A larger one may be padded with zeros."""
        if tensor.source is not None:
            shape, _ = self._stored(tensor)
            expected = tensor.stored or tensor.shape
            if len(shape) != len(expected) or any(a < b for a, b in zip(shape, expected, strict=True)):
                raise self._other_shape(tensor)

    def _other_shape(self, tensor: TensorSpec) -> BridgeError:
        shape, file = self._stored(tensor)
        return BridgeError(
            f"{file}: {tensor.source} has shape {list(shape)} where config.json makes it {list(tensor.shape)}; "
            "config and weights are not of the same model"
        )

    def _order(self, tensor: TensorSpec, module: str) -> np.ndarray | None:
        """GGUF row i is checkpoint row order[i]: the fold's permutation, then the architecture's."""
        fold, arch = self._row_orders.get(module), tensor.row_order
        if fold is None or arch is None:
            return arch if fold is None else fold
        return fold[arch]

    def place(self, tensor: TensorSpec) -> TensorPlace:
        """Where a tensor stands in the model, for the recipe."""
        spec = self.spec
        gqa = spec.n_heads // spec.n_kv_heads
        tied = tensor.kind == "token_embd" and spec.tied
        columns = tensor.shape[-1]
        return TensorPlace(tensor.name, tensor.kind, tensor.layer, spec.n_layers, gqa, columns, tied, spec.experts)

    def column_importance(self, tensor: TensorSpec, part: int = 0) -> np.ndarray | None:
        """float32 [in] of a tensor, or of one of its parts, in the GGUF's order; None where there is no imatrix."""
        if not self.importance:
            return None
        from bridge.mapping.imatrix import for_tensor

        experts = tensor.shape[0] if len(tensor.shape) == 3 else 1
        importance = for_tensor(self.importance, tensor.name, tensor.shape[-1], experts)
        if importance is None:
            return None
        if experts > 1:
            importance = importance[part * experts // len(tensor.leaves)]
        order = self._column_orders.get(str(tensor.leaves[part].source).removesuffix(".weight"))
        return importance if order is None else importance[order]

    def carries(self, module: str) -> bool:
        """Whether a module's codes can be kept at all: no act-order, or one that is folded into other layers."""
        return module in self._column_orders or self.ckpt.group_order(module) is None

    def _from_codes(self, tensor: TensorSpec, module: str) -> Result:
        from bridge.mapping import choose

        t = self.grouped(tensor, module)
        if not tensor.quantizable:
            return self._dequantized(tensor, t, "F32", list(t.notes))
        importance = self.column_importance(tensor)
        wanted = self.recipe.wanted(self.place(tensor), as_codes=True, act_order=not t.sequential)
        notes = list(t.notes)
        mapped: Mapped | None = None
        if wanted.mode == "forced":
            block = block_type(str(wanted.type))
            if block is None:
                return self._dequantized(tensor, t, str(wanted.type), notes)
            mapped = choose.map_to(t, block, importance)
        elif wanted.mode == "exact":
            mapped = choose.carry_exact(t)
            if mapped is None:
                notes.append(f"{tensor.name}: no type holds it bit for bit; the type is auto's")
        if mapped is None:
            mapped = choose.map_auto(t, importance)
            limit = block_type(str(wanted.type)) if wanted.mode == "at_most" else None
            if limit and mapped.block.bpw > limit.bpw:
                mapped = choose.map_to(t, limit, importance)
        free = choose.exact_type(t) if mapped.fidelity.error else None
        if free and free.bpw > mapped.block.bpw:
            free = None
        how = CARRIED if mapped.fidelity.kept else ROUNDED
        report = TensorReport(
            tensor.name, tensor.source, tensor.kind, mapped.block.name, tensor.shape, mapped.data.nbytes, how,
            mapped.fidelity, free.name if free else None, notes,
        )  # fmt: skip
        return Result(mapped.data, report)

    def _dequantized(self, tensor: TensorSpec, t: GroupedTensor, name: str, notes: list[str]) -> Result:
        """Codes that are to be stored as floats."""
        from bridge.mapping.carry import Fidelity

        exact = t.dequantize()
        data = as_float(exact, name, tensor.name).reshape(tensor.shape)
        error = float(np.square(float_value(data, name) - exact.reshape(data.shape), dtype=np.float64).sum())
        signal = float(np.square(exact, dtype=np.float64).sum())
        fidelity = Fidelity(exact.size, error, signal, t.noise(), 0)
        report = TensorReport(
            tensor.name, tensor.source, tensor.kind, name, tensor.shape, data.nbytes, ROUNDED, fidelity, None, notes
        )
        return Result(data, report)

    def _from_floats(self, tensor: TensorSpec) -> Result:
        name = "F32"
        if tensor.quantizable:
            name = str(self.recipe.wanted(self.place(tensor), as_codes=False).type)
        block = block_type(name)
        report = TensorReport(tensor.name, source_name(tensor), tensor.kind, name, tensor.shape, 0, AS_IS)
        report.stored = self.ckpt.stored_as(str(tensor.leaves[0].source))
        if block is None:
            chunks = (x for leaf in tensor.leaves for x in self.floats(leaf))
            data = np.concatenate([as_float(x, name, tensor.name) for x in chunks])
            report.nbytes = data.nbytes
            return Result(data, report)
        from bridge.mapping.carry import Fidelity
        from bridge.mapping.floats import quantize_rows
        from bridge.mapping.pack import row_bytes

        rows = int(np.prod(tensor.shape[:-1]))
        data = np.empty((rows, row_bytes(block, tensor.shape[-1])), np.uint8)
        done, error, signal = 0, 0.0, 0.0
        for number, leaf in enumerate(tensor.leaves):
            importance = self.column_importance(tensor, number)
            for x in self.floats(leaf):
                part = quantize_rows(x, block, importance)
                data[done : done + len(x)] = part.data
                done += len(x)
                error += part.error
                signal += part.signal
        report.nbytes, report.how = data.nbytes, FLOAT
        report.fidelity = Fidelity(rows * tensor.shape[-1], error, signal, 0.0, 0)
        return Result(data, report)


def source_name(tensor: TensorSpec) -> str:
    """The tensor's name in the checkpoint; of experts, with * for their number."""
    names = [str(leaf.source) for leaf in tensor.leaves]
    return names[0] if len(names) == 1 else re.sub(r"\bexperts\.\d+", "experts.*", names[0])


def as_float(x: np.ndarray, name: str, tensor: str) -> np.ndarray:
    """float32 as F32, F16 or BF16 (uint16 bits, rounded to nearest even)."""
    if name != "BF16":
        with np.errstate(over="ignore"):
            data = x.astype(_FLOAT_DTYPES[name])
        if name == "F16" and not np.isfinite(data).all():
            raise BridgeError(f"{tensor}: has values beyond half precision's 65504; choose BF16 or F32 for it")
        return data
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def float_value(data: np.ndarray, name: str) -> np.ndarray:
    """The inverse of `as_float`."""
    return (data.astype(np.uint32) << 16).view(np.float32) if name == "BF16" else data.astype(np.float32)
