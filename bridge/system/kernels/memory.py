"""Kernels on plain addresses: C functions, arrays, halves and vectors.

A decoder's kernels get addresses as the products do (see interleaved.py), and have the same signature, so
that a whole token is computed by one table of calls (see program.py).
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import numpy as np

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
