"""The CPU that kernels are compiled for, as LLVM describes it; `targets` chooses among the instruction sets it has.

NUMBA_CPU_NAME and NUMBA_CPU_FEATURES count as the CPU's description where they are set, since numba compiles for them.
What LLVM does not see of an Arm CPU (on macOS and under qemu, for instance) comes from the system: see arm.py.
"""

import os
from functools import cache
from typing import NamedTuple

import llvmlite.binding as llvm

from bridge.system import arm


class Machine(NamedTuple):
    """What LLVM compiles for. features: "+avx2,-avx512f" ..."""

    triple: str
    cpu: str
    features: str


@cache
def host() -> Machine:
    """This machine."""
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        unseen = unseen_features()
        seen = llvm.get_host_cpu_features().flatten().split(",")
        told = [feature for feature in seen if feature and feature[1:] not in unseen]
        features = ",".join([*told, *(f"+{name}" for name in unseen)])
    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    return Machine(llvm.get_process_triple(), name, features)


@cache
def features() -> frozenset[str]:
    """The CPU features that compiled code may use, as LLVM names them."""
    found = _seen_by_llvm() | arm.features()
    wanted = os.environ.get("NUMBA_CPU_FEATURES")
    if wanted is not None or os.environ.get("NUMBA_CPU_NAME"):
        # a CPU's name proves nothing: features must be listed, and present here too
        found &= {f[1:] for f in (wanted or "").split(",") if f.startswith("+")}
    return frozenset(found)


def unseen_features() -> list[str]:
    """What numba must be told that the CPU has, as LLVM does not see it; nothing where the user describes the CPU."""
    if os.environ.get("NUMBA_CPU_NAME") or os.environ.get("NUMBA_CPU_FEATURES") is not None:
        return []
    return sorted(arm.features() - _seen_by_llvm())


def _seen_by_llvm() -> set[str]:
    return {name for name, present in llvm.get_host_cpu_features().items() if present}
