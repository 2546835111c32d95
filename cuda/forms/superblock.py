"""The arithmetic of a unit, 32 columns, written once for all types; `expand` makes a type's functions of it.

    affine  w = d*sc*q - dmin*mn         sum += dx * (d * sum_j sc_j (q_j . x_j)  -  dmin * sum_j mn_j s_j)
    scaled  w = d*sc*(q - zero)          sum += dx *  d * sum_j sc_j (q_j . x_j - zero * s_j)
    plain   w = d*(q - zero)             sum += dx *  d * (q . x - zero * s)
            w = d*q + dmin               sum += dx * (d * (q . x)  +  dmin * s)
    table   w = scale_j*values[q]        sum += dx * sum_j scale_j * (values[q_j] . x_j)

x_j are the int8 values of sub-block j (16 or 32 columns), s_j their sum, dx their step: see activations.py. Inside
the brackets everything is exact in int32; float32 rounds twice for every 32 columns.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from bridge.cuda.forms import numbered, scales, tables
from bridge.cuda.forms.layout import THIRD_BIT, DeviceLayout
from bridge.cuda.toolchain.intrinsics import (
    SIGN_BITS,
    ahead_1,
    ahead_2,
    ahead_4,
    ahead_8,
    ahead_16,
    bits,
    bits_float,
    cached_1,
    cached_2,
    cached_4,
    cached_8,
    cached_16,
    device_function,
    dp2a,
    dp4a,
    fma,
    high_half,
    low_half,
    mad,
    or_,
    prefetch_1,
    prefetch_2,
    prefetch_4,
    prefetch_8,
    prefetch_16,
    prmt,
    shl,
    signed_byte,
    stream_4,
    stream_8,
    stream_16,
    sub,
    xor,
)
from bridge.cuda.toolchain.unroll import expand, gathered, registers, unroll

from bridge.blocks.read import WRITTEN

# set per type by `expand`; tuples have one entry a piece or plane
PIECES = PLANES = CODE_WORDS = HELD = BLOCK_LOG = WORD = 0
PIECE_WORDS = PIECE_AT = PIECE_FIRST = WIDTH = COUNT = FIRST = LOW = MASK = THIRD = ()
SCALES_AT = SCALE_WORDS = HALVES_AT = HALF_BYTES = ZERO = ZEROS = ZERO_BYTES = UP = LEVELS = BASE = 0
LOADED = OWN_BYTES = 0
FACTORS_AT = 0
K = MINS = WIDE = WHOLE = HALVES_INSIDE = IN_PLACE = EIGHT = TABLED = TWO = EXACT = NUMBERED = False
float32 = np.float32
read_scales: Any = None
read_steps: Any = None
looked_up: Any = ()
put_high: Any = None
steps: Any = None
signed: Any = None


def _load(weights, room_16, unit):
    """All words of the unit with number `unit`: codes, then scales, then halves; `room_16` is layout.room / 16."""
    word = registers()
    for p in unroll(PIECES):
        if PIECE_WORDS[p] == 4:
            quad = stream_16(weights, mad(room_16, PIECE_AT[p], unit))
            for i in unroll(4):
                word[PIECE_FIRST[p] + i] = quad[i]
        elif PIECE_WORDS[p] == 2:
            pair = stream_8(weights, mad(room_16, 2 * PIECE_AT[p], unit))
            for i in unroll(2):
                word[PIECE_FIRST[p] + i] = pair[i]
        else:
            word[PIECE_FIRST[p]] = stream_4(weights, mad(room_16, 4 * PIECE_AT[p], unit))
    if WHOLE:
        quad = ahead_16(weights, mad(room_16, SCALES_AT, bits(unit, BLOCK_LOG, 0x7FFFFFFF)))
        for i in unroll(4):
            word[LOADED + i] = quad[i]
    elif OWN_BYTES == 2:
        word[LOADED] = ahead_2(weights, mad(room_16, 8 * SCALES_AT, unit))
    elif OWN_BYTES == 1:
        word[LOADED] = ahead_1(weights, mad(room_16, 16 * SCALES_AT, unit))
    if HALF_BYTES == 8:
        pair = ahead_8(weights, mad(room_16, HALVES_AT // 8, bits(unit, BLOCK_LOG, 0x7FFFFFFF)))
        for i in unroll(2):
            word[LOADED + SCALE_WORDS + i] = pair[i]
    elif HALF_BYTES == 4:
        word[LOADED + SCALE_WORDS] = ahead_4(weights, mad(room_16, HALVES_AT // 4, bits(unit, BLOCK_LOG, 0x7FFFFFFF)))
    elif HALF_BYTES == 2:
        word[LOADED + SCALE_WORDS] = ahead_2(weights, mad(room_16, HALVES_AT // 2, bits(unit, BLOCK_LOG, 0x7FFFFFFF)))
    return gathered(word, HELD)


def _unpack(held, lane):
    """A unit: 8 words of codes, scales and mins as scales.py reads them, d, dmin; of table types, `_steps`.

    Codes of 3 bits stay where they are in their bytes: words 0 and 1 at bit 0, 2 and 3 at 2, the others at 4.
    """
    word = registers()
    for i in unroll(8):
        if TABLED:
            word[i] = looked_up[i](held)
        elif IN_PLACE:
            if i < 6:
                word[i] = bits(held[i % 2], 0, 0x03030303 << (i // 2 * 2))
            else:
                word[i] = bits(held[i % 2], 2, 0x30303030)
            if i == 6:
                word[i] = or_(word[i], bits(held[2], 1, 0x40404040))
            elif i == 7:
                word[i] = or_(word[i], bits(shl(held[2], 6), 0, 0x40404040))
            else:
                word[i] = or_(word[i], bits(shl(held[2], i % 2), 0, 0x04040404 << (i // 2 * 2)))
        else:
            for p in unroll(PLANES):
                if WIDTH[p] == 8:
                    part = held[FIRST[p] + i]
                elif WIDTH[p] * (i // COUNT[p]) >= LOW[p]:
                    part = bits(held[FIRST[p] + i % COUNT[p]], WIDTH[p] * (i // COUNT[p]) - LOW[p], MASK[p])
                else:
                    part = shl(held[FIRST[p] + i % COUNT[p]], LOW[p] - WIDTH[p] * (i // COUNT[p]))
                    part = bits(part, 0, MASK[p])
                word[i] = part if p == 0 else or_(word[i], part)
    scale, least, d, dmin = steps(held, lane)
    if K and WIDE:  # both products are exact: 11 bits times 6
        d *= float32(scale)
        if MINS:
            dmin *= float32(least)
    return gathered(word, 8), scale, least, d, dmin


def _steps(held, lane):
    """Scales and mins of a unit as scales.py reads them, d, dmin; of table types, 1, 1 and what tables.py reads."""
    scale = 1
    least = 1
    if K:
        scale, least = read_scales(held[CODE_WORDS:], lane)
    if TABLED:
        d, dmin = read_steps(held, lane)
        return scale, least, d, dmin
    # nothing is between codes that have been decoded and d
    halves = held[CODE_WORDS] if HALVES_INSIDE or NUMBERED else held[CODE_WORDS + SCALE_WORDS]
    return scale, least, low_half(halves), high_half(halves)


def _integer(weights, low, high, step, sums):
    """The unit times int8 values of x: `low` and `high` 16 each, in four words; `sums` of each 16 as two int16.

    What is fused is named, so that the compiler has nothing to choose, and all columns have the sums of one.
    """
    codes, scale, least, d, dmin = weights
    if WIDE:
        total = dp2a(sums, ZEROS, 0) if ZERO else 0
        for i in unroll(4):
            total = dp4a(codes[i], low[i], total)
        for i in unroll(4):
            total = dp4a(codes[4 + i], high[i], total)
    else:
        total = 0
        other = 0
        for i in unroll(4):
            if IN_PLACE and i == 2:
                total = shl(total, 2)
            total = dp4a(codes[i], low[i], total)
            other = dp4a(codes[4 + i], high[i], other)
        if TWO:
            return step * fma(dmin, float32(other), d * float32(total))
        if IN_PLACE:
            total = shl(total, 2)
        total = mad(total, signed_byte(scale, 0), 0)
        total = mad(other, signed_byte(scale, 8), total)
        if ZERO:
            total = mad(dp2a(sums, scale, 0), -16 * ZERO if IN_PLACE else -ZERO, total)
        if IN_PLACE:
            d *= float32(0.0625)
    value = d * float32(total)
    if MINS:
        value = fma(-dmin if K else dmin, float32(dp2a(sums, 0x0101 if WIDE else least, 0)), value)
    return step * value


def _signed(code):
    """Word WORD of codes less the zero point, as int8: with the top bits set nothing is borrowed across bytes."""
    if IN_PLACE:
        code = bits(code, 4 if WORD > 3 else WORD // 2 * 2, 0x07070707)
    return xor(sub(or_(code, SIGN_BITS), ZERO_BYTES), SIGN_BITS) if ZERO else code


def _floats(weights):
    """The four weights of word WORD of a unit."""
    codes, scale, least, d, dmin = weights
    code = signed(codes[WORD])
    if K and not WIDE:
        d *= float32(signed_byte(scale, WORD // 4 * 8))
        if MINS:
            dmin *= float32(bits(least, WORD // 4 * 8, 255))
    if TWO and WORD > 3:
        d = dmin
    value = registers()
    for j in unroll(4):
        value[j] = d * float32(signed_byte(code, 8 * j))
        if MINS:
            value[j] += -dmin if K else dmin
    return gathered(value, 4)


def _line(held, lane):
    """The weights of a unit as factor * v + summand, see `_lifted`: two factors and summands, of 16 columns each."""
    scale, least, d, dmin = steps(held, lane)
    value = registers()
    for h in unroll(2):
        step = dmin if TWO and h == 1 else d
        if K:
            step *= float32(scale if WIDE else signed_byte(scale, 8 * h))
        value[h] = step * float32(LEVELS)
        if EXACT and MINS:
            value[2 + h] = float32(0)
        else:
            value[2 + h] = step * float32(-BASE)
        if MINS:
            if K:
                value[2 + h] = fma(-dmin, float32(least if WIDE else bits(least, 8 * h, 255)), value[2 + h])
            else:
                value[2 + h] += dmin
    return gathered(value, 4)


def _lifted(held, line):
    """The four weights of word WORD of a unit, for a product.

    A byte becomes a float32 without a conversion: codes of b bits go to the top of the mantissa of 1, which reads
    v = 1 + code / 2^b; those of 8 bits to the middle of that of 32768, which reads v = 32768 + code. The step times
    2^b and a summand that removes the rest make it the weight in one instruction. With mins the summand is rounded
    once more than in `_floats`; with EXACT it is the mins alone, and 1 is subtracted from v.
    """
    if TABLED:
        word = put_high(held)
    elif EIGHT:
        word = xor(held[WORD], SIGN_BITS)
    else:
        word = SIGN_BITS
        for p in unroll(PLANES):
            if IN_PLACE and p == 1:
                if THIRD[WORD] > 6:
                    part = bits(held[FIRST[p]], THIRD[WORD] - 6, 0x40404040)
                else:
                    part = bits(shl(held[FIRST[p]], 6 - THIRD[WORD]), 0, 0x40404040)
            elif WIDTH[p] * (WORD // COUNT[p]) >= LOW[p] + UP:
                part = bits(
                    held[FIRST[p] + WORD % COUNT[p]], WIDTH[p] * (WORD // COUNT[p]) - LOW[p] - UP, MASK[p] << UP
                )
            else:
                part = shl(held[FIRST[p] + WORD % COUNT[p]], LOW[p] + UP - WIDTH[p] * (WORD // COUNT[p]))
                part = bits(part, 0, MASK[p] << UP)
            word = or_(word, part)
    value = registers()
    for j in unroll(4):
        if EIGHT:
            v = bits_float(prmt(word, 0x47000000, 0x7404 + 16 * j))
        else:
            v = bits_float(prmt(word, 0x3F000000, 0x7044 + 256 * j))
            if EXACT and MINS:
                v -= float32(1)
        if EIGHT and TABLED:  # the summand would be rounded
            value[j] = (v - float32(BASE)) * line[WORD // 4]
        else:
            value[j] = fma(v, line[WORD // 4], line[2 + WORD // 4])
    return gathered(value, 4)


def _factor(weights, room_16, row):
    """The factor of a row."""
    return bits_float(stream_4(weights, mad(room_16, FACTORS_AT // 4, row)))


def _constants(layout: DeviceLayout) -> dict[str, Any]:
    block = layout.block
    first, low, table = 0, 0, []
    planes = [(8, 8)] if block.numbered and not block.values else layout.planes  # of TQ1_0, once decoded
    for width, count in planes:
        mask = 0x01010101 * ((1 << min(width, layout.code_bits)) - 1) << low
        table.append((width, count, first, low, mask))
        first += count
        low += width
    width, count, first_of, low_of, mask = zip(*table, strict=True)
    eight = block.value_bits == 8
    lift = 0 if eight else block.lift
    zero = 0 if block.values else lift  # eight bits and values are int8
    bits = (max(block.values) + lift).bit_length() if block.values else layout.code_bits
    room = 1 << 20
    scale_words = 4 if layout.whole else layout.own > 0
    return {
        "PIECES": len(layout.pieces), "PIECE_WORDS": tuple(layout.pieces),
        "PIECE_AT": tuple(start // 4 * 4 for start in layout.pieces_at),
        "PIECE_FIRST": tuple(start // 4 for start in layout.pieces_at), "PLANES": len(table), "WIDTH": width,
        "COUNT": count, "FIRST": first_of, "LOW": low_of, "MASK": mask, "LOADED": sum(layout.pieces),
        "CODE_WORDS": first, "SCALE_WORDS": scale_words,
        "HELD": sum(layout.pieces) + scale_words + -(-layout.half_bytes // 4), "OWN_BYTES": layout.own,
        "BLOCK_LOG": layout.units_per_block.bit_length() - 1, "SCALES_AT": layout.scales_at,
        "HALVES_AT": layout.halves_at(room) * 16 // room, "HALF_BYTES": layout.half_bytes,
        "FACTORS_AT": layout.factors_at(room) * 16 // room, "K": block.is_k and not block.values,
        "MINS": block.has_min, "WIDE": block.sum_span == 32, "TABLED": bool(block.values),
        "TWO": bool(block.values) and block.sum_span == 16, "WHOLE": layout.whole,
        "HALVES_INSIDE": layout.half_bytes == 0, "NUMBERED": block.numbered, "ZERO": zero,
        "ZEROS": (-zero & 255) * 257, "IN_PLACE": layout.code_bits == 3 and not block.numbered,
        "ZERO_BYTES": zero * 0x01010101, "EIGHT": eight, "UP": 7 - bits, "LEVELS": 1 if eight else 1 << bits,
        "BASE": 0x8000 + 0x80 if eight else (1 << bits) + lift, "THIRD": tuple(map(int, THIRD_BIT)),
    }  # fmt: skip


@dataclass(frozen=True)
class BlockFunctions:
    """A type's functions on the device; `signed`, `floats` and `lifted` have one for each word of a unit.

    What `load` has loaded of a type with numbered codes goes through `decode` (numbered.py) before the others take it.

    `load_rows` is `load` for a warp whose lanes take few units of many rows: the L2 cache fetches 128 bytes around the
    codes, and what is less than 8 bytes of a unit stays in L1. The weights of `line_exact` and `lifted_exact` are those
    of `floats`, to the bit except for the sign of 0. `prefetch` asks the L2 cache for what `load` takes.
    """

    layout: DeviceLayout
    load: Any
    unpack: Any
    integer: Any
    signed: tuple[Any, ...]
    floats: tuple[Any, ...]
    line: Any
    lifted: tuple[Any, ...]
    factor: Any
    load_rows: Any
    line_exact: Any
    lifted_exact: tuple[Any, ...]
    prefetch: Any
    decode: Any  # None if codes are not numbered
    decode_shared: Any  # the same with the codebook in shared memory
    table_at: int  # where the codebook begins, in four bytes for each 16 of the `room` units


@cache
def functions(name: str) -> BlockFunctions:
    """The functions of a type, made from those above."""
    layout = DeviceLayout(WRITTEN[name])
    block, constants = layout.block, _constants(layout)

    def make(function: Any, suffix: str = "", **scope: Any) -> Any:
        return device_function(expand(function, f"{name}{suffix}", **constants | scope))

    if constants["K"]:
        constants["read_scales"] = make(scales.FORMS[name].read)
    put_high: Any = (None,) * 8
    if block.values and (form := layout.fields):
        own_at = 4 + (layout.book.sign_words if layout.book else 0)
        constants["read_steps"] = make(
            tables.READ.get(name, tables.read_scaled), OWN_AT=own_at, SHARED_AT=own_at + (form.own > 0),
            SCALE_IN=form.scale_in, SCALE_AT=form.scale_at, SCALE_BITS=form.scale_bits, SCALE_LIFT=form.scale_lift,
            ODD=block.odd_scales, UNIT_OF_D=block.unit,
        )  # fmt: skip
        high = {"lift": block.lift} if constants["EIGHT"] else {"lift": block.lift, "up": constants["UP"], "top": 128}
        constants["looked_up"], put_high = (
            tuple(make(tables.look_up, f"_{what}_{i}", WORD=i, FEW=tables.few(block), **tables.entries(block, **how))
                  for i in range(8))
            for what, how in (("codes", {}), ("high", high))
        )  # fmt: skip
    constants["steps"] = make(_steps)
    decode, decode_shared = None, None
    if layout.book:
        more = numbered.constants(layout.book) | {"TABLE_AT": constants["FACTORS_AT"]}
        decode = make(numbered.decode_points, **more)
        decode_shared = make(numbered.decode_points, "_shared", IN_SHARED=True, **more)
    elif block.numbered:
        decode = decode_shared = make(numbered.decode_digits)
    signed = tuple(make(_signed, f"_{i}", WORD=i) for i in range(8))
    words = [(f"_{i}", {"WORD": i, "signed": signed[i]}) for i in range(8)]
    return BlockFunctions(
        layout,
        make(_load),
        make(_unpack),
        make(_integer),
        signed,
        tuple(make(_floats, suffix, **scope) for suffix, scope in words),
        make(_line),
        tuple(make(_lifted, f"_{i}", WORD=i, put_high=put_high[i]) for i in range(8)),
        make(_factor),
        make(_load, "_rows", stream_16=ahead_16, stream_8=ahead_8, stream_4=cached_4, ahead_16=cached_16,
             ahead_8=cached_8, ahead_4=cached_4, ahead_2=cached_2, ahead_1=cached_1),
        make(_line, "_exact", EXACT=True),
        tuple(make(_lifted, f"_{i}_exact", WORD=i, put_high=put_high[i], EXACT=True) for i in range(8)),
        make(_load, "_prefetch", stream_16=prefetch_16, stream_8=prefetch_8, stream_4=prefetch_4, ahead_16=prefetch_16,
             ahead_8=prefetch_8, ahead_4=prefetch_4, ahead_2=prefetch_2, ahead_1=prefetch_1),
        decode,
        decode_shared,
        constants["FACTORS_AT"] // 4,
    )  # fmt: skip
