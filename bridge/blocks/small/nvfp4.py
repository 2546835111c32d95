"""NVFP4: w = ue4m3(sc) / 2 * values[q], q 0..15; 4 sub-blocks of 16; 64 weights in 36 bytes, 4.5 bits per weight.

bytes  0..3   sc[4]    UE4M3: no sign, 4 bits of exponent (bias 7), 3 of mantissa; halved because `values` are doubled
       4..35  qs[32]   byte 8j + l: low nibble q[16j + l], high nibble q[16j + l + 8]

The F32 tensor `<name>.scale` multiplies all of `<name>.weight`: one number, or one per expert.
"""

from bridge.blocks.base import BlockType
from bridge.blocks.small.mxfp4 import E2M1


def _ue4m3(code: int) -> float:
    """The value of a scale byte, whose top bit is ignored; 127 stands for NaN, which ggml reads as 0."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code in (0, 127):
        return 0.0
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


def pack(q, sc, mn, d, dmin, out):
    for j in range(4):
        out[j] = sc[j] & 255
        for i in range(8):
            out[4 + 8 * j + i] = q[16 * j + i] | (q[16 * j + i + 8] << 4)


def unpack(raw, q, sc, mn):
    for j in range(4):
        sc[j] = (raw[j] ^ 128) - 128
        for i in range(8):
            q[16 * j + i] = raw[4 + 8 * j + i] & 15
            q[16 * j + i + 8] = raw[4 + 8 * j + i] >> 4


_SCALES = tuple(_ue4m3(code) / 2 for code in range(256))
NVFP4 = BlockType(
    name="NVFP4", size=64, sub=16, nbytes=36, levels=16,
    scale_lo=-128, scale_hi=127, values=E2M1, scales=_SCALES, pack=pack, unpack=unpack,
    nibble_run=8, matrix_scale=True, noise=0.06,
)  # fmt: skip
