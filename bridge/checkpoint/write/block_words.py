"""Codes of blocks as a checkpoint packs them, without a byte for each code in between.

    words   consecutive codes of a row, the first in the low bits: n * bits / 32 uint32 for n columns
    halves  at a byte of each block, such as d

Both are [rows, n], or transposed, as GPTQ stores them: then a tile of 128 rows is read at a time, and what is written
fills whole cache lines, of arrays that begin with one (`ReusedArrays`). Of 4-bit types, `nibble_run` bytes of a block
hold the codes of as many columns in their low nibbles, and of the next in their high ones; eight of them are one
uint64.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from bridge.blocks import TYPES, BlockType
from bridge.checkpoint.formats.packing import joined
from bridge.system.kernels.jit import inlined, kernel, specialize

TILE = 128  # rows that are written transposed
_LINE = 64  # bytes
TYPES_IN_WORDS = ("Q8_0", *(name for name, block in TYPES.items() if block.nibble_run))

# set per type by `specialize`
store: Any = None
first_byte = half = words = tile_rows = 0


class ReusedArrays:
    """Memory of one layer after another: an array is valid until the next of that name.

    Packing into new pages takes up to twice as long, and into arrays that begin within a cache line, transposed, too.
    """

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}

    def empty(self, name: str, shape: tuple[int, int], dtype: DTypeLike) -> np.ndarray:
        """As `np.empty`."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        memory = self._memory.get(name)
        if memory is None or len(memory) < nbytes + _LINE:
            memory = self._memory[name] = np.empty(nbytes + _LINE, np.uint8)
        start = -memory.ctypes.data % _LINE
        return memory[start : start + nbytes].view(dtype).reshape(shape)


def pack_words(block: BlockType, raw: np.ndarray, out: np.ndarray) -> None:
    """Blocks uint8 [rows, row bytes] of TYPES_IN_WORDS -> out uint32 [rows, words], any view of an array."""
    pack, rows = _packer(block.name, _is_transposed(out)), len(raw)
    if block.nibble_run and out.flags.c_contiguous:  # each block as a row: what is read at once lies together
        rows = raw.size // block.nbytes
        out = out.reshape(rows, -1)
    pack(raw.reshape(rows, -1, block.nbytes), out)


def gather_halves(block: BlockType, raw: np.ndarray, offset: int, out: np.ndarray) -> None:
    """The halves at an even byte of every block -> out float16 [rows, blocks], any view of an array."""
    _gather(halves_at(block, raw, offset), out.view(np.uint16), TILE if _is_transposed(out) else 16)


def halves_at(block: BlockType, raw: np.ndarray, offset: int) -> np.ndarray:
    """A view uint16 [rows, blocks]: the bits of the halves at an even byte of every block."""
    return raw.view(np.uint16).reshape(len(raw), -1, block.nbytes // 2)[:, :, offset // 2]


def _pack_nibbles(raw, out):
    """raw uint8 [rows, blocks, bytes] -> out uint32 [rows, words], or its transpose."""
    eights, tile = np.zeros((words // 2, tile_rows), np.uint64), np.empty((words, tile_rows), np.uint32)
    low = np.uint64(0x0F0F0F0F0F0F0F0F)
    for first in range(0, raw.shape[0], tile_rows):
        count = min(tile_rows, raw.shape[0] - first)
        for b in range(raw.shape[1]):
            for j in range(count):
                block = raw[first + j, b]
                for i in range(words // 2):
                    eights[i, j] = _eight(block, first_byte + 8 * i)
            for i in range(words // 2):
                word = i // half * half + i
                for j in range(tile_rows):
                    tile[word, j] = np.uint32(joined(eights[i, j] & low, 4))
                    tile[word + half, j] = np.uint32(joined(eights[i, j] >> np.uint64(4) & low, 4))
            store(tile, count, first, b * words, out)


def _pack_bytes(raw, out):
    """Like `_pack_nibbles`, of Q8_0's codes, whose top bits are flipped."""
    tile = np.empty((words, tile_rows), np.uint32)
    flipped = np.uint64(0x8080808080808080)
    for first in range(0, raw.shape[0], tile_rows):
        count = min(tile_rows, raw.shape[0] - first)
        for b in range(raw.shape[1]):
            for j in range(count):
                block = raw[first + j, b]
                for i in range(words // 2):
                    x = _eight(block, first_byte + 8 * i) ^ flipped
                    tile[2 * i, j] = np.uint32(x & np.uint64(0xFFFFFFFF))
                    tile[2 * i + 1, j] = np.uint32(x >> np.uint64(32))
            store(tile, count, first, b * words, out)


def _store_tile(tile, count, row, word, out):
    if count == tile_rows:  # which is known: vectors
        for i in range(words):
            for j in range(tile_rows):
                out[row + j, word + i] = tile[i, j]
    else:
        for i in range(words):
            for j in range(count):
                out[row + j, word + i] = tile[i, j]


@inlined
def _eight(raw, offset):
    """Eight bytes as a uint64, the first the lowest."""
    return (
        np.uint64(raw[offset])
        | np.uint64(raw[offset + 1]) << np.uint64(8)
        | np.uint64(raw[offset + 2]) << np.uint64(16)
        | np.uint64(raw[offset + 3]) << np.uint64(24)
        | np.uint64(raw[offset + 4]) << np.uint64(32)
        | np.uint64(raw[offset + 5]) << np.uint64(40)
        | np.uint64(raw[offset + 6]) << np.uint64(48)
        | np.uint64(raw[offset + 7]) << np.uint64(56)
    )


@kernel
def _gather(halves, out, tile):
    """halves uint16 [rows, blocks] of any strides -> out uint16, the same or its transpose."""
    for first in range(0, halves.shape[0], tile):
        for b in range(halves.shape[1]):
            for row in range(first, min(first + tile, halves.shape[0])):
                out[row, b] = halves[row, b]


def _is_transposed(out: np.ndarray) -> bool:
    return out.strides[0] < out.strides[1]


@cache
def _packer(name: str, transposed: bool) -> Callable[..., None]:
    block = TYPES[name]
    run, count = block.nibble_run, block.size // 2 if block.nibble_run else block.size  # bytes of codes, the last ones
    rows = TILE if transposed else 16 if run else 1  # measured; nibbles are vectors of rows
    settings: dict[str, Any] = {"words": count // 4, "tile_rows": rows}
    label = f"{name}x{rows}"
    store = specialize(_store_tile, label, inlined, **settings)
    return specialize(
        _pack_nibbles if run else _pack_bytes,
        label, store=store, first_byte=block.nbytes - count, half=run // 8, **settings,
    )  # fmt: skip
