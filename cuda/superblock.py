"""The arithmetic of a unit, 32 columns, written once for all types; `expand` makes a type's functions of it.

    affine  w = d*sc*q - dmin*mn         sum += dx * (d * sum_j sc_j (q_j . x_j)  -  dmin * sum_j mn_j s_j)
    scaled  w = d*sc*(q - zero)          sum += dx *  d * sum_j sc_j (q_j . x_j - zero * s_j)
    plain   w = d*(q - zero)             sum += dx *  d * (q . x - zero * s)
            w = d*q + dmin               sum += dx * (d * (q . x)  +  dmin * s)

x_j are the int8 values of sub-block j (16 or 32 columns), s_j their sum, dx their step: see activations.py. Inside
the brackets everything is exact in int32; float32 rounds twice for every 32 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from bridge.cuda import scales
from bridge.cuda.intrinsics import (
    SIMULATED,
    ahead_2,
    ahead_4,
    ahead_16,
    bits,
    differing,
    dp2a,
    dp4a,
    either,
    high_half,
    low_half,
    minus,
    multiply_add,
    shifted,
    signed_byte,
    stream_4,
    stream_8,
    stream_16,
)
from bridge.cuda.layout import Layout
from bridge.cuda.unroll import expand, gathered, registers, unroll
from numba import cuda

from bridge.blocks import BLOCKS

SIGN_BITS = -0x7F7F7F80  # 0x80808080 as int32

# set per type by `expand`; tuples have one entry a piece or plane
PIECES = PLANES = CODE_WORDS = HELD = BLOCK_LOG = WORD = 0
PIECE_WORDS = PIECE_AT = PIECE_FIRST = WIDTH = COUNT = FIRST = LOW = MASK = ()
SCALES_AT = SCALE_WORDS = HALVES_AT = HALF_BYTES = ZERO = ZEROS = ZERO_BYTES = 0
K = MINS = WIDE = WHOLE = HALVES_INSIDE = IN_PLACE = False
float32 = np.float32
read_scales: Any = None
signed: Any = None


def _load(weights, sixteenth, at):
    """All words of the unit with number `at`: codes, then scales, then halves; `sixteenth` is spaced / 16."""
    word = registers()
    for p in unroll(PIECES):
        if PIECE_WORDS[p] == 4:
            quad = stream_16(weights, multiply_add(sixteenth, PIECE_AT[p], at))
            for i in unroll(4):
                word[PIECE_FIRST[p] + i] = quad[i]
        elif PIECE_WORDS[p] == 2:
            pair = stream_8(weights, multiply_add(sixteenth, 2 * PIECE_AT[p], at))
            for i in unroll(2):
                word[PIECE_FIRST[p] + i] = pair[i]
        else:
            word[PIECE_FIRST[p]] = stream_4(weights, multiply_add(sixteenth, 4 * PIECE_AT[p], at))
    if WHOLE:
        quad = ahead_16(weights, multiply_add(sixteenth, SCALES_AT, bits(at, BLOCK_LOG, 0x7FFFFFFF)))
        for i in unroll(4):
            word[CODE_WORDS + i] = quad[i]
    elif K:
        word[CODE_WORDS] = ahead_2(weights, multiply_add(sixteenth, 8 * SCALES_AT, at))
    if HALF_BYTES == 4:
        word[CODE_WORDS + SCALE_WORDS] = ahead_4(
            weights, multiply_add(sixteenth, HALVES_AT // 4, bits(at, BLOCK_LOG, 0x7FFFFFFF))
        )
    elif HALF_BYTES == 2:
        word[CODE_WORDS + SCALE_WORDS] = ahead_2(
            weights, multiply_add(sixteenth, HALVES_AT // 2, bits(at, BLOCK_LOG, 0x7FFFFFFF))
        )
    return gathered(word, HELD)


def _unpack(held, lane):
    """A unit: 8 words of codes, scales and mins as scales.py reads them, d, dmin.

    Codes of 2 and 3 bits stay where they are in their bytes: words 0 and 1 at bit 0, 2 and 3 at 2, the others at 4.
    """
    word = registers()
    for i in unroll(8):
        if IN_PLACE:
            if i < 6:
                word[i] = bits(held[i % 2], 0, 0x03030303 << (i // 2 * 2))
            else:
                word[i] = bits(held[i % 2], 2, 0x30303030)
            if PLANES == 2:
                if i == 6:
                    word[i] = either(word[i], bits(held[2], 1, 0x40404040))
                elif i == 7:
                    word[i] = either(word[i], bits(shifted(held[2], 6), 0, 0x40404040))
                else:
                    word[i] = either(word[i], bits(shifted(held[2], i % 2), 0, 0x04040404 << (i // 2 * 2)))
        else:
            for p in unroll(PLANES):
                if WIDTH[p] == 8:
                    part = held[FIRST[p] + i]
                elif WIDTH[p] * (i // COUNT[p]) >= LOW[p]:
                    part = bits(held[FIRST[p] + i % COUNT[p]], WIDTH[p] * (i // COUNT[p]) - LOW[p], MASK[p])
                else:
                    part = shifted(held[FIRST[p] + i % COUNT[p]], LOW[p] - WIDTH[p] * (i // COUNT[p]))
                    part = bits(part, 0, MASK[p])
                word[i] = part if p == 0 else either(word[i], part)
    scale = 1
    least = 0x0101
    if K:
        scale, least = read_scales(held[CODE_WORDS:], lane)
    halves = held[CODE_WORDS] if HALVES_INSIDE else held[CODE_WORDS + SCALE_WORDS]
    return gathered(word, 8), scale, least, low_half(halves), high_half(halves)


def _integer(weights, low, high, step, sums):
    """The unit times int8 values of x: `low` and `high` 16 each, in four words; `sums` of each 16 as two int16."""
    codes, scale, least, d, dmin = weights
    if WIDE:
        total = dp2a(sums, ZEROS, 0) if ZERO else 0
        for i in unroll(4):
            total = dp4a(codes[i], low[i], total)
        for i in unroll(4):
            total = dp4a(codes[4 + i], high[i], total)
        if K:
            total = multiply_add(total, scale, 0)
    else:
        total = 0
        other = 0
        for i in unroll(4):
            if IN_PLACE and i == 2:
                total = shifted(total, 2)
            total = dp4a(codes[i], low[i], total)
            other = dp4a(codes[4 + i], high[i], other)
        if IN_PLACE:
            total = shifted(total, 2)
        total = multiply_add(total, signed_byte(scale, 0), 0)
        total = multiply_add(other, signed_byte(scale, 8), total)
        if ZERO:
            total = multiply_add(dp2a(sums, scale, 0), -16 * ZERO if IN_PLACE else -ZERO, total)
        if IN_PLACE:
            d *= float32(0.0625)
    value = d * float32(total)
    if MINS:
        value += (-dmin if K else dmin) * float32(dp2a(sums, least, 0))
    return step * value


def _signed(code):
    """Word WORD of codes less the zero point, as int8: with the top bits set nothing is borrowed across bytes."""
    if IN_PLACE:
        code = bits(code, 4 if WORD > 3 else WORD // 2 * 2, 0x07070707)
    return differing(minus(either(code, SIGN_BITS), ZERO_BYTES), SIGN_BITS) if ZERO else code


def _floats(weights):
    """The four weights of word WORD of a unit."""
    codes, scale, least, d, dmin = weights
    code = signed(codes[WORD])
    if K:
        d *= float32(scale if WIDE else signed_byte(scale, WORD // 4 * 8))
    if K and MINS:
        dmin *= -float32(bits(least, 0 if WIDE else WORD // 4 * 8, 255))
    value = registers()
    for j in unroll(4):
        value[j] = d * float32(signed_byte(code, 8 * j))
        if MINS:
            value[j] += dmin
    return gathered(value, 4)


def _constants(layout: Layout) -> dict[str, Any]:
    block = layout.block
    first, low, table = 0, 0, []
    for width, count in layout.planes:
        mask = 0x01010101 * ((1 << width) - 1) << low
        table.append((width, count, first, low, mask))
        first += count
        low += width
    width, count, first_of, low_of, mask = zip(*table, strict=True)
    form = scales.FORMS[block.name] if block.is_k else None
    scale_words = (4 if form.whole else 1) if form else 0
    zero = 0 if layout.code_bits == 8 else block.zero  # eight bits are kept as int8
    spaced = 1 << 20
    return {
        "PIECES": len(layout.pieces),
        "PIECE_WORDS": tuple(layout.pieces),
        "PIECE_AT": tuple(at // 4 * 4 for at in layout.pieces_at),
        "PIECE_FIRST": tuple(at // 4 for at in layout.pieces_at),
        "PLANES": len(table),
        "WIDTH": width,
        "COUNT": count,
        "FIRST": first_of,
        "LOW": low_of,
        "MASK": mask,
        "CODE_WORDS": first,
        "SCALE_WORDS": scale_words,
        "HELD": first + scale_words + (layout.half_bytes > 0),
        "BLOCK_LOG": layout.units_per_block.bit_length() - 1,
        "SCALES_AT": layout.scales_at,
        "HALVES_AT": layout.halves_at(spaced) * 16 // spaced,
        "HALF_BYTES": layout.half_bytes,
        "K": block.is_k,
        "MINS": block.has_min,
        "WIDE": block.sub == 32,
        "WHOLE": bool(form and form.whole),
        "HALVES_INSIDE": layout.half_bytes == 0,
        "ZERO": zero,
        "ZEROS": (-zero & 255) * 257,
        "IN_PLACE": layout.code_bits < 4,
        "ZERO_BYTES": zero * 0x01010101,
    }


def device_function(function: Any) -> Any:
    """A function that kernels call; in the simulator, the function itself."""
    return function if SIMULATED else cuda.jit(device=True, forceinline=True)(function)


@dataclass(frozen=True)
class Functions:
    """A type's functions on the device; `floats` has one for each word of a unit."""

    layout: Layout
    load: Any
    unpack: Any
    integer: Any
    floats: tuple[Any, ...]


@cache
def functions(name: str) -> Functions:
    """The functions of a type, made from those above."""
    layout = Layout(BLOCKS[name])
    constants = _constants(layout)

    def make(function: Any, suffix: str = "", **scope: Any) -> Any:
        return device_function(expand(function, f"{name}{suffix}", **constants | scope))

    if layout.block.is_k:
        constants["read_scales"] = make(scales.FORMS[name].read)
    words = [(f"_{i}", {"WORD": i, "signed": make(_signed, f"_{i}", WORD=i)}) for i in range(8)]
    return Functions(
        layout,
        make(_load),
        make(_unpack),
        make(_integer),
        tuple(make(_floats, suffix, **scope) for suffix, scope in words),
    )
