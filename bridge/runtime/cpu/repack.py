"""The file's blocks -> the repacked form (layout.py), a row group's rows side by side in vector registers.

Repacking only moves bits: each bit of a repacked word is one bit of the file's block, or its complement. Which
one is found by asking `Layout.words` about a few well-chosen blocks, so that no type is described twice. Bits
that move the same way are moved together: a word is an or of a few words of the file, shifted and masked.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from bridge.blocks import TYPES
from bridge.jit import inner, kernel, specialize
from bridge.runtime.cpu.layout import Layout

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_WORD = 32  # bits

# set per type and lanes by `specialize`
move: Any = None
lanes = nbytes = halves_bytes = block_bytes = 0


class Move(NamedTuple):
    """Bits of a word: the file's four bytes from `offset` on, shifted left (right, where negative), then masked."""

    offset: int
    shift: int
    mask: int


class Word(NamedTuple):
    """A repacked word: the or of moves, some bits of it flipped."""

    moves: tuple[Move, ...]
    flipped: int


@cache
def words(name: str) -> tuple[Word, ...]:
    """Where the words of a repacked block come from."""
    block = TYPES[name]
    layout = Layout(block, 1)

    def repacked(bits: np.ndarray) -> np.ndarray:
        found = layout.words(np.packbits(bits, bitorder="little"))
        return np.unpackbits(found.view(np.uint8), bitorder="little")

    numbers = np.arange(8 * block.nbytes)
    flipped = repacked(numbers < 0)
    depends = repacked(numbers >= 0) ^ flipped
    source = np.zeros(flipped.size, np.int64)
    for digit in range(int(numbers[-1]).bit_length()):
        source |= (repacked(numbers >> digit & 1 == 1) ^ flipped).astype(np.int64) << digit
    constants = np.packbits(flipped, bitorder="little").view(np.uint32)
    return tuple(
        Word(_moves(source[at : at + _WORD], depends[at : at + _WORD], block.nbytes), int(constants[at // _WORD]))
        for at in range(0, flipped.size, _WORD)
    )


def _moves(source: np.ndarray, depends: np.ndarray, nbytes: int) -> tuple[Move, ...]:
    """The fewest moves for the bits of a word whose sources are known."""
    moves = []
    left = {place: int(source[place]) for place in range(_WORD) if depends[place]}
    while left:
        first = min(left, key=lambda place: left[place])
        offset = min(left[first] // 8, nbytes - 4)
        shift = first - (left[first] - 8 * offset)
        mask = 0
        for place in list(left):
            at = place - shift
            if 0 <= at < _WORD and left[place] == 8 * offset + at:
                mask |= 1 << place
                del left[place]
        moves.append(Move(offset, shift, mask))
    return tuple(moves)


def _mover(name: str, lanes: int) -> Any:
    """move(source, row_bytes, halves, codes): repack one block of `lanes` rows; bit r of the result: row r is bad.

    source    address of the block in the first of the rows, which are row_bytes apart
    halves    where its d, and dmin, go; bad is what is not finite
    codes     where its words go
    """
    block = TYPES[name]
    vector = ir.VectorType(_I32, lanes)
    shorts = ir.VectorType(_I16, lanes)
    octets = ir.VectorType(_I8, lanes)

    @intrinsic
    def move(typingctx, source, row_bytes, halves, codes):
        def emit(context, builder, signature, arguments):
            source, row_bytes, halves, codes = arguments
            rows = [builder.add(source, builder.mul(row_bytes, _I64(r))) for r in range(lanes)]
            known: dict[tuple[int, Any], ir.Value] = {}

            def same(kind: ir.VectorType, value: int) -> ir.Constant:
                return ir.Constant(kind, [value] * lanes)

            def load(offset: int, kind: ir.VectorType) -> ir.Value:
                if (offset, kind) not in known:
                    result: ir.Value = ir.Constant(kind, ir.Undefined)
                    for r, row in enumerate(rows):
                        place = builder.inttoptr(builder.add(row, _I64(offset)), kind.element.as_pointer())
                        result = builder.insert_element(result, builder.load(place, align=1), _I32(r))
                    known[offset, kind] = result
                return known[offset, kind]

            bad: ir.Value = ir.Constant(ir.VectorType(ir.IntType(1), lanes), [0] * lanes)
            for j in range(block.subs if block.scales else 0):
                scale = load(j, octets)
                place = builder.add(halves, _I64(lanes * j))
                builder.store(scale, builder.inttoptr(place, octets.as_pointer()), align=1)
                nan = same(octets, block.no_scale)
                bad = builder.or_(bad, builder.icmp_unsigned("==", builder.and_(scale, nan), nan))
            for i, offset in enumerate([] if block.scales else [block.d_at] + [block.dmin_at] * block.has_min):
                half = load(offset, shorts)
                place = builder.add(halves, _I64(2 * lanes * i))
                builder.store(half, builder.inttoptr(place, shorts.as_pointer()), align=2)
                exponent = builder.and_(half, same(shorts, 0x7C00))
                bad = builder.or_(bad, builder.icmp_unsigned("==", exponent, same(shorts, 0x7C00)))
            for i, word in enumerate(words(name)):
                value: ir.Value = same(vector, word.flipped)
                for j, (offset, shift, mask) in enumerate(word.moves):
                    part = load(offset, vector)
                    if shift:
                        part = (builder.shl if shift > 0 else builder.lshr)(part, same(vector, abs(shift)))
                    part = builder.and_(part, same(vector, mask))
                    value = (builder.or_ if j else builder.xor)(part, value) if j or word.flipped else part
                place = builder.add(codes, _I64(4 * lanes * i))
                builder.store(value, builder.inttoptr(place, vector.as_pointer()), align=4)
            return builder.zext(builder.bitcast(bad, ir.IntType(lanes)), _I64)

        return types.int64(types.int64, types.int64, types.int64, types.int64), emit

    return move


def _repack(raw, first, last, stride, codes_from, out):
    """Row groups first..last-1 of raw uint8 [rows, row bytes] -> out uint8, row group `first` at its beginning.

    Rows that the last group lacks become zeros. Returns the first row whose d or dmin
    is not finite, or -1.
    """
    rows, row_bytes = raw.shape
    source = raw.ctypes.data
    target = out.ctypes.data
    padded = np.zeros((0, row_bytes), np.uint8)
    bad_row = -1
    for group in range(first, last):
        start = source + group * lanes * row_bytes
        if (group + 1) * lanes > rows:
            padded = np.zeros((lanes, row_bytes), np.uint8)
            for r in range(rows - group * lanes):
                for i in range(row_bytes):
                    padded[r, i] = raw[group * lanes + r, i]
            start = padded.ctypes.data
        place = target + (group - first) * stride
        bad = 0
        for b in range(row_bytes // nbytes):
            bad |= move(start + b * nbytes, row_bytes, place + b * halves_bytes, place + codes_from + b * block_bytes)
        if bad and bad_row < 0:
            bad_row = group * lanes
            while not bad & 1:
                bad >>= 1
                bad_row += 1
    return bad_row


@cache
def repacker(name: str, lanes: int, inside: bool = False) -> Any:
    """The compiled `repack(raw, first, last, stride, codes_from, out)`; `inside`: for calls from kernels alone."""
    layout = Layout(TYPES[name], lanes)
    return specialize(
        _repack,
        f"{name}_{lanes}",
        inner if inside else kernel,
        move=_mover(name, lanes),
        lanes=lanes,
        nbytes=layout.block.nbytes,
        halves_bytes=layout.halves_bytes,
        block_bytes=layout.block_bytes,
    )
