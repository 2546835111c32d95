"""Memory that tables of calls work on, and numbers as their arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge.runtime.cpu.program import Product
from bridge.runtime.quant_tensor import QuantTensor

_COLUMNS = 8  # of the widest kernel: buffers have rows for all of them


def product(engine: Any, records: np.ndarray, y: np.ndarray, turns: int, columns: int, integer: bool) -> Product:
    """A matrix times records, into a buffer's rows."""
    if y.base is None or (turns * columns - 1) * y.shape[-1] + engine.groups * engine.lanes > y.base.size:
        raise AssertionError(f"{engine.matrix.name}: rows beyond the buffer")
    function, weights = engine.kernel(columns, integer, False)
    place = address(records), address(y)
    return Product(function, weights, *place, engine.blocks, engine.stride, turns, 4 * y.shape[-1], engine.groups)


class Places:
    """Where tables say how matrices are multiplied: two words, the kernel and what it gets as weights.

    They change when a matrix is prepared.
    """

    def __init__(self, integer: bool):
        self.integer = integer
        self._found: dict[int, list[tuple[np.ndarray, int]]] = {}

    def note(self, matrix: QuantTensor, words: np.ndarray, columns: int) -> None:
        """int64 [2] that are this matrix's, for a kernel of so many columns."""
        self._found.setdefault(id(matrix), []).append((words, columns))

    def renew(self, matrix: QuantTensor) -> None:
        """Let the tables use the matrix's engine of now."""
        engine: Any = matrix._get_engine()
        for words, columns in self._found.get(id(matrix), ()):
            words[:] = engine.kernel(columns, self.integer, False)


def buffer(n: int, columns: int) -> np.ndarray:
    """float32 [n, columns], with room behind it: for a kernel's unused columns, or a last row group beyond the rows."""
    whole = -(-n // _COLUMNS) * _COLUMNS if n > 1 else 1
    return np.zeros(whole * columns + 16, np.float32)[: n * columns].reshape(n, columns)


def bits(value: float) -> int:
    """A float64's, as an argument of a call."""
    return int(np.array(value, np.float64).view(np.int64))


def address(array: np.ndarray | None) -> int:
    """Where it begins; 0 for none."""
    return 0 if array is None else array.ctypes.data
