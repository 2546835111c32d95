"""Memory: how much is free, how malloc takes it from the system, and large zeroed arrays on small pages.

malloc maps blocks above a threshold from the system, and they go back to it when freed; but each one that is freed
raises the threshold, up to 32 MB. After a few layers, matrices come from the heap, where freed ones stay between those
in use: calibrating blocks of 1024 x 2816 weights takes 1.54 GB instead of 1.29. A threshold set here stays.

Memory from the system is cleared before use, one page after the other. In pages of 2 MB, which PyTorch can ask for,
this takes less time than in those of 4 KB. But numpy asks Linux for such pages under arrays of 4 MB and more, where the
first byte that is written takes 2 MB: of a context's keys and values, which are in as many places as there are layers,
heads and dimensions, the first token would take nearly all.
"""

import ctypes
import math
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

_LIMITS = Path("/sys/fs/cgroup")  # of the container, in version 2
_THRESHOLD = 8 << 20  # bytes
_M_MMAP_THRESHOLD = -3  # of malloc.h
_SMALL = 1 << 22  # bytes: for less, numpy does not ask for huge pages


def free_memory() -> int | None:
    """Bytes that this process can still take without swapping, on Linux; None where it is not known."""
    limits = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError):  # "max" is no number
        limit, used = (int((_LIMITS / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        limits.append(limit - used)
    return min(limits, default=None)


def resident() -> int:
    """Bytes of this process that are in memory; where the system does not tell, as many as its imports take."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 600 << 20


def tune_malloc() -> None:
    """From now on, blocks of 8 MB and more go back to the system once they are freed, where malloc is glibc's.

    PyTorch, if it is not imported yet, asks for large pages. What the environment sets already
    (MALLOC_MMAP_THRESHOLD_, THP_MEM_ALLOC_ENABLE) stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    with suppress(AttributeError, OSError, TypeError):  # macOS and musl have no mallopt, Windows no such library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)


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
