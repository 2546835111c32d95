"""Q3_K: w = d * sc * (q - 4), q 0..7, sc -32..31; 16 sub-blocks of 16; 3.4375 bpw.

bytes  0..31   hmask[32]   byte l: bit 4h + j is bit 2 of q[128h + 32j + l]
      32..95   qs[64]      byte 32h + l: bits 2j, 2j+1 are bits 0, 1 of q[128h + 32j + l]
      96..107  scales[12]  u[j] = sc[j] + 32, six bits each:

               byte j (0..7):      7 6 5 4 | 3 2 1 0      byte 8 + i (0..3):  76 | 54 | 32 | 10
                                   u[j+8]  |  u[j]        bits 5..4 of:   u[i+12] u[i+8] u[i+4] u[i]
                                   bits 3..0 of each

     108..109  d, f16
"""

from bridge.blocks.base import BlockType, ScaleSearch, put_word


def pack(q, sc, mn, d, dmin, out):
    for i in range(32):
        high = 0
        for j in range(8):
            high |= (q[32 * j + i] >> 2) << j
        out[i] = high
    for h in range(2):
        for i in range(32):
            k = 128 * h + i
            out[32 + 32 * h + i] = (q[k] & 3) | ((q[k + 32] & 3) << 2) | ((q[k + 64] & 3) << 4) | ((q[k + 96] & 3) << 6)
    for j in range(8):
        out[96 + j] = ((sc[j] + 32) & 15) | (((sc[j + 8] + 32) & 15) << 4)
    for i in range(4):
        high = 0
        for j in range(4):
            high |= ((sc[i + 4 * j] + 32) >> 4) << (2 * j)
        out[104 + i] = high
    put_word(out, 108, d)


def unpack(raw, q, sc, mn):
    for h in range(2):
        for i in range(32):
            for j in range(4):
                low = (raw[32 + 32 * h + i] >> (2 * j)) & 3
                high = (raw[i] >> (4 * h + j)) & 1
                q[128 * h + 32 * j + i] = low | (high << 2)
    for j in range(16):
        low = (raw[96 + (j & 7)] >> (4 * (j >> 3))) & 15
        high = (raw[104 + (j & 3)] >> (2 * (j >> 2))) & 3
        sc[j] = (low | (high << 4)) - 32


Q3_K = BlockType(
    name="Q3_K", size=256, sub=16, nbytes=110, levels=8, zero=4,
    scale_lo=-32, scale_hi=31, d_at=108, pack=pack, unpack=unpack,
    search=ScaleSearch(-0.4, 0.16, 12, grid_wide=1, wide=64, shakes=6, coarse=8.0), noise=0.15,
)  # fmt: skip
