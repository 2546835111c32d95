"""A tensor that is not prepared: its blocks are repacked as they are needed, into the core's cache.

With one vector, a block is multiplied as it is where filerows.py has a kernel for that; else right after it is
repacked, so that memory is read all the time, and repacking takes as long as the product itself. With many, a tile of
row groups is repacked before all of them pass over it, and repacking hardly counts. No memory is taken but a tile a
thread.
"""

from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.runtime.cpu.engines import filerows, interleaved
from bridge.runtime.cpu.engines.portable import RawMatrix
from bridge.runtime.cpu.engines.products import Interleaved
from bridge.runtime.cpu.forms.repack import first_bad, group_start, moves, repacker
from bridge.system.cpu import targets
from bridge.system.kernels.jit import CFunction, c_function, maker
from bridge.system.kernels.memory import allocate, array_at, free, next_line, stack
from bridge.system.threads.words import call

_TILE = 1 << 17  # bytes
_LINE = 64
_AHEAD = 8192  # bytes beyond the next row group: its last rows are needed as early as its first

# words of the block that a kernel gets in place of the weights' address
_RAW, _ROWS, _ROW_BYTES, _CODES_FROM, _KERNEL, _TILED, _REPACK, _BAD, _WORDS = range(9)

# set per type by `c_function`
move: Any = None
space: Any = None
fetch: Any = None
zeros: Any = None
accumulate: Any = None
store: Any = None
lanes = nbytes = record = halves_bytes = block_bytes = 0


def _tiles(block, x, y, blocks, stride, tokens, y_stride, first, last):
    """Like a kernel of interleaved.py, but repacks its weights first; the first bad row found goes to _BAD."""
    fields = array_at(block, _WORDS, np.int64)
    rows, row_bytes, codes_from = fields[_ROWS], fields[_ROW_BYTES], fields[_CODES_FROM]
    tile = max(1, _TILE // stride)
    memory = allocate(tile * stride + _LINE)
    space = next_line(memory)
    for start in range(first, last, tile):
        end = min(start + tile, last)
        weights = space - start * stride
        bad = block + 8 * _BAD
        call(fields[_REPACK], fields[_RAW], rows, row_bytes, stride, codes_from, weights, bad, start, end)
        call(fields[_KERNEL], weights, x, y, blocks, stride, tokens, y_stride, start, end)
    free(memory)


def _blocks(block, x, y, blocks, stride, tokens, y_stride, first, last):
    """`_tiles` for one vector; any other number, which only float32 kernels are given, is left to it."""
    fields = array_at(block, _WORDS, np.int64)
    if tokens != 1:
        call(fields[_TILED], block, x, y, blocks, stride, tokens, y_stride, first, last)
        return
    rows, row_bytes = fields[_ROWS], fields[_ROW_BYTES]
    spare = allocate(lanes * row_bytes) if last * lanes > rows else 0
    codes = space()
    halves = codes + (block_bytes + _LINE - 1) // _LINE * _LINE
    for group in range(first, last):
        start = group_start(fields[_RAW], rows, row_bytes, group, lanes, spare)
        totals = zeros()
        bad = 0
        values = x
        for b in range(blocks):
            fetch(start + lanes * (row_bytes + b * nbytes))
            bad |= move(start + b * nbytes, row_bytes, halves, codes)
            totals = accumulate(totals, codes, halves, values)
            values += record
        store(totals, y + group * lanes * 4, y_stride)
        if bad:
            fields[_BAD] = first_bad(bad, group, lanes)
    if spare:
        free(spare)


def _rows(block, x, y, blocks, stride, tokens, y_stride, first, last):
    """As `_blocks`, of a type whose blocks are multiplied as they are."""
    fields = array_at(block, _WORDS, np.int64)
    if tokens != 1:
        call(fields[_TILED], block, x, y, blocks, stride, tokens, y_stride, first, last)
        return
    rows, row_bytes = fields[_ROWS], fields[_ROW_BYTES]
    spare = allocate(lanes * row_bytes) if last * lanes > rows else 0
    halves = space()
    flags = halves + (halves_bytes + _LINE - 1) // _LINE * _LINE
    for group in range(first, last):
        start = group_start(fields[_RAW], rows, row_bytes, group, lanes, spare)
        totals = zeros()
        ahead = start + lanes * row_bytes + _AHEAD
        bad = array_at(flags, 1, np.int64)
        bad[0] = 0
        values = x
        for b in range(blocks):
            totals = accumulate(totals, start + b * nbytes, row_bytes, halves, values, flags, ahead)
            ahead += lanes * nbytes
            values += record
        store(totals, y + group * lanes * 4, y_stride)
        if bad[0]:
            fields[_BAD] = first_bad(bad[0], group, lanes)
    if spare:
        free(spare)


@maker
def _tile_function() -> CFunction:
    return c_function(_tiles)


@maker
def _block_function(name: str, target: str, lanes: int, integer: bool) -> CFunction:
    scope = {**interleaved.block_by_block(name, target, integer), **moves(name, lanes)}
    del scope["columns"]
    scope["space"] = stack(scope["block_bytes"] + 2 * _LINE + scope["halves_bytes"])
    if integer and filerows.fits(name, targets.isa(target)):
        scope["accumulate"] = filerows.accumulator(name, targets.isa(target))
        return c_function(_rows, f"{name}_{target}", **scope)
    return c_function(_blocks, f"{name}_{target}_{'int8' if integer else 'f32'}", **scope)


class Tiled(Interleaved):
    """The engine of a tensor before it is prepared."""

    repacks = True

    def __init__(self, matrix: RawMatrix, target: str):
        super().__init__(matrix, target)
        self.name = f"{target}/{matrix.type.lower()}, rows interleaved on the way"
        self._blocks: list[np.ndarray] = []

    def kernel(self, columns: int, integer: bool, near: bool) -> tuple[int, int]:
        raw = self.matrix.raw
        rows = self.matrix.shape[0]
        block = np.zeros(_WORDS, np.int64)
        block[_RAW], block[_ROWS], block[_ROW_BYTES] = raw.ctypes.data, rows, raw.size // rows
        block[_CODES_FROM] = self.layout.codes_from(self.blocks)
        block[_BAD] = -1
        self._blocks.append(block)
        *tiles, first = (function.address for function in self.kernels(columns, integer))
        if tiles:
            block[_KERNEL], block[_REPACK], block[_TILED] = *tiles, first if columns > 1 else _tile_function().address
        return first, block.ctypes.data

    def kernels(self, columns: int, integer: bool) -> list[CFunction]:
        """The last is called; those before it, by it where there are several vectors."""
        name, target = self.block.name, self.target
        called = _tile_function() if columns > 1 else _block_function(name, target, self.lanes, integer)
        if columns == 1 and integer:
            return [called]
        return [interleaved.kernel(name, target, columns, integer, True), repacker(name, self.lanes), called]

    def check(self) -> None:
        bad = max((int(block[_BAD]) for block in self._blocks), default=-1)
        if bad >= 0:
            raise BridgeError(f"{self.matrix.name}: the scales of row {bad} are not finite; the file is damaged")
