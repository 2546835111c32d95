"""The file's blocks -> the repacked form (layout.py), a row group's rows side by side in vector registers.

Repacking only moves bits: each bit of a repacked word is one bit of the file's block, or its complement, see
columns.py. But where codes are numbered (codebooks, base 3) none is one of the file's: such blocks go row by row
through the type's own `unpack`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from bridge.blocks.read import READ
from bridge.runtime.cpu.forms.columns import Word, assembled, block_columns, store_halves, words_of
from bridge.runtime.cpu.forms.layout import GROUP, InterleavedLayout, pieces
from bridge.runtime.cpu.forms.rowmajor import readers_of
from bridge.runtime.cpu.machine.emitter import Emitter
from bridge.system.kernels import ir
from bridge.system.kernels.jit import CFunction, c_function, inlined, inner, intrinsic, maker, specialize, types
from bridge.system.kernels.memory import allocate, array_at, array_on_stack, free
from bridge.system.threads.words import write

_LINE = 64  # bytes of a cache line

# set per type and lanes by `c_function` and `specialize`
move: Any = None
fetch: Any = None
unpack: Any = None
d_bits: Any = None
lanes = nbytes = halves_bytes = block_bytes = size = most_subs = scales = codes_at = group_words = block_words = 0
code_pieces: tuple[tuple[int, ...], ...] = ()  # (word, vector, start, low, width), by vector
scale_pieces: tuple[tuple[int, ...], ...] = ()


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


@inlined
def _put_pieces(words, first, pieces, out, offset, step):
    """Words of four codes from words[first] on, as layout.py's vectors, to out[offset], out[offset + step], ..."""
    value = np.uint32(0)
    last = 0
    for word, vector, start, low, width in pieces:
        if vector != last:
            out[np.uint32(offset + step * last)] = value
            value = np.uint32(0)
            last = vector
        mask = np.uint32(0x01010101 * ((1 << width) - 1))
        value |= np.uint32(((words[np.uint32(first + word)] >> np.uint32(low)) & mask) << np.uint32(start))
    out[np.uint32(offset + step * last)] = value


def _move(source, row_bytes, halves, codes):
    """As `_mover`'s `move`, of a type with numbered codes."""
    q = array_on_stack(size, np.uint8)
    sc = array_on_stack(most_subs, np.int8)
    for j in range(most_subs):
        sc[j] = 0
    mn = array_on_stack(1, np.uint8)
    code_words = q.view(np.uint32)
    scale_words = sc.view(np.uint32)
    ds = array_at(halves, lanes, np.uint16)
    out = array_at(codes, block_words, np.uint32)
    bad = np.int64(0)
    for row in range(lanes):
        block = array_at(source + row * row_bytes, nbytes, np.uint8)
        unpack(block, q, sc, mn)
        bits = d_bits(block)
        ds[row] = bits
        if bits & 0x7C00 == 0x7C00:
            bad |= np.int64(1) << row
        if scales:
            _put_pieces(scale_words, 0, scale_pieces, out, row, lanes)
        for group in range(size // 32):
            _put_pieces(code_words, 8 * group, code_pieces, out, codes_at + group * group_words + row, lanes)
    return bad


@cache
def _recoder(name: str, lanes: int) -> Any:
    """The compiled `move(source, row_bytes, halves, codes)` of a type with numbered codes."""
    block = READ[name]
    layout = InterleavedLayout(block, lanes)
    sizes = {"size": block.size, "most_subs": max(block.subs, 4), "nbytes": block.nbytes, "lanes": lanes}
    places = {"codes_at": layout.codes_at // 4, "group_words": layout.group_bytes // 4}
    places |= {"block_words": layout.block_bytes // 4, "scales": layout.scale_words}
    parts = {"code_pieces": _by_vector(layout.code_bits, GROUP)}
    parts["scale_pieces"] = _by_vector(layout.scale_bits, layout.scale_words) if layout.scale_words else ()
    return specialize(_move, f"{name}_{lanes}", inner, **readers_of(block), **sizes, **places, **parts)


def _by_vector(bits: int, count: int) -> tuple[tuple[int, ...], ...]:
    """(word, vector, start, low, width) of the pieces of all words, those of a vector together."""
    numbered = [(i, *piece) for i, word in enumerate(pieces(bits, count)) for piece in word]
    return tuple(sorted(numbered, key=lambda piece: piece[1]))


def _fetcher(nbytes: int) -> Any:
    """fetch(address): bring so many bytes to the second-level cache."""

    @intrinsic
    def fetch(typingctx, address):
        def emit(context, builder, signature, arguments):
            for offset in range(0, nbytes, _LINE):
                Emitter(builder, None, level=2).prefetch(arguments[0], offset)
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
    move = _recoder(name, lanes) if READ[name].numbered else _mover(name, lanes)
    return {"move": move, "fetch": _fetcher(lanes * nbytes), **sizes}


@maker
def repacker(name: str, lanes: int) -> CFunction:
    """`_repack` of a type as a C function."""
    return c_function(_repack, f"{name}_{lanes}", **moves(name, lanes))
