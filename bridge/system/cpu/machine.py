"""The CPU that kernels are compiled for, as LLVM describes it; `targets` chooses among the instruction sets it has.

NUMBA_CPU_NAME and NUMBA_CPU_FEATURES count as the CPU's description where they are set, since numba compiles for them.
What LLVM does not see of an Arm CPU (on macOS and under qemu, for instance) comes from the system: see arm.py.
"""

import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bridge.system.cpu import arm
from bridge.system.storage import kernel_cache

# Linux's name for a kind of x86 CPU, with numbers for all its features
_MODALIAS = Path("/sys/devices/system/cpu/modalias")


class Machine(NamedTuple):
    """What LLVM compiles for. features: "+avx2,-avx512f" ..."""

    triple: str
    cpu: str
    features: str


@cache
def host() -> Machine:
    """This machine."""
    triple, cpu, present = _seen_by_llvm()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        unseen = unseen_features()
        told = [("+" if has else "-") + name for name, has in present.items() if name not in unseen]
        features = ",".join([*told, *(f"+{name}" for name in unseen)])
    return Machine(triple, os.environ.get("NUMBA_CPU_NAME") or cpu, features)


@cache
def features() -> frozenset[str]:
    """The CPU features that compiled code may use, as LLVM names them."""
    usable = _present() | arm.features()
    wanted = os.environ.get("NUMBA_CPU_FEATURES")
    if wanted is not None or os.environ.get("NUMBA_CPU_NAME"):
        # a CPU's name proves nothing: features must be listed, and present here too
        usable &= {f[1:] for f in (wanted or "").split(",") if f.startswith("+")}
    return frozenset(usable)


def unseen_features() -> list[str]:
    """What numba must be told that the CPU has, as LLVM does not see it; nothing where the user describes the CPU."""
    if os.environ.get("NUMBA_CPU_NAME") or os.environ.get("NUMBA_CPU_FEATURES") is not None:
        return []
    return sorted(arm.features() - _present())


def _present() -> set[str]:
    return {name for name, present in _seen_by_llvm()[2].items() if present}


@cache
def _seen_by_llvm() -> tuple[str, str, dict[str, bool]]:
    """This machine's triple, CPU and features; kept with the kernels where Linux names the CPU: LLVM takes 50 ms."""
    file = _cache_name()
    with suppress(ValueError):
        triple, cpu, features = json.loads((file and kernel_cache.load(file)) or b"")
        return triple, cpu, features
    import llvmlite.binding as llvm

    seen = llvm.get_process_triple(), llvm.get_host_cpu_name(), dict(sorted(llvm.get_host_cpu_features().items()))
    if file:
        kernel_cache.note(file, json.dumps(seen).encode())
    return seen


def _cache_name() -> str | None:
    """The name of the file for what LLVM says of this kind of CPU; None where the kind is not known."""
    import llvmlite

    with suppress(OSError, AttributeError):  # other systems
        kind = _MODALIAS.read_text()
        if kind.startswith("cpu:type:x86"):
            return f"cpu-{kernel_cache.digest(kind, os.uname().release, llvmlite.__version__)}.json"
    return None
