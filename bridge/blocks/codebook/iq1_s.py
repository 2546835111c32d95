"""IQ1_S: w = d/8 * (2sc + 1) * values[q], sc 0..7; 8 sub-blocks of 32; 1.5625 bpw.

The levels of a point are -1, 0, 1, to all of which a shift of 1/8 is added or, for 32 weights together, subtracted.
A code q 0..5 is a level 0..2, and 3 more where the shift is negative; the values are eight times as large.

bytes  0..1   d, f16
       2..33  qs[32]   byte k: bits 0..7 of the number of the point whose coordinates are the levels of q[8k..8k+7]
      34..49  qh[8]    little-endian words of 16 bits, word j for q[32j..32j+31]:

              15                | 14..12 | 11..9   8..6   5..3   2..0
              shift is negative | sc[j]  | bits 8..10 of the four numbers, of 2048, the first in 2..0
"""

from gguf.quants import IQ1_S as _GGUF

from bridge.blocks.base import BlockType, ScaleSearch, put_word
from bridge.blocks.codebook.codebooks import digits, levels_of, numbers_of, points_of

VALUES = tuple(8 * level + shift for shift in (1, -1) for level in levels_of(_GGUF))
POINTS = points_of(_GGUF)
NUMBERS = numbers_of(POINTS)


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    for j in range(8):
        word = (sc[j] << 12) | ((q[32 * j] // 3) << 15)
        for k in range(4):
            number = NUMBERS[digits(q, 32 * j + 8 * k, 8, 3)]
            out[2 + 4 * j + k] = number & 255
            word |= (number >> 8) << (3 * k)
        put_word(out, 34 + 2 * j, word)


def unpack(raw, q, sc, mn):
    for j in range(8):
        word = raw[34 + 2 * j] | (raw[35 + 2 * j] << 8)
        sc[j] = (word >> 12) & 7
        for k in range(4):
            point = raw[2 + 4 * j + k] | (((word >> (3 * k)) & 7) << 8)
            for i in range(8):
                q[32 * j + 8 * k + i] = POINTS[point, i] + 3 * (word >> 15)


IQ1_S = BlockType(
    name="IQ1_S", size=256, sub=32, nbytes=50, levels=6, unit=0.125, scale_lo=0, scale_hi=7, odd_scales=True,
    values=VALUES, d_at=0, points=POINTS, shifted=32, pack=pack, unpack=unpack,
    search=ScaleSearch(10.0, 1.0, 1, tries=16, rounds=1, compared=1), lift_share=0.8, needs_imatrix=True, noise=0.7,
)  # fmt: skip
