"""What compiled code calls to wait for other threads: a lock, a condition variable, and the rest of a time slice.

They are pthreads' or, on Windows, those of kernel32 (a slim lock and its condition variable). Both begin as zeros and
fit in 128 bytes. Each function here takes their addresses, and is for compiled code alone.
"""

import ctypes
import sys

from bridge.system.kernels.jit import inner
from bridge.system.kernels.memory import external

if sys.platform == "win32":
    from llvmlite import binding

    for _name in (
        "AcquireSRWLockExclusive", "ReleaseSRWLockExclusive", "SleepConditionVariableSRW", "WakeAllConditionVariable",
        "SwitchToThread",
    ):  # fmt: skip
        _address = ctypes.cast(getattr(ctypes.WinDLL("kernel32"), _name), ctypes.c_void_p).value
        binding.add_symbol(_name, _address)

    lock = external("AcquireSRWLockExclusive", 1)
    unlock = external("ReleaseSRWLockExclusive", 1)
    wake = external("WakeAllConditionVariable", 1)
    give_way = external("SwitchToThread", 0)
    _sleep = external("SleepConditionVariableSRW", 4)

    @inner
    def wait(condition, mutex):
        """Release a held lock, sleep until woken, and take the lock again."""
        _sleep(condition, mutex, 0xFFFFFFFF, 0)  # for ever; the lock is exclusive

    @inner
    def initialize(condition, mutex):
        """Zeros are a lock and a condition variable already."""

else:
    lock = external("pthread_mutex_lock", 1)
    unlock = external("pthread_mutex_unlock", 1)
    wake = external("pthread_cond_broadcast", 1)
    give_way = external("sched_yield", 0)
    wait = external("pthread_cond_wait", 2)
    _mutex_init = external("pthread_mutex_init", 2)
    _condition_init = external("pthread_cond_init", 2)

    @inner
    def initialize(condition, mutex):
        """Make a lock and a condition variable of the bytes at two addresses."""
        _mutex_init(mutex, 0)
        _condition_init(condition, 0)
