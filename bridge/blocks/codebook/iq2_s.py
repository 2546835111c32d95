"""IQ2_S: w = d/8 * (2sc + 1) * values[q], sc 0..15; 16 sub-blocks of 16; 2.5625 bpw.

A code q 0..5 is a level 0..2, and 3 more where the weight is negative.

bytes  0..1   d, f16
       2..33  qs[32]     byte k: bits 0..7 of the number of the point whose coordinates are the levels of q[8k..8k+7]
      34..65  signs[32]  bit i of byte k: whether q[8k + i] is negative
      66..73  qh[8]      bits 2(k & 3), 2(k & 3)+1 of byte k >> 2: bits 8, 9 of that number, of 1024
      74..81  scales[8]  low nibble sc[2j], high nibble sc[2j+1]
"""

from gguf.quants import IQ2_S as _GGUF

from bridge.blocks.base import BlockType, ScaleSearch, put_word
from bridge.blocks.codebook.codebooks import digits, levels_of, numbers_of, points_of, signs

_LEVELS = levels_of(_GGUF)
POINTS = points_of(_GGUF)
NUMBERS = numbers_of(POINTS)


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    for b in range(8):
        high = 0
        for k in range(4):
            number = NUMBERS[digits(q, 32 * b + 8 * k, 8, 3)]
            out[2 + 4 * b + k] = number & 255
            high |= (number >> 8) << (2 * k)
            out[34 + 4 * b + k] = signs(q, 32 * b + 8 * k, 3)
        out[66 + b] = high
    for j in range(8):
        out[74 + j] = sc[2 * j] | (sc[2 * j + 1] << 4)


def unpack(raw, q, sc, mn):
    for j in range(16):
        sc[j] = (raw[74 + (j >> 1)] >> (4 * (j & 1))) & 15
    for k in range(32):
        point = raw[2 + k] | (((raw[66 + (k >> 2)] >> (2 * (k & 3))) & 3) << 8)
        for i in range(8):
            q[8 * k + i] = POINTS[point, i] + 3 * ((raw[34 + k] >> i) & 1)


IQ2_S = BlockType(
    name="IQ2_S", size=256, sub=16, nbytes=82, levels=6, unit=0.125, scale_lo=0, scale_hi=15, odd_scales=True,
    values=(*_LEVELS, *(-level for level in _LEVELS)), d_at=0, points=POINTS, pack=pack, unpack=unpack,
    search=ScaleSearch(32.5, 6.0, 2, tries=32, rounds=1, compared=1), lift_share=0.8, needs_imatrix=True, noise=0.35,
)  # fmt: skip
