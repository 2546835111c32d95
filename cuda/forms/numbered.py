"""Types of which several codes share a number: how they lie on the device, and how numbers become codes.

IQ1, IQ2 and IQ3 number the points of a codebook, of 8 coordinates (IQ3: 4). A unit of 32 columns has

    numbers  bits 0..7 of its 4 (8) numbers, a byte each: one word (two)
    high     the other bits of the numbers, those of the first lowest
    signs    bit 4i + g: whether column 8g + i is negative. Where the signs of 8 columns are even, only those of i < 7
             are there, 28 bits. IQ1: whether the shift of column 8g is negative, bit g, or of all, bit 0
    scales   see tables.py

             words                            own bytes                     bits a weight
    IQ3_XXS  numbers 2; signs, scale          -                             3.0625
    IQ3_S    numbers 2; signs                 high 8                        3.5     (GGUF 3.4375)
    IQ2_XXS  numbers, (signs, scale)          -                             2.0625
    IQ2_XS   numbers, (signs, high 4)         scales                        2.3125
    IQ2_S    numbers, signs                   high 8, scales                2.5625
    IQ1_S    numbers                          high 12, scale, sign          1.5625
    IQ1_M    numbers                          high 12, signs                1.75

The codebook follows the last array: of each point the levels of its coordinates, a nibble each in four bytes, 1 to 8 KB
in all. So four (eight) weights are one look-up, and a word of nibbles is what tables.py looks up in turn; a sign is the
nibble's highest bit, or the third where six values are all. matvec_kernel.py copies the codebook to shared memory: 32
lanes look up in as many clocks as most of them meet in one of 32 banks, 3.5 for random points, and an address is one
number of 32 bits. The L1 cache, from which dequantize.py and mma.py look up (a block of theirs has too few weights for
a copy, or no room), needs one more instruction for an address, and its clocks grow with the lines of 128 bytes that a
look-up touches. Constant memory would serve one lane after the other.

TQ1_0 has five codes, of base 3, in a byte, as in GGUF: byte i of a unit's word is columns i, 4 + i .. 16 + i. Columns
20 + i, 24 + i, 28 + i are a number below 27, over 27 in 32nds and rounded up: bits 1..4 are nibble i of two own bytes,
bit 0 is bit i of the unit's nibble in the first of eight bytes of the superblock. d is in the second word. 1.75 bits
a weight (GGUF 1.6875).
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from bridge.cuda.forms.tables import OWN, SHARED, SIGN_WORD, FieldForm
from bridge.cuda.toolchain.intrinsics import bits, cached_4_further, mad, or_, prmt, shared_4, shl, xor
from bridge.cuda.toolchain.unroll import gathered, registers, unroll

from bridge.blocks import BlockType
from bridge.blocks.codebook.codebooks import digits, numbers_of
from bridge.blocks.read import WRITTEN
from bridge.system.kernels.jit import from_plain, inlined, specialize


class Book(NamedTuple):
    """A type's codebook, and where its fields are; signs of fewer than 28 bits are the highest of the own bytes."""

    block: BlockType

    @property
    def points(self) -> np.ndarray:
        assert self.block.points is not None, self.block
        return self.block.points

    @property
    def width(self) -> int:
        """Coordinates of a point."""
        return int(self.points.shape[1])

    @property
    def levels(self) -> int:
        return int(self.points.max()) + 1

    @property
    def number_words(self) -> int:
        return 8 // self.width

    @property
    def signs(self) -> int:
        """Bits of a unit."""
        return 32 // self.block.shifted if self.block.shifted else 28 if self.block.even_signs else 32

    @property
    def sign_words(self) -> int:
        return int(self.signs >= 28)

    @property
    def high_bits(self) -> int:
        """Bits of a number beyond eight."""
        return (len(self.points) - 1).bit_length() - 8

    @property
    def unit_high_bits(self) -> int:
        """The same of all numbers of a unit."""
        return self.high_bits * 32 // self.width

    @property
    def high_in_signs(self) -> bool:
        """Whether these are the upper four bits of the signs, else they are the own bytes' from bit 0 on."""
        return self.signs == 28 and self.unit_high_bits == 4

    @property
    def pieces(self) -> list[int]:
        """Words of a unit in each of its arrays."""
        return [2, 1] if self.width == 4 else [1 + self.sign_words]

    @property
    def table(self) -> np.ndarray:
        """uint32 [points]: a nibble for each coordinate."""
        shifts = 4 * np.arange(self.width, dtype=np.uint32)
        return np.bitwise_or.reduce(self.points.astype(np.uint32) << shifts, axis=1)


def book_of(block: BlockType) -> Book | None:
    """The codebook of a type that has one."""
    return None if block.points is None else Book(block)


def form_of(block: BlockType) -> FieldForm | None:
    """Where the fields of a type with a table of values or with numbered codes are; None: another type.

    Scale codes of a unit are the own bytes' from the numbers' bits on, if all together are whole bytes; or they are the
    upper four bits of the signs, or shared.
    """
    book = book_of(block)
    if block.numbered and book is None:
        return FieldForm(own=2, shared=8)
    if not block.values:
        return None
    scale_bits = (block.scale_hi - block.scale_lo).bit_length()
    unit_scales = scale_bits * max(1, 32 // block.sub)
    if block.scales:
        return FieldForm(unit_scales // 8, 0, scale_bits)
    high = book.unit_high_bits if book and not book.high_in_signs else 0
    shift_bits = book.signs if book and not book.sign_words else 0
    if book and book.signs == 28 and not high and unit_scales == 4:
        return FieldForm(0, 2, scale_bits, SIGN_WORD, 28)
    if (high + unit_scales + shift_bits) % 8 == 0:
        return FieldForm((high + unit_scales + shift_bits) // 8, 2, scale_bits, OWN, high)
    return FieldForm((high + shift_bits) // 8, 8, scale_bits, SHARED, scale_lift=-block.scale_lo)


# on the device; set per type by `expand`
POINTS = NUMBER_WORDS = SIGNS = HIGH_BITS = HIGH_IN = HIGH_AT = PAIR = SINGLE = TOP = TOPS = 0
TABLE_AT = LOADED = HELD = 0
IN_SHARED = False


def decode_points(weights, room_16, table, held, lane):
    """The words of a unit with codes, four words of nibbles, in place of the words of numbers.

    With IN_SHARED, `table` is the codebook in shared memory.
    """
    first = np.int64(room_16) * (TABLE_AT // 4)
    word = registers()
    if SIGNS >= 28:
        minus = held[NUMBER_WORDS]
    if SIGNS == 28:
        minus = bits(minus, 0, 0x0FFFFFFF)
        parity = xor(minus, shl(minus, 16))
        parity = xor(parity, shl(parity, 8))
        minus = or_(minus, bits(xor(parity, shl(parity, 4)), 0, -0x10000000))
    for k in unroll(POINTS):
        if HIGH_BITS == 0:
            number = prmt(held[k // 4], 0, 0x4440 + k % 4)
        else:
            if k % 4 == 0:  # the other bits of four numbers, to a byte each
                high = bits(held[HIGH_IN], HIGH_AT + HIGH_BITS * k, -1)
                high = or_(bits(high, 0, PAIR), bits(shl(high, 16 - 2 * HIGH_BITS), 0, PAIR << 16))
                high = or_(bits(high, 0, SINGLE), bits(shl(high, 8 - HIGH_BITS), 0, SINGLE << 8))
            number = prmt(held[k // 4], high, 0xCC40 + 0x1111 * (k % 4))
        code = shared_4(table, number) if IN_SHARED else cached_4_further(weights, first, number)
        if POINTS == 4:
            word[k] = code
        else:
            word[k // 2] = code if k % 2 == 0 else mad(code, 0x10000, word[k // 2])
    for g in unroll(4):
        if SIGNS < 28:
            negative = mad(bits(held[LOADED], 16 - SIGNS + (g if SIGNS > 1 else 0), 1), TOPS, 0)
        else:
            moved = shl(minus, TOP - g) if g <= TOP else bits(minus, g - TOP, -1)
            negative = bits(moved, 0, TOPS)
        word[g] = or_(word[g], negative)
    for i in unroll(HELD - NUMBER_WORDS):
        word[4 + i] = held[NUMBER_WORDS + i]
    return gathered(word, 4 + HELD - NUMBER_WORDS)


def decode_digits(weights, room_16, table, held, lane):
    """A unit of TQ1_0: eight words of codes, and the word that has d."""
    word = registers()
    numbers = held[0]
    for n in unroll(8):
        if n == 5:
            high = prmt(held[1], 0, 0x1100)
            high = or_(bits(high, 0, -0x0FFF1000), bits(shl(high, 4), 0, 0x00F000F0))
            low = bits(mad(bits(held[2], shl(bits(lane, 0, 7), 2), 15), 0x01020408, 0), 0, 0x08080808)
            numbers = or_(high, low)
        if n == 0 or n == 5:
            even = bits(numbers, 0, 0x00FF00FF)
            odd = bits(numbers, 8, 0x00FF00FF)
        else:
            even = bits(even, 0, 0x00FF00FF)
            odd = bits(odd, 0, 0x00FF00FF)
        even = mad(even, 3, 0)  # the digit is carried out of the byte
        odd = mad(odd, 3, 0)
        word[n] = prmt(even, odd, 0x7351)
    word[8] = held[3]
    return gathered(word, 9)


def constants(book: Book) -> dict[str, Any]:
    """Those of `decode_points`, but for places in memory."""
    top = 3 if book.width == 4 else 2
    return {
        "POINTS": 32 // book.width, "NUMBER_WORDS": book.number_words, "SIGNS": book.signs, "TOP": top,
        "TOPS": -0x77777778 if top == 3 else 0x44444444, "HIGH_BITS": book.high_bits,
        "PAIR": (1 << 2 * book.high_bits) - 1, "SINGLE": ((1 << book.high_bits) - 1) * 0x00010001,
        "HIGH_AT": 28 if book.high_in_signs else 0,
        "HIGH_IN": book.number_words if book.high_in_signs else book.number_words + book.sign_words,
    }  # fmt: skip


# on the host; set per type by `specialize`
levels = width = high_bits = number_words = stride = sign_bits = scale_at = 0
high_in_signs = scale_in_signs = False
numbers = np.zeros(0, np.int16)
digits_of: Any = None


def _put_points(q, first, scale, out, room, unit):
    """Write the words of codes q[first : first + 32]; returns what belongs to the own bytes, but for the scale."""
    signs = np.uint32(0)
    high = np.uint32(0)
    for g in range(4):
        for i in range(8):
            signs |= np.uint32(q[first + 8 * g + i] // levels) << np.uint32(4 * i + g)
    for w in range(number_words):
        word = np.uint32(0)
        for k in range(4 * w, 4 * w + 4):
            number = np.uint32(numbers[digits_of(q, first + width * k, width, levels)])
            word |= (number & np.uint32(255)) << np.uint32(8 * (k - 4 * w))
            high |= (number >> np.uint32(8)) << np.uint32(high_bits * k)
        out[unit * stride + w] = word
    if sign_bits < 28:
        return high | (signs & np.uint32((1 << sign_bits) - 1)) << np.uint32(16 - sign_bits)
    if sign_bits == 28:
        signs &= np.uint32(0x0FFFFFFF)
    if scale_in_signs:
        signs |= scale << np.uint32(scale_at)
    if high_in_signs:
        signs |= high << np.uint32(28)
        high = np.uint32(0)
    out[2 * room + unit if width == 4 else 2 * unit + 1] = signs
    return high


def _put_digits(q, first, scale, out, room, unit):
    """Write the word of codes q[first : first + 32]; returns the own bytes, and above them the unit's nibble."""
    word = np.uint32(0)
    rest = np.uint32(0)
    for i in range(4):
        number = 0
        for n in range(5):
            number = number * 3 + q[first + 4 * n + i]
        word |= np.uint32((number * 256 + 242) // 243) << np.uint32(8 * i)
        number = 0
        for n in range(5, 8):
            number = number * 3 + q[first + 4 * n + i]
        part = np.uint32((number * 32 + 26) // 27)
        rest |= part >> np.uint32(1) << np.uint32(4 * i) | (part & np.uint32(1)) << np.uint32(16 + i)
    out[unit] = word
    return rest


@cache
def putter(name: str) -> Any:
    """The compiled `put(q, first, scale, out, room, unit)` of a type."""
    book, form = book_of(WRITTEN[name]), form_of(WRITTEN[name])
    if book is None or form is None:
        return specialize(_put_digits, name, inlined)
    return specialize(
        _put_points, name, inlined, levels=book.levels, width=book.width, high_bits=book.high_bits,
        number_words=book.number_words, stride=book.pieces[0], sign_bits=book.signs, high_in_signs=book.high_in_signs,
        scale_in_signs=form.scale_in == SIGN_WORD, scale_at=form.scale_at, numbers=numbers_of(book.points),
        digits_of=from_plain(digits, inlined),
    )  # fmt: skip
