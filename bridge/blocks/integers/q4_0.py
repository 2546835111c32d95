"""Q4_0: w = d * (q - 8), q 0..15; 32 weights in 18 bytes, 4.5 bits per weight.

bytes  0..1   d, f16
       2..17  qs[16]   low nibble q[l], high nibble q[l + 16]
"""

from bridge.blocks.base import BlockType, ScaleSearch, put_word


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    for i in range(16):
        out[2 + i] = q[i] | (q[i + 16] << 4)


def unpack(raw, q, sc, mn):
    for i in range(16):
        q[i] = raw[2 + i] & 15
        q[i + 16] = raw[2 + i] >> 4


Q4_0 = BlockType(
    name="Q4_0", size=32, sub=32, nbytes=18, levels=16, zero=8, d_at=0, pack=pack, unpack=unpack,
    search=ScaleSearch(-1.0, 0.15, 16), text_starts=(-1.0, 0.15), nibble_run=16, noise=0.06,
)  # fmt: skip
