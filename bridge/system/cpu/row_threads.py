"""Rows are independent of each other: kernels without the GIL run on chunks of them, a thread each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bridge.errors import BridgeError
from bridge.system.cpu.cpus import usable_cpus

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_TILE = 512
_CHUNK_VALUES = 1 << 22


def slices(rows: int, count: int) -> list[slice]:
    """At most `count` slices of about equal length that cover 0..rows, one at least."""
    count = max(1, min(count, rows))
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def over_rows(rows: int, work: Callable[[slice], object], least: int = 1) -> None:
    """Call `work` on slices that cover 0..rows, on as many threads as there are CPUs; errors are raised here.

    least  rows that are worth a thread

    The threads are the process's own, and this thread does its part. Work that calls this again does all of it.
    """
    parts = slices(rows, 1 if getattr(_inside, "pool", False) else min(usable_cpus(), max(1, rows // least)))
    if len(parts) == 1:
        work(parts[0])
        return
    from concurrent.futures import wait

    futures: list[Future[object]] = []
    try:
        with thread_limit():
            futures += (_pool.submit(work, part) for part in parts[1:])
        work(parts[0])
    finally:
        wait(futures)
    for future in futures:
        future.result()


class _Pool:
    """Threads that are started when they are first needed, and anew in a process that was forked."""

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[slice], object], rows: slice) -> Future[object]:
        from concurrent.futures import ThreadPoolExecutor

        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(max(1, usable_cpus() - 1), initializer=_enter)
            try:
                return self._threads.submit(work, rows)
            except RuntimeError:  # a thread could not be started; those that were finish what is queued
                threads, self._threads = self._threads, None
                threads.shutdown(wait=False)
                raise


_inside = threading.local()


def _enter() -> None:
    _inside.pool = True


_pool = _Pool()


@contextmanager
def thread_limit() -> Iterator[None]:
    """Have threads that the system does not start raise BridgeError."""
    try:
        yield
    except RuntimeError as problem:
        if "start new thread" not in str(problem):  # Python has no class of its own for it
            raise
        raise BridgeError(
            "the system starts no more threads for this user: raise the limit (ulimit -u) or end other programs"
        ) from problem


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices that cover 0..rows, about four million values each: what is made from a file piece by piece."""
    step = max(1, _CHUNK_VALUES // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def tiles(rows: int) -> Iterator[slice]:
    """Slices that cover 0..rows, few rows each: what is as large as the matrix itself is made tile by tile."""
    return (slice(start, min(start + _TILE, rows)) for start in range(0, rows, _TILE))


def sleep_when_idle() -> None:
    """Let OpenMP's threads, which PyTorch computes with, sleep when idle, unless the environment says otherwise.

    By default they spin, and the pool's threads have fewer cores: on a busy machine, quantizing took 2 to 7 times as
    long. OpenMP reads the variable when PyTorch is loaded, so this has no effect after that.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
