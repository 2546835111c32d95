"""Products of a few rows with panels of 16 columns, which attention consists of, and the unpacking of int8 panels.

A panel is b [count, 16], of float32 or halves, each of its rows one vector. The sums of up to eight rows are in
registers, so that a load from b is used for all of them, and no multiply-add waits for the one before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from bridge.system.cpu import machine
from bridge.system.kernels import ir
from bridge.system.kernels.jit import cgutils, inner, intrinsic, specialize, types
from bridge.system.kernels.memory import LANES, call_intrinsic, fma, spread

TOGETHER = 8  # rows of the widest product

# set by `by_rows`
rows_1: Any = None
rows_4: Any = None
rows_8: Any = None


def _rows_together(rows: int) -> list[range]:
    """The rows of a product whose sums the registers hold: 16 and 32 narrower ones hold four."""
    most = 8 if "avx512f" in machine.features() else 4
    return [range(first, min(first + most, rows)) for first in range(0, rows, most)]


@cache
def panels(rows: int, halves: bool) -> Any:
    """panels(a, a_stride, b, b_stride, b_step, count, columns, c, c_stride, shares), products with several panels:

        c[r, 16 j : 16 j + 16] = sum over i < count of a[r, i] b[j, i, :] + shares[r] c[r, 16 j : 16 j + 16]

    r < rows, j < columns; a, c and shares are float32, b is float32 or halves. Strides in bytes: from one row to the
    next; `b_step` from one panel to the next. `shares` may be 0: then c is not read.
    """

    @intrinsic
    def multiply(typingctx, a, a_stride, b, b_stride, b_step, count, columns, c, c_stride, shares):
        def emit(context, builder, signature, arguments):
            a, a_stride, b, b_stride, b_step, count, columns, c, c_stride, shares = arguments
            vector = ir.VectorType(ir.F16 if halves else ir.F32, LANES)
            floats = ir.VectorType(ir.F32, LANES)

            def load(address: Any, kind: Any, align: int = 4) -> Any:
                return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)

            def place(base: Any, index: Any, stride: Any) -> Any:
                return builder.add(base, builder.mul(index, stride))

            with cgutils.for_range(builder, columns) as column:
                panel, out = place(b, column.index, b_step), place(c, column.index, ir.I64(4 * LANES))
                for group in _rows_together(rows):
                    totals = [cgutils.alloca_once(builder, floats) for _ in group]
                    starts = [place(a, ir.I64(r), a_stride) for r in group]
                    targets = [place(out, ir.I64(r), c_stride) for r in group]
                    for total in totals:
                        builder.store(ir.Constant(floats, [0.0] * LANES), total)
                    with builder.if_then(builder.icmp_signed("!=", shares, ir.I64(0))):
                        for r, target, total in zip(group, targets, totals, strict=True):
                            share = spread(builder, load(builder.add(shares, ir.I64(4 * r)), ir.F32), floats)
                            builder.store(builder.fmul(load(target, floats), share), total)
                    with cgutils.for_range(builder, count) as loop:
                        values = load(place(panel, loop.index, b_stride), vector, 2 if halves else 4)
                        values = builder.fpext(values, floats) if halves else values
                        for start, total in zip(starts, totals, strict=True):
                            factor = spread(builder, load(place(start, loop.index, ir.I64(4)), ir.F32), floats)
                            builder.store(fma(builder, factor, values, builder.load(total)), total)
                    for target, total in zip(targets, totals, strict=True):
                        builder.store(builder.load(total), builder.inttoptr(target, floats.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), emit

    return multiply


@cache
def dots(rows: int, halves: bool) -> Any:
    """dots(a, a_stride, b, b_stride, count, c, c_stride): c[r, t] = sum over i of a[r, i] * b[t, i].

    r < rows, t < count. Rows of b fill its stride, a multiple of 16 elements. a and c are float32, b is float32 or
    halves; strides in bytes.
    """
    item = ir.F16 if halves else ir.F32

    @intrinsic
    def multiply(typingctx, a, a_stride, b, b_stride, count, c, c_stride):
        def emit(context, builder, signature, arguments):
            a, a_stride, b, b_stride, count, c, c_stride = arguments
            vector, stored, nbytes = ir.VectorType(ir.F32, LANES), ir.VectorType(item, LANES), 2 if halves else 4
            reduce = f"llvm.vector.reduce.fadd.v{LANES}f32"
            zero = ir.Constant(vector, [0.0] * LANES)
            chunks = builder.udiv(b_stride, ir.I64(LANES * nbytes))
            for group in _rows_together(rows):
                totals = [cgutils.alloca_once(builder, vector) for _ in group]
                starts = [builder.add(a, builder.mul(a_stride, ir.I64(r))) for r in group]
                targets = [builder.add(c, builder.mul(c_stride, ir.I64(r))) for r in group]
                with cgutils.for_range(builder, count) as position:
                    row = builder.add(b, builder.mul(b_stride, position.index))
                    for total in totals:
                        builder.store(zero, total)
                    with cgutils.for_range(builder, chunks) as loop:
                        address = builder.add(row, builder.mul(loop.index, ir.I64(LANES * nbytes)))
                        values = builder.load(builder.inttoptr(address, stored.as_pointer()), align=nbytes)
                        values = builder.fpext(values, vector) if halves else values
                        for start, total in zip(starts, totals, strict=True):
                            address = builder.add(start, builder.mul(loop.index, ir.I64(4 * LANES)))
                            factors = builder.load(builder.inttoptr(address, vector.as_pointer()), align=4)
                            builder.store(fma(builder, factors, values, builder.load(total)), total)
                    for target, total in zip(targets, totals, strict=True):
                        address = builder.add(target, builder.shl(position.index, ir.I64(2)))
                        parts = ir.F32(0.0), builder.load(total)
                        dot = call_intrinsic(builder, reduce, ir.F32, *parts, fastmath=("reassoc",))
                        builder.store(dot, builder.inttoptr(address, ir.F32.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), emit

    return multiply


@cache
def unpack(scale_each: bool) -> Any:
    """unpack(codes, scales, out): 16 int8 codes times halves, a scale for each or one for all, as float32."""

    @intrinsic
    def multiply(typingctx, codes, scales, out):
        def emit(context, builder, signature, arguments):
            codes, scales, out = arguments
            floats = ir.VectorType(ir.F32, LANES)
            stored = ir.VectorType(ir.F16, LANES) if scale_each else ir.F16
            scale = builder.load(builder.inttoptr(scales, stored.as_pointer()), align=2)
            if scale_each:
                scale = builder.fpext(scale, floats)
            else:
                scale = spread(builder, builder.fpext(scale, ir.F32), floats)
            row = builder.load(builder.inttoptr(codes, ir.VectorType(ir.I8, LANES).as_pointer()), align=1)
            product = builder.fmul(builder.sitofp(row, floats), scale)
            builder.store(product, builder.inttoptr(out, floats.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), emit

    return multiply


@intrinsic
def _keep_apart(typingctx):
    """Let the function that calls this be compiled once, not in each place that calls it."""

    def emit(context, builder, signature, arguments):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), emit


def of_rows(rows, *arguments):
    """The narrowest of the compiled products that has `rows` rows; those beyond are computed and not used."""
    _keep_apart()
    if rows > 4:
        rows_8(*arguments)
    elif rows > 1:
        rows_4(*arguments)
    else:
        rows_1(*arguments)


def by_rows(make: Callable[[int], Any], suffix: str) -> Any:
    """`of_rows` for the products that `make` compiles for so many rows."""
    return specialize(of_rows, suffix, inner, **{f"rows_{rows}": make(rows) for rows in (1, 4, 8)})
