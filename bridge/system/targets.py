"""Which instruction set the kernels use: chosen when the program runs, from the CPU's features.

BRIDGE_CPU=avx512vbmi, avx512, avxvnni, avx512bw, avx2, i8mm, neon or portable overrides the choice, downwards only: an
instruction that the CPU lacks ends the process, so asking for one is an error. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES
count as the CPU's description where they are set, since numba compiles for them. What LLVM does not see of an Arm CPU
(on macOS and under qemu, for instance) comes from the system: see arm.py.
"""

import importlib
import os
from functools import cache
from types import ModuleType

from bridge.errors import BridgeError
from bridge.system import arm

_ORDER = ("avx512vbmi", "avx512", "avxvnni", "avx512bw", "avx2", "i8mm", "neon")
PORTABLE = "portable"


def module(name: str) -> ModuleType:
    """The intrinsics of a target, whether or not they run here."""
    return importlib.import_module(f"bridge.runtime.cpu.intrinsics_{name}")


def _seen_by_llvm() -> set[str]:
    import llvmlite.binding as llvm

    return {name for name, present in llvm.get_host_cpu_features().items() if present}


def unseen_features() -> list[str]:
    """What numba must be told that the CPU has, as LLVM does not see it; nothing where the user describes the CPU."""
    if os.environ.get("NUMBA_CPU_NAME") or os.environ.get("NUMBA_CPU_FEATURES") is not None:
        return []
    return sorted(arm.features() - _seen_by_llvm())


@cache
def host_features() -> frozenset[str]:
    """The CPU features that compiled code may use, as LLVM names them."""
    features = _seen_by_llvm() | arm.features()
    wanted = os.environ.get("NUMBA_CPU_FEATURES")
    if wanted is not None or os.environ.get("NUMBA_CPU_NAME"):
        # a CPU's name proves nothing: features must be listed, and present here too
        features &= {f[1:] for f in (wanted or "").split(",") if f.startswith("+")}
    return frozenset(features)


def available() -> list[str]:
    """The targets that run here, fastest first; "portable" is always the last."""
    have = host_features()
    return [name for name in _ORDER if have.issuperset(module(name).FEATURES)] + [PORTABLE]


def chosen() -> str:
    """The target for new kernels. Raises BridgeError where BRIDGE_CPU asks for one that does not run here."""
    names = available()
    wanted = os.environ.get("BRIDGE_CPU", "").lower()
    if not wanted:
        return names[0]
    if wanted not in names:
        raise BridgeError(f"BRIDGE_CPU={wanted}: must be one that this machine runs: {', '.join(names)}")
    return wanted
