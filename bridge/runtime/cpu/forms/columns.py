"""Where the bits of vectors come from in the file's blocks, and the code that brings them there.

Which bit of a block a bit is, or its complement, is found by unpacking a few well-chosen blocks, so that no type is
described twice. Bits that move the same way are moved together: a word is an or of a few words of the file, shifted
and masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from bridge.blocks import BlockType
from bridge.runtime.cpu.machine.operands import interleaving
from bridge.system.kernels import ir

_WORD = 32  # bits


class Move(NamedTuple):
    """Bits of a word: the file's four bytes from `offset` on, shifted left (right, where negative), then masked."""

    offset: int
    shift: int
    mask: int


class Word(NamedTuple):
    """A repacked word: the or of moves, some bits of it flipped."""

    moves: tuple[Move, ...]
    flipped: int


def words_of(make: Callable[[np.ndarray], np.ndarray], nbytes: int) -> tuple[Word, ...]:
    """Where the words come from that `make` makes of a file's block, uint8 [nbytes]."""
    source, depends, flipped = sources(make, nbytes)
    constants = np.packbits(flipped, bitorder="little").view(np.uint32)
    return tuple(
        Word(_moves(source[bit : bit + _WORD], depends[bit : bit + _WORD], nbytes), int(constants[bit // _WORD]))
        for bit in range(0, flipped.size, _WORD)
    )


def sources(make: Callable[[np.ndarray], np.ndarray], nbytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each bit that `make` makes of a block: which of the block's it is, whether it is one, its value for zeros."""

    def bits_of_result(bits: np.ndarray) -> np.ndarray:
        return np.unpackbits(make(np.packbits(bits, bitorder="little")).view(np.uint8), bitorder="little")

    numbers = np.arange(8 * nbytes)
    flipped = bits_of_result(numbers < 0)
    depends = bits_of_result(numbers >= 0) ^ flipped
    source = np.zeros(flipped.size, np.int64)
    for digit in range(int(numbers[-1]).bit_length()):
        source |= (bits_of_result(numbers >> digit & 1 == 1) ^ flipped).astype(np.int64) << digit
    return source, depends, flipped


def _moves(source: np.ndarray, depends: np.ndarray, nbytes: int) -> tuple[Move, ...]:
    """The fewest moves for the bits of a word whose sources are known."""
    moves = []
    left = {bit: int(source[bit]) for bit in range(_WORD) if depends[bit]}
    while left:
        first = min(left, key=lambda bit: left[bit])
        offset = min(left[first] // 8, nbytes - 4)
        shift = first - (left[first] - 8 * offset)
        mask = 0
        for bit in list(left):
            file_bit = bit - shift
            if 0 <= file_bit < _WORD and left[bit] == 8 * offset + file_bit:
                mask |= 1 << bit
                del left[bit]
        moves.append(Move(offset, shift, mask))
    return tuple(moves)


class Columns:
    """Four bytes from an offset in each of some rows, side by side in a vector.

    Rows are loaded 16 bytes at a time. Four vectors of rows side by side hold matrices of 4 x 4 words, which two steps
    of interleaving turn over: a third of the instructions that loading word by word takes.
    """

    def __init__(self, builder: ir.IRBuilder, rows: list[ir.Value], nbytes: int):
        self.builder, self.rows, self._nbytes = builder, rows, nbytes
        self._known: dict[int, ir.Value] = {}

    def load(self, offset: int) -> ir.Value:
        """int32 [rows] from an offset of at most nbytes - 4."""
        if offset not in self._known:
            first = min(offset % 4 + (offset - offset % 4) // 16 * 16, self._nbytes - 16)
            first -= (first - offset) % 4
            if first < 0:
                return self._one_by_one(offset)
            for i, column in enumerate(self._turned(first)):
                self._known[first + 4 * i] = column
        return self._known[offset]

    def _turned(self, offset: int) -> list[ir.Value]:
        """The columns of four words from an offset on."""
        low, high = (0, 1), (2, 3)
        a, b, c, d = (self.side_by_side(offset, i) for i in range(4))
        pairs = [(self._interleaved(a, b, half, 1), self._interleaved(c, d, half, 1)) for half in (low, high)]
        return [self._interleaved(*pair, half, 2) for pair in pairs for half in ((0,), (1,))]

    def side_by_side(self, offset: int, i: int) -> ir.Value:
        """16 bytes of the rows i, i + 4, i + 8 and so on."""
        parts = []
        for row in self.rows[i::4]:
            address = self.builder.add(row, ir.I64(offset))
            kind = ir.VectorType(ir.I32, 4).as_pointer()
            parts.append(self.builder.load(self.builder.inttoptr(address, kind), align=1))
        while len(parts) > 1:
            count = 2 * parts[0].type.count
            parts = [self._shuffled(parts[k], parts[k + 1], range(count)) for k in range(0, len(parts), 2)]
        return parts[0]

    def _interleaved(self, a: ir.Value, b: ir.Value, chosen: tuple[int, ...], size: int) -> ir.Value:
        """In every four words, runs of `size` of a and b in turn: those whose numbers are chosen."""
        return self._shuffled(a, b, interleaving(a.type.count, chosen, size))

    def _shuffled(self, a: ir.Value, b: ir.Value, order: Iterable[int]) -> ir.Value:
        places = list(order)
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.I32, len(places)), places))

    def _one_by_one(self, offset: int) -> ir.Value:
        result: ir.Value = ir.Constant(ir.VectorType(ir.I32, len(self.rows)), ir.Undefined)
        for r, row in enumerate(self.rows):
            pointer = self.builder.inttoptr(self.builder.add(row, ir.I64(offset)), ir.I32.as_pointer())
            result = self.builder.insert_element(result, self.builder.load(pointer, align=1), ir.I32(r))
        return result


def block_columns(builder: ir.IRBuilder, source: ir.Value, row_bytes: ir.Value, lanes: int, nbytes: int) -> Columns:
    """The columns of a block of `lanes` rows, which are row_bytes apart; `source`: where that of the first row is."""
    # of every four rows one address, to which others add a register: 16 addresses would not stay in registers
    fours = [builder.add(source, builder.mul(row_bytes, ir.I64(r))) for r in range(0, lanes, 4)]
    steps = [builder.mul(row_bytes, ir.I64(r)) for r in range(4)]
    return Columns(builder, [builder.add(fours[r // 4], steps[r % 4]) for r in range(lanes)], nbytes)


def store_halves(columns: Columns, block: BlockType, aligned: int, halves: ir.Value) -> ir.Value:
    """Store a block's d, and dmin, or its scale bytes, to `halves`; bit r of the result, int64: one of row r is bad.

    aligned  words that are loaded begin at multiples of four from there
    """
    builder, lanes = columns.builder, len(columns.rows)
    vector = ir.VectorType(ir.I32, lanes)
    shorts = ir.VectorType(ir.I16, lanes)
    octets = ir.VectorType(ir.I8, lanes)

    def load(offset: int, kind: ir.VectorType) -> ir.Value:
        start = offset - (offset - aligned) % 4
        if start < 0 or start + 4 > block.nbytes or offset + kind.element.width // 8 > start + 4:
            start = min(offset, block.nbytes - 4)
        return builder.trunc(builder.lshr(columns.load(start), same(vector, 8 * (offset - start))), kind)

    bad: ir.Value = ir.Constant(ir.VectorType(ir.I1, lanes), [0] * lanes)
    for j in range(block.subs if block.scales else 0):
        scale = load(j, octets)
        address = builder.add(halves, ir.I64(lanes * j))
        builder.store(scale, builder.inttoptr(address, octets.as_pointer()), align=1)
        nan = same(octets, block.no_scale)
        bad = builder.or_(bad, builder.icmp_unsigned("==", builder.and_(scale, nan), nan))
    for i, offset in enumerate([] if block.scales else [block.d_at] + [block.dmin_at] * block.has_min):
        half = load(offset, shorts)
        address = builder.add(halves, ir.I64(2 * lanes * i))
        builder.store(half, builder.inttoptr(address, shorts.as_pointer()), align=2)
        exponent = builder.and_(half, same(shorts, 0x7C00))
        bad = builder.or_(bad, builder.icmp_unsigned("==", exponent, same(shorts, 0x7C00)))
    return builder.zext(builder.bitcast(bad, ir.IntType(lanes)), ir.I64)


def assembled(columns: Columns, word: Word) -> ir.Value:
    """A word of each row, as a vector."""
    builder = columns.builder
    vector = ir.VectorType(ir.I32, len(columns.rows))
    value: ir.Value = same(vector, word.flipped)
    for j, (offset, shift, mask) in enumerate(word.moves):
        part = columns.load(offset)
        if shift:
            part = (builder.shl if shift > 0 else builder.lshr)(part, same(vector, abs(shift)))
        part = builder.and_(part, same(vector, mask))
        value = builder.xor(part, value) if j or word.flipped else part
    return value


def same(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)
