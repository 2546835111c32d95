"""A token's computation as a table of calls.

Every row is a C function's address, its seven arguments, the number of items (tokens, row groups, ...) that
its range covers, and whether threads share them. One compiled loop walks the table: from Python, the 300
calls of a small model would cost as much as a quarter of its arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge.jit import kernel
from bridge.runtime.cpu import pool

ITEMS, SHARED, WORDS = 8, 9, 10


@kernel
def _walk(table, state, threads):
    for i in range(table.shape[0]):
        e = table[i]
        own = state if e[SHARED] else 0
        pool.run(own, threads, e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7], e[ITEMS])


class Program:
    """Calls in order; what they point to is kept alive by `keep`."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []
        self._table: np.ndarray | None = None
        self._kept: list[Any] = []

    def add(self, function: Any, *arguments: int, items: int, shared: bool = False) -> None:
        """One call of a CFunc, or of an address."""
        address = function if isinstance(function, int) else function.address
        row = [address, *arguments]
        self._rows.append([*row, *[0] * (ITEMS - len(row)), items, int(shared)])
        self._kept.append(function)
        self._table = None

    def keep(self, *objects: Any) -> None:
        self._kept += objects

    def run(self) -> None:
        """Make the calls, on the pool's threads if nobody else has them."""
        if self._table is None:
            self._table = np.array(self._rows, np.int64).reshape(-1, WORDS)
        threads = pool.get_pool()
        if threads.state and threads.lock.acquire(blocking=False):
            try:
                _walk(self._table, threads.state, threads.threads)
            finally:
                threads.lock.release()
        else:
            _walk(self._table, 0, 1)
