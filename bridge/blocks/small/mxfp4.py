"""MXFP4: w = 2^(e - 128) * values[q], q 0..15; 32 weights in 17 bytes, 4.25 bits per weight.

bytes  0      e        E8M0, that is 2^(e - 127), halved because `values` are doubled
       1..16  qs[16]   low nibble q[l], high nibble q[l + 16]

A code is an E2M1 float: sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
"""

from bridge.blocks.base import BlockType

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled, so that they are integers
_SCALES = (*(2.0 ** (e - 128) for e in range(255)), 2.0**127)  # 255 stands for NaN; ggml reads it so


def pack(q, sc, mn, d, dmin, out):
    out[0] = sc[0] & 255
    for i in range(16):
        out[1 + i] = q[i] | (q[i + 16] << 4)


def unpack(raw, q, sc, mn):
    sc[0] = (raw[0] ^ 128) - 128
    for i in range(16):
        q[i] = raw[1 + i] & 15
        q[i + 16] = raw[1 + i] >> 4


MXFP4 = BlockType(
    name="MXFP4", size=32, sub=32, nbytes=17, levels=16,
    scale_lo=-128, scale_hi=127, values=E2M1, scales=_SCALES, pack=pack, unpack=unpack,
    nibble_run=16, noise=0.06,
)  # fmt: skip
