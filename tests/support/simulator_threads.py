"""The threads of a block in Numba's CUDA simulator, one at a time.

Numba gives each of them a thread of the system, lets all run at once and asks each, again and again, whether it waits
at a barrier: that takes most of the processor's time. Here a thread is a greenlet. It runs until it comes to a barrier
or ends, then the next one runs. After each barrier they run in the opposite order, so that kernels that need a barrier
and have none come out differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from bridge.cuda.toolchain import twins
from greenlet import getcurrent, greenlet
from numba.cuda.simulator import kernel, kernelapi


class Thread(kernel.BlockThread):  # type: ignore[misc]
    """A thread of a block. It is never started: a greenlet runs it."""

    def syncthreads(self) -> None:
        getcurrent().parent.switch()


def _run(self: Any, grid_point: Any, *args: Any) -> None:
    """BlockManager.run."""
    running = []
    for point in np.ndindex(*self._block_dim):
        thread = Thread(lambda: self._f(*args), self, grid_point, point, self._debug)
        running.append(greenlet(thread.run))
        running[-1].cuda_thread = thread
    while running:
        for each in running:
            each.switch()
            if each.cuda_thread.exception is not None:
                error, traceback = each.cuda_thread.exception
                raise error.with_traceback(traceback)
        running = [each for each in reversed(running) if not each.dead]


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """The simulator's threads take turns."""
    current = SimpleNamespace(current_thread=lambda: getcurrent().cuda_thread)
    with (
        mock.patch.object(kernel.BlockManager, "run", _run),
        mock.patch.object(kernelapi, "threading", current),
        mock.patch.object(twins, "threading", current),
    ):
        yield
