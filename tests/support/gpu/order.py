"""What blocks of one launch may read of each other's stores (PTX ISA, Memory Consistency Model).

    a release   by one thread covers what its block had stored before the last barrier that this thread has passed
    an acquire  after it lets its block read that, behind the next barrier

Here a release is an atom.release.gpu, an acquire a fence.acq_rel.gpu behind an atomic operation. That is less than a
GPU grants: a thread's own stores and loads need no barrier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.support.gpu.memory import Access


class Order:
    """The last release and the last acquire of each block of a launch: when, and barriers passed until then."""

    def __init__(self, blocks: int):
        self._time = 0
        self._released, self._acquired = (np.full((2, blocks), -1) for _ in range(2))

    def release(self, who: Access) -> None:
        """By these threads."""
        self._note(self._released, who)

    def acquire(self, who: Access) -> None:
        """By these threads."""
        self._note(self._acquired, who)

    def _note(self, times: np.ndarray, who: Access) -> None:
        self._time += 1
        times[0, who.thread // who.per_block] = self._time
        times[1, who.thread // who.per_block] = who.barriers

    def missing(self, writer: np.ndarray, stored: np.ndarray, who: Access) -> np.ndarray:
        """Whether threads read what a thread of another block has stored, after `stored` barriers, too early."""
        own, other = who.thread[:, None] // who.per_block, writer // who.per_block
        apart: np.ndarray = (writer >= 0) & (own != other)
        if not apart.any():
            return apart
        released = stored < self._released[1, other]
        acquired = self._acquired[0, own] > self._released[0, other]
        shown = who.barriers[:, None] > self._acquired[1, own]
        return apart & ~(released & acquired & shown)
