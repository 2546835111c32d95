"""A tensor's codes or floats as the checkpoint has them, with rows and columns in the GGUF's order.

Act-order of a fold's consumer (down_proj) is undone by permuting its columns and the rows of its producers
(gate_proj, up_proj) alike; architectures that permute rows of their own do so on top.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.errors import BridgeError
from bridge.models import ModelSpec, TensorSpec

if TYPE_CHECKING:
    from bridge.checkpoint.grouped import GroupedTensor

_CHUNK_WEIGHTS = 1 << 22  # float rows read at a time


@dataclass
class Source:
    """The tensors of a model, read from its checkpoint. Raises BridgeError where the two are not of one shape."""

    ckpt: Checkpoint
    spec: ModelSpec

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

    def module_of(self, tensor: TensorSpec) -> str | None:
        """The quantized module that a tensor without parts is; None where the checkpoint has it as floats."""
        if tensor.source is None:
            return None
        module = tensor.source.removesuffix(".weight")
        return module if module in self.ckpt.modules and tensor.source != module else None

    def nbytes(self, tensor: TensorSpec) -> int:
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

    def carries(self, module: str) -> bool:
        """Whether a module's codes can be kept at all: no act-order, or one that is folded into other layers."""
        return module in self._column_orders or self.ckpt.group_order(module) is None

    def column_order(self, tensor: TensorSpec) -> np.ndarray | None:
        """GGUF column i is checkpoint column order[i]; None where they are the same."""
        return self._column_orders.get(str(tensor.source).removesuffix(".weight"))

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


def source_name(tensor: TensorSpec) -> str:
    """The tensor's name in the checkpoint; of experts, with * for their number."""
    names = [str(leaf.source) for leaf in tensor.leaves]
    return names[0] if len(names) == 1 else re.sub(r"\bexperts\.\d+", "experts.*", names[0])
