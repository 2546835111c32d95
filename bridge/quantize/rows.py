"""Rows are independent once H is known: kernels without the GIL run on chunks of them, a thread each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from bridge.cpus import usable_cpus

_TILE = 512


def over_rows(rows: int, work: Callable[[slice], object]) -> None:
    """Call `work` on slices that cover 0..rows, on as many threads as there are CPUs; errors are raised here."""
    threads = max(1, min(usable_cpus(), rows))
    cuts = np.linspace(0, rows, threads + 1).astype(int)
    slices = [slice(int(a), int(b)) for a, b in pairwise(cuts)]
    if threads == 1:
        work(slices[0])
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, slices))


def tiles(rows: int) -> Iterator[slice]:
    """Slices that cover 0..rows, few rows each: what is as large as the matrix itself is made tile by tile."""
    return (slice(at, min(at + _TILE, rows)) for at in range(0, rows, _TILE))
