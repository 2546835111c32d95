"""Memory that tables of calls work on, and numbers as their arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge.runtime.cpu.program import Product

_COLUMNS = 8  # of the widest kernel: buffers have rows for all of them


def product(engine: Any, records: np.ndarray, y: np.ndarray, turns: int, columns: int, integer: bool) -> Product:
    """A prepared matrix times records, into a buffer's rows."""
    from bridge.runtime.cpu import interleaved

    if y.base is None or (turns * columns - 1) * y.shape[-1] + engine.groups * engine.lanes > y.base.size:
        raise AssertionError(f"{engine.matrix.name}: rows beyond the buffer")
    kernel = interleaved.kernel(engine.block.name, engine.target, columns, integer)
    return Product(
        kernel.address, engine.address, address(records), address(y), engine.blocks, engine.stride, turns,
        4 * y.shape[-1], engine.groups,
    )  # fmt: skip


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
