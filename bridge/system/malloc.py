"""glibc's malloc and freed memory.

Blocks above a threshold are mapped from the system and go back to it when freed; but each one that is freed raises the
threshold, up to 32 MB. After a few layers, matrices come from the heap, where freed ones stay between those in use:
calibrating a block of 1024 x 2816 weights to Q4_K takes 330 to 440 MB instead of 300. A threshold set here stays.
It costs 5 to 10% of the time: memory from the system is cleared before use.
"""

import ctypes
import os
from contextlib import suppress

_THRESHOLD = 1 << 20  # bytes
_M_MMAP_THRESHOLD = -3  # of malloc.h


def return_freed_memory() -> None:
    """From now on, memory of a megabyte and more goes back to the system once it is freed. Does nothing where malloc is
    not glibc's, or where MALLOC_MMAP_THRESHOLD_ sets it."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    with suppress(AttributeError, OSError, TypeError):  # macOS and musl have no mallopt, Windows no such library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)
