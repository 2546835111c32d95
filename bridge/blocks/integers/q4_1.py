"""Q4_1: w = d * q + m, q 0..15; 32 weights in 20 bytes, 5 bits per weight.

bytes  0..1   d, f16
       2..3   m, f16
       4..19  qs[16]   low nibble q[l], high nibble q[l + 16]
"""

from bridge.blocks.base import BlockType, ScaleSearch, put_word


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    put_word(out, 2, dmin)
    for i in range(16):
        out[4 + i] = q[i] | (q[i + 16] << 4)


def unpack(raw, q, sc, mn):
    for i in range(16):
        q[i] = raw[4 + i] & 15
        q[i + 16] = raw[4 + i] >> 4


Q4_1 = BlockType(
    name="Q4_1", size=32, sub=32, nbytes=20, levels=16, d_at=0, dmin_at=2, pack=pack, unpack=unpack,
    search=ScaleSearch(-1.0, 0.2, 12), text_starts=(-1.0, 0.25), nibble_run=16, noise=0.06,
)  # fmt: skip
