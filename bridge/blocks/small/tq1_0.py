"""TQ1_0: w = d * (q - 1), q 0..2; 256 weights in 54 bytes, 1.6875 bits per weight.

bytes  0..31  qs[32]   byte l: q[32n + l], n 0..4, that is q[0..159]
      32..47  qs[16]   byte l: q[160 + 16n + l], n 0..4
      48..51  qh[4]    byte l: q[240 + 4n + l], n 0..3
      52..53  d, f16

Five codes are the digits of a number of base 3, the first the highest (the last byte's fifth is 0). The byte is that
number over 243, in 256ths and rounded up: a code is what is carried out when the byte is multiplied by 3 once more.
"""

from bridge.blocks.base import BlockType, put_word


def pack_digits(q, first, step, count, out, start):
    """Write bytes out[place : place + step], each of `count` codes that are `step` apart."""
    for i in range(step):
        number = 0
        for n in range(5):
            number = number * 3 + (q[first + step * n + i] if n < count else 0)
        out[start + i] = (number * 256 + 242) // 243


def unpack_digits(raw, start, q, first, step, count):
    """The inverse of `pack_digits`."""
    for i in range(step):
        rest = raw[start + i] * 1
        for n in range(count):
            q[first + step * n + i] = (rest * 3) >> 8
            rest = (rest * 3) & 255


def pack(q, sc, mn, d, dmin, out):
    pack_digits(q, 0, 32, 5, out, 0)
    pack_digits(q, 160, 16, 5, out, 32)
    pack_digits(q, 240, 4, 4, out, 48)
    put_word(out, 52, d)


def unpack(raw, q, sc, mn):
    unpack_digits(raw, 0, q, 0, 32, 5)
    unpack_digits(raw, 32, q, 160, 16, 5)
    unpack_digits(raw, 48, q, 240, 4, 4)


TQ1_0 = BlockType(
    name="TQ1_0", size=256, sub=256, nbytes=54, levels=3, zero=1, d_at=52, pack=pack, unpack=unpack,
    ternary=True,
)  # fmt: skip
