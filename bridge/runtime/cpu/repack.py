"""The file's blocks -> the repacked form (layout.py), a row group's rows side by side in vector registers.

Repacking only moves bits: each bit of a repacked word is one bit of the file's block, or its complement. Which
one is found by calling `InterleavedLayout.words` on a few well-chosen blocks, so that no type is described twice.
Bits that move the same way are moved together: a word is an or of a few words of the file, shifted and masked.
The types whose codes are numbered are repacked by recode.py.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from bridge.blocks.read import READ
from bridge.runtime.cpu.layout import InterleavedLayout
from bridge.runtime.cpu.recode import recoder
from bridge.system.jit import inner
from bridge.system.memory import array_at, c_function
from bridge.system.pool import write

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_WORD = 32  # bits
_LINE = 64  # bytes of a cache line

# set per type and lanes by `c_function`
move: Any = None
fetch: Any = None
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
def words(name: str, lanes: int) -> tuple[Word, ...]:
    """Where the words of a repacked block come from."""
    block = READ[name]
    layout = InterleavedLayout(block, lanes)

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


class _Columns:
    """Four bytes from an offset in each of some rows, side by side in a vector.

    Rows are loaded 16 bytes at a time. Four vectors of rows side by side hold matrices of 4 x 4 words, which two steps
    of interleaving turn over: a third of the instructions that loading word by word takes.
    """

    def __init__(self, builder: ir.IRBuilder, rows: list[ir.Value], nbytes: int):
        self._builder, self._rows, self._nbytes = builder, rows, nbytes
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
        a, b, c, d = (self._side_by_side(offset, i) for i in range(4))
        pairs = [(self._interleaved(a, b, half, 1), self._interleaved(c, d, half, 1)) for half in (low, high)]
        return [self._interleaved(*pair, half, 2) for pair in pairs for half in ((0,), (1,))]

    def _side_by_side(self, offset: int, i: int) -> ir.Value:
        """16 bytes of the rows i, i + 4, i + 8 and so on."""
        parts = []
        for row in self._rows[i::4]:
            place = self._builder.add(row, _I64(offset))
            kind = ir.VectorType(_I32, 4).as_pointer()
            parts.append(self._builder.load(self._builder.inttoptr(place, kind), align=1))
        while len(parts) > 1:
            count = 2 * parts[0].type.count
            parts = [self._shuffled(parts[k], parts[k + 1], range(count)) for k in range(0, len(parts), 2)]
        return parts[0]

    def _interleaved(self, a: ir.Value, b: ir.Value, chosen: tuple[int, ...], size: int) -> ir.Value:
        """In every four words, runs of `size` of a and b in turn: those whose numbers are chosen."""
        count = a.type.count
        order = [
            source + at + run * size + i
            for at in range(0, count, 4)
            for run in chosen
            for source in (0, count)
            for i in range(size)
        ]
        return self._shuffled(a, b, order)

    def _shuffled(self, a: ir.Value, b: ir.Value, order: Iterable[int]) -> ir.Value:
        places = list(order)
        return self._builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(places)), places))

    def _one_by_one(self, offset: int) -> ir.Value:
        result: ir.Value = ir.Constant(ir.VectorType(_I32, len(self._rows)), ir.Undefined)
        for r, row in enumerate(self._rows):
            place = self._builder.inttoptr(self._builder.add(row, _I64(offset)), _I32.as_pointer())
            result = self._builder.insert_element(result, self._builder.load(place, align=1), _I32(r))
        return result


def _mover(name: str, lanes: int) -> Any:
    """move(source, row_bytes, halves, codes): repack one block of `lanes` rows; bit r of the result: row r is bad.

    source    address of the block in the first of the rows, which are row_bytes apart
    halves    where its d, and dmin, go; one that is not finite is bad
    codes     where its words go
    """
    block = READ[name]
    vector = ir.VectorType(_I32, lanes)
    shorts = ir.VectorType(_I16, lanes)
    octets = ir.VectorType(_I8, lanes)

    @intrinsic
    def move(typingctx, source, row_bytes, halves, codes):
        def emit(context, builder, signature, arguments):
            source, row_bytes, halves, codes = arguments
            # of every four rows one address, to which others add a register: 16 addresses would not stay in registers
            fours = [builder.add(source, builder.mul(row_bytes, _I64(r))) for r in range(0, lanes, 4)]
            steps = [builder.mul(row_bytes, _I64(r)) for r in range(4)]
            rows = [builder.add(fours[r // 4], steps[r % 4]) for r in range(lanes)]
            columns = _Columns(builder, rows, block.nbytes)
            aligned = words(name, lanes)[0].moves[0].offset % 4  # where most words begin

            def same(kind: ir.VectorType, value: int) -> ir.Constant:
                return ir.Constant(kind, [value] * lanes)

            def load(offset: int, kind: ir.VectorType) -> ir.Value:
                if kind == vector:
                    return columns.load(offset)
                at = offset - (offset - aligned) % 4
                if at < 0 or at + 4 > block.nbytes or offset + kind.element.width // 8 > at + 4:
                    at = min(offset, block.nbytes - 4)
                return builder.trunc(builder.lshr(columns.load(at), same(vector, 8 * (offset - at))), kind)

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
            for i, word in enumerate(words(name, lanes)):
                value: ir.Value = same(vector, word.flipped)
                for j, (offset, shift, mask) in enumerate(word.moves):
                    part = load(offset, vector)
                    if shift:
                        part = (builder.shl if shift > 0 else builder.lshr)(part, same(vector, abs(shift)))
                    part = builder.and_(part, same(vector, mask))
                    value = builder.xor(part, value) if j or word.flipped else part
                place = builder.add(codes, _I64(4 * lanes * i))
                builder.store(value, builder.inttoptr(place, vector.as_pointer()), align=4)
            return builder.zext(builder.bitcast(bad, ir.IntType(lanes)), _I64)

        return types.int64(types.int64, types.int64, types.int64, types.int64), emit

    return move


def _fetcher(nbytes: int) -> Any:
    """fetch(address): bring so many bytes to the second-level cache."""

    @intrinsic
    def fetch(typingctx, address):
        def emit(context, builder, signature, arguments):
            flags = _I32(0), _I32(2), _I32(1)  # to be read, second level, of data
            kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), *[_I32] * 3])
            prefetch = builder.module.declare_intrinsic("llvm.prefetch.p0", fnty=kind)
            for at in range(0, nbytes, _LINE):
                place = builder.inttoptr(builder.add(arguments[0], _I64(at)), _I8.as_pointer())
                builder.call(prefetch, [place, *flags])
            return context.get_dummy_value()

        return types.void(types.int64), emit

    return fetch


@inner
def group_start(raw, rows, row_bytes, group, lanes, spare):
    """The address of a row group's blocks: in raw, or, if it lacks rows, in spare uint8 [lanes, row_bytes], padded."""
    start = raw + group * lanes * row_bytes
    if (group + 1) * lanes <= rows:
        return start
    there = (rows - group * lanes) * row_bytes
    source = array_at(start, there, np.uint8)
    padded = array_at(spare, lanes * row_bytes, np.uint8)
    for i in range(lanes * row_bytes):
        padded[i] = source[i] if i < there else 0
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
    at `bad`. All but the sizes are addresses: a C function (`bridge.system.memory`).
    """
    spare = np.empty(lanes * row_bytes if last * lanes > rows else 1, np.uint8)
    bad_row = -1
    for group in range(first, last):
        start = group_start(raw, rows, row_bytes, group, lanes, np.int64(spare.ctypes.data))
        place = out + group * stride
        flags = 0
        for b in range(row_bytes // nbytes):
            fetch(start + lanes * (row_bytes + b * nbytes))  # the same part of the next row group
            flags |= move(start + b * nbytes, row_bytes, place + b * halves_bytes, place + codes_from + b * block_bytes)
        if flags and bad_row < 0:
            bad_row = first_bad(flags, group, lanes)
    if bad_row >= 0:
        write(bad, 0, bad_row)
    spare[0] = 0  # numba frees an array after its last use, and taking its address is not a use


@cache
def moves(name: str, lanes: int) -> dict[str, Any]:
    """`move` and `fetch` of a type, and the sizes of its blocks."""
    layout, nbytes = InterleavedLayout(READ[name], lanes), READ[name].nbytes
    sizes = {"lanes": lanes, "nbytes": nbytes}
    sizes |= {"halves_bytes": layout.halves_bytes, "block_bytes": layout.block_bytes}
    move = recoder(name, lanes) if READ[name].numbered else _mover(name, lanes)
    return {"move": move, "fetch": _fetcher(lanes * nbytes), **sizes}


@cache
def repacker(name: str, lanes: int) -> Any:
    """`_repack` of a type as a numba CFunc."""
    return c_function(_repack, f"{name}_{lanes}", **moves(name, lanes))
