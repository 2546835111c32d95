"""Q2_K: w = d * sc * q - dmin * mn, q 0..3, sc and mn 0..15; 16 sub-blocks of 16; 2.625 bpw.

bytes  0..15  scales[16]  low nibble sc[j], high nibble mn[j]
      16..79  qs[64]      byte 32h + l: bits 2j, 2j+1 hold q[128h + 32j + l], j 0..3
      80..81  d, f16
      82..83  dmin, f16
"""

from bridge.blocks.base import BlockType, ScaleSearch, put_word


def pack(q, sc, mn, d, dmin, out):
    for j in range(16):
        out[j] = sc[j] | (mn[j] << 4)
    for h in range(2):
        for i in range(32):
            k = 128 * h + i
            out[16 + 32 * h + i] = q[k] | (q[k + 32] << 2) | (q[k + 64] << 4) | (q[k + 96] << 6)
    put_word(out, 80, d)
    put_word(out, 82, dmin)


def unpack(raw, q, sc, mn):
    for j in range(16):
        sc[j] = raw[j] & 15
        mn[j] = raw[j] >> 4
    for h in range(2):
        for i in range(32):
            for j in range(4):
                q[128 * h + 32 * j + i] = (raw[16 + 32 * h + i] >> (2 * j)) & 3


Q2_K = BlockType(
    name="Q2_K", size=256, sub=16, nbytes=84, levels=4,
    scale_lo=0, scale_hi=15, min_hi=15, d_at=80, dmin_at=82, pack=pack, unpack=unpack,
    search=ScaleSearch(-0.6, 0.2, 12, d_step=0.5, m_step=0.5), noise=0.3,
)  # fmt: skip
