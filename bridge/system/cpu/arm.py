"""What an Arm CPU has, asked of the system, since LLVM does not know it everywhere.

Linux says it in two words of bits (getauxval), qemu's user mode too; there, LLVM reads the host's /proc/cpuinfo. macOS
says it through sysctl, one name a question. Neither starts a process.
"""

import ctypes
import platform
import sys
from functools import cache

_HWCAP, _HWCAP2 = 16, 26  # of <elf.h>
_FEATURES = {  # LLVM's name: word and bit on Linux, as in <asm/hwcap.h>, and macOS's name
    "neon": (_HWCAP, 1, "hw.optional.neon"),
    "fullfp16": (_HWCAP, 10, "hw.optional.arm.FEAT_FP16"),
    "dotprod": (_HWCAP, 20, "hw.optional.arm.FEAT_DotProd"),
    "i8mm": (_HWCAP2, 13, "hw.optional.arm.FEAT_I8MM"),
}


@cache
def features() -> frozenset[str]:
    """What kernels may use, by LLVM's names; empty on other CPUs and systems."""
    if platform.machine() not in ("aarch64", "arm64"):
        return frozenset()
    if sys.platform == "darwin":
        return frozenset(feature for feature, (*_, name) in _FEATURES.items() if _sysctl(name))
    if sys.platform == "linux":
        ask = ctypes.CDLL(None).getauxval
        ask.argtypes, ask.restype = [ctypes.c_ulong], ctypes.c_ulong
        return frozenset(feature for feature, (word, bit, _) in _FEATURES.items() if ask(word) >> bit & 1)
    return frozenset()


def performance_cores() -> int:
    """A Mac's fast cores: a product waits for its slowest thread. 0 where all are alike, and on other systems."""
    return _sysctl("hw.perflevel0.physicalcpu") if sys.platform == "darwin" else 0


def _sysctl(name: str) -> int:
    """macOS's answer to a name, a whole number; 0 to one that it does not know."""
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)  # zeros above a number of 4 bytes
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value
