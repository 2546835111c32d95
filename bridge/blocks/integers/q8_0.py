"""Q8_0: w = d * (q - 128), q 0..255; 32 weights in 34 bytes, 8.5 bits per weight.

bytes  0..1   d, f16
       2..33  qs[32]   q - 128 as int8, that is q with its top bit flipped
"""

from bridge.blocks.base import BlockType, put_word


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    for i in range(32):
        out[2 + i] = q[i] ^ 128


def unpack(raw, q, sc, mn):
    for i in range(32):
        q[i] = raw[2 + i] ^ 128


Q8_0 = BlockType(
    name="Q8_0", size=32, sub=32, nbytes=34, levels=256, zero=128,
    clips=True, last_resort=True, d_at=0, pack=pack, unpack=unpack,
    text_starts=(-1.2, 0.15), noise=0.0005,
)  # fmt: skip
