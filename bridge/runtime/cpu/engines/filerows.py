"""One vector times the file's own rows, at the speed of the repacked form: no code is moved to another place.

16 bytes of rows r and r + 4 side by side (on 16 lanes of r + 8 and r + 12 too) are multiplied with 16 values of x in
each, so that sums lie in four vectors for four neighbouring rows. Two steps of interleaving and adding leave one sum a
lane. They are the same integers as those of the repacked form, and what follows is the same code (superblock.py), so
results are the same to the last bit.

That takes 16 codes of a row whose bits lie at the same places of 16 bytes. Where a type has other places (`fits`), its
blocks are repacked on the way, see tiled.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from bridge.blocks import BlockType
from bridge.blocks.read import READ
from bridge.runtime.cpu.engines.superblock import k_block, plain_block
from bridge.runtime.cpu.forms.columns import (
    Columns,
    Move,
    Word,
    assembled,
    block_columns,
    sources,
    store_halves,
    words_of,
)
from bridge.runtime.cpu.forms.layout import InterleavedLayout, unpacked
from bridge.runtime.cpu.machine.emitter import Emitter
from bridge.runtime.cpu.machine.instruction_set import InstructionSet
from bridge.runtime.cpu.machine.operands import LookedUp, computed
from bridge.runtime.cpu.machine.vectors import totals_type
from bridge.system.kernels import ir
from bridge.system.kernels.jit import intrinsic, types

_STEP = 16  # bytes
_LINE = 64
_MOST = 4  # sums that are taken together: more would not stay in registers


class Sixteen(NamedTuple):
    """16 codes, one a byte: the or of moves of 16 bytes each, whose masks are of a byte, some bits flipped."""

    moves: tuple[Move, ...]
    flipped: int


@cache
def sixteens(name: str) -> tuple[Sixteen, ...]:
    """How the codes of a block lie in the file, 16 after 16; empty where they do not lie in steps of 16 bytes."""
    block = READ[name]
    if block.numbered:
        return ()
    source, depends, flipped = sources(lambda raw: unpacked(block, raw)[0], block.nbytes)
    first = (source.reshape(-1, _STEP, 8) - 8 * np.arange(_STEP)[:, None]).astype(np.int64)
    depends, flipped = (flags.reshape(first.shape).astype(bool) for flags in (depends, flipped))
    result = []
    for starts, used, ones in zip(first, depends, flipped, strict=True):
        if (used != used[0]).any() or (ones != ones[0]).any() or (starts != starts[0])[used].any():
            return ()
        masks: dict[tuple[int, int], int] = {}
        for bit in range(8):
            if used[0, bit]:
                offset, file_bit = divmod(int(starts[0, bit]), 8)
                masks[offset, bit - file_bit] = masks.get((offset, bit - file_bit), 0) | 1 << bit
        moves = tuple(Move(offset, shift, mask) for (offset, shift), mask in sorted(masks.items()))
        result.append(Sixteen(moves, int(np.packbits(ones[0], bitorder="little")[0])))
    return tuple(result)


@cache
def _scale_words(name: str, lanes: int) -> tuple[Word, ...]:
    """The words of a block's scale and min codes, of the bits that the repacked form keeps."""
    block = READ[name]
    layout = InterleavedLayout(block, lanes)
    mask = np.uint8((1 << layout.scale_bits) - 1)
    words = words_of(lambda raw: unpacked(block, raw)[1] & mask, block.nbytes)
    return words[: layout.scale_words]


def fits(name: str, target: InstructionSet) -> bool:
    """Whether there is such a kernel for a type."""
    block = READ[name]
    return block.value_bits <= target.row_bits and block.sum_span >= _STEP and bool(sixteens(name))


class FileBlock:
    """A block of rows in the file as superblock.py reads it, see `Repacked` there."""

    fuses_scales = False

    def __init__(self, v: Emitter, layout: InterleavedLayout, columns: Columns, ahead: ir.Value):
        self._v, self._layout, self._columns, self._ahead = v, layout, columns, ahead
        self._sixteens = sixteens(layout.block.name)
        self._loads = 4 * len({move.offset for piece in self._sixteens for move in piece.moves})
        self._loaded = self._fetched = 0
        self._sums: dict[int, ir.Value] = {}

    @property
    def signed(self) -> bool:
        block = self._layout.block
        return block.value_bits == 8 and bool(block.values) and self._v.target.emit_signed_row_dots is not None

    def scale_words(self) -> list[Callable[[], ir.Value]]:
        words = _scale_words(self._layout.block.name, self._layout.lanes)
        return [computed(assembled(self._columns, word)) for word in words]

    def dots(self, parts: list[ir.Value], j: int, x: ir.Value) -> list[ir.Value]:
        if j not in self._sums:
            self._multiply(self._together(j), x)
        return [self._v.add(parts[0], self._sums.pop(j))]

    def _fetch(self) -> None:
        """Prefetch some of the lines ahead with each load: as many as a block has with all of them."""
        self._loaded += 1
        lines = -(-self._layout.lanes * self._layout.block.nbytes // _LINE)
        while self._fetched * self._loads < self._loaded * lines and self._fetched < lines:
            self._v.prefetch(self._ahead, self._fetched * _LINE)
            self._fetched += 1

    def _pieces(self, j: int) -> range:
        """Which sixteens share the j-th sum."""
        count = self._layout.block.sum_span // _STEP
        return range(j * count, (j + 1) * count)

    def _together(self, j: int) -> list[int]:
        """Sums of codes in the same bytes, whose sums are taken together: the bytes are loaded once."""
        offsets = {move.offset for piece in self._pieces(j) for move in self._sixteens[piece].moves}
        count = self._layout.block.size // self._layout.block.sum_span
        return [
            other
            for other in range(j, count)
            if offsets & {move.offset for piece in self._pieces(other) for move in self._sixteens[piece].moves}
        ][:_MOST]

    def _multiply(self, sums: list[int], x: ir.Value) -> None:
        v, block = self._v, self._layout.block
        loaded: dict[tuple[int, int], ir.Value] = {}

        def raw(offset: int, i: int) -> ir.Value:
            if (offset, i) not in loaded:
                loaded[offset, i] = self._columns.side_by_side(offset, i)
                self._fetch()
            return loaded[offset, i]

        def code(piece: Sixteen, i: int) -> ir.Value:
            value = None
            for offset, shift, mask in piece.moves:
                part = raw(offset, i)
                part = v.shl(part, shift) if shift > 0 else v.shr(part, -shift)
                part = part if mask == 255 and not shift else v.and_(part, 0x01010101 * mask)
                value = part if value is None else v.or_(value, part)
            assert value is not None
            return v.builder.xor(value, v.splat(0x01010101 * piece.flipped)) if piece.flipped else value

        def word(piece: int, i: int) -> Callable[[], ir.Value]:
            emit_code = partial(code, self._sixteens[piece], i)
            if not block.values:
                return emit_code
            table = tuple(value & 255 if self.signed else value + block.lift for value in block.values)
            return LookedUp(v, emit_code, table)

        rows = [[[word(piece, i) for piece in self._pieces(j)] for i in range(4)] for j in sums]
        places = [[_STEP * piece for piece in self._pieces(j)] for j in sums]
        if self.signed:
            dots = v.target.emit_signed_row_dots(v, rows, x, places)
        else:
            dots = v.target.emit_row_dots(v, rows, x, places, block.value_bits)
        self._sums.update(zip(sums, dots, strict=True))


def add_block(v: Emitter, block: BlockType, total: ir.Value, *addresses: ir.Value) -> ir.Value:
    """total + one block of some rows times as many values of x, for the addresses that `accumulator` names."""
    source, row_bytes, halves, x, bad, ahead = addresses
    builder, layout = v.builder, InterleavedLayout(block, v.lanes)
    columns = block_columns(builder, source, row_bytes, v.lanes, block.nbytes)
    flags = builder.inttoptr(bad, ir.I64.as_pointer())
    builder.store(builder.or_(builder.load(flags), store_halves(columns, block, 0, halves)), flags)
    multiply = k_block if block.is_k else plain_block
    (total,) = multiply(v, layout, [total], None, halves, x, FileBlock(v, layout, columns, ahead))
    return total


def accumulator(name: str, target: InstructionSet) -> Any:
    """accumulate(totals, source, row_bytes, halves, x, bad, ahead): totals + one block of some rows.

    source  address of the block in the first of the rows, which are row_bytes apart
    halves  room for d, and dmin, or scale bytes of the rows
    bad     the int64 there gets bit r where one of row r is not finite
    ahead   from there on, as many lines as the rows' blocks have are prefetched
    """

    @intrinsic
    def accumulate(typingctx, totals, source, row_bytes, halves, x, bad, ahead):
        def emit(context, builder, signature, arguments):
            packed, *addresses = arguments
            v = Emitter(builder, target, level=2)
            total = add_block(v, READ[name], builder.extract_value(packed, 0), *addresses)
            return builder.insert_value(packed, total, 0)

        kind = totals_type(1, target.lanes)
        return kind(kind, *[types.int64] * 6), emit

    return accumulate
