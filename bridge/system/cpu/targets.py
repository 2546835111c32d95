"""Which instruction set the kernels use: chosen when the program runs, from the CPU's features.

BRIDGE_CPU=avx512vbmi, avx512, avxvnni, avx512bw, avx2, i8mm, neon or portable overrides the choice, downwards only: an
instruction that the CPU lacks ends the process, so asking for one is an error.
"""

import importlib
import os
from functools import cache
from typing import Any

from bridge.errors import BridgeError
from bridge.system.cpu import machine

PORTABLE = "portable"
_AVX2 = {"avx2", "f16c", "fma"}
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "f16c", "fma"}
_NEON = {"neon", "dotprod"}
FEATURES = {  # what each target needs, as LLVM names it; fastest first
    "avx512vbmi": _AVX512 | {"avx512vnni", "avx512vbmi"},
    "avx512": _AVX512 | {"avx512vnni"},
    "avxvnni": _AVX2 | {"avxvnni"},
    "avx512bw": _AVX512,
    "avx2": _AVX2,
    "i8mm": _NEON | {"i8mm"},
    "neon": _NEON,
}


@cache
def isa(name: str) -> Any:
    """The `InstructionSet` of a target, whether or not it runs here."""
    return importlib.import_module(f"bridge.runtime.cpu.machine.intrinsics_{name}").ISA


def available() -> list[str]:
    """The targets that run here, fastest first; "portable" is always the last."""
    return list(_available(machine.features()))


@cache
def _available(features: frozenset[str]) -> tuple[str, ...]:
    return (*(name for name, needed in FEATURES.items() if needed <= features), PORTABLE)


def chosen() -> str:
    """The target for new kernels. Raises BridgeError where BRIDGE_CPU asks for one that does not run here."""
    names = available()
    wanted = os.environ.get("BRIDGE_CPU", "").lower()
    if not wanted:
        return names[0]
    if wanted not in names:
        raise BridgeError(f"BRIDGE_CPU={wanted}: must be one that this machine runs: {', '.join(names)}")
    return wanted
