"""Types whose codes stand for the values of a table: where their fields lie on the device, how they are read.

A unit's codes are nibbles: those of columns 8v to 8v + 7 are word v, in order. Of types that number the points of a
codebook, numbered.py makes such words. A scale code is in one of three places:

    MXFP4   own      a byte of the unit, e: w = 2^(e - 128) * value
    NVFP4   own      two bytes, of columns 0..15 and 16..31: w = ue4m3 / 2 * value, times the row's factor
    IQ2_S, IQ2_XS, IQ1_S   own, or for IQ3_XXS, IQ2_XXS the word of signs: see numbered.py
    IQ4_XS, IQ3_S, IQ1_M   eight bytes of the superblock: bits 4u .. 4u + 3 of word 0 are bits 0..3 of the six of unit
                     u, bits 16 + 2u, 17 + 2u of word 1 the others. Of IQ4_XS they are sc + 32. Bits 0..15 are d

A permutation of bytes (prmt) looks up four codes at once, but in 8 bytes: the lower three bits of a nibble are the
place. A table of 16 takes two, and a third one chooses, by the highest bits of the nibbles, from their results. Six
values are 8 bytes: the levels of a codebook from place 0 on, and with the other sign from place 4 on.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from bridge.cuda.toolchain.intrinsics import bits, bits_float, kept, low_half, or_, prmt, ror, shl, sub

from bridge.blocks import BlockType

_HALVED = np.float32(128)  # 2^8, by which the exponent's bias differs from that of a half, over 2
OWN, SIGN_WORD, SHARED = range(3)  # where scale codes are


class FieldForm(NamedTuple):
    """Where the fields of a type are, see `numbered.form_of`."""

    own: int = 0  # bytes of a unit besides its codes, or numbers and signs
    shared: int = 2  # bytes of a block: d, or six bits of each unit and d
    scale_bits: int = 0  # of a sub-block's scale code
    scale_in: int = OWN
    scale_at: int = 0  # the bit where a unit's scale codes begin
    scale_lift: int = 0  # what makes them unsigned


# set by `expand`
WORD = LOW_0 = LOW_1 = HIGH_0 = HIGH_1 = OWN_AT = SHARED_AT = SCALE_IN = SCALE_AT = SCALE_BITS = SCALE_LIFT = 0
FEW = TWO = ODD = False
UNIT_OF_D = 1.0
float32 = np.float32


def look_up(held):
    """The entries of four codes, those of word WORD of a unit."""
    if FEW:
        return prmt(kept(LOW_0), LOW_1, bits(held[WORD // 2], 16 * (WORD % 2), -1))
    places = bits(held[WORD // 2], 0, 0x77777777)
    halves = or_(bits(held[WORD // 2], 1, 0x44444444), kept(0x32103210))
    if WORD % 2 == 1:
        places = ror(places, 16)
        halves = ror(halves, 16)
    return prmt(prmt(kept(LOW_0), LOW_1, places), prmt(kept(HIGH_0), HIGH_1, places), halves)


def few(block: BlockType) -> bool:
    """Whether 8 bytes are enough."""
    return len(block.values) <= 8


def entries(block: BlockType, lift: int = 0, up: int = 0, top: int = 0) -> dict[str, int]:
    """The constants of `look_up`: values + lift, moved up by so many bits, with bits `top`."""
    values: Sequence[int] = block.values
    if few(block):
        half = len(values) // 2
        values = (*values[:half], *[0] * (4 - half), *values[half:], *[0] * (12 - half))
    words = np.array([(value + lift << up | top) & 255 for value in values], np.uint8).view(np.int32).tolist()
    return dict(zip(("LOW_0", "LOW_1", "HIGH_0", "HIGH_1"), words, strict=True))


def read_mxfp4(held, lane):
    """The scale byte of a unit -> its scale, twice: of columns 0..15 and of 16..31. Lowest ones are subnormal."""
    scale = held[OWN_AT]
    step = bits_float(shl(sub(scale, 1), 23) if scale > 1 else shl(0x00200000, scale))
    return step, step


def read_nvfp4(held, lane):
    """The scale bytes of a unit -> the scales of columns 0..15 and of 16..31. The top bits are ignored."""
    scales = held[OWN_AT]
    return low_half(shl(bits(scales, 0, 127), 7)) * _HALVED, low_half(shl(bits(scales, 8, 127), 7)) * _HALVED


def read_scaled(held, lane):
    """d times scale of columns 0..15 and of 16..31, exact. `lane` modulo 8 is the unit's place in its superblock."""
    d = low_half(held[SHARED_AT + (SCALE_IN == SHARED)]) * float32(UNIT_OF_D)
    if SCALE_BITS == 0:
        return d, d
    if SCALE_IN == SHARED:
        unit = bits(lane, 0, 7)
        high = bits(held[SHARED_AT + 1], or_(shl(unit, 1), 16), 3)
        scales = or_(bits(held[SHARED_AT], shl(unit, 2), 15), shl(high, 4))
    else:
        scales = bits(held[OWN_AT if SCALE_IN == OWN else 4], SCALE_AT, -1)
    scale = bits(scales, 0, (1 << SCALE_BITS) - 1)
    if ODD:
        scale = or_(shl(scale, 1), 1)
    one = d * float32(sub(scale, SCALE_LIFT))
    if not TWO:
        return one, one
    return one, d * float32(or_(bits(scales, SCALE_BITS - 1, 2 * ((1 << SCALE_BITS) - 1)), 1))


READ: dict[str, Any] = {"MXFP4": read_mxfp4, "NVFP4": read_nvfp4}
