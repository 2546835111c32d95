"""Rows are independent once H is known: kernels without the GIL run on chunks of them, a thread each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from bridge.cpus import usable_cpus


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
