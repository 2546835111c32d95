"""Q2_0: w = d * (q - 1), q 0..3; 64 weights in 18 bytes, 2.25 bits per weight. llama.cpp loads it since July 2026.

bytes  0..1   d, f16
       2..17  qs[16]   byte l: bits 2j, 2j+1 hold q[4l + j]
"""

from bridge.blocks.base import BlockType, ScaleSearch, put_word


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    for i in range(16):
        out[2 + i] = q[4 * i] | (q[4 * i + 1] << 2) | (q[4 * i + 2] << 4) | (q[4 * i + 3] << 6)


def unpack(raw, q, sc, mn):
    for i in range(16):
        for j in range(4):
            q[4 * i + j] = (raw[2 + i] >> (2 * j)) & 3


Q2_0 = BlockType(
    name="Q2_0", size=64, sub=64, nbytes=18, levels=4, zero=1, d_at=0, pack=pack, unpack=unpack,
    search=ScaleSearch(-3.2, 0.2, 18), text_starts=(-0.3, 0.22),
)  # fmt: skip
