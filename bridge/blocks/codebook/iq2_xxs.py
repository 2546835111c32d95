"""IQ2_XXS: w = d/8 * (2sc + 1) * values[q], sc 0..15; 8 sub-blocks of 32; 2.0625 bpw.

A code q 0..5 is a level 0..2, and 3 more where the weight is negative.

bytes  0..1   d, f16
       2..65  eight times 8 bytes, those from 2 + 8j on for q[32j..32j+31]:

              0..3  byte k: the number of the point whose coordinates are the levels of q[32j+8k..32j+8k+7], of 256
              4..7  little-endian word:

                    31..28 | 27..21 | 20..14 | 13..7 | 6..0
                    sc[j]  |    signs of 8 weights each, as in IQ3_XXS
"""

from gguf.quants import IQ2_XXS as _GGUF

from bridge.blocks.base import BlockType, ScaleSearch, put_word
from bridge.blocks.codebook.codebooks import digits, even_signs, levels_of, numbers_of, points_of, signs

_LEVELS = levels_of(_GGUF)
POINTS = points_of(_GGUF)
NUMBERS = numbers_of(POINTS)


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    for j in range(8):
        word = sc[j] << 28
        for k in range(4):
            first = 32 * j + 8 * k
            out[2 + 8 * j + k] = NUMBERS[digits(q, first, 8, 3)]
            word |= (signs(q, first, 3) & 127) << (7 * k)
        for i in range(4):
            out[6 + 8 * j + i] = (word >> (8 * i)) & 255


def unpack(raw, q, sc, mn):
    for j in range(8):
        start = 2 + 8 * j
        word = raw[start + 4] | (raw[start + 5] << 8) | (raw[start + 6] << 16) | (raw[start + 7] << 24)
        sc[j] = word >> 28
        for k in range(4):
            minus = even_signs((word >> (7 * k)) & 127)
            for i in range(8):
                q[32 * j + 8 * k + i] = POINTS[raw[start + k], i] + 3 * ((minus >> i) & 1)


IQ2_XXS = BlockType(
    name="IQ2_XXS", size=256, sub=32, nbytes=66, levels=6, unit=0.125, scale_lo=0, scale_hi=15, odd_scales=True,
    values=(*_LEVELS, *(-level for level in _LEVELS)), d_at=0, points=POINTS, even_signs=True, pack=pack, unpack=unpack,
    search=ScaleSearch(28.0, 3.5, 5, tries=32, rounds=2), lift_share=0.8, needs_imatrix=True, noise=0.5,
)  # fmt: skip
