"""Threads that run a compiled kernel over chunks of rows.

Numba's own threading layers do not fit: workqueue costs 25 to 39 us a call and aborts on concurrent calls,
omp needs a libgomp that may be missing, ends the process on fork and fights with torch's threads over the
cores, tbb is an extra package. Here the workers are Python threads that live in one compiled function,
never holding the GIL. How they share the rows of a call, and when they sleep, is in `jobs`.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.system.cpu import numa
from bridge.system.cpu.cpus import usable_cpus
from bridge.system.cpu.fork_locks import ForkLock
from bridge.system.cpu.row_threads import thread_limit
from bridge.system.kernels.jit import CFunction, c_function, maker
from bridge.system.kernels.memory import array_at
from bridge.system.options import check_integer
from bridge.system.threads import jobs
from bridge.system.threads.jobs import run
from bridge.system.threads.words import ARGUMENTS

ITEMS, SHARED, WORDS = 8, 9, 10  # of a call in a table
_MAX_THREADS = 1024
_ALIGNED = 128  # bytes
MIN_BYTES_TO_SHARE = 1 << 17  # of weights: below, waking other threads costs more than it saves
MIN_VALUES_TO_SHARE = 1 << 16  # of activations that are normalized or rounded


class Pool:
    """`threads` threads, including the caller's. `lock` is held by the caller whose job runs.

    cpus  those that each thread may run on, if not all; the caller's stays as it is
    """

    def __init__(self, threads: int, cpus: list[frozenset[int]] | None = None):
        self.threads = threads
        self.lock = threading.Lock()
        self.state = 0
        self._workers: list[threading.Thread] = []
        if threads > 1:
            self._memory = np.zeros(jobs.words(threads) + _ALIGNED // 8, np.int64)
            self.state = -(-self._memory.ctypes.data // _ALIGNED) * _ALIGNED
            function("begin")(self.state, threads)
            try:
                with thread_limit():
                    for number in range(1, threads):
                        name = f"gguf-bridge-{number}"
                        arguments = self, number, cpus and cpus[number]
                        worker = threading.Thread(target=_work, args=arguments, name=name, daemon=True)
                        worker.start()
                        self._workers.append(worker)
            except BridgeError:
                self.stop()
                raise

    def stop(self) -> None:
        """Let the workers end, and wait until they have; a caller that goes on has no others then."""
        if self.state:
            function("stop")(self.state, self.threads)
            for worker in self._workers:
                worker.join()


def _work(pool: Pool, number: int, cpus: frozenset[int] | None) -> None:
    if cpus:
        numa.keep_on(cpus)
    function("serve")(pool.state, number, pool.threads)  # `pool` keeps the shared memory alive


_pool: Pool | None = None
_wanted: int | None = None
_numa: str | None = None
_choosing = ForkLock()  # held while these change


def get_num_threads() -> int:
    """Threads that a product uses: set_num_threads, else BRIDGE_THREADS, else the cores this process may use.

    With `get_numa()` "isolate", the cores of one node.
    """
    if _wanted is not None:
        return _wanted
    configured = os.environ.get("BRIDGE_THREADS", "")
    if not configured:
        return numa.limited(usable_cpus(), get_numa())
    if not re.fullmatch(r"[0-9]{1,9}", configured) or not 1 <= int(configured) <= _MAX_THREADS:
        raise BridgeError(f"BRIDGE_THREADS={configured}: must be between 1 and {_MAX_THREADS}")
    return int(configured)


def set_num_threads(threads: int) -> None:
    """Use that many threads from the next product on."""
    global _wanted, _pool
    check_integer("threads", threads, 1, _MAX_THREADS)
    with _choosing:
        _wanted, old = threads, _pool
        if old is None or old.threads == threads:
            return
        _pool = None
    _end(old)


def get_numa() -> str | None:
    """How threads are placed on NUMA nodes: set_numa, else BRIDGE_NUMA, else None, where the system likes."""
    return _numa or (
        numa.check_way("BRIDGE_NUMA", os.environ["BRIDGE_NUMA"]) if os.environ.get("BRIDGE_NUMA") else None
    )


def set_numa(how: str) -> None:
    """Place threads on NUMA nodes from the next product on: one of `numa.WAYS`, see there.

    Copies of weights that were made before stay where they are. Raises BridgeError where the system is not Linux.
    """
    global _numa, _pool
    numa.check_way("numa", how)
    with _choosing:
        before, _numa, old = get_numa(), how, _pool
        if old is None or before == how:
            return
        _pool = None
    _end(old)


def thread_cpus() -> list[frozenset[int]] | None:
    """The CPUs that each thread may run on, the caller's first; None where they may run on all."""
    return numa.thread_cpus(get_numa(), get_num_threads())


def _end(pool: Pool) -> None:
    with pool.lock:
        pool.stop()


def get_pool() -> Pool:
    """The process's pool, started when first wanted."""
    global _pool
    if (pool := _pool) is None:
        with _choosing:
            if (pool := _pool) is None:
                cpus = thread_cpus()
                if cpus and get_numa() == "isolate":
                    numa.keep_on(cpus[0])  # this thread, and those that it starts
                _pool = pool = Pool(get_num_threads(), cpus)
    return pool


def _walk(state, threads, table, rows, _0, _1, _2, _3, _4):
    """Make the calls of a table, int64 [rows, WORDS]."""
    calls = array_at(table, (rows, WORDS), np.int64)
    for i in range(rows):
        e = calls[i]
        shared = state if e[SHARED] else 0
        run(shared, threads, e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7], e[ITEMS])


def _begin(state, threads, _0, _1, _2, _3, _4, _5, _6):
    jobs.begin(state, threads)


def _serve(state, thread, threads, _0, _1, _2, _3, _4, _5):
    jobs.serve(state, thread, threads)


def _stop(state, threads, _0, _1, _2, _3, _4, _5, _6):
    jobs.stop(state, threads)


FUNCTIONS = {"begin": _begin, "serve": _serve, "stop": _stop, "walk": _walk}


@maker
def function(name: str) -> CFunction:
    """One of FUNCTIONS as a C function."""
    return c_function(FUNCTIONS[name])


def functions() -> list[CFunction]:
    """The C functions of a pool."""
    return [function(name) for name in FUNCTIONS]


def make_calls(table: np.ndarray, worth: bool = True) -> None:
    """Make the calls of int64 [rows, WORDS] one after another; `worth`: see `share`.

    A row is a C function's address, its seven arguments, how many items its range covers, and whether threads share
    them.
    """
    share(worth, function("walk"), table.ctypes.data, len(table))


def share_items(worth: bool, function: CFunction, *arguments: int, items: int) -> None:
    """Call a C function with up to seven arguments for a number of items; see `share`."""
    padding = [0] * (ARGUMENTS - len(arguments))
    make_calls(np.array([[function.address, *arguments, *padding, items, 1]], np.int64), worth)


def share(worth: bool, function: Callable[..., None], *arguments: Any) -> None:
    """function(state, threads, *arguments), which passes the first two to `run`.

    With the pool's threads, if that is `worth` it and no other caller has them; else in this thread alone.
    """
    pool = get_pool() if worth else None
    if pool is not None and pool.state and pool.lock.acquire(blocking=False):
        try:
            function(pool.state, pool.threads, *arguments)
        finally:
            pool.lock.release()
    else:
        function(0, 1, *arguments)


@atexit.register
def _at_exit() -> None:
    """Threads that still run compiled code when Python takes its memory away would end the process by a signal."""
    if _pool is not None:
        _pool.stop()


def _after_fork() -> None:
    global _pool
    _pool = None  # its workers are the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
