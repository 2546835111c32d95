"""A tensor that is not prepared: row groups are repacked as they are needed, tile by tile, into the core's cache.

Repacking takes several times as long as a product with one vector, so that these run at a fraction of a prepared
tensor's speed (measured on a Zen 4, one thread: Q4_K 6, Q6_K 4, Q8_0 10 GB/s); for many tokens at once it hardly
counts. No memory is taken but a tile a thread.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np

from bridge.errors import BridgeError
from bridge.runtime.cpu import interleaved, pool
from bridge.runtime.cpu.memory import c_function, pointer
from bridge.runtime.cpu.portable import Matrix
from bridge.runtime.cpu.products import Interleaved
from bridge.runtime.cpu.repack import repacker

_TILE = 1 << 17  # bytes
_LINE = 64

# words of the block that a kernel gets in place of the weights' address
_RAW, _ROWS, _ROW_BYTES, _CODES_FROM, _KERNEL, _BAD, _WORDS = range(7)

# set per type by `c_function`
repack: Any = None


def _tiles(block, x, y, blocks, stride, tokens, y_stride, first, last):
    """As a kernel of interleaved.py, whose weights are made here; the first bad row that is met goes to _BAD."""
    fields = numba.carray(pointer(block), (_WORDS,), np.int64)
    raw = numba.carray(pointer(fields[_RAW]), (fields[_ROWS], fields[_ROW_BYTES]), np.uint8)
    tile = max(1, _TILE // stride)
    memory = np.empty(tile * stride + _LINE, np.uint8)
    skip = -memory.ctypes.data % _LINE
    space = memory[skip : skip + tile * stride]
    for start in range(first, last, tile):
        groups = min(tile, last - start)
        bad = repack(raw, start, start + groups, stride, fields[_CODES_FROM], space)
        if bad >= 0:
            fields[_BAD] = bad
        weights = space.ctypes.data - start * stride
        pool.call(fields[_KERNEL], weights, x, y, blocks, stride, tokens, y_stride, start, start + groups)


@cache
def _function(name: str, lanes: int) -> Any:
    return c_function(_tiles, f"{name}_{lanes}", repack=repacker(name, lanes, inside=True))


class Tiled(Interleaved):
    """The engine of a tensor before it is prepared."""

    def __init__(self, matrix: Matrix, target: str):
        super().__init__(matrix, target)
        self.name = f"{target}/{matrix.type.lower()}, rows interleaved on the way"
        self._blocks: list[np.ndarray] = []

    def kernel(self, columns: int, integer: bool, near: bool) -> tuple[int, int]:
        raw = self.matrix.raw
        rows = self.matrix.shape[0]
        block = np.zeros(_WORDS, np.int64)
        block[_RAW], block[_ROWS], block[_ROW_BYTES] = raw.ctypes.data, rows, raw.size // rows
        block[_CODES_FROM] = self.layout.codes_from(self.blocks)
        block[_KERNEL] = interleaved.kernel(self.block.name, self.target, columns, integer, near=True).address
        block[_BAD] = -1
        self._blocks.append(block)
        return _function(self.block.name, self.lanes).address, block.ctypes.data

    def passes(self, tokens: int) -> list[tuple[int, int]]:
        return [(tokens, self._width(tokens))]  # each pass repacks

    def run(self, x: np.ndarray, y: np.ndarray, integer: bool) -> None:
        super().run(x, y, integer)
        bad = max((int(block[_BAD]) for block in self._blocks), default=-1)
        if bad >= 0:
            raise BridgeError(f"{self.matrix.name}: the scales of row {bad} are not finite; the file is damaged")
