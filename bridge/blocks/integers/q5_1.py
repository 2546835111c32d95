"""Q5_1: w = d * q + m, q 0..31; 32 weights in 24 bytes, 6 bits per weight.

bytes  0..1   d, f16
       2..3   m, f16
       4..7   qh[4]    bit l of the little-endian word is bit 4 of q[l]
       8..23  qs[16]   low nibble q[l] & 15, high nibble q[l + 16] & 15
"""

from bridge.blocks.base import BlockType, ScaleSearch, put_word


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    put_word(out, 2, dmin)
    for i in range(4):
        high = 0
        for j in range(8):
            high |= (q[8 * i + j] >> 4) << j
        out[4 + i] = high
    for i in range(16):
        out[8 + i] = (q[i] & 15) | ((q[i + 16] & 15) << 4)


def unpack(raw, q, sc, mn):
    for i in range(16):
        q[i] = (raw[8 + i] & 15) | (((raw[4 + (i >> 3)] >> (i & 7)) & 1) << 4)
        q[i + 16] = (raw[8 + i] >> 4) | (((raw[6 + (i >> 3)] >> (i & 7)) & 1) << 4)


Q5_1 = BlockType(
    name="Q5_1", size=32, sub=32, nbytes=24, levels=32, d_at=0, dmin_at=2, pack=pack, unpack=unpack,
    search=ScaleSearch(-1.2, 0.3, 12), text_starts=(-1.0, 0.25), noise=0.02,
)  # fmt: skip
