"""One tensor of the GGUF from the checkpoint's: rows and columns in the GGUF's order, codes or floats mapped.

Act-order of a fold's consumer (down_proj) is undone by permuting its columns and the rows of its producers
(gate_proj, up_proj) alike; architectures that permute rows of their own do so on top.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.errors import BridgeError
from bridge.models import ModelSpec, TensorSpec
from bridge.recipe import Recipe, TensorPlace, block_type
from bridge.report import AS_IS, CARRIED, FLOAT, ROUNDED, TensorReport

if TYPE_CHECKING:
    from bridge.checkpoint.grouped import GroupedTensor
    from bridge.mapping.carry import Mapped

_CHUNK_WEIGHTS = 1 << 22  # float rows quantized at a time
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
        widths = {str(t.source).removesuffix(".weight"): t.shape[-1] for t in self.spec.tensors}
        for fold in self.spec.folds:
            group = self.ckpt.group_order(fold.consumer) if fold.consumer in self.ckpt.modules else None
            if group is not None:
                # columns beyond the model's true width are padding, and will be cropped
                order = np.argsort(group[: widths[fold.consumer]], kind="stable")
                self._column_orders[fold.consumer] = order
                for producer in fold.producers:
                    self._row_orders[producer] = order
        for tensor in self.spec.tensors:
            self._check_shape(tensor)
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
        """All tensors in order, made by worker threads a few ahead of the consumer."""
        workers = threads or usable_cpus()
        pending: deque[Future[Result]] = deque()
        todo = iter(self.spec.tensors)
        with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="convert") as pool:
            try:
                for tensor in todo:
                    pending.append(pool.submit(self.make, tensor))
                    if len(pending) > workers + 1:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()

    def make(self, tensor: TensorSpec) -> Result:
        """Read and map one tensor."""
        if tensor.source is None:
            assert tensor.data is not None
            data = np.ascontiguousarray(tensor.data, np.float32)
            return Result(data, TensorReport(tensor.name, None, tensor.kind, "F32", tensor.shape, data.nbytes, AS_IS))
        module = tensor.source.removesuffix(".weight")
        if module in self.ckpt.modules and tensor.source != module:
            return self._from_codes(tensor, module)
        return self._from_floats(tensor)

    def source_bytes(self, tensor: TensorSpec) -> int:
        """Bytes of the tensor in the checkpoint."""
        if tensor.source is None:
            return 0
        module = tensor.source.removesuffix(".weight")
        if module in self.ckpt.modules and tensor.source != module:
            return self.ckpt.modules[module].nbytes
        return self.ckpt.tensors[tensor.source].nbytes

    def grouped(self, tensor: TensorSpec, module: str) -> GroupedTensor:
        """The tensor's codes with rows and columns as the GGUF has them."""
        t = self.ckpt.read_module(module)
        out, columns = tensor.shape
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
        columns = self._column_orders.get(tensor.source.removesuffix(".weight"))
        if len(tensor.shape) == 1 or order is not None:
            whole = self._cropped(self.ckpt.read_float(tensor.source), tensor)
            yield whole if order is None else whole[order]
            return
        assert columns is None  # only codes have act-order
        stored, step = self.ckpt.tensors[tensor.source].shape[0], max(1, _CHUNK_WEIGHTS // tensor.shape[1])
        for start in range(0, stored, step):
            rows = (start, min(start + step, stored))
            part = self._cropped(self.ckpt.read_float(tensor.source, rows), tensor, start)
            if len(part):
                yield part

    def _cropped(self, x: np.ndarray, tensor: TensorSpec, start: int = 0) -> np.ndarray:
        """Finite rows of a float tensor from `start` on, without zero padding beyond the model's true shape."""
        inner = tuple(slice(size) for size in (max(0, tensor.shape[0] - start), *tensor.shape[1:]))
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
        """Shape in the checkpoint, and the file."""
        module = str(tensor.source).removesuffix(".weight")
        if module in self.ckpt.modules and tensor.source != module:
            info = self.ckpt.modules[module]
            return info.shape, info.file
        plain = self.ckpt.tensors[str(tensor.source)]
        return plain.shape, plain.file

    def _check_shape(self, tensor: TensorSpec) -> None:
        """Refuse a tensor that is smaller than the config makes it. A larger one may be padded with zeros."""
        if tensor.source is not None:
            shape, _ = self._stored(tensor)
            if len(shape) != len(tensor.shape) or any(a < b for a, b in zip(shape, tensor.shape, strict=True)):
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
        return TensorPlace(tensor.name, tensor.kind, tensor.layer, spec.n_layers, gqa, tensor.shape[-1], tied)

    def _column_importance(self, tensor: TensorSpec) -> np.ndarray | None:
        if not self.importance:
            return None
        from bridge.mapping.imatrix import for_tensor

        importance = for_tensor(self.importance, tensor.name, tensor.shape[1])
        if importance is None:
            return None
        order = self._column_orders.get(str(tensor.source).removesuffix(".weight"))
        return importance if order is None else importance[order]

    def _from_codes(self, tensor: TensorSpec, module: str) -> Result:
        from bridge.mapping import choose

        t = self.grouped(tensor, module)
        importance = self._column_importance(tensor)
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
        data = _as_float(exact, name, tensor.name)
        error = float(np.square(_float_value(data, name) - exact, dtype=np.float64).sum())
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
        if block is None:
            data = np.concatenate([_as_float(x, name, tensor.name) for x in self.floats(tensor)])
            report = TensorReport(tensor.name, tensor.source, tensor.kind, name, tensor.shape, data.nbytes, AS_IS)
            return Result(data, report)
        from bridge.mapping.carry import Fidelity
        from bridge.mapping.floats import quantize_rows
        from bridge.mapping.pack import row_bytes

        importance = self._column_importance(tensor)
        data = np.empty((tensor.shape[0], row_bytes(block, tensor.shape[1])), np.uint8)
        done, error, signal = 0, 0.0, 0.0
        for x in self.floats(tensor):
            part = quantize_rows(x, block, importance)
            data[done : done + len(x)] = part.data
            done += len(x)
            error += part.error
            signal += part.signal
        fidelity = Fidelity(tensor.shape[0] * tensor.shape[1], error, signal, 0.0, 0)
        report = TensorReport(tensor.name, tensor.source, tensor.kind, name, tensor.shape, data.nbytes, FLOAT, fidelity)
        return Result(data, report)


def _as_float(x: np.ndarray, name: str, tensor: str) -> np.ndarray:
    """float32 as F32, F16 or BF16 (uint16 bits, rounded to nearest even)."""
    if name != "BF16":
        with np.errstate(over="ignore"):
            data = x.astype(_FLOAT_DTYPES[name])
        if name == "F16" and not np.isfinite(data).all():
            raise BridgeError(f"{tensor}: has values beyond half precision's 65504; choose BF16 or F32 for it")
        return data
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _float_value(data: np.ndarray, name: str) -> np.ndarray:
    """The inverse of `_as_float`."""
    return (data.astype(np.uint32) << 16).view(np.float32) if name == "BF16" else data.astype(np.float32)


def usable_cpus() -> int:
    """The CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
