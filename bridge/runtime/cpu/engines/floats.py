"""F32, F16 and BF16 matrices: the file's own rows, widened in registers and multiplied with float32.

A row is `count` numbers of 4 or 2 bytes, as in the file; there is nothing to repack. The kernel is a
C function as those of interleaved.py are; its "row groups" are single rows, `blocks` is the row's length and
`stride` its bytes. From memory it runs at the speed of reading; several tokens at once go through a dense
product (dense.py) where that is less work than passing over the weights again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from bridge.system.kernels import ir
from bridge.system.kernels.jit import CFunction, c_function, cgutils, intrinsic, maker, types
from bridge.system.kernels.memory import LANES, call_intrinsic, floats, fma

SIZES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of a number
_PARTS = 4  # independent sums, to hide the latency of additions


# set per type by `c_function`
dot: Any = None
widen: Any = None


def _widened(builder: ir.IRBuilder, kind: str, address: ir.Value, lanes: int) -> ir.Value:
    """`lanes` numbers of a type at an address, as float32."""

    def wide(element: ir.Type) -> ir.Type:
        return ir.VectorType(element, lanes) if lanes > 1 else element

    stored = {"F32": ir.F32, "F16": ir.F16, "BF16": ir.I16}[kind]
    values = builder.load(builder.inttoptr(address, wide(stored).as_pointer()), align=SIZES[kind])
    if kind == "F16":
        return builder.fpext(values, wide(ir.F32))
    if kind == "BF16":
        sixteen = ir.Constant(wide(ir.I32), [16] * lanes if lanes > 1 else 16)
        return builder.bitcast(builder.shl(builder.zext(values, wide(ir.I32)), sixteen), wide(ir.F32))
    return values


@cache
def dot_function(kind: str) -> Any:
    """dot(weights, x, count): the sum of products of `count` numbers of a type and float32, at two addresses."""

    @intrinsic
    def multiply(typingctx, weights, x, count):
        def emit(context, builder, signature, arguments):
            weights, x, count = arguments
            vector = ir.VectorType(ir.F32, LANES)
            sums = [cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * LANES)) for _ in range(_PARTS)]
            rest = cgutils.alloca_once_value(builder, ir.Constant(ir.F32, 0.0))

            def pair(index, lanes):
                address = builder.add(weights, builder.mul(index, ir.I64(SIZES[kind])))
                value = builder.inttoptr(
                    builder.add(x, builder.mul(index, ir.I64(4))), (vector if lanes > 1 else ir.F32).as_pointer()
                )
                return _widened(builder, kind, address, lanes), builder.load(value, align=4)

            step = LANES * _PARTS
            full_steps = builder.udiv(count, ir.I64(step))
            with cgutils.for_range(builder, full_steps) as loop:
                first = builder.mul(loop.index, ir.I64(step))
                for p, total in enumerate(sums):
                    a, b = pair(builder.add(first, ir.I64(p * LANES)), LANES)
                    builder.store(fma(builder, a, b, builder.load(total)), total)
            done = builder.mul(full_steps, ir.I64(step))
            with cgutils.for_range_slice(builder, done, count, ir.I64(1), inc=True) as (i, _):
                a, b = pair(i, 1)
                builder.store(builder.fadd(builder.load(rest), builder.fmul(a, b)), rest)
            total = builder.load(sums[0])
            for other in sums[1:]:
                total = builder.fadd(total, builder.load(other))
            reduce, first = f"llvm.vector.reduce.fadd.v{LANES}f32", builder.load(rest)
            return call_intrinsic(builder, reduce, ir.F32, first, total, fastmath=("reassoc",))

        return types.float32(types.int64, types.int64, types.int64), emit

    return multiply


def _rows(weights, x, y, blocks, stride, tokens, y_stride, first, last):
    for t in range(tokens):
        out = floats(y + t * y_stride, last)
        for row in range(first, last):
            out[row] = dot(weights + row * stride, x + t * blocks * 4, blocks)


@maker
def rows_function(kind: str) -> CFunction:
    """The C function that multiplies rows of a type, see above."""
    return c_function(_rows, f"rows_{kind}", dot=dot_function(kind))


@cache
def _widening(kind: str) -> Any:
    """widen(numbers, y, count): so many numbers of a type -> float32, at two addresses."""

    @intrinsic
    def widen(typingctx, numbers, y, count):
        def emit(context, builder, signature, arguments):
            numbers, y, count = arguments

            def store(index, lanes):
                value = _widened(builder, kind, builder.add(numbers, builder.mul(index, ir.I64(SIZES[kind]))), lanes)
                place = builder.add(y, builder.mul(index, ir.I64(4)))
                builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=4)

            full = builder.udiv(count, ir.I64(LANES))
            with cgutils.for_range(builder, full) as loop:
                store(builder.mul(loop.index, ir.I64(LANES)), LANES)
            done = builder.mul(full, ir.I64(LANES))
            with cgutils.for_range_slice(builder, done, count, ir.I64(1), inc=True) as (i, _):
                store(i, 1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), emit

    return widen


def _wide_rows(raw, y, row_bytes, columns, _0, _1, _2, first, last):
    widen(raw + first * row_bytes, y + 4 * first * columns, (last - first) * columns)


@maker
def wide_rows_function(kind: str) -> CFunction:
    """rowmajor.py's `rows_function` for a type of floats."""
    return c_function(_wide_rows, kind, widen=_widening(kind))
