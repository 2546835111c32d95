"""Rows are independent of each other: kernels without the GIL run on chunks of them, a thread each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import numpy as np

from bridge.cpus import usable_cpus

_TILE = 512

T = TypeVar("T")


def over_rows(rows: int, work: Callable[[slice], T], threads: int | None = None) -> list[T]:
    """Call `work` on slices that cover 0..rows, each on a thread, by default as many as there are CPUs: the results in
    order. Errors are raised here."""
    threads = max(1, min(threads or usable_cpus(), rows))
    cuts = np.linspace(0, rows, threads + 1).astype(int)
    slices = [slice(int(a), int(b)) for a, b in pairwise(cuts)]
    if threads == 1:
        return [work(slices[0])]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, slices))


def tiles(rows: int) -> Iterator[slice]:
    """Slices that cover 0..rows, few rows each: what is as large as the matrix itself is made tile by tile."""
    return (slice(at, min(at + _TILE, rows)) for at in range(0, rows, _TILE))
