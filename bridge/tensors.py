"""Tensors of the GGUF made from what source.py reads: codes carried or rounded anew, floats quantized."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bridge.cpus import usable_cpus
from bridge.errors import BridgeError
from bridge.models import TensorSpec
from bridge.recipe import Recipe, TensorPlace, block_type
from bridge.report import AS_IS, CARRIED, FLOAT, ROUNDED, TensorReport
from bridge.source import Source, source_name

if TYPE_CHECKING:
    from bridge.checkpoint.grouped import GroupedTensor
    from bridge.mapping.carry import Mapped

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

    source: Source
    recipe: Recipe
    importance: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors = self.source.spec.tensors
        unused = set(self.importance) - {t.name for t in tensors}
        if self.importance and len(unused) == len(self.importance):
            raise BridgeError("the imatrix names no tensor of this model; it was made for another one")
        names = [t.name for t in tensors if t.quantizable]
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
                for tensor in self.source.spec.tensors:
                    nbytes = self.source.nbytes(tensor)
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
        modules = [self.source.module_of(leaf) for leaf in tensor.leaves]
        if not any(modules):
            return self._from_floats(tensor)
        if tensor.parts:
            from bridge.stacks import make_stack

            return make_stack(self, tensor)
        return self._from_codes(tensor, str(modules[0]))

    def place(self, tensor: TensorSpec) -> TensorPlace:
        """Where a tensor stands in the model, for the recipe."""
        spec = self.source.spec
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
        order = self.source.column_order(tensor.leaves[part])
        return importance if order is None else importance[order]

    def _from_codes(self, tensor: TensorSpec, module: str) -> Result:
        from bridge.mapping import choose

        t = self.source.grouped(tensor, module)
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
        report.stored = self.source.ckpt.stored_as(str(tensor.leaves[0].source))
        if block is None:
            chunks = (x for leaf in tensor.leaves for x in self.source.floats(leaf))
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
            for x in self.source.floats(leaf):
                part = quantize_rows(x, block, importance)
                data[done : done + len(x)] = part.data
                done += len(x)
                error += part.error
                signal += part.signal
        report.nbytes, report.how = data.nbytes, FLOAT
        report.fidelity = Fidelity(rows * tensor.shape[-1], error, signal, 0.0, 0)
        return Result(data, report)


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
