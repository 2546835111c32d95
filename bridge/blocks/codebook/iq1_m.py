"""IQ1_M: w = d/8 * (2sc + 1) * values[q], sc 0..7; 16 sub-blocks of 16; 1.75 bpw.

Points, codes and values are those of IQ1_S, but the shift is of 8 weights.

bytes  0..31  qs[32]     byte k: bits 0..7 of the number of the point whose coordinates are the levels of q[8k..8k+7]
      32..47  qh[16]     nibble k, low ones first: bits 0..2 are bits 8..10 of that number, bit 3: shift is negative
      48..55  scales[4]  little-endian words of 16 bits:

              15..12                     | 11..9    8..6     5..3     2..0
              bits 4n..4n+3 of d, f16    | sc[4n+3] sc[4n+2] sc[4n+1] sc[4n]
"""

from bridge.blocks.base import BlockType, put_word
from bridge.blocks.codebook.codebooks import digits
from bridge.blocks.codebook.iq1_s import IQ1_S, NUMBERS, POINTS, VALUES


def pack(q, sc, mn, d, dmin, out):
    for b in range(16):
        high = 0
        for k in range(2):
            first = 16 * b + 8 * k
            number = NUMBERS[digits(q, first, 8, 3)]
            out[2 * b + k] = number & 255
            high |= ((number >> 8) | ((q[first] // 3) << 3)) << (4 * k)
        out[32 + b] = high
    for n in range(4):
        word = ((d >> (4 * n)) & 15) << 12
        for j in range(4):
            word |= sc[4 * n + j] << (3 * j)
        put_word(out, 48 + 2 * n, word)


def unpack(raw, q, sc, mn):
    for j in range(16):
        word = raw[48 + 2 * (j >> 2)] | (raw[49 + 2 * (j >> 2)] << 8)
        sc[j] = (word >> (3 * (j & 3))) & 7
    for k in range(32):
        high = (raw[32 + (k >> 1)] >> (4 * (k & 1))) & 15
        point = raw[k] | ((high & 7) << 8)
        for i in range(8):
            q[8 * k + i] = POINTS[point, i] + 3 * (high >> 3)


IQ1_M = BlockType(
    name="IQ1_M", size=256, sub=16, nbytes=56, levels=6, unit=0.125, scale_lo=0, scale_hi=7, odd_scales=True,
    values=VALUES, d_nibbles=(49, 51, 53, 55), points=POINTS, shifted=8, pack=pack, unpack=unpack,
    search=IQ1_S.search, lift_share=0.7, needs_imatrix=True, noise=0.6,
)  # fmt: skip
