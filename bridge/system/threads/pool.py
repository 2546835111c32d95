"""Threads that run a compiled kernel over chunks of rows.

Numba's own threading layers do not fit: workqueue costs 25 to 39 us a call and aborts on concurrent calls,
omp needs a libgomp that may be missing, ends the process on fork and fights with torch's threads over the
cores, tbb is an extra package. Here the workers are Python threads that live in one compiled function,
never holding the GIL. An idle worker spins for some 50 us, so that it is there for the next product of a
model, then sleeps on a condition variable.

A job is one word: its number, then the chunks left in the low bits. Taking a chunk is a compare-and-swap on it, so a
worker that comes late finds nothing and disturbs nobody, and no one waits for a worker that sleeps: whoever
is free takes the next chunk, the calling thread among them.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.system.cpu import machine
from bridge.system.cpu.cpus import usable_cpus
from bridge.system.cpu.fork_locks import ForkLock
from bridge.system.cpu.row_threads import thread_limit
from bridge.system.kernels import ir
from bridge.system.kernels.jit import CFunction, c_function, inner, intrinsic, maker, types
from bridge.system.kernels.memory import array_at, call_intrinsic
from bridge.system.options import check_integer
from bridge.system.threads.waiting import give_way, initialize, lock, unlock, wait, wake

# words of the shared state, a cache line apart where different threads write them
_TICKET, _DONE, _SLEEPERS, _STOP = 0, 8, 16, 24
_FUNCTION, _GROUPS, _CHUNK, _ARGUMENTS = 32, 33, 34, 35
ARGUMENTS = 7  # int64 arguments of a kernel, before its first and last row group
ITEMS, SHARED, WORDS = 8, 9, 10  # of a call in a table
_MUTEX, _CONDITION = 48, 64  # 128 bytes each, more than any system's
_WORDS = 80

_CHUNKS_LEFT = (1 << 20) - 1  # mask of the ticket
_SPINS_BEFORE_SLEEP = 1500  # pauses, of some 30 ns, before a worker sleeps
_SPINS_BEFORE_YIELD = 20000  # pauses before a waiting caller begins to yield its core
_MAX_THREADS = 1024
MIN_BYTES_TO_SHARE = 1 << 17  # of weights: below, waking other threads costs more than it saves
MIN_VALUES_TO_SHARE = 1 << 16  # of activations that are normalized or rounded
_PER_THREAD = 12  # chunks: few enough to stream, enough to make up for a thread that is held up


def _word(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    return builder.gep(builder.inttoptr(address, ir.I64.as_pointer()), [index])


@intrinsic
def read(typingctx, state, index):
    """Word `index` of the state, after everything that was written before it."""

    def emit(context, builder, signature, arguments):
        return builder.load_atomic(_word(builder, *arguments), "seq_cst", 8)

    return types.int64(types.int64, types.int64), emit


@intrinsic
def write(typingctx, state, index, value):
    def emit(context, builder, signature, arguments):
        builder.store_atomic(arguments[2], _word(builder, *arguments[:2]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def add(typingctx, state, index, value):
    """Add to a word; returns what it was."""

    def emit(context, builder, signature, arguments):
        return builder.atomic_rmw("add", _word(builder, *arguments[:2]), arguments[2], "seq_cst")

    return types.int64(types.int64, types.int64, types.int64), emit


@intrinsic
def swap(typingctx, state, index, old, new):
    """Replace a word that is still `old`; returns whether it was."""

    def emit(context, builder, signature, arguments):
        pair = builder.cmpxchg(_word(builder, *arguments[:2]), *arguments[2:], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64, types.int64), emit


@intrinsic
def pause(typingctx):
    """Tell the core that this is a waiting loop."""

    def emit(context, builder, signature, arguments):
        architecture = machine.host().triple.partition("-")[0]
        if architecture == "x86_64":
            call_intrinsic(builder, "llvm.x86.sse2.pause", ir.VoidType())
        elif architecture in ("aarch64", "arm64"):
            call_intrinsic(builder, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(ir.I32, 1))  # yield
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def call(typingctx, function, a, b, c, d, e, f, g, first, last):
    """Call the compiled kernel at an address."""
    integers = [types.int64] * (ARGUMENTS + 3)

    def emit(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [ir.I64] * (ARGUMENTS + 2))
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*integers), emit


@inner
def _take(state):
    """Run chunks until there are none."""
    while True:
        ticket = read(state, _TICKET)
        left = ticket & _CHUNKS_LEFT
        if left == 0:
            return
        if not swap(state, _TICKET, ticket, ticket - 1):
            continue
        chunk = read(state, _CHUNK)
        first = (left - 1) * chunk
        call(
            read(state, _FUNCTION), read(state, _ARGUMENTS), read(state, _ARGUMENTS + 1), read(state, _ARGUMENTS + 2),
            read(state, _ARGUMENTS + 3), read(state, _ARGUMENTS + 4), read(state, _ARGUMENTS + 5),
            read(state, _ARGUMENTS + 6), first, min(first + chunk, read(state, _GROUPS)),
        )  # fmt: skip
        add(state, _DONE, 1)


def _serve(state, _0, _1, _2, _3, _4, _5, _6, _7):
    """A worker's life."""
    spins = 0
    while read(state, _STOP) == 0:
        if read(state, _TICKET) & _CHUNKS_LEFT:
            _take(state)
            spins = 0
            continue
        spins += 1
        if spins < _SPINS_BEFORE_SLEEP:
            pause()
            continue
        lock(state + 8 * _MUTEX)
        add(state, _SLEEPERS, 1)
        while read(state, _TICKET) & _CHUNKS_LEFT == 0 and read(state, _STOP) == 0:
            wait(state + 8 * _CONDITION, state + 8 * _MUTEX)
        add(state, _SLEEPERS, -1)
        unlock(state + 8 * _MUTEX)
        spins = 0


@inner
def _wake_all(state):
    if read(state, _SLEEPERS) > 0:
        lock(state + 8 * _MUTEX)
        wake(state + 8 * _CONDITION)
        unlock(state + 8 * _MUTEX)


@inner
def run(state, threads, function, a, b, c, d, e, f, g, groups):
    """Call a kernel for row groups 0..groups-1; state 0, or one chunk, means: in this thread."""
    chunk = max(1, -(-groups // (threads * _PER_THREAD)))
    chunks = -(-groups // chunk)
    if state == 0 or chunks < 2:
        call(function, a, b, c, d, e, f, g, 0, groups)
        return
    write(state, _FUNCTION, function)
    write(state, _GROUPS, groups)
    write(state, _CHUNK, chunk)
    write(state, _ARGUMENTS, a)
    write(state, _ARGUMENTS + 1, b)
    write(state, _ARGUMENTS + 2, c)
    write(state, _ARGUMENTS + 3, d)
    write(state, _ARGUMENTS + 4, e)
    write(state, _ARGUMENTS + 5, f)
    write(state, _ARGUMENTS + 6, g)
    write(state, _DONE, 0)
    write(state, _TICKET, ((read(state, _TICKET) >> 20) + 1) << 20 | chunks)
    _wake_all(state)
    _take(state)
    spins = 0
    while read(state, _DONE) < chunks:
        spins += 1
        if spins < _SPINS_BEFORE_YIELD:
            pause()
        else:
            give_way()


class Pool:
    """`threads` threads, including the caller's. `lock` is held by the caller whose job runs."""

    def __init__(self, threads: int):
        self.threads = threads
        self.lock = threading.Lock()
        self._memory = np.zeros(_WORDS + 8, np.int64)
        address = self._memory.ctypes.data
        self.state = 0
        if threads > 1:
            self.state = -(-address // 64) * 64
            function("begin")(self.state)
            try:
                with thread_limit():
                    for number in range(threads - 1):
                        threading.Thread(target=_work, args=(self,), name=f"gguf-bridge-{number}", daemon=True).start()
            except BridgeError:
                self.stop()
                raise

    def stop(self) -> None:
        """Let the workers end."""
        if self.state:
            function("stop")(self.state)


def _work(pool: Pool) -> None:
    function("serve")(pool.state)  # `pool` keeps the shared memory alive


def _begin(state, _0, _1, _2, _3, _4, _5, _6, _7):
    initialize(state + 8 * _CONDITION, state + 8 * _MUTEX)


def _stop(state, _0, _1, _2, _3, _4, _5, _6, _7):
    write(state, _STOP, 1)
    lock(state + 8 * _MUTEX)
    wake(state + 8 * _CONDITION)
    unlock(state + 8 * _MUTEX)


_pool: Pool | None = None
_wanted: int | None = None
_choosing = ForkLock()  # held while the two change


def get_num_threads() -> int:
    """Threads that a product uses: set_num_threads, else BRIDGE_THREADS, else the cores this process may use."""
    if _wanted is not None:
        return _wanted
    configured = os.environ.get("BRIDGE_THREADS", "")
    if not configured:
        return usable_cpus()
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
    with old.lock:
        old.stop()


def get_pool() -> Pool:
    """The process's pool, started when first wanted."""
    global _pool
    if (pool := _pool) is None:
        with _choosing:
            if (pool := _pool) is None:
                _pool = pool = Pool(get_num_threads())
    return pool


def _walk(state, threads, table, rows, _0, _1, _2, _3, _4):
    """Make the calls of a table, int64 [rows, WORDS]."""
    calls = array_at(table, (rows, WORDS), np.int64)
    for i in range(rows):
        e = calls[i]
        shared = state if e[SHARED] else 0
        run(shared, threads, e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7], e[ITEMS])


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


def _after_fork() -> None:
    global _pool
    _pool = None  # its workers are the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
