"""Kernels on plain addresses: C functions, arrays, halves and small vector products.

A decoder's kernels get addresses as the products do (see interleaved.py), and have the same signature, so
that a whole token is computed by one table of calls (see program.py).
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import numpy as np

from bridge.system.cpu import machine
from bridge.system.kernels import ir
from bridge.system.kernels.jit import arrayobj, cgutils, inner, intrinsic, types

LANES = 16  # floats of a vector here; LLVM splits it where registers are smaller


@intrinsic
def to_half(typingctx, value):
    """float32 -> the bits of the nearest half."""

    def emit(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.F16), ir.I16)

    return types.uint16(types.float32), emit


@intrinsic
def from_half(typingctx, bits):
    """The bits of a half -> float32."""

    def emit(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.F16), ir.F32)

    return types.float32(types.uint16), emit


@cache
def stack(nbytes: int) -> Any:
    """stack(): the address of so many bytes on the stack of the function that calls it, of any contents."""

    @intrinsic
    def space(typingctx):
        def emit(context, builder, signature, arguments):
            with builder.goto_entry_block():  # cgutils.alloca_once stores zeros, 8 KB of which take LLVM seconds
                memory = builder.alloca(ir.ArrayType(ir.I8, nbytes))
            memory.align = 64
            return builder.ptrtoint(memory, ir.I64)

        return types.int64(), emit

    return space


def _array(context: Any, builder: Any, kind: Any, memory: Any, shape: list[Any]) -> Any:
    """An array that does not own its memory; numba.carray and numpy.empty are compiled for each kind of arguments."""
    array = arrayobj.make_array(kind)(context, builder)
    item = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    strides = [ir.I64(item)]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    data = builder.bitcast(memory, array.data.type)
    arrayobj.populate_array(array, data=data, shape=shape, strides=strides, itemsize=ir.I64(item), meminfo=None)
    return array._getvalue()


@intrinsic
def array_at(typingctx, address, shape, dtype):
    """The array of this shape, an integer or a tuple, and dtype at an address."""
    dimensions = getattr(shape, "count", 0)  # of a tuple
    kind = types.Array(dtype.dtype, dimensions or 1, "C")

    def emit(context, builder, signature, arguments):
        lengths = cgutils.unpack_tuple(builder, arguments[1]) if dimensions else [arguments[1]]
        return _array(context, builder, kind, builder.inttoptr(arguments[0], ir.I8.as_pointer()), lengths)

    integers = types.UniTuple(types.int64, dimensions) if dimensions else types.int64
    return kind(types.int64, integers, dtype), emit


@intrinsic(prefer_literal=True)
def array_on_stack(typingctx, length, dtype):
    """An array of a length that is known when the function is compiled, on its stack."""
    kind = types.Array(dtype.dtype, 1, "C")
    count = length.literal_value

    def emit(context, builder, signature, arguments):
        memory = cgutils.alloca_once(builder, context.get_data_type(kind.dtype), size=count)
        return _array(context, builder, kind, memory, [ir.I64(count)])

    return kind(length, dtype), emit


def external(name: str, count: int) -> Any:
    """A function of the C library, of `count` int64 or addresses, for compiled code; its result as int64."""

    def declared() -> Any:
        def emit(context, builder, signature, arguments):
            kind = ir.FunctionType(ir.I64, [ir.I64] * count)
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

        return types.int64(*[types.int64] * count), emit

    takes = (lambda typingctx: declared(), lambda typingctx, a: declared(), lambda typingctx, a, b: declared(),
             lambda typingctx, a, b, c: declared(), lambda typingctx, a, b, c, d: declared())  # fmt: skip
    return intrinsic(takes[count])


allocate = external("malloc", 1)  # bytes -> the address of so many, of any contents, a multiple of 16
free = external("free", 1)
if sys.platform == "win32":
    from llvmlite import binding

    for _name in ("malloc", "free"):
        binding.add_symbol(_name, ctypes.cast(getattr(ctypes.WinDLL("msvcrt"), _name), ctypes.c_void_p).value)


@inner
def next_line(address):
    """The first address from there on that begins a line of the cache."""
    return (address + 63) // 64 * 64


@inner
def floats(address, count):
    """float32 [count] at an address."""
    return array_at(address, count, np.float32)


def rows_together(rows: int) -> list[range]:
    """The rows of a product with `LANES` columns whose sums the registers hold: 16 and 32 narrower ones hold four."""
    most = 8 if "avx512f" in machine.features() else 4
    return [range(first, min(first + most, rows)) for first in range(0, rows, most)]


@cache
def panel(rows: int, halves: bool) -> Any:
    """panel(a, a_stride, b, b_stride, count, c, c_stride): c[r, :] = sum over i < count of a[r, i] * b[i, :].

    r < rows; c and b have 16 columns; a and c are float32, b is float32 or halves. Strides in bytes.
    """

    @intrinsic
    def multiply(typingctx, a, a_stride, b, b_stride, count, c, c_stride):
        def emit(context, builder, signature, arguments):
            a, a_stride, b, b_stride, count, c, c_stride = arguments
            vector = ir.VectorType(ir.F16 if halves else ir.F32, LANES)
            floats = ir.VectorType(ir.F32, LANES)
            zero = ir.Constant(floats, [0.0] * LANES)
            for block in rows_together(rows):
                totals = [cgutils.alloca_once_value(builder, zero) for _ in block]
                starts = [builder.add(a, builder.mul(a_stride, ir.I64(r))) for r in block]
                with cgutils.for_range(builder, count) as loop:
                    address = builder.add(b, builder.mul(b_stride, loop.index))
                    values = builder.load(builder.inttoptr(address, vector.as_pointer()), align=2 if halves else 4)
                    if halves:
                        values = builder.fpext(values, floats)
                    for start, total in zip(starts, totals, strict=True):
                        element = builder.add(start, builder.shl(loop.index, ir.I64(2)))
                        scalar = builder.load(builder.inttoptr(element, ir.F32.as_pointer()), align=4)
                        factor = spread(builder, scalar, floats)
                        builder.store(fma(builder, factor, values, builder.load(total)), total)
                for r, total in zip(block, totals, strict=True):
                    target = builder.add(c, builder.mul(c_stride, ir.I64(r)))
                    builder.store(builder.load(total), builder.inttoptr(target, floats.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), emit

    return multiply


def call_intrinsic(
    builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value, fastmath: tuple[str, ...] = ()
) -> ir.Value:
    """Call an LLVM intrinsic."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(builder.module.declare_intrinsic(name, fnty=kind), arguments, fastmath=fastmath)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c, vectors of float32."""
    return call_intrinsic(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def spread(builder: ir.IRBuilder, scalar: ir.Value, kind: ir.VectorType) -> ir.Value:
    """A scalar in all lanes."""
    empty = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.Constant(ir.I32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(ir.I32, kind.count), [0] * kind.count))
