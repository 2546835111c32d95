"""The engines that every machine can run, and what an engine is.

`Dequantizing` needs nothing but dequantized rows, so it serves all types; `RowMajor` multiplies the file's own blocks.
"""

from typing import Protocol

import numpy as np

from bridge.blocks.read import READ
from bridge.errors import BridgeError
from bridge.runtime.cpu.engines import dense, dequantize
from bridge.runtime.cpu.engines.floats import rows_function, wide_rows_function
from bridge.runtime.cpu.forms import rowmajor
from bridge.runtime.cpu.forms.activations import records
from bridge.system.kernels.jit import CFunction
from bridge.system.threads.pool import MIN_BYTES_TO_SHARE, share_items

_TILE = 1 << 20  # weights that Python dequantizes at a time
_FEW = 4  # most vectors that float rows are multiplied by one after the other


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
    """Tiles of rows become float32 and multiply all vectors, see dense.py."""

    def __init__(self, matrix: RawMatrix):
        self.name = f"float32/{matrix.type.lower()} dequantized"
        self.type = matrix.type
        self.raw = matrix.raw.reshape(matrix.shape[0], -1)

    def functions(self, tokens: int, integer: bool) -> list[CFunction]:
        return [dense.tiles_function(), dequantize.rows_function(self.type) or wide_rows_function("F32")]

    def run(self, x: np.ndarray, y: np.ndarray, integer: bool) -> None:
        if widen := dequantize.rows_function(self.type):
            dense.multiply(self.raw, widen, x, y)
            return
        step = max(1, _TILE // x.shape[1])  # rows that Python dequantizes
        for start in range(0, y.shape[1], step):
            y[:, start : start + step] = dense.product(dequantize.rows(self.type, self.raw[start : start + step]), x)


class FloatRows(Dequantizing):
    """The engine of a float matrix."""

    def __init__(self, matrix: RawMatrix):
        super().__init__(matrix)
        self.name = f"vector/{matrix.type.lower()} rows"

    def functions(self, tokens: int, integer: bool) -> list[CFunction]:
        return [rows_function(self.type)] if tokens <= _FEW else super().functions(tokens, integer)

    def run(self, x: np.ndarray, y: np.ndarray, integer: bool) -> None:
        if x.shape[0] > _FEW:
            return super().run(x, y, integer)
        tokens, rows = y.shape
        return share_items(
            self.raw.nbytes >= MIN_BYTES_TO_SHARE, rows_function(self.type), self.raw.ctypes.data, x.ctypes.data,
            y.ctypes.data, x.shape[1], self.raw.shape[1], tokens, 4 * rows, items=rows,
        )  # fmt: skip


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
