"""Q4_K: w = d * sc * q - dmin * mn, q 0..15, sc and mn 0..63; 8 sub-blocks of 32; 4.5 bpw.

bytes  0..1    d, f16
       2..3    dmin, f16
       4..15   scales[12], six bits each:

               byte j (0..3)      7 6        | 5 4 3 2 1 0
                                  sc[j+4] hi | sc[j]
               byte 4 + j         7 6        | 5 4 3 2 1 0
                                  mn[j+4] hi | mn[j]
               byte 8 + j         7 6 5 4    | 3 2 1 0
                                  mn[j+4] lo | sc[j+4] lo

      16..143  qs[128]   byte 32c + l: low nibble q[64c + l], high nibble q[64c + 32 + l]
"""

from bridge.blocks.base import BlockType, ScaleSearch, put_word


def pack_scales(sc, mn, out):
    """Write the 12 bytes of six-bit scales, shared by Q4_K and Q5_K, to bytes 4..15 of `out`."""
    for j in range(4):
        out[4 + j] = sc[j] | ((sc[j + 4] >> 4) << 6)
        out[8 + j] = mn[j] | ((mn[j + 4] >> 4) << 6)
        out[12 + j] = (sc[j + 4] & 15) | ((mn[j + 4] & 15) << 4)


def unpack_scales(raw, sc, mn):
    """The inverse of `pack_scales`."""
    for j in range(4):
        sc[j] = raw[4 + j] & 63
        mn[j] = raw[8 + j] & 63
        sc[j + 4] = (raw[12 + j] & 15) | ((raw[4 + j] >> 6) << 4)
        mn[j + 4] = (raw[12 + j] >> 4) | ((raw[8 + j] >> 6) << 4)


def pack(q, sc, mn, d, dmin, out):
    put_word(out, 0, d)
    put_word(out, 2, dmin)
    pack_scales(sc, mn, out)
    for i in range(32):  # in this order LLVM vectorizes it
        for c in range(4):
            out[16 + 32 * c + i] = q[64 * c + i] | (q[64 * c + 32 + i] << 4)


def unpack(raw, q, sc, mn):
    unpack_scales(raw, sc, mn)
    for i in range(32):
        for c in range(4):
            q[64 * c + i] = raw[16 + 32 * c + i] & 15
            q[64 * c + 32 + i] = raw[16 + 32 * c + i] >> 4


Q4_K = BlockType(
    name="Q4_K", size=256, sub=32, nbytes=144, levels=16,
    scale_lo=0, scale_hi=63, min_hi=63, d_at=0, dmin_at=2, pack=pack, unpack=unpack,
    search=ScaleSearch(-1.0, 0.3, 10, d_step=1.0, m_step=2.0), noise=0.06,
)  # fmt: skip
