"""Locks that a forked child finds free: the thread that held one in the parent does not exist in the child."""

import gc
import os
import sys
import threading
import weakref
from functools import cached_property
from typing import Any


class ForkLock:
    """`threading.Lock` as a context manager, made anew in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Forget who held it."""
        self._lock = threading.Lock()


_locks: Any = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_locks):
        lock.renew()
    if sys.version_info < (3, 12):  # since then, properties have no locks
        for each in gc.get_referrers(cached_property):
            if isinstance(each, cached_property):
                vars(each)["lock"] = threading.RLock()  # held while the property of any object is computed


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
