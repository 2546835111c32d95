"""Q6_K: w = d * sc * (q - 32), q 0..63, sc -128..127; 16 sub-blocks of 16; 6.5625 bpw.

bytes   0..127  ql[128]    byte 64h + l:      low nibble q[128h + l], high nibble q[128h + 64 + l]
                           byte 64h + 32 + l: low nibble q[128h + 32 + l], high nibble q[128h + 96 + l]
                           (bits 3..0 of each code)
      128..191  qh[64]     byte 32h + l: bits 2j, 2j+1 are bits 4, 5 of q[128h + 32j + l]
      192..207  scales[16] int8
      208..209  d, f16
"""

from bridge.blocks.base import BlockType, ScaleSearch, put_word


def pack(q, sc, mn, d, dmin, out):
    for h in range(2):
        for i in range(32):
            k = 128 * h + i
            out[64 * h + i] = (q[k] & 15) | ((q[k + 64] & 15) << 4)
            out[64 * h + 32 + i] = (q[k + 32] & 15) | ((q[k + 96] & 15) << 4)
            out[128 + 32 * h + i] = (
                (q[k] >> 4) | ((q[k + 32] >> 4) << 2) | ((q[k + 64] >> 4) << 4) | ((q[k + 96] >> 4) << 6)
            )
    for j in range(16):
        out[192 + j] = sc[j] & 255
    put_word(out, 208, d)


def unpack(raw, q, sc, mn):
    for h in range(2):
        for i in range(32):
            k = 128 * h + i
            high = raw[128 + 32 * h + i]
            q[k] = (raw[64 * h + i] & 15) | ((high & 3) << 4)
            q[k + 32] = (raw[64 * h + 32 + i] & 15) | (((high >> 2) & 3) << 4)
            q[k + 64] = (raw[64 * h + i] >> 4) | (((high >> 4) & 3) << 4)
            q[k + 96] = (raw[64 * h + 32 + i] >> 4) | ((high >> 6) << 4)
    for j in range(16):
        sc[j] = (raw[192 + j] ^ 128) - 128


Q6_K = BlockType(
    name="Q6_K", size=256, sub=16, nbytes=210, levels=64, zero=32,
    scale_lo=-128, scale_hi=127, d_at=208, pack=pack, unpack=unpack,
    search=ScaleSearch(-0.6, 0.3, 8, grid_wide=1, wide=8, coarse=32.0), noise=0.005,
)  # fmt: skip
