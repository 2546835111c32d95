"""Rows are independent of each other: kernels without the GIL run on chunks of them, a thread each."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from bridge.errors import BridgeError
from bridge.system.cpus import usable_cpus

_TILE = 512
_CHUNK_VALUES = 1 << 22


def slices(rows: int, count: int) -> list[slice]:
    """At most `count` slices of about equal length that cover 0..rows, one at least."""
    cuts = np.linspace(0, rows, max(1, min(count, rows)) + 1).astype(int)
    return [slice(int(a), int(b)) for a, b in pairwise(cuts)]


def over_rows(rows: int, work: Callable[[slice], object]) -> None:
    """Call `work` on slices that cover 0..rows, on as many threads as there are CPUs; errors are raised here."""
    parts = slices(rows, usable_cpus())
    if len(parts) == 1:
        work(parts[0])
        return
    with thread_limit(), ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(work, parts))


@contextmanager
def thread_limit() -> Iterator[None]:
    """Have threads that the system does not start raise BridgeError."""
    try:
        yield
    except RuntimeError as problem:
        if "start new thread" not in str(problem):  # Python has no class of its own for it
            raise
        raise BridgeError(
            "the system starts no more threads for this user: raise the limit (ulimit -u) or end other programs"
        ) from problem


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices that cover 0..rows, about four million values each: what is made from a file piece by piece."""
    step = max(1, _CHUNK_VALUES // max(1, columns))
    return (slice(at, min(at + step, rows)) for at in range(0, rows, step))


def tiles(rows: int) -> Iterator[slice]:
    """Slices that cover 0..rows, few rows each: what is as large as the matrix itself is made tile by tile."""
    return (slice(at, min(at + _TILE, rows)) for at in range(0, rows, _TILE))
