"""Large zeroed arrays that are filled bit by bit, on pages of the usual size.

numpy asks Linux for huge pages under arrays of 4 MB and more. There, the first byte that is written takes 2 MB: of a
context's keys and values, which are in as many places as there are layers, heads and dimensions, the first token would
take nearly all.
"""

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np

_SMALL = 1 << 22  # bytes: for less, numpy does not ask


def zeros_filled_later(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """As numpy.zeros, in memory whose pages are taken when they are first written. Raises MemoryError as it does."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < _SMALL or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    try:
        memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a forked child gets its own
    except OSError as problem:
        raise MemoryError(f"{nbytes} bytes") from problem
    with suppress(OSError):  # a system without huge pages; others may give them to all memory
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
