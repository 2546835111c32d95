"""IQ3_S: w = d * (2sc + 1) * values[q], sc 0..15; 8 sub-blocks of 32; 3.4375 bpw.

A code q 0..15 is a level 0..7, and 8 more where the weight is negative.

bytes   0..1    d, f16
        2..65   qs[64]     byte k: bits 0..7 of the number of the point whose coordinates are the levels of q[4k..4k+3]
       66..73   qh[8]      bit k & 7 of byte k >> 3: bit 8 of that number, of 512
       74..105  signs[32]  bit i of byte k: whether q[8k + i] is negative
      106..109  scales[4]  low nibble sc[2j], high nibble sc[2j+1]
"""

from gguf.quants import IQ3_S as _GGUF

from bridge.blocks.base import BlockType, ScaleSearch, put_word
from bridge.blocks.codebook.codebooks import digits, levels_of, numbers_of, points_of, signs

_LEVELS = levels_of(_GGUF)
POINTS = points_of(_GGUF)
NUMBERS = numbers_of(POINTS)


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    for b in range(8):
        high = 0
        for k in range(8):
            number = NUMBERS[digits(q, 32 * b + 4 * k, 4, 8)]
            out[2 + 8 * b + k] = number & 255
            high |= (number >> 8) << k
        out[66 + b] = high
    for k in range(32):
        out[74 + k] = signs(q, 8 * k, 8)
    for j in range(4):
        out[106 + j] = sc[2 * j] | (sc[2 * j + 1] << 4)


def unpack(raw, q, sc, mn):
    for j in range(8):
        sc[j] = (raw[106 + (j >> 1)] >> (4 * (j & 1))) & 15
    for k in range(64):
        point = raw[2 + k] | (((raw[66 + (k >> 3)] >> (k & 7)) & 1) << 8)
        minus = raw[74 + (k >> 1)] >> (4 * (k & 1))
        for i in range(4):
            q[4 * k + i] = POINTS[point, i] | (((minus >> i) & 1) << 3)


IQ3_S = BlockType(
    name="IQ3_S", size=256, sub=32, nbytes=110, levels=16, scale_lo=0, scale_hi=15, odd_scales=True,
    values=(*_LEVELS, *(-level for level in _LEVELS)), d_at=0, points=POINTS, pack=pack, unpack=unpack,
    search=ScaleSearch(8.0, 1.5, 4, tries=32, rounds=1), noise=0.15,
)  # fmt: skip
