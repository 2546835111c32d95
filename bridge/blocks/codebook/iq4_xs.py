"""IQ4_XS: w = d * sc * values[q], q 0..15, sc -32..31, values as in IQ4_NL; 8 sub-blocks of 32; 4.25 bpw.

bytes  0..1    d, f16
       2..3    scales_h    little-endian: bits 2j, 2j+1 are bits 4, 5 of u[j] = sc[j] + 32
       4..7    scales_l[4] bits 3..0 of u[2j] in the low nibble, of u[2j+1] in the high nibble
       8..135  qs[128]     byte 16j + l: low nibble q[32j + l], high nibble q[32j + l + 16]
"""

from bridge.blocks.base import BlockType, ScaleSearch, put_word
from bridge.blocks.codebook.iq4_nl import IQ4_NL


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    for j in range(2):
        high = 0
        for i in range(4):
            high |= ((sc[4 * j + i] + 32) >> 4) << (2 * i)
        out[2 + j] = high
    for j in range(4):
        out[4 + j] = ((sc[2 * j] + 32) & 15) | (((sc[2 * j + 1] + 32) & 15) << 4)
    for j in range(8):
        for i in range(16):
            out[8 + 16 * j + i] = q[32 * j + i] | (q[32 * j + i + 16] << 4)


def unpack(raw, q, sc, mn):
    for j in range(8):
        low = (raw[4 + (j >> 1)] >> (4 * (j & 1))) & 15
        high = (raw[2 + (j >> 2)] >> (2 * (j & 3))) & 3
        sc[j] = (low | (high << 4)) - 32
        for i in range(16):
            q[32 * j + i] = raw[8 + 16 * j + i] & 15
            q[32 * j + i + 16] = raw[8 + 16 * j + i] >> 4


IQ4_XS = BlockType(
    name="IQ4_XS", size=256, sub=32, nbytes=136, levels=16,
    scale_lo=-32, scale_hi=31, values=IQ4_NL.values, d_at=0, pack=pack, unpack=unpack,
    search=ScaleSearch(103.0, 9.0, 5, tries=32, rounds=2), noise=0.06,
)  # fmt: skip
