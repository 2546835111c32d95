"""The repacked form of a tensor: `lanes` rows interleaved, in as many bytes as in GGUF.

Codes are handled four at a time: a *word* is 4 bytes holding codes 4i..4i+3 of one row, and a vector is the
words of `lanes` rows (16 for AVX-512, 8 for AVX2, 4 for NEON). A dot-product instruction multiplies such a
vector with four int8 values of x, broadcast, and adds into one int32 a row: no sum across lanes is ever taken.

8 words (32 columns) of codes of `bits` bits take `bits` vectors. Vector v holds in each byte, from the lowest bits up,
words v, v + bits, v + 2 * bits, ... as far as they fit: one shift and one mask bring a word back. Of 3, 5 and 6 bits,
some bits are left at the top of each byte; the last words are put together of those, lowest bits first:

    bits   whole words    left in a vector   the others, from the bits left in vectors
    1      0..7           0
    2      0..7           0
    3      0..5           2                  6: 0, 2        7: 1, 2
    4      0..7           0
    5      0..4           3                  5: 0, 3        6: 1, 4      7: 2, 3, 4
    6      0..5           2                  6: 0, 1, 2     7: 3, 4, 5
    8      0..7           0

Fewer words, of scale codes, are stored as planes (`PLANES`), lowest bits first: a plane of `width` bits of `count`
words takes n = count * width / 8 vectors, and vector v holds it of words v, v + n, v + 2n, ...

A block of a row group (K-quants: 256 columns; others: 32 or 64):

    scale words   types with two levels of scales: sc (two's complement in scale_bits), then mn, four a word, as planes
    code words    one group of 8 after another

A row group: the halves (per block: d of each row, then dmin of each row; of MXFP4 and NVFP4 the scale bytes of each
row, those of one sub-block after those of another), padded to 64 bytes; then its blocks.
Rows are padded with zeros to a multiple of `lanes`. Of all types but IQ4_XS and those of numbered codes, the
bytes of the file's tensor are all here and no more: for instance, a row's share of a block of Q4_K is the 144 bytes of
the file's block,

    halves   d, dmin, f16: 4 bytes
    bytes    0..11     8 sc, 8 mn of 6 bits: low nibbles, then high pairs of bits
             12..27    q[0..31]: nibbles
             28..139   the other seven groups of 32

Where the file has one number for several codes, the codes themselves are here, since nothing looks up a codebook as
fast as memory is read: with 3 or 4 bits a code and 4 a scale, bits a weight become

    IQ1_S 1.56 -> 3.19    IQ2_XXS 2.06 -> 3.19    IQ3_XXS 3.06 -> 4.19    TQ1_0 1.69 -> 2.06
    IQ1_M 1.75 -> 3.31    IQ2_XS  2.31 -> 3.31    IQ3_S   3.44 -> 4.19
                          IQ2_S   2.56 -> 3.31    IQ4_XS  4.25 -> 4.31, with scales of 8 bits
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from bridge.blocks import BlockType
from bridge.system.records import record

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
GROUP = 8  # words, that is 32 columns
# the words after the whole ones: (vector, bits) of each piece
_LEFT = {
    3: (((0, 2), (2, 1)), ((1, 2), (2, 1))),
    5: (((0, 3), (3, 2)), ((1, 3), (4, 2)), ((2, 3), (3, 1), (4, 1))),
    6: (((0, 2), (1, 2), (2, 2)), ((3, 2), (4, 2), (5, 2))),
}
_LINE = 64


class Piece(NamedTuple):
    """`width` bits of each byte of a word, from bit `low` on: in a vector, from bit `start` on."""

    vector: int
    start: int
    low: int
    width: int


@cache
def pieces(bits: int, count: int) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each of `count` words of `bits` bits a code, see the head of this module."""
    if count != GROUP:
        words: list[list[Piece]] = [[] for _ in range(count)]
        first = low = 0
        for width in PLANES[bits]:
            n = count * width // 8
            for i, word in enumerate(words):
                word.append(Piece(first + i % n, i // n * width, low, width))
            first, low = first + n, low + width
        return tuple(map(tuple, words))
    whole_words = 8 // bits * bits
    words = [[Piece(i % bits, i // bits * bits, 0, bits)] for i in range(whole_words)]
    free = [whole_words] * bits  # the first bit left in each vector
    for parts in _LEFT.get(bits, ()):
        low = 0
        words.append([])
        for vector, width in parts:
            words[-1].append(Piece(vector, free[vector], low, width))
            free[vector] += width
            low += width
    return tuple(map(tuple, words))


@record
class InterleavedLayout:
    """Sizes, in bytes, of the repacked form of a type for a number of lanes."""

    block: BlockType
    lanes: int

    @property
    def code_bits(self) -> int:
        return (self.block.levels - 1).bit_length()

    @property
    def signed(self) -> bool:
        """Whether codes of 8 bits are stored less 128, in two's complement: for NEON, which multiplies signed bytes."""
        return self.lanes == 4 and self.code_bits == 8

    @property
    def scale_bits(self) -> int:
        """Bits of a scale or min code, signed ones in two's complement: so many that planes are whole vectors, or 0."""
        block = self.block
        if not block.is_k:
            return 0
        needed = max(block.scale_hi, -block.scale_lo - 1).bit_length() + (block.scale_lo < 0)
        fits = (bits for bits, planes in PLANES.items() if all(self.scale_words * width % 8 == 0 for width in planes))
        return next(bits for bits in fits if bits >= needed)

    @property
    def scale_words(self) -> int:
        """Words of scale and min codes in a block."""
        if not self.block.is_k:
            return 0
        return self.block.subs // 4 * (2 if self.block.has_min else 1)

    @property
    def codes_at(self) -> int:
        """Where a block's code words begin."""
        return self.scale_words * self.scale_bits // 8 * 4 * self.lanes

    @property
    def group_bytes(self) -> int:
        """Bytes of 8 code words of all lanes."""
        return self.code_bits * 4 * self.lanes

    @property
    def block_bytes(self) -> int:
        return self.codes_at + self.block.size // 32 * self.group_bytes

    @property
    def halves_bytes(self) -> int:
        """Bytes of d (and dmin) of one block of all lanes, or of its scale bytes."""
        if self.block.scales:
            return self.lanes * self.block.subs
        return 2 * self.lanes * (2 if self.block.has_min else 1)

    def codes_from(self, blocks: int) -> int:
        """Where the blocks of a row group of `blocks` blocks begin."""
        return -(-blocks * self.halves_bytes // _LINE) * _LINE

    def stride(self, blocks: int) -> int:
        """Bytes of a row group."""
        return self.codes_from(blocks) + blocks * self.block_bytes

    def words(self, raw: np.ndarray) -> np.ndarray:
        """One row's words of a block, in order: uint32 [block_bytes/4/lanes] of the file's block, uint8 [nbytes].

        Slow and plain: what the compiled repacker is derived from.
        """
        codes, scales = unpacked(self.block, raw)
        codes = codes ^ np.uint8(128) if self.signed else codes
        parts = [_vectors(words, self.code_bits) for words in codes.view(np.uint32).reshape(-1, GROUP)]
        if self.block.is_k:
            parts.insert(0, _vectors(scales.view(np.uint32)[: self.scale_words], self.scale_bits))
        return np.concatenate(parts)


def unpacked(block: BlockType, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes, and the scale and min codes, of a block's bytes, uint8 each."""
    q, sc, mn = [0] * block.size, [0] * block.subs, [0] * block.subs
    block.unpack(raw.tolist(), q, sc, mn)
    return np.array(q).astype(np.uint8), np.array([*sc, *mn]).astype(np.uint8)


def _vectors(words: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [count] of four codes each -> one row's part of their vectors, uint32 [count * bits / 8]."""
    out = np.zeros(len(words) * bits // 8, np.uint32)
    for word, parts in zip(words, pieces(bits, len(words)), strict=True):
        for vector, start, low, width in parts:
            mask = np.uint32(0x01010101 * ((1 << width) - 1))
            out[vector] |= (word >> np.uint32(low) & mask) << np.uint32(start)
    return out
