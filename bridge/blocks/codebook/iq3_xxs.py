"""IQ3_XXS: w = d/4 * (2sc + 1) * values[q], sc 0..15; 8 sub-blocks of 32; 3.0625 bpw.

A code q 0..15 is a level 0..7, and 8 more where the weight is negative.

bytes  0..1   d, f16
       2..65  qs[64]    byte k: the number of the point whose coordinates are the levels of q[4k..4k+3], of 256
      66..97  eight little-endian words of 32 bits, word j for q[32j..32j+31]:

              31..28 | 27..21 | 20..14 | 13..7 | 6..0
              sc[j]  |    signs of 8 weights each, the first eight in 6..0: seven bits, the eighth makes them even
"""

from gguf.quants import IQ3_XXS as _GGUF

from bridge.blocks.base import BlockType, ScaleSearch, put_word
from bridge.blocks.codebook.codebooks import digits, even_signs, levels_of, numbers_of, points_of, signs

_LEVELS = levels_of(_GGUF)
POINTS = points_of(_GGUF)
NUMBERS = numbers_of(POINTS)


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    for k in range(64):
        out[2 + k] = NUMBERS[digits(q, 4 * k, 4, 8)]
    for j in range(8):
        word = sc[j] << 28
        for k in range(4):
            word |= (signs(q, 32 * j + 8 * k, 8) & 127) << (7 * k)
        for i in range(4):
            out[66 + 4 * j + i] = (word >> (8 * i)) & 255


def unpack(raw, q, sc, mn):
    for j in range(8):
        start = 66 + 4 * j
        word = raw[start] | (raw[start + 1] << 8) | (raw[start + 2] << 16) | (raw[start + 3] << 24)
        sc[j] = word >> 28
        for k in range(4):
            minus = even_signs((word >> (7 * k)) & 127)
            for i in range(8):
                point = raw[2 + 8 * j + 2 * k + (i >> 2)]
                q[32 * j + 8 * k + i] = POINTS[point, i & 3] | (((minus >> i) & 1) << 3)


IQ3_XXS = BlockType(
    name="IQ3_XXS", size=256, sub=32, nbytes=98, levels=16, unit=0.25, scale_lo=0, scale_hi=15, odd_scales=True,
    values=(*_LEVELS, *(-level for level in _LEVELS)), d_at=0, points=POINTS, even_signs=True, pack=pack, unpack=unpack,
    search=ScaleSearch(31.0, 5.0, 5, tries=32, rounds=2), lift_share=0.8, needs_imatrix=True, noise=0.2,
)  # fmt: skip
