"""Words of memory that several threads read and write, and calls of addresses: what the pool's protocol is made of.

A word is the int64 of that number from `state`, an address, on. All accesses are in one order that every thread sees
("sequentially consistent"), except `release`, which only comes after what its thread wrote before.
"""

from __future__ import annotations

from typing import Any

from bridge.system.cpu import machine
from bridge.system.kernels import ir
from bridge.system.kernels.jit import intrinsic, types
from bridge.system.kernels.memory import call_intrinsic

ARGUMENTS = 7  # int64 arguments of a kernel, before its first and last row group


def _word(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    return builder.gep(builder.inttoptr(address, ir.I64.as_pointer()), [index])


@intrinsic
def read(typingctx, state, index):
    """Word `index` of the state, after everything that was written before it."""

    def emit(context, builder, signature, arguments):
        return builder.load_atomic(_word(builder, *arguments), "seq_cst", 8)

    return types.int64(types.int64, types.int64), emit


def _writing(order: str) -> Any:
    """Of an intrinsic that writes a word: its signature, and what emits it."""

    def emit(context, builder, signature, arguments):
        builder.store_atomic(arguments[2], _word(builder, *arguments[:2]), order, 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def write(typingctx, state, index, value):
    return _writing("seq_cst")


@intrinsic
def release(typingctx, state, index, value):
    """Write a word for a thread that waits for it; on x86 a plain store, where `write` waits until all cores know."""
    return _writing("release")


@intrinsic
def add(typingctx, state, index, value):
    """Add to a word; returns what it was."""

    def emit(context, builder, signature, arguments):
        return builder.atomic_rmw("add", _word(builder, *arguments[:2]), arguments[2], "seq_cst")

    return types.int64(types.int64, types.int64, types.int64), emit


@intrinsic
def swap(typingctx, state, index, old, new):
    """Replace a word that is still `old`; returns whether it was."""

    def emit(context, builder, signature, arguments):
        pair = builder.cmpxchg(_word(builder, *arguments[:2]), *arguments[2:], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64, types.int64), emit


@intrinsic
def pause(typingctx):
    """Tell the core that this is a waiting loop."""

    def emit(context, builder, signature, arguments):
        architecture = machine.host().triple.partition("-")[0]
        if architecture == "x86_64":
            call_intrinsic(builder, "llvm.x86.sse2.pause", ir.VoidType())
        elif architecture in ("aarch64", "arm64"):
            call_intrinsic(builder, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(ir.I32, 1))  # yield
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def call(typingctx, function, a, b, c, d, e, f, g, first, last):
    """Call the compiled kernel at an address."""
    integers = [types.int64] * (ARGUMENTS + 3)

    def emit(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [ir.I64] * (ARGUMENTS + 2))
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*integers), emit
