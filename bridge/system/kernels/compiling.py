"""How long kernels take to compile: a clock that stops meanwhile, and how far it is, for whoever waits.

This module needs no numba, so that whoever measures time can import it.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_active = 0  # kernels that are being compiled; those that one needs are compiled within it
_began = 0.0
_seconds = 0.0
_loading = 0.0  # seconds that importing the compiler took
_steps = 0
_elsewhere = 0, 0


@contextmanager
def kernel() -> Iterator[None]:
    """A kernel is compiled meanwhile: it is not in the cache."""
    global _active, _began, _seconds, _steps
    with _lock:
        if not _active:
            _began = time.perf_counter()
        _active += 1
        _steps += 1
    try:
        yield
    finally:
        with _lock:
            _active = max(0, _active - 1)
            if not _active:
                _seconds += time.perf_counter() - _began


@contextmanager
def kernels_elsewhere(total: int) -> Iterator[Callable[[int], None]]:
    """Other processes compile so many kernels meanwhile; call what this yields with how many they have compiled."""
    global _steps, _elsewhere
    done, before = _elsewhere
    _elsewhere = done, before + total

    def report(compiled: int) -> None:
        global _elsewhere
        _elsewhere = done + compiled, before + total

    try:
        with kernel():
            _steps += total - 1
            yield report
    finally:
        report(total)


def active() -> bool:
    """Whether something is being compiled."""
    return _active > 0


def elsewhere() -> tuple[int, int]:
    """How many kernels other processes have compiled since this one began, and how many they were given."""
    return _elsewhere


def steps() -> int:
    """The kernels that this process has compiled so far, those within kernels too; 0 where all came from the cache."""
    return _steps


def seconds() -> float:
    """Seconds that this process has spent on compiling kernels."""
    with _lock:
        return _seconds + (time.perf_counter() - _began if _active else 0.0)


@contextmanager
def loading() -> Iterator[None]:
    """The compiler is imported meanwhile, which each process may have to do, whether or not it compiles."""
    global _loading
    began = time.perf_counter()
    try:
        yield
    finally:
        _loading += time.perf_counter() - began


def clock() -> float:
    """time.perf_counter without the seconds spent on kernels and their compiler: speeds are measured with it."""
    return time.perf_counter() - seconds() - _loading


def _after_fork() -> None:
    global _active, _lock
    _active, _lock = 0, threading.Lock()  # the threads that compiled are the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
