"""Q5_0: w = d * (q - 16), q 0..31; 32 weights in 22 bytes, 5.5 bits per weight.

bytes  0..1   d, f16
       2..5   qh[4]    bit l of the little-endian word is bit 4 of q[l]
       6..21  qs[16]   low nibble q[l] & 15, high nibble q[l + 16] & 15
"""

from bridge.blocks.base import BlockType, ScaleSearch, put_word


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    for i in range(4):
        high = 0
        for j in range(8):
            high |= (q[8 * i + j] >> 4) << j
        out[2 + i] = high
    for i in range(16):
        out[6 + i] = (q[i] & 15) | ((q[i + 16] & 15) << 4)


def unpack(raw, q, sc, mn):
    for i in range(16):
        q[i] = (raw[6 + i] & 15) | (((raw[2 + (i >> 3)] >> (i & 7)) & 1) << 4)
        q[i + 16] = (raw[6 + i] >> 4) | (((raw[4 + (i >> 3)] >> (i & 7)) & 1) << 4)


Q5_0 = BlockType(
    name="Q5_0", size=32, sub=32, nbytes=22, levels=32, zero=16, d_at=0, pack=pack, unpack=unpack,
    search=ScaleSearch(-1.2, 0.12, 24), text_starts=(-1.2, 0.15), noise=0.02,
)  # fmt: skip
