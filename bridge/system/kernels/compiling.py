"""How long kernels take to compile: a clock that stops meanwhile, and a line for whoever waits. `jit` reports to it.

This module needs no numba, so that whoever measures time can import it.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, bool], None]  # "3 s" or "7 of 23", and whether there is more to compile right now

_lock = threading.Lock()
_active = 0  # kernels that are being compiled; those that one needs are compiled within it
_began = 0.0
_seconds = 0.0
_loading = 0.0  # seconds that importing the compiler took
_steps = 0
_listener: Listener | None = None


@contextmanager
def kernel() -> Iterator[None]:
    """A kernel is compiled meanwhile: it is not in the cache."""
    global _active, _began, _seconds, _steps
    with _lock:
        if not _active:
            _began = time.perf_counter()
        _active += 1
        _steps += 1
    _report(f"{seconds():.0f} s", True)
    try:
        yield
    finally:
        with _lock:
            _active = max(0, _active - 1)
            if not _active:
                _seconds += time.perf_counter() - _began
        if not _active:
            _report("", False)


@contextmanager
def kernels_elsewhere(total: int) -> Iterator[Callable[[int], None]]:
    """Other processes compile so many kernels meanwhile; call what this yields with how many they have compiled."""
    global _steps
    with kernel():
        _steps += total - 1
        _report(f"0 of {total}", True)
        yield lambda done: _report(f"{done} of {total}", True)


def _report(text: str, more: bool) -> None:
    if _listener is not None:
        _listener(text, more)


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


@contextmanager
def reporting_to(listener: Listener) -> Iterator[None]:
    """Call `listener` while kernels are compiled, several times a kernel."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def _after_fork() -> None:
    global _active, _lock
    _active, _lock = 0, threading.Lock()  # the threads that compiled are the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
