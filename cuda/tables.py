"""Types whose codes stand for the values of a table, MXFP4 and NVFP4: how they lie on the device, how they are read.

    codes    word v of a unit: the nibbles of columns 8v to 8v + 7 in order, so that a half of it selects four bytes
    scales   MXFP4   a byte, e: w = 2^(e - 128) * value
             NVFP4   two bytes, those of columns 0..15 and 16..31: w = ue4m3 / 2 * value
    factors  NVFP4   float32 a row: the value of `<name>.scale`, or 1

A permutation of bytes (prmt) looks up four codes at once, but in 8 bytes: the lower three bits of a nibble are the
place, and the highest bit asks for eight copies of that byte's sign. So if all of a table's bytes have their highest
bit set, codes 8..15 find 255 in the table of 0..7, and codes 0..7 find it in that of 8..15 if their highest bits are
flipped; the two results combined with `and` are those of a table of 16.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from bridge.cuda.intrinsics import bits, bits_float, low_half, prmt, shl, sub, xor

from bridge.blocks import BlockType

_OTHERS = -0x77777778  # 0x88888888 as int32: the highest bits of nibbles
_HALVED = np.float32(128)  # 2^8, by which the exponent's bias differs from that of a half, over 2

# set by `expand`
WORD = LOW_0 = LOW_1 = HIGH_0 = HIGH_1 = 0


def look_up(held):
    """The entries of four codes, those of word WORD of a unit."""
    chosen = bits(held[WORD // 2], 16 * (WORD % 2), -1)
    other = bits(xor(held[WORD // 2], _OTHERS), 16 * (WORD % 2), -1)
    return bits(prmt(LOW_0, LOW_1, chosen), 0, prmt(HIGH_0, HIGH_1, other))


def entries(table: Sequence[int]) -> dict[str, int]:
    """The constants of `look_up` for 16 bytes from 128 to 255."""
    assert len(table) == 16
    assert all(128 <= entry <= 255 for entry in table)
    names = "LOW_0", "LOW_1", "HIGH_0", "HIGH_1"
    return dict(zip(names, np.array(table, np.uint8).view(np.int32).tolist(), strict=True))


def lifted(block: BlockType) -> tuple[int, ...]:
    """What codes stand for, made positive, with the highest bit set."""
    return tuple(128 + value + block.lift for value in block.values)


def read_mxfp4(scale):
    """The scale byte of a unit -> its scale, twice: of columns 0..15 and of 16..31. Lowest ones are subnormal."""
    step = bits_float(shl(sub(scale, 1), 23) if scale > 1 else shl(0x00200000, scale))
    return step, step


def read_nvfp4(scales):
    """The scale bytes of a unit -> the scales of columns 0..15 and of 16..31. The top bits are ignored."""
    return low_half(shl(bits(scales, 0, 127), 7)) * _HALVED, low_half(shl(bits(scales, 8, 127), 7)) * _HALVED


READ: dict[str, Any] = {"MXFP4": read_mxfp4, "NVFP4": read_nvfp4}
