"""Which engine multiplies a matrix on this machine; portable.py says what an engine is."""

import warnings
from collections.abc import Callable
from functools import cache

from bridge.blocks.read import READ
from bridge.runtime.cpu.engines import interleaved
from bridge.runtime.cpu.engines.dequantize import UNQUANTIZED
from bridge.runtime.cpu.engines.floats import SIZES
from bridge.runtime.cpu.engines.portable import Dequantizing, Engine, FloatRows, RawMatrix, RowMajor
from bridge.runtime.cpu.engines.prepared import Prepared
from bridge.runtime.cpu.engines.tiled import Tiled
from bridge.runtime.cpu.forms.repack import repacker
from bridge.system.cpu import targets
from bridge.system.kernels.jit import CFunction


def unprepared(matrix: RawMatrix) -> Engine:
    """The engine that needs no copy of the weights."""
    if matrix.type in READ:
        target = targets.chosen()
        return RowMajor(matrix) if target == targets.PORTABLE else Tiled(matrix, target)
    if matrix.type in SIZES:
        return FloatRows(matrix)
    if matrix.type not in UNQUANTIZED:
        _warn_of_slowness(matrix.type)
    return Dequantizing(matrix)


def prepare(matrix: RawMatrix, done: Callable[[int, int], None] | None = None) -> Engine:
    """The fastest engine of this machine, with its own copy of the weights; `done` is told which bytes have been copied
    (see `Prepared`)."""
    if matrix.type in READ and (target := targets.chosen()) != targets.PORTABLE:
        return Prepared(matrix, target, done)
    return unprepared(matrix)


def prepared_functions(type: str, integer: bool) -> list[CFunction]:
    """The C functions that prepare a matrix of a type, and then multiply it by one vector."""
    if type not in READ or (target := targets.chosen()) == targets.PORTABLE:
        return []
    return [repacker(type, targets.isa(target).lanes), interleaved.kernel(type, target, 1, integer, False)]


@cache  # once a process, whatever the warning filters make of repetitions
def _warn_of_slowness(type: str) -> None:
    message = f"no kernel for {type}: such tensors are dequantized for every product, which is slow"
    warnings.warn(message, stacklevel=4)
