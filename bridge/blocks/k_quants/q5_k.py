"""Q5_K: w = d * sc * q - dmin * mn, q 0..31, sc and mn 0..63; 8 sub-blocks of 32; 5.5 bpw.

bytes  0..1    d, f16
       2..3    dmin, f16
       4..15   scales[12]  as in Q4_K
      16..47   qh[32]      byte l: bit 2c is bit 4 of q[64c + l], bit 2c + 1 that of q[64c + 32 + l]
      48..175  qs[128]     byte 32c + l: low nibble q[64c + l] & 15, high nibble q[64c + 32 + l] & 15
"""

from bridge.blocks.base import BlockType, ScaleSearch, put_word
from bridge.blocks.k_quants.q4_k import pack_scales, unpack_scales


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    put_word(out, 2, dmin)
    pack_scales(sc, mn, out)
    for i in range(32):
        high = 0
        for j in range(8):
            high |= (q[32 * j + i] >> 4) << j
        out[16 + i] = high
    for i in range(32):  # in this order LLVM vectorizes it
        for c in range(4):
            out[48 + 32 * c + i] = (q[64 * c + i] & 15) | ((q[64 * c + 32 + i] & 15) << 4)


def unpack(raw, q, sc, mn):
    unpack_scales(raw, sc, mn)
    for c in range(4):
        for i in range(32):
            low = raw[48 + 32 * c + i]
            high = raw[16 + i] >> (2 * c)
            q[64 * c + i] = (low & 15) | ((high & 1) << 4)
            q[64 * c + 32 + i] = (low >> 4) | (((high >> 1) & 1) << 4)


Q5_K = BlockType(
    name="Q5_K", size=256, sub=32, nbytes=176, levels=32,
    scale_lo=0, scale_hi=63, min_hi=63, d_at=0, dmin_at=2, pack=pack, unpack=unpack,
    search=ScaleSearch(-1.0, 0.3, 10, d_step=1.0, m_step=2.0), noise=0.02,
)  # fmt: skip
