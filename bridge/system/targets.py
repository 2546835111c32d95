"""Which instruction set the kernels use: chosen when the program runs, from the CPU's features.

BRIDGE_CPU=avx512vbmi, avx512, avxvnni, avx512bw, avx2, i8mm, neon or portable overrides the choice, downwards only: an
instruction that the CPU lacks ends the process, so asking for one is an error.
"""

import importlib
import os
from functools import cache
from types import ModuleType

from bridge.errors import BridgeError
from bridge.system import machine

_ORDER = ("avx512vbmi", "avx512", "avxvnni", "avx512bw", "avx2", "i8mm", "neon")
PORTABLE = "portable"


@cache
def module(name: str) -> ModuleType:
    """The intrinsics of a target, whether or not they run here."""
    return importlib.import_module(f"bridge.runtime.cpu.intrinsics_{name}")


def available() -> list[str]:
    """The targets that run here, fastest first; "portable" is always the last."""
    have = machine.features()
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
