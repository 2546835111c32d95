"""Which kernel multiplies a tensor, and the objects that run it.

An engine has a `name` and `run(x, y, integer)`: x float32 [tokens, in], y float32 [tokens, rows], both
contiguous and of the right shape (QuantTensor sees to that); `integer` rounds x to int8 records first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from bridge.blocks import BLOCKS
from bridge.errors import BridgeError
from bridge.runtime import dequantize
from bridge.runtime.cpu import targets

if TYPE_CHECKING:
    from bridge.runtime.quant_tensor import QuantTensor

_TILE = 1 << 20  # weights dequantized at a time


class Engine(Protocol):
    """Multiplies one tensor."""

    name: str

    def run(self, x: np.ndarray, y: np.ndarray, integer: bool) -> None:
        """y = x W^T."""


class Dequantizing:
    """Tiles of rows become float32 and go through numpy's matrix product."""

    def __init__(self, tensor: QuantTensor):
        self.name = f"numpy/{tensor.type.lower()} dequantized"
        self.type = tensor.type
        self.raw = tensor.raw.reshape(tensor.shape[0], -1)
        self.step = max(1, _TILE // tensor.shape[1])

    def run(self, x: np.ndarray, y: np.ndarray, integer: bool) -> None:
        for start in range(0, self.raw.shape[0], self.step):
            tile = dequantize.rows(self.type, self.raw[start : start + self.step])
            y[:, start : start + self.step] = x @ tile.T


class RowMajor(Dequantizing):
    """The file's own blocks, unpacked as they are multiplied."""

    def __init__(self, tensor: QuantTensor):
        super().__init__(tensor)
        self.name = f"portable/{tensor.type.lower()} row-major"
        self.tensor = tensor.name

    def run(self, x: np.ndarray, y: np.ndarray, integer: bool) -> None:
        if not integer:
            return super().run(x, y, integer)
        from bridge.runtime.cpu import rowmajor
        from bridge.runtime.cpu.activations import records

        bad = rowmajor.dot(self.type)(self.raw, records(x, BLOCKS[self.type]), x.shape[0], y)
        if bad >= 0:
            raise BridgeError(f"{self.tensor}: the scales of row {bad} are not finite; the file is damaged")
        return None


def unprepared(tensor: QuantTensor) -> Engine:
    """The engine that needs no copy of the weights."""
    if tensor.type in BLOCKS:
        target = targets.chosen()
        if target == targets.PORTABLE:
            return RowMajor(tensor)
        from bridge.runtime.cpu.tiled import Tiled

        return Tiled(tensor, target)
    if tensor.type in ("F32", "F16", "BF16"):
        from bridge.runtime.cpu.floats import FloatRows

        return FloatRows(tensor)
    if tensor.type not in dequantize.FLOATS:
        from bridge.runtime.quant_tensor import warn_once

        warn_once(f"no kernel for {tensor.type}: such tensors are dequantized for every product, which is slow")
    return Dequantizing(tensor)


def prepare(tensor: QuantTensor) -> Engine:
    """The fastest engine of this machine, with its own copy of the weights."""
    if tensor.type in BLOCKS and (target := targets.chosen()) != targets.PORTABLE:
        from bridge.runtime.cpu.prepared import Prepared

        return Prepared(tensor, target)
    return unprepared(tensor)
