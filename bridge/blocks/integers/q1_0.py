"""Q1_0: w = d * (2q - 1), q 0..1, that is d or -d; 128 weights in 18 bytes, 1.125 bits per weight. Read, never written.

bytes  0..1   d, f16
       2..17  qs[16]   byte l: bit j is q[8l + j]
"""

from bridge.blocks.base import BlockType, put_word


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    for i in range(16):
        byte = 0
        for j in range(8):
            byte |= q[8 * i + j] << j
        out[2 + i] = byte


def unpack(raw, q, sc, mn):
    for i in range(16):
        for j in range(8):
            q[8 * i + j] = (raw[2 + i] >> j) & 1


Q1_0 = BlockType(name="Q1_0", size=128, sub=128, nbytes=18, levels=2, values=(-1, 1), d_at=0, pack=pack, unpack=unpack)
