"""IQ2_XS: w = d/8 * (2sc + 1) * values[q], sc 0..15; 16 sub-blocks of 16; 2.3125 bpw.

A code q 0..5 is a level 0..2, and 3 more where the weight is negative.

bytes  0..1   d, f16
       2..65  32 little-endian words of 16 bits, word k for q[8k..8k+7]:

              15..9                    | 8..0
              signs, as in IQ3_XXS     | the number of the point whose coordinates are the levels, of 512

      66..73  scales[8]  low nibble sc[2j], high nibble sc[2j+1]
"""

from gguf.quants import IQ2_XS as _GGUF

from bridge.blocks.base import BlockType, ScaleSearch, put_word
from bridge.blocks.codebook.codebooks import digits, even_signs, levels_of, numbers_of, points_of, signs

_LEVELS = levels_of(_GGUF)
POINTS = points_of(_GGUF)
NUMBERS = numbers_of(POINTS)


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    for k in range(32):
        word = NUMBERS[digits(q, 8 * k, 8, 3)] | ((signs(q, 8 * k, 3) & 127) << 9)
        put_word(out, 2 + 2 * k, word)
    for j in range(8):
        out[66 + j] = sc[2 * j] | (sc[2 * j + 1] << 4)


def unpack(raw, q, sc, mn):
    for j in range(16):
        sc[j] = (raw[66 + (j >> 1)] >> (4 * (j & 1))) & 15
    for k in range(32):
        word = raw[2 + 2 * k] | (raw[3 + 2 * k] << 8)
        minus = even_signs(word >> 9)
        for i in range(8):
            q[8 * k + i] = POINTS[word & 511, i] + 3 * ((minus >> i) & 1)


IQ2_XS = BlockType(
    name="IQ2_XS", size=256, sub=16, nbytes=74, levels=6, unit=0.125, scale_lo=0, scale_hi=15, odd_scales=True,
    values=(*_LEVELS, *(-level for level in _LEVELS)), d_at=0, points=POINTS, even_signs=True, pack=pack, unpack=unpack,
    search=ScaleSearch(27.0, 2.5, 8, refits=1, tries=32, rounds=2), lift_share=0.8, needs_imatrix=True, noise=0.4,
)  # fmt: skip
