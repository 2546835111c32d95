"""llvmlite.ir, and the types that kernels have most: imported when something in it is asked for.

A start that finds its kernels' object code writes no LLVM code, and does without. Modules that use this have
`from __future__ import annotations`, as their annotations would ask for it.
"""

import importlib
from typing import Any

_TYPES = {
    "I1": ("IntType", 1), "I8": ("IntType", 8), "I16": ("IntType", 16), "I32": ("IntType", 32), "I64": ("IntType", 64),
    "F16": ("HalfType",), "F32": ("FloatType",),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    kind, *bits = _TYPES.get(name, (name,))
    attribute = getattr(importlib.import_module("llvmlite.ir"), str(kind))
    globals()[name] = value = attribute(*bits) if name in _TYPES else attribute
    return value
