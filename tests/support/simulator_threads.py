"""The threads of a block in Numba's CUDA simulator, one at a time.

Numba lets all of them run at once and asks each, again and again, whether it waits at a barrier, which takes most of
the processor's time. Here a thread runs until it comes to a barrier or ends, and then wakes the next one. After each
barrier they go in the opposite order, so that what needs a barrier and has none comes out differently.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any
from unittest import mock

import numpy as np
from numba.cuda.simulator import kernel as simulator


class Turns:
    """Whose turn it is, of the threads of a block."""

    def __init__(self, threads: list[Any]):
        self.ready = deque(threads)  # those that are still to run to the barrier
        self.arrived: list[Any] = []  # those at the barrier
        self.done = threading.Lock()
        self.failed: Any = None  # the first exception of a thread, with its traceback

    def next(self) -> Any:
        """Who comes next; None where all have ended."""
        if not self.ready:
            self.ready.extend(reversed(self.arrived))
            self.arrived.clear()
        return self.ready.popleft() if self.ready else None


class Thread(simulator.BlockThread):  # type: ignore[misc]
    """A thread of a block, which runs while it holds `turn`."""

    turns: Turns
    turn: threading.Lock

    def run(self) -> None:
        self.turn.acquire()
        if self.turns.failed is None:
            super().run()
            self.turns.failed = self.turns.failed or self.exception
        other = self.turns.next()
        (self.turns.done if other is None else other.turn).release()

    def syncthreads(self) -> None:
        self.turns.arrived.append(self)
        other = self.turns.next()
        if other is not self:
            other.turn.release()
            self.turn.acquire()
        if self.turns.failed is not None:
            raise RuntimeError("another thread of the block has failed")


def _run(self: Any, grid_point: Any, *args: Any) -> None:
    """BlockManager.run."""
    threads = []
    for point in np.ndindex(*self._block_dim):
        thread = Thread(lambda: self._f(*args), self, grid_point, point, self._debug)
        thread.turn = threading.Lock()
        thread.turn.acquire()
        threads.append(thread)
    turns = Turns(threads)
    turns.done.acquire()
    for thread in threads:
        thread.turns = turns
        thread.start()
    turns.next().turn.release()
    turns.done.acquire()
    if turns.failed is not None:
        raise turns.failed[0].with_traceback(turns.failed[1])


def one_at_a_time() -> Any:
    """A context in which the simulator's threads take turns."""
    return mock.patch.object(simulator.BlockManager, "run", _run)
