"""The 16 bytes that hold a superblock's scales on the device: how they are packed, and how a lane reads them.

    Q4_K, Q5_K   word 0       d, dmin
                 word 1, 2    nibble u: low bits of sc[u]; of mn[u]
                 word 3       nibble u: high bits of sc[u] in 0..1, of mn[u] in 2..3
    Q3_K         word 0       d
                 word 1 + i   half h, byte j: low bits of sc + 32 of sub-block 2u + j, u = 4i + 2h in the low nibble,
                              u = 4i + 2h + 1 in the high one
                 word 3       half h, byte j: bits 2n, 2n + 1 are bits 4, 5 of sc + 32 of sub-block 2u + j, u = 4h + n
    Q2_K         half u       byte j: sc[2u + j] in the low nibble, mn[2u + j] in the high one
    Q6_K         half u       byte j: sc[2u + j]

u is the unit, 32 columns, of a superblock. A lane reads all 16 bytes of the first three, its own half word of the
last two. For its unit, number lane modulo 8 of the superblock, it returns:

    Q4_K, Q5_K   the scale and the min of its sub-block
    others       the scales of its two sub-blocks in bytes 0 and 1, and their mins in the same way
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from bridge.cuda.toolchain.intrinsics import bits, or_, ror, shl, sub, xor


class ScaleForm(NamedTuple):
    """How a type's scales are packed."""

    pack: Callable[..., None]  # (sc, mn, d, dmin, out uint32 [4])
    read: Callable[..., Any]  # (words, lane) -> scale or scales, min or mins, as described above
    holds_halves: bool  # whether d and dmin are in there
    whole: bool  # whether a lane reads all of it


def _pack_32(sc, mn, d, dmin, out):
    low = np.uint32(0)
    mins = np.uint32(0)
    high = np.uint32(0)
    for j in range(8):
        s = np.uint32(sc[j])
        m = np.uint32(mn[j])
        low |= (s & np.uint32(15)) << np.uint32(4 * j)
        mins |= (m & np.uint32(15)) << np.uint32(4 * j)
        high |= (s >> np.uint32(4) | m >> np.uint32(4) << np.uint32(2)) << np.uint32(4 * j)
    out[0] = np.uint32(d) | np.uint32(dmin) << np.uint32(16)
    out[1] = low
    out[2] = mins
    out[3] = high


def _pack_q3(sc, mn, d, dmin, out):
    out[0] = np.uint32(d)
    for i in range(1, 4):
        out[i] = np.uint32(0)
    for u in range(8):
        for j in range(2):
            s = np.uint32(sc[2 * u + j] + 32)
            out[1 + u // 4] |= (s & np.uint32(15)) << np.uint32(16 * (u // 2 % 2) + 8 * j + 4 * (u % 2))
            out[3] |= (s >> np.uint32(4)) << np.uint32(16 * (u // 4) + 8 * j + 2 * (u % 4))


def _pack_q2(sc, mn, d, dmin, out):
    for i in range(4):
        out[i] = np.uint32(0)
        for j in range(4):
            out[i] |= (np.uint32(sc[4 * i + j]) | np.uint32(mn[4 * i + j]) << np.uint32(4)) << np.uint32(8 * j)


def _pack_q6(sc, mn, d, dmin, out):
    for i in range(4):
        out[i] = np.uint32(0)
        for j in range(4):
            out[i] |= np.uint32(np.uint8(sc[4 * i + j])) << np.uint32(8 * j)


def read_32(words, lane):
    shift = shl(bits(lane, 0, 7), 2)
    scale = or_(bits(words[1], shift, 15), bits(ror(words[3], sub(shift, 4)), 0, 0x30))
    least = or_(bits(words[2], shift, 15), bits(ror(words[3], sub(shift, 2)), 0, 0x30))
    return scale, least


def read_q3(words, lane):
    shift = or_(shl(bits(lane, 1, 1), 4), shl(bits(lane, 0, 1), 2))
    low = bits(words[2] if bits(lane, 2, 1) else words[1], shift, 0x0F0F)
    shift = or_(shl(bits(lane, 2, 1), 4), shl(bits(lane, 0, 3), 1))
    scale = or_(low, bits(ror(words[3], sub(shift, 4)), 0, 0x3030))
    # subtract 32 from each byte: the top bits, set before, stop borrows and end up as inverted signs
    return xor(sub(or_(scale, 0x8080), 0x2020), 0x8080), 0


def read_q2(words, lane):
    return bits(words[0], 0, 0x0F0F), bits(words[0], 4, 0x0F0F)


def read_q6(words, lane):
    return words[0], 0


FORMS = {
    "Q2_K": ScaleForm(_pack_q2, read_q2, holds_halves=False, whole=False),
    "Q3_K": ScaleForm(_pack_q3, read_q3, holds_halves=True, whole=True),
    "Q4_K": ScaleForm(_pack_32, read_32, holds_halves=True, whole=True),
    "Q5_K": ScaleForm(_pack_32, read_32, holds_halves=True, whole=True),
    "Q6_K": ScaleForm(_pack_q6, read_q6, holds_halves=False, whole=False),
}
