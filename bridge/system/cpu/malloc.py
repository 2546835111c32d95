"""How glibc's malloc and PyTorch take memory from the system for matrices.

malloc maps blocks above a threshold from the system, and they go back to it when freed; but each one that is freed
raises the threshold, up to 32 MB. After a few layers, matrices come from the heap, where freed ones stay between those
in use: calibrating blocks of 1024 x 2816 weights takes 1.54 GB instead of 1.29. A threshold set here stays.

Memory from the system is cleared before use, one page after the other. In pages of 2 MB, which PyTorch can ask for,
this takes less time than in those of 4 KB.
"""

import ctypes
import os
from contextlib import suppress

_THRESHOLD = 8 << 20  # bytes
_M_MMAP_THRESHOLD = -3  # of malloc.h


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
