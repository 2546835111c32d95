"""What compiled code calls to wait for other threads: a lock, a condition variable, and the rest of a time slice.

They are pthreads' or, on Windows, those of kernel32 (a slim lock and its condition variable). Both begin as zeros and
fit in 128 bytes. Each function here takes their addresses, and is for compiled code alone.
"""

import ctypes
import sys
from typing import Any

from llvmlite import binding
from numba.core import types

from bridge.system.jit import inner, kernel

_function: Any = types.ExternalFunction
_int32: Any = types.int32
_uint32: Any = types.uint32
_nothing: Any = types.void
_pointer = types.intp

if sys.platform == "win32":
    for _name in (
        "AcquireSRWLockExclusive", "ReleaseSRWLockExclusive", "SleepConditionVariableSRW", "WakeAllConditionVariable",
        "SwitchToThread",
    ):  # fmt: skip
        _address = ctypes.cast(getattr(ctypes.WinDLL("kernel32"), _name), ctypes.c_void_p).value
        binding.add_symbol(_name, _address)

    lock = _function("AcquireSRWLockExclusive", _nothing(_pointer))
    unlock = _function("ReleaseSRWLockExclusive", _nothing(_pointer))
    wake = _function("WakeAllConditionVariable", _nothing(_pointer))
    give_way = _function("SwitchToThread", _int32())
    _sleep = _function("SleepConditionVariableSRW", _int32(_pointer, _pointer, _uint32, _uint32))

    @inner
    def wait(condition, mutex):
        """Release a held lock, sleep until woken, and take the lock again."""
        _sleep(condition, mutex, 0xFFFFFFFF, 0)  # for ever; the lock is exclusive

    @kernel
    def initialize(condition, mutex):
        """Zeros are a lock and a condition variable already."""

else:
    lock = _function("pthread_mutex_lock", _int32(_pointer))
    unlock = _function("pthread_mutex_unlock", _int32(_pointer))
    wake = _function("pthread_cond_broadcast", _int32(_pointer))
    give_way = _function("sched_yield", _int32())
    wait = _function("pthread_cond_wait", _int32(_pointer, _pointer))
    _mutex_init = _function("pthread_mutex_init", _int32(_pointer, _pointer))
    _condition_init = _function("pthread_cond_init", _int32(_pointer, _pointer))

    @kernel
    def initialize(condition, mutex):
        """Make a lock and a condition variable of the bytes at two addresses."""
        _mutex_init(mutex, 0)
        _condition_init(condition, 0)
