"""The repacked form of a tensor: `lanes` rows interleaved, everything in dense bit-planes, GGUF bytes to the byte.

Codes are handled four at a time: a *word* is 4 bytes holding codes 4i..4i+3 of one row, and a vector is the
words of `lanes` rows (16 for AVX-512, 8 for AVX2, 4 for NEON). A dot-product instruction multiplies such a
vector with four int8 values of x, broadcast, and adds into one int32 a row: no sum across lanes is ever taken.

`count` words of `bits` bits a code are stored as planes, lowest bits first:

    bits   planes    vectors for 8 words (32 columns)
    2      2         2
    3      2 + 1     2 + 1
    4      4         4
    5      4 + 1     4 + 1
    6      4 + 2     4 + 2
    8      8         8

A plane of `width` bits takes n = count * width / 8 vectors; vector v holds in each byte, from the lowest
bits up, that plane of words v, v + n, v + 2n, ...: one shift and one mask bring a word back.

A block of a row group (K-quants: 256 columns; others: 32):

    scale words   K only: sc (two's complement in scale_bits), then mn, four a word, as planes
    code words    one group of 8 after another

A row group: the halves (per block: d of each row, then dmin of each row), padded to 64 bytes; then its blocks.
Rows are padded with zeros to a multiple of `lanes`. The bytes of the file's tensor are all here and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from bridge.blocks import BLOCKS, BlockType
from bridge.jit import from_plain, inlined, specialize

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
GROUP = 8  # words, that is 32 columns
_LINE = 64


@dataclass(frozen=True)
class Layout:
    """Sizes, in bytes, of the repacked form of a type for a number of lanes."""

    block: BlockType
    lanes: int

    @property
    def code_bits(self) -> int:
        return (self.block.levels - 1).bit_length()

    @property
    def scale_bits(self) -> int:
        """Bits of a scale or min code; signed ones in two's complement. 0 where there are none."""
        block = self.block
        if not block.is_k:
            return 0
        return max(block.scale_hi, -block.scale_lo - 1).bit_length() + (block.scale_lo < 0)

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
        """Bytes of d (and dmin) of one block of all lanes."""
        return 2 * self.lanes * (2 if self.block.has_min else 1)

    def codes_from(self, blocks: int) -> int:
        """Where the blocks of a row group of `blocks` blocks begin."""
        return -(-blocks * self.halves_bytes // _LINE) * _LINE

    def stride(self, blocks: int) -> int:
        """Bytes of a row group."""
        return self.codes_from(blocks) + blocks * self.block_bytes


# set per type and lanes by `specialize`
unpack: Any = None
size = subs = nbytes = d_at = dmin_at = scale_bytes = group_bytes = 0
scale_words = low_width = high_width = scale_low_width = scale_high_width = 0
mins = is_k = False


@inlined
def _put_plane(words, first, count, width, shift, lanes, lane, out, at):
    """OR plane `width` bits wide at bit `shift` of words[first:first + count] into uint32 vectors from out[at]."""
    n = count * width // 8
    mask = np.uint32(0x01010101) * np.uint32((1 << width) - 1)
    for v in range(n):
        value = np.uint32(0)
        for i in range(8 // width):
            value |= ((words[first + v + i * n] >> np.uint32(shift)) & mask) << np.uint32(width * i)
        out[at + v * lanes + lane] = value


def _repack(raw, first, last, lanes, stride, codes_from, out):
    """Row groups first..last-1 of raw uint8 [rows, row bytes] -> out uint8 [groups * stride].

    Returns the first row whose d or dmin is not finite, or -1.
    """
    rows = raw.shape[0]
    blocks = raw.shape[1] // nbytes
    halves_bytes = (4 if mins else 2) * lanes
    block_bytes = (scale_bytes + size // 32 * group_bytes) * lanes
    out32 = out.view(np.uint32)
    out16 = out.view(np.uint16)
    q = np.empty(size, np.uint8)
    fields = np.zeros(2 * subs + 4, np.uint8)
    sc = fields[:subs].view(np.int8)
    mn = fields[subs : 2 * subs]
    words = q.view(np.uint32)
    scales = fields[: 2 * subs // 4 * 4].view(np.uint32)
    bad = -1
    for group in range(first, last):
        for lane in range(lanes):
            row = group * lanes + lane
            for b in range(blocks):
                halves = group * stride + b * halves_bytes
                at = (group * stride + codes_from + b * block_bytes) // 4
                if row >= rows:
                    out16[halves // 2 + lane] = 0
                    if mins:
                        out16[halves // 2 + lanes + lane] = 0
                    for i in range(block_bytes // 4 // lanes):
                        out32[at + i * lanes + lane] = 0
                    continue
                block = raw[row, b * nbytes : (b + 1) * nbytes]
                unpack(block, q, sc, mn)
                d = np.uint16(block[d_at]) | np.uint16(block[d_at + 1]) << np.uint16(8)
                infinite = d & 0x7C00 == 0x7C00
                out16[halves // 2 + lane] = d
                if mins:
                    dmin = np.uint16(block[dmin_at]) | np.uint16(block[dmin_at + 1]) << np.uint16(8)
                    infinite |= dmin & 0x7C00 == 0x7C00
                    out16[halves // 2 + lanes + lane] = dmin
                if infinite and bad < 0:
                    bad = row
                if is_k:
                    _put_plane(scales, 0, scale_words, scale_low_width, 0, lanes, lane, out32, at)
                    if scale_high_width:
                        high_at = at + scale_words * scale_low_width // 8 * lanes
                        _put_plane(
                            scales, 0, scale_words, scale_high_width, scale_low_width, lanes, lane, out32, high_at
                        )
                for g in range(size // 32):
                    place = at + (scale_bytes + g * group_bytes) // 4 * lanes
                    _put_plane(words, 8 * g, 8, low_width, 0, lanes, lane, out32, place)
                    if high_width:
                        _put_plane(
                            words, 8 * g, 8, high_width, low_width, lanes, lane, out32, place + low_width * lanes
                        )
    return bad


@cache
def repacker(name: str) -> Any:
    """The compiled `repack(raw, first, last, lanes, stride, codes_from, out)` of a type."""
    layout = Layout(BLOCKS[name], 1)
    block = layout.block
    low, *high = PLANES[layout.code_bits]
    scale_low, *scale_high = PLANES[layout.scale_bits] if block.is_k else (0,)
    return specialize(
        _repack,
        name,
        unpack=from_plain(block.unpack, inlined),
        size=block.size,
        subs=block.subs,
        nbytes=block.nbytes,
        d_at=block.d_at,
        dmin_at=block.dmin_at,
        mins=block.has_min,
        is_k=block.is_k,
        scale_bytes=layout.codes_at,
        group_bytes=layout.group_bytes,
        scale_words=layout.scale_words,
        low_width=low,
        high_width=sum(high),
        scale_low_width=scale_low,
        scale_high_width=sum(scale_high),
    )
