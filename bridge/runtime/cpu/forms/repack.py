"""The file's blocks -> the repacked form (layout.py), a row group's rows side by side in vector registers.

Repacking only moves bits: each bit of a repacked word is one bit of the file's block, or its complement, see
columns.py.
The types whose codes are numbered are repacked by recode.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from bridge.blocks.read import READ
from bridge.runtime.cpu.forms.columns import Word, assembled, block_columns, store_halves, words_of
from bridge.runtime.cpu.forms.layout import InterleavedLayout
from bridge.runtime.cpu.forms.recode import recoder
from bridge.system.kernels import ir
from bridge.system.kernels.jit import CFunction, c_function, inner, intrinsic, maker, types
from bridge.system.kernels.memory import allocate, array_at, free
from bridge.system.threads.pool import write

_LINE = 64  # bytes of a cache line

# set per type and lanes by `c_function`
move: Any = None
fetch: Any = None
lanes = nbytes = halves_bytes = block_bytes = 0


@cache
def words(name: str, lanes: int) -> tuple[Word, ...]:
    """Where the words of a repacked block come from."""
    return words_of(InterleavedLayout(READ[name], lanes).words, READ[name].nbytes)


def _mover(name: str, lanes: int) -> Any:
    """move(source, row_bytes, halves, codes): repack one block of `lanes` rows; bit r of the result: row r is bad.

    source    address of the block in the first of the rows, which are row_bytes apart
    halves    where its d, and dmin, go; one that is not finite is bad
    codes     where its words go
    """
    block = READ[name]

    @intrinsic
    def move(typingctx, source, row_bytes, halves, codes):
        def emit(context, builder, signature, arguments):
            source, row_bytes, halves, codes = arguments
            columns = block_columns(builder, source, row_bytes, lanes, block.nbytes)
            aligned = words(name, lanes)[0].moves[0].offset % 4  # where most words begin
            bad = store_halves(columns, block, aligned, halves)
            vector = ir.VectorType(ir.I32, lanes)
            for i, word in enumerate(words(name, lanes)):
                address = builder.add(codes, ir.I64(4 * lanes * i))
                builder.store(assembled(columns, word), builder.inttoptr(address, vector.as_pointer()), align=4)
            return bad

        return types.int64(types.int64, types.int64, types.int64, types.int64), emit

    return move


def _fetcher(nbytes: int) -> Any:
    """fetch(address): bring so many bytes to the second-level cache."""

    @intrinsic
    def fetch(typingctx, address):
        def emit(context, builder, signature, arguments):
            flags = ir.I32(0), ir.I32(2), ir.I32(1)  # to be read, second level, of data
            kind = ir.FunctionType(ir.VoidType(), [ir.I8.as_pointer(), *[ir.I32] * 3])
            prefetch = builder.module.declare_intrinsic("llvm.prefetch.p0", fnty=kind)
            for offset in range(0, nbytes, _LINE):
                pointer = builder.inttoptr(builder.add(arguments[0], ir.I64(offset)), ir.I8.as_pointer())
                builder.call(prefetch, [pointer, *flags])
            return context.get_dummy_value()

        return types.void(types.int64), emit

    return fetch


@inner
def group_start(raw, rows, row_bytes, group, lanes, spare):
    """The address of a row group's blocks: in raw, or, if it lacks rows, in spare uint8 [lanes, row_bytes], padded."""
    start = raw + group * lanes * row_bytes
    if (group + 1) * lanes <= rows:
        return start
    available = (rows - group * lanes) * row_bytes
    source = array_at(start, available, np.uint8)
    padded = array_at(spare, lanes * row_bytes, np.uint8)
    for i in range(lanes * row_bytes):
        padded[i] = source[i] if i < available else 0
    return spare


@inner
def first_bad(bad, group, lanes):
    """The row of the lowest bit of `bad`, which `move` returned."""
    row = group * lanes
    while not bad & 1:
        bad >>= 1
        row += 1
    return row


def _repack(raw, rows, row_bytes, stride, codes_from, out, bad, first, last):
    """Row groups first..last-1 of raw uint8 [rows, row_bytes] -> their place in out uint8 [groups, stride].

    Rows that the last group lacks become zeros. The first row whose d or dmin is not finite, if any, goes to the int64
    at `bad`. All but the sizes are addresses: a C function (`bridge.system.kernels.memory`).
    """
    spare = allocate(lanes * row_bytes) if last * lanes > rows else 0
    bad_row = -1
    for group in range(first, last):
        start = group_start(raw, rows, row_bytes, group, lanes, spare)
        base = out + group * stride
        flags = 0
        for b in range(row_bytes // nbytes):
            fetch(start + lanes * (row_bytes + b * nbytes))  # the same part of the next row group
            flags |= move(start + b * nbytes, row_bytes, base + b * halves_bytes, base + codes_from + b * block_bytes)
        if flags and bad_row < 0:
            bad_row = first_bad(flags, group, lanes)
    if bad_row >= 0:
        write(bad, 0, bad_row)
    if spare:
        free(spare)


@cache
def moves(name: str, lanes: int) -> dict[str, Any]:
    """`move` and `fetch` of a type, and the sizes of its blocks."""
    layout, nbytes = InterleavedLayout(READ[name], lanes), READ[name].nbytes
    sizes = {"lanes": lanes, "nbytes": nbytes}
    sizes |= {"halves_bytes": layout.halves_bytes, "block_bytes": layout.block_bytes}
    move = recoder(name, lanes) if READ[name].numbered else _mover(name, lanes)
    return {"move": move, "fetch": _fetcher(lanes * nbytes), **sizes}


@maker
def repacker(name: str, lanes: int) -> CFunction:
    """`_repack` of a type as a C function."""
    return c_function(_repack, f"{name}_{lanes}", **moves(name, lanes))
