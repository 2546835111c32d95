"""The threads' protocol (threads/jobs.py): its own source, run step by step in every order, and with real threads.

The source is turned into generators that stop before every access to what threads share. All orders of two or three
threads' steps are then followed, each state once: in none may a unit be run twice, too late or by a wrong call, or a
thread sleep unnoticed, and from each the end must be within reach.
"""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.system.kernels.jit import c_function
from bridge.system.threads import jobs, pool, words
from scripts.benchlib.stepped import Step, stepped
from tests.conftest import ROOT

FUNCTIONS = {"_take", "_work", "_rouse", "_wake_next", "_sleep", "_finished", "begin", "serve", "stop", "run"}


def protocol_with(replaced: dict[str, str]) -> Any:
    """jobs.py's functions as generators, with some of its text replaced."""
    return stepped(Path(jobs.__file__).read_text(encoding="utf-8"), replaced, FUNCTIONS)


class Parameters(dict[int, int]):
    """The words that say what to call."""


class Machine:
    """Threads of the protocol, run by `step`: jobs of so many units, one after the other, then `stop`."""

    def __init__(self, protocol: Any, threads: int, units: list[int]):
        self.protocol = protocol
        self.memory: dict[int, int] = {}
        self.parameters = Parameters()
        self.holders: dict[int, int] = {}  # of locks
        self.waiting: dict[int, int] = {}  # thread -> condition
        self.locked: dict[int, int] = {}  # thread -> the lock that it takes again when woken
        self.runs: dict[tuple[int, int], int] = {}  # (job, unit) -> 1: begun, 2: finished
        self.job = 0  # the one that runs
        self.threads: list[Step] = [self._caller(protocol, threads, units)]
        self.threads += (protocol.serve(1, thread, threads) for thread in range(1, threads))
        self.ended = [False] * threads
        self.next: list[Any] = [next(thread) for thread in self.threads]

    def _caller(self, protocol: Any, threads: int, units: list[int]) -> Step:
        for number, count in enumerate(units, 1):
            self.job = number
            yield from protocol.run(1, threads, number, 0, 0, 0, 0, 0, 0, 0, count)
            assert [self.runs.get((number, unit)) for unit in range(count)] == [2] * count, "it returned too early"
            self.runs.clear()
            self.job = 0
        yield from protocol.stop(1, threads)

    def enabled(self) -> list[int]:
        """The threads that can make a step."""
        return [
            thread
            for thread, action in enumerate(self.next)
            if not self.ended[thread]
            and thread not in self.waiting
            and not (action[0] == "lock" and action[1] in self.holders)
            and not (thread in self.locked and self.locked[thread] in self.holders)
        ]

    def step(self, thread: int) -> None:
        """Let a thread do what it stopped before, and go on to the next such place."""
        name, *arguments = self.next[thread]
        if name == "call" and arguments[-1] != "running":
            function, *_, first, last = arguments
            assert function == self.job, "a call of another job"
            for unit in range(first, last):
                assert self.runs.setdefault((function, unit), 1) == 1
                self.runs[function, unit] = 1
            self.next[thread] = "call", function, first, last, "running"
            return
        if name == "wait" and thread not in self.locked:
            condition, mutex = arguments
            assert self.holders.pop(mutex) == thread
            self.waiting[thread], self.locked[thread] = condition, mutex
            return
        result = getattr(self, f"_{name}")(thread, *arguments)
        try:
            self.next[thread] = self.threads[thread].send(result)
        except StopIteration:
            self.ended[thread] = True

    def _array_at(self, thread: int, address: int, length: int, dtype: Any) -> Parameters:
        return self.parameters

    def _call(self, thread: int, function: int, first: int, last: int, running: str) -> None:
        assert function == self.job, "a call that goes on after its job"
        for unit in range(first, last):
            assert self.runs[function, unit] == 1, "a unit that is run twice"
            self.runs[function, unit] = 2

    def _pause(self, thread: int) -> None:
        pass

    _give_way = _pause

    def _read(self, thread: int, state: int, word: int) -> int:
        return self.memory.get(word, 0)

    def _write(self, thread: int, state: int, word: int, value: int) -> None:
        self.memory[word] = value

    _release = _write

    def _swap(self, thread: int, state: int, word: int, old: int, new: int) -> bool:
        if self.memory.get(word, 0) != old:
            return False
        self.memory[word] = new
        return True

    def _lock(self, thread: int, mutex: int) -> None:
        self.holders[mutex] = thread

    def _unlock(self, thread: int, mutex: int) -> None:
        assert self.holders.pop(mutex) == thread

    def _wait(self, thread: int, condition: int, mutex: int) -> None:
        """Woken: it has the lock again."""
        self.holders[self.locked.pop(thread)] = thread

    def _wake(self, thread: int, condition: int) -> None:
        for other in [other for other, where in self.waiting.items() if where == condition]:
            del self.waiting[other]

    def state(self) -> tuple[Any, ...]:
        """All that decides what may follow; how long a thread was idle does not."""
        return (
            *(tuple(sorted(part.items())) for part in (self.memory, self.parameters, self.holders, self.waiting)),
            *(tuple(sorted(part.items())) for part in (self.locked, self.runs)),
            tuple(self.next),
            tuple(tuple(frames(thread)) for thread in self.threads),
        )

    def check_sleepers(self) -> None:
        """Who sleeps says so, or is just being woken: else no job would ever wake it."""
        for thread in self.waiting:
            if not self.memory[self.protocol._word(thread, self.protocol._SLEEPS)]:
                assert any(map(waking, self.threads)), "nobody will wake it"


def waking(thread: Step) -> bool:
    """Whether a generator is about to wake another thread."""
    inner: Any = thread
    while inner is not None:
        if inner.gi_code.co_name == "_rouse":
            return True
        inner = inner.gi_yieldfrom
    return False


def frames(thread: Step) -> Iterator[tuple[Any, ...]]:
    """Where a generator is, and its variables."""
    inner: Any = thread
    while inner is not None and inner.gi_frame is not None:
        frame = inner.gi_frame
        variables = {k: v for k, v in frame.f_locals.items() if isinstance(v, int) and k != "idle"}
        yield frame.f_lasti, tuple(sorted(variables.items()))
        inner = inner.gi_yieldfrom


def explore(make: Callable[[], Machine]) -> int:
    """Follow every order of the threads' steps; how many states there are. From each the end can be reached."""
    before: dict[Any, set[Any]] = {}  # state -> those that lead to it
    ends = []
    paths: list[list[int]] = [[]]
    while paths:
        path = paths.pop()
        machine = make()
        for thread in path[:-1]:
            machine.step(thread)
        last = None
        if path:
            last = machine.state()
            machine.step(path[-1])
        while True:
            state = machine.state()
            known = state in before
            before.setdefault(state, set()).add(last)
            if known:
                break
            machine.check_sleepers()
            enabled = machine.enabled()
            if not enabled:
                assert all(machine.ended), f"nobody can go on: {machine.next}"
                ends.append(state)
                break
            paths += ([*path, thread] for thread in enabled[1:])
            path = [*path, enabled[0]]
            last = state
            machine.step(enabled[0])
    reached = set()
    while ends:
        state = ends.pop()
        if state is not None and state not in reached:
            reached.add(state)
            ends += before[state]
    assert len(reached) == len(before), "from some state the end is never reached"
    return len(before)


SLEEPING = {"_PAUSES = 1500": "_PAUSES = 0", "_YIELDS = 200": "_YIELDS = 0"}
SPINNING = {"_PAUSES = 1500": "_PAUSES = 1 << 60"}


@pytest.mark.parametrize(
    ("threads", "units", "how"),
    [
        (2, [3, 2], SPINNING),
        (2, [2, 2], SLEEPING),
        pytest.param(3, [2], SPINNING, marks=pytest.mark.exhaustive),  # 80,000 states, half a minute
    ],
)
def test_in_every_order_of_steps_each_unit_runs_once(threads: int, units: list[int], how: dict[str, str]) -> None:
    protocol = protocol_with(how)
    assert explore(lambda: Machine(protocol, threads, units)) > 1000


@pytest.mark.parametrize(
    ("how", "old", "new"),
    [
        (SPINNING, "if read(state, _JOB) != job:", "if job == 0:"),
        (SPINNING, "if before >> _BITS == job >> _BITS else 0", ""),
        (SPINNING, "if done >> _BITS == job >> _BITS:", "if done:"),
        (SPINNING, "while _finished(state, threads, job) < units:", "while False:"),
        (SLEEPING, "    lock(mutex)\n    unlock(mutex)  # now", "    # now"),
        (SLEEPING, "        wait(state + 8 * _word(thread, _CONDITION), mutex)\n        write(state, sleeps, 1)",
         "        wait(state + 8 * _word(thread, _CONDITION), mutex)"),
    ],
)  # fmt: skip
def test_a_protocol_with_a_fault_fails(how: dict[str, str], old: str, new: str) -> None:
    protocol = protocol_with({**how, old: new})
    with pytest.raises(AssertionError):
        explore(lambda: Machine(protocol, 2, [3, 2]))


@pytest.mark.parametrize("how", [SPINNING, SLEEPING])
def test_in_random_orders_of_more_threads_each_unit_runs_once(how: dict[str, str]) -> None:
    """A thread in turn is held up for long, between any two of its steps."""
    protocol = protocol_with(how)
    rng = random.Random(1)
    for _ in range(200):
        machine = Machine(protocol, rng.randint(2, 6), [rng.randint(2, 20) for _ in range(4)])
        late, until = 0, 0
        for step in range(100_000):
            if step == until:
                late, until = rng.randrange(len(machine.threads)), step + rng.randint(1, 300)
            machine.check_sleepers()
            enabled = machine.enabled()
            if not enabled:
                break
            machine.step(rng.choice([thread for thread in enabled if thread != late] or enabled))
        assert all(machine.ended)


def _count(counts, _1, _2, _3, _4, _5, _6, first, last):
    for item in range(first, last):
        words.add(counts, item, 1)


def test_many_small_jobs_of_more_threads_than_cores_run_each_item_once() -> None:
    counter = c_function(_count)
    counts = np.zeros(300, np.int64)
    rng = random.Random(2)
    for threads in (2, 3, 16):
        threads_pool = pool.Pool(threads)
        try:
            for turn in range(2000):
                items = rng.choice([2, 3, rng.randint(2, 300)])
                if turn % 100 == 0:
                    time.sleep(0.002)  # they fall asleep
                row = [counter.address, counts.ctypes.data, 0, 0, 0, 0, 0, 0, items, 1]
                calls = np.array([row] * rng.randint(1, 3), np.int64)
                pool.function("walk")(threads_pool.state, threads, calls.ctypes.data, len(calls))
                assert counts[:items].min() == counts[:items].max() == len(calls)
                assert not counts[items:].any()
                counts[:] = 0
        finally:
            threads_pool.stop()


def test_items_beyond_a_words_bits_are_shared_several_at_once() -> None:
    counter = c_function(_count)
    counts = np.zeros(3 << 20, np.int64)
    threads_pool = pool.Pool(3)
    try:
        row = [counter.address, counts.ctypes.data, 0, 0, 0, 0, 0, 0, len(counts), 1]
        pool.function("walk")(threads_pool.state, 3, np.array([row], np.int64).ctypes.data, 1)
    finally:
        threads_pool.stop()
    assert counts.min() == counts.max() == 1


def test_threads_end_whether_they_sleep_or_not() -> None:
    for rest in (0.0, 0.0001, 0.02):
        before = set(threading.enumerate())
        threads_pool = pool.Pool(5)
        workers = set(threading.enumerate()) - before
        assert len(workers) == 4
        time.sleep(rest)
        threads_pool.stop()
        assert not any(worker.is_alive() for worker in workers)


ENDING = """
import numpy as np
from bridge.system.threads import pool
from bridge.runtime.cpu.ops import decoder_ops
pool.set_num_threads(8)
pool.share_items(True, decoder_ops.function("scale"), 0, 0, items=100)
"""


@pytest.mark.parametrize("_", range(5))
def test_a_process_may_end_right_after_a_product(_: int) -> None:
    """Its threads still spin then, in code whose memory Python frees."""
    subprocess.run([sys.executable, "-c", ENDING], check=True, cwd=ROOT)
