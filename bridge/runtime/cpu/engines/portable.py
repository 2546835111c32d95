"""The engines that every machine can run, and what an engine is.

`Dequantizing` needs nothing but dequantized rows, so it serves all types; `RowMajor` multiplies the file's own blocks.
"""

from typing import Protocol

import numpy as np

from bridge.blocks.read import READ
from bridge.errors import BridgeError
from bridge.runtime.cpu.engines import dequantize
from bridge.runtime.cpu.forms import rowmajor
from bridge.runtime.cpu.forms.activations import records
from bridge.system.kernels.jit import CFunction

_TILE = 1 << 20  # weights dequantized at a time


class RawMatrix(Protocol):
    """The matrix that an engine multiplies: a QuantTensor of two dimensions."""

    name: str
    type: str
    shape: tuple[int, ...]
    raw: np.ndarray


class Engine(Protocol):
    """Multiplies one matrix."""

    name: str

    def functions(self, tokens: int, integer: bool) -> list[CFunction]:
        """The C functions that a product of so many tokens calls."""

    def run(self, x: np.ndarray, y: np.ndarray, integer: bool) -> None:
        """y = x W^T: x float32 [tokens, in], y float32 [tokens, rows], both contiguous and of the right shape.

        `integer` rounds x to int8 records first.
        """


class Dequantizing:
    """Tiles of rows become float32 and go through numpy's matrix product."""

    def __init__(self, matrix: RawMatrix):
        self.name = f"numpy/{matrix.type.lower()} dequantized"
        self.type = matrix.type
        self.raw = matrix.raw.reshape(matrix.shape[0], -1)
        self.step = max(1, _TILE // matrix.shape[1])

    def functions(self, tokens: int, integer: bool) -> list[CFunction]:
        return [rowmajor.rows_function(self.type)] if self.type in READ else []

    def run(self, x: np.ndarray, y: np.ndarray, integer: bool) -> None:
        for start in range(0, self.raw.shape[0], self.step):
            tile = dequantize.rows(self.type, self.raw[start : start + self.step])
            y[:, start : start + self.step] = x @ tile.T


class RowMajor(Dequantizing):
    """The file's own blocks, unpacked as they are multiplied."""

    def __init__(self, matrix: RawMatrix):
        super().__init__(matrix)
        self.name = f"portable/{matrix.type.lower()} row-major"
        self.matrix = matrix.name

    def run(self, x: np.ndarray, y: np.ndarray, integer: bool) -> None:
        if not integer:
            return super().run(x, y, integer)
        bad = rowmajor.dot(self.type)(self.raw, records(x, READ[self.type]), x.shape[0], y)
        if bad >= 0:
            raise BridgeError(f"{self.matrix}: the scales of row {bad} are not finite; the file is damaged")
        return None
