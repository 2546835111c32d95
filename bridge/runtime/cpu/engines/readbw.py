"""How fast this machine reads memory: the limit that a matvec is measured against.

The same chunks, threads and huge pages as a product, every cache line loaded and added up, nothing else done.
"""

from __future__ import annotations

import numpy as np

from bridge.runtime.cpu.machine.emitter import Emitter
from bridge.system.kernels import ir
from bridge.system.kernels.jit import CFunction, c_function, intrinsic, maker, types
from bridge.system.threads import pool, words

_UNROLLED = 8  # vectors


@intrinsic
def _sum_lines(typingctx, address):
    """Add up 8 lines; returns a number that depends on all of them."""

    def emit(context, builder, signature, arguments):
        v, total, wide = Emitter(builder, None), None, ir.VectorType(ir.I32, 16)
        for i in range(_UNROLLED):
            line = builder.load(v.pointer(arguments[0], 64 * i, wide), align=64)
            v.prefetch(arguments[0], 64 * i + 4096)
            total = line if total is None else builder.xor(total, line)
        return builder.sext(v.call("llvm.vector.reduce.xor.v16i32", ir.I32, total), ir.I64)

    return types.int64(types.int64), emit


def _read(start, sums, c, d, stride, f, g, first, last):
    total = 0
    for group in range(first, last):
        for line in range(0, stride, 64 * _UNROLLED):
            total ^= _sum_lines(start + group * stride + line)
    words.add(sums, 0, total)


@maker
def _kernel() -> CFunction:
    return c_function(_read)


class Reader:
    """`run()` reads `nbytes` bytes with the pool's threads."""

    _STRIDE = 1 << 15

    def __init__(self, nbytes: int):
        from bridge.runtime.cpu.engines.prepared import on_huge_pages

        self.groups = max(1, nbytes // self._STRIDE)
        self.nbytes = self.groups * self._STRIDE
        self.memory = on_huge_pages(self.nbytes)
        self.memory[:] = 1
        self.sums = np.zeros(1, np.int64)

    def run(self) -> None:
        pool.share_items(
            True, _kernel(), self.memory.ctypes.data, self.sums.ctypes.data, 0, 0, self._STRIDE, items=self.groups
        )
