"""The 16 bytes that hold a superblock's scales on the device: how they are packed, and how a lane reads them.

    Q4_K, Q5_K   word 0       d, dmin
                 word 1, 2    nibble j: low bits of sc[j]; of mn[j]
                 word 3       nibble j: high bits of sc[j] in 0..1, of mn[j] in 2..3
    Q3_K         word 0       d
                 word 1       byte u: low nibbles of sc[4u] + 32 and of sc[4u+1] + 32 (unit u of 64 columns)
                 word 2       the same of sc[4u+2] and sc[4u+3]
                 word 3       byte u: bits 2j, 2j+1 are bits 4, 5 of sc[4u+j] + 32
    Q2_K         word u       byte j: sc[4u+j] in the low nibble, mn[4u+j] in the high one
    Q6_K         word u       byte j: sc[4u+j]

A lane reads all 16 bytes of the first two, its own word of the last two. `group` of a unit is 0 or 1: which half of
its four sub-blocks of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from bridge.cuda.intrinsics import bits, either, minus, multiply_add, shifted, signed_byte


class Form(NamedTuple):
    """How a type's scales are packed."""

    pack: Callable[..., None]  # (sc, mn, d, dmin, out uint32 [4])
    read: Callable[..., Any]  # see below
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
    for u in range(4):
        for j in range(4):
            s = np.uint32(sc[4 * u + j] + 32)
            out[1 + j // 2] |= (s & np.uint32(15)) << np.uint32(8 * u + 4 * (j % 2))
            out[3] |= (s >> np.uint32(4)) << np.uint32(8 * u + 2 * j)


def _pack_q2(sc, mn, d, dmin, out):
    for u in range(4):
        out[u] = np.uint32(0)
        for j in range(4):
            out[u] |= (np.uint32(sc[4 * u + j]) | np.uint32(mn[4 * u + j]) << np.uint32(4)) << np.uint32(8 * j)


def _pack_q6(sc, mn, d, dmin, out):
    for u in range(4):
        out[u] = np.uint32(0)
        for j in range(4):
            out[u] |= np.uint32(np.uint8(sc[4 * u + j])) << np.uint32(8 * j)


group = 0  # set by `expand`

# Reading: (words, unit) -> scale of the group's first 16 columns, of its last 16, min twice in bytes 0 and 1


def read_32(words, unit):
    """Of sub-blocks of 32: the same scale twice."""
    at = shifted(bits(unit, 0, 7), 2)
    high = bits(words[3], at, 15)
    scale = either(bits(words[1], at, 15), bits(shifted(high, 4), 0, 0x30))
    least = either(bits(words[2], at, 15), bits(shifted(high, 2), 0, 0x30))
    return scale, scale, multiply_add(least, 257, 0)


def read_q3(words, unit):
    at = shifted(bits(unit, 0, 3), 3)
    low = bits(words[2] if group else words[1], at, 255)
    high = bits(bits(words[3], at, 255), 4 * group, 15)
    first = either(bits(low, 0, 15), bits(shifted(high, 4), 0, 0x30))
    last = either(bits(low, 4, 15), bits(shifted(high, 2), 0, 0x30))
    return minus(first, 32), minus(last, 32), 0


def read_q2(words, unit):
    word = words[0]
    return (
        bits(word, 16 * group, 15),
        bits(word, 16 * group + 8, 15),
        bits(word, 16 * group + 4, 0x0F0F),
    )


def read_q6(words, unit):
    return signed_byte(words[0], 16 * group), signed_byte(words[0], 16 * group + 8), 0


FORMS = {
    "Q2_K": Form(_pack_q2, read_q2, holds_halves=False, whole=False),
    "Q3_K": Form(_pack_q3, read_q3, holds_halves=True, whole=True),
    "Q4_K": Form(_pack_32, read_32, holds_halves=True, whole=True),
    "Q5_K": Form(_pack_32, read_32, holds_halves=True, whole=True),
    "Q6_K": Form(_pack_q6, read_q6, holds_halves=False, whole=False),
}
