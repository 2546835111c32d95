"""Threads that run generators of `stepped` on a machine that is not here: cache lines, memory and the system take time.

The assumed machine has sockets of 64 cores:

    LINE        ns until a line comes from a core of the same or of the other socket: Xeon 8375C, Ice Lake (medians of
                github.com/nviennot/core-to-core-latency). A line that is written goes to one core after the other
    CORE, NODE  bytes a ns that one core and all of a socket read: 80% of 8 channels of DDR5-4800
    LINK        bytes a ns between sockets in each direction: 83% of 3 links of 16 GT/s, 2 bytes wide
    WAKE        ns of the call that wakes a thread, and until it runs
"""

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from scripts.benchlib.stepped import Step

SOCKET = 64  # cores
LINE = 51, 108
CORE, NODE, LINK = 12, 246, 80
WAKE = 5_000, 30_000
HIT, SHARED_LINE, ATOMIC, PAUSE = 1, 10, 6, 40  # ns: of a line that is there, between readers of one, of a locked one
JITTER = 0.03  # a thread's range takes up to so much longer
_LINE_WORDS = 8


class Machine:
    """Threads on cores 0, 1, ..., their memory in words, and the time.

    transfers  lines that came from another core, by the primitive for which they came
    ranges     calls of what is shared
    wakes      threads that the system woke
    """

    def __init__(self, threads: Sequence[Step], duration: Callable[[int, int, int], float]):
        """`duration`: ns that a thread takes for units first..last-1."""
        self.threads = threads
        self.sockets = [thread // SOCKET for thread in range(len(threads))]
        self._duration = duration
        self._random = random.Random(0)
        self.memory: dict[int, int] = {}
        self._parameters: defaultdict[int, int] = defaultdict(int)
        self._sharers: defaultdict[int, set[int]] = defaultdict(set)
        self._free: defaultdict[int, float] = defaultdict(float)  # when a line can go to the next core
        self._watched: list[set[int]] = [set() for _ in threads]  # lines that a thread has read since its last pause
        self._parked: dict[int, set[int]] = {}  # thread -> lines for whose change it waits
        self._holders: dict[int, int] = {}
        self._blocked: defaultdict[int, list[int]] = defaultdict(list)
        self._asleep: dict[int, tuple[int, int]] = {}  # thread -> condition, mutex
        self._events: list[tuple[float, int, int, Any]] = []
        self._order = 0
        self.transfers: Counter[str] = Counter()
        self.ranges = self.wakes = 0
        self.now = 0.0
        self.ended: set[int] = set()

    def start(self, thread: int) -> None:
        self._advance(thread, None)

    def run(self, until: Callable[[], bool]) -> float:
        """Let the threads go on until something is so, or none can; the time then."""
        while self._events and not until():
            self.now, _, thread, effect = heapq.heappop(self._events)
            effect(thread)
        return self.now

    def _later(self, delay: float, thread: int, effect: Callable[[int], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (self.now + delay, self._order, thread, effect))

    def _advance(self, thread: int, result: Any) -> None:
        """Give a thread the result of its primitive, and begin with the next."""
        try:
            name, *arguments = self.threads[thread].send(result)
        except StopIteration:
            self.ended.add(thread)
            return
        getattr(self, f"_{name}")(thread, *arguments)

    def _then(self, delay: float, thread: int, result: Callable[[], Any] = lambda: None) -> None:
        self._later(delay, thread, lambda thread: self._advance(thread, result()))

    def _fetch(self, thread: int, line: int, exclusive: bool, name: str) -> float:
        """ns until a thread has a line, alone or with others."""
        sharers = self._sharers[line]
        if thread in sharers and (not exclusive or len(sharers) == 1):
            return HIT
        others = {self.sockets[other] != self.sockets[thread] for other in sharers if other != thread}
        if not others:
            sharers.add(thread)
            return HIT
        self.transfers[name] += 1
        cost = LINE[max(others) if exclusive else min(others)]
        start = max(self.now, self._free[line])
        alone = len(sharers) == 1
        self._free[line] = start + (cost if exclusive or alone else SHARED_LINE)
        if exclusive:
            sharers.clear()
        sharers.add(thread)
        return start + cost - self.now

    def _changed(self, line: int) -> None:
        for thread in [thread for thread, lines in self._parked.items() if line in lines]:
            del self._parked[thread]
            self._then(PAUSE / 2, thread)

    def _read(self, thread: int, state: int, word: int) -> None:
        line = word // _LINE_WORDS
        self._watched[thread].add(line)
        self._then(self._fetch(thread, line, False, "read"), thread, lambda: self.memory.get(word, 0))

    def _store(self, thread: int, word: int, change: Callable[[int], int | None], name: str) -> float:
        """Change a word when its line has come; ns until then."""
        line = word // _LINE_WORDS
        delay = self._fetch(thread, line, True, name) + ATOMIC

        def apply(thread: int) -> None:
            value = change(self.memory.get(word, 0))
            if value is not None:
                self.memory[word] = value
                self._changed(line)

        self._later(delay, thread, apply)
        return delay

    def _write(self, thread: int, state: int, word: int, value: int) -> None:
        self._then(self._store(thread, word, lambda _: value, "write"), thread)

    def _release(self, thread: int, state: int, word: int, value: int) -> None:
        self._store(thread, word, lambda _: value, "release")
        self._then(HIT, thread)

    def _add(self, thread: int, state: int, word: int, value: int) -> None:
        before: list[int] = []

        def change(old: int) -> int:
            before.append(old)
            return old + value

        self._then(self._store(thread, word, change, "add"), thread, lambda: before[0])

    def _swap(self, thread: int, state: int, word: int, old: int, new: int) -> None:
        done: list[bool] = []

        def change(value: int) -> int | None:
            done.append(value == old)
            return new if value == old else None

        self._then(self._store(thread, word, change, "swap"), thread, lambda: done[0])

    def _array_at(self, thread: int, address: int, length: int, dtype: Any) -> None:
        """The parameters' lines, which the caller has written."""
        line = -1
        delay = self._fetch(thread, line, thread == 0, "read")
        self._then(delay, thread, lambda: self._parameters)

    def _call(self, thread: int, *arguments: int) -> None:
        self.ranges += 1
        late = 1 + JITTER * self._random.random()
        self._then(late * self._duration(thread, *arguments[-2:]), thread)

    def _pause(self, thread: int) -> None:
        lines = self._watched[thread]
        self._watched[thread] = set()
        if all(thread in self._sharers[line] for line in lines):
            self._parked[thread] = lines
        else:
            self._then(PAUSE, thread)

    _give_way = _pause

    def _lock(self, thread: int, mutex: int) -> None:
        if mutex in self._holders:
            self._blocked[mutex].append(thread)
            return
        self._holders[mutex] = thread
        self._then(self._fetch(thread, -2 - mutex, True, "lock") + ATOMIC, thread)

    def _unlock(self, thread: int, mutex: int) -> None:
        del self._holders[mutex]
        self._then(ATOMIC, thread)
        if self._blocked[mutex]:  # through the system, as glibc's
            self._later(WAKE[0] / 5, self._blocked[mutex].pop(0), lambda other: self._lock(other, mutex))

    def _wait(self, thread: int, condition: int, mutex: int) -> None:
        self._asleep[thread] = condition, mutex
        del self._holders[mutex]
        if self._blocked[mutex]:
            self._lock(self._blocked[mutex].pop(0), mutex)

    def _wake(self, thread: int, condition: int) -> None:
        sleepers = [other for other, (where, _) in self._asleep.items() if where == condition]
        for number, other in enumerate(sleepers, 1):
            _, mutex = self._asleep.pop(other)
            self._later(WAKE[0] * number + WAKE[1], other, lambda other, mutex=mutex: self._lock(other, mutex))  # type: ignore[misc]
        self.wakes += len(sleepers)
        self._then(WAKE[0] * len(sleepers), thread)
