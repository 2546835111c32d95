"""TQ2_0: w = d * (q - 1), q 0..3, of which quantizers use 0..2; 256 weights in 66 bytes, 2.0625 bpw.

bytes  0..63  qs[64]   byte 32h + l: bits 2j, 2j+1 hold q[128h + 32j + l], j 0..3
      64..65  d, f16
"""

from bridge.blocks.base import BlockType, put_word


def pack(q, sc, mn, d, dmin, out):
    for h in range(2):
        for i in range(32):
            k = 128 * h + i
            out[32 * h + i] = q[k] | (q[k + 32] << 2) | (q[k + 64] << 4) | (q[k + 96] << 6)
    put_word(out, 64, d)


def unpack(raw, q, sc, mn):
    for h in range(2):
        for i in range(32):
            for j in range(4):
                q[128 * h + 32 * j + i] = (raw[32 * h + i] >> (2 * j)) & 3


TQ2_0 = BlockType(
    name="TQ2_0", size=256, sub=256, nbytes=66, levels=4, zero=1, d_at=64, pack=pack, unpack=unpack,
    ternary=True,
)  # fmt: skip
