"""The arithmetic of a group of 32 columns, written once for all types; `expand` makes a type's functions of it.

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
    bits,
    differing,
    dp2a_low,
    dp4a,
    either,
    high_half,
    low_half,
    minus,
    multiply_add,
    shifted,
    signed_byte,
    stream_2,
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
PIECES = PLANES = CODE_WORDS = HELD = BLOCK_LOG = GROUP = 0
PIECE_WORDS = PIECE_AT = PIECE_FIRST = WIDTH = COUNT = FIRST = LOW = MASK = ()
SCALES_AT = SCALE_WORDS = HALVES_AT = HALF_BYTES = ZERO = ZEROS = ZERO_BYTES = WORD = 0
K = MINS = WIDE = WHOLE = HALVES_INSIDE = False
float32 = np.float32
read_scales: Any = None


def _load(weights, sixteenth, at):
    """All words of the unit with number `at`: codes, then scales, then halves; `sixteenth` is spaced / 16."""
    word = registers()
    for p in unroll(PIECES):
        if PIECE_WORDS[p] == 4:
            quad = stream_16(weights, PIECE_AT[p] * sixteenth + at)
            for i in unroll(4):
                word[PIECE_FIRST[p] + i] = quad[i]
        elif PIECE_WORDS[p] == 2:
            pair = stream_8(weights, 2 * PIECE_AT[p] * sixteenth + at)
            for i in unroll(2):
                word[PIECE_FIRST[p] + i] = pair[i]
        else:
            word[PIECE_FIRST[p]] = stream_4(weights, 4 * PIECE_AT[p] * sixteenth + at)
    if WHOLE:
        quad = stream_16(weights, SCALES_AT * sixteenth + bits(at, BLOCK_LOG, 0x7FFFFFFF))
        for i in unroll(4):
            word[CODE_WORDS + i] = quad[i]
    elif K:
        word[CODE_WORDS] = stream_4(weights, 4 * SCALES_AT * sixteenth + at)
    if HALF_BYTES == 4:
        word[CODE_WORDS + SCALE_WORDS] = stream_4(weights, HALVES_AT * sixteenth // 4 + bits(at, BLOCK_LOG, 0x7FFFFFFF))
    elif HALF_BYTES == 2:
        word[CODE_WORDS + SCALE_WORDS] = stream_2(weights, HALVES_AT * sixteenth // 2 + bits(at, BLOCK_LOG, 0x7FFFFFFF))
    return gathered(word, HELD)


def _unpack(held, unit):
    """Group GROUP of a unit: 8 words of codes, scale of the first and of the last 16, mins, d, dmin."""
    word = registers()
    for i in unroll(8):
        for p in unroll(PLANES):
            if WIDTH[p] == 8:
                part = held[FIRST[p] + 8 * GROUP + i]
            elif WIDTH[p] * ((8 * GROUP + i) // COUNT[p]) >= LOW[p]:
                part = bits(
                    held[FIRST[p] + (8 * GROUP + i) % COUNT[p]],
                    WIDTH[p] * ((8 * GROUP + i) // COUNT[p]) - LOW[p],
                    MASK[p],
                )
            else:
                part = bits(
                    shifted(
                        held[FIRST[p] + (8 * GROUP + i) % COUNT[p]],
                        LOW[p] - WIDTH[p] * ((8 * GROUP + i) // COUNT[p]),
                    ),
                    0,
                    MASK[p],
                )
            word[i] = part if p == 0 else either(word[i], part)
    first = 1
    last = 1
    least = 0x0101
    if K:
        first, last, least = read_scales(held[CODE_WORDS:], unit)
    halves = held[CODE_WORDS] if HALVES_INSIDE else held[CODE_WORDS + SCALE_WORDS]
    return gathered(word, 8), first, last, least, low_half(halves), high_half(halves)


def _integer(weights, low, high, step, sums):
    """The group times int8 values of x: `low` and `high` 16 each, in four words; `sums` of each 16 as two int16."""
    codes, first, last, least, d, dmin = weights
    if ZERO and WIDE:
        total = dp2a_low(sums, ZEROS, 0)
    elif ZERO:
        total = dp2a_low(sums, ZEROS % 256, 0)
    else:
        total = 0
    for i in unroll(4):
        total = dp4a(codes[i], low[i], total)
    if WIDE:
        for i in unroll(4):
            total = dp4a(codes[4 + i], high[i], total)
        if K:
            total = multiply_add(total, first, 0)
    else:
        other = dp2a_low(sums, ZEROS - ZEROS % 256, 0) if ZERO else 0
        for i in unroll(4):
            other = dp4a(codes[4 + i], high[i], other)
        total = multiply_add(other, last, multiply_add(total, first, 0))
    value = d * float32(total)
    if MINS:
        value += (-dmin if K else dmin) * float32(dp2a_low(sums, least, 0))
    return step * value


def _floats(weights):
    """The four weights of word WORD of a group."""
    codes, first, last, least, d, dmin = weights
    code = codes[WORD]
    if ZERO:
        code = differing(minus(either(code, SIGN_BITS), ZERO_BYTES), SIGN_BITS)
    scale = d * float32(first if WORD < 4 else last) if K else d
    value = registers()
    for j in unroll(4):
        value[j] = scale * float32(signed_byte(code, 8 * j))
        if MINS and K:
            value[j] -= dmin * float32(bits(least, 0 if WORD < 4 else 8, 255))
        elif MINS:
            value[j] += dmin
    return gathered(value, 4)


def _exact(weights, x, first_sum, last_sum):
    """The group times float32 x, eight words of four, whose first and last 16 sum up to what is given."""
    codes, first, last, least, d, dmin = weights
    total = float32(0)
    other = float32(0)
    for i in unroll(8):
        code = codes[i]
        if ZERO:  # four bytes at once: their top bits are free, so nothing is borrowed across bytes
            code = differing(minus(either(code, SIGN_BITS), ZERO_BYTES), SIGN_BITS)
        for j in unroll(4):
            if i < 4:
                total += float32(signed_byte(code, 8 * j)) * x[i][j]
            else:
                other += float32(signed_byte(code, 8 * j)) * x[i][j]
    value = d * (float32(first) * total + float32(last) * other if K else total + other)
    if MINS and K:
        value -= dmin * (float32(bits(least, 0, 255)) * first_sum + float32(bits(least, 8, 255)) * last_sum)
    elif MINS:
        value += dmin * (first_sum + last_sum)
    return value


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
        "WIDE": layout.span == 32,
        "WHOLE": bool(form and form.whole),
        "HALVES_INSIDE": layout.half_bytes == 0,
        "ZERO": zero,
        "ZEROS": (-zero & 255) * 257,
        "ZERO_BYTES": zero * 0x01010101,
    }


def device_function(function: Any) -> Any:
    """A function that kernels call; in the simulator, the function itself."""
    return function if SIMULATED else cuda.jit(device=True, forceinline=True)(function)


@dataclass(frozen=True)
class Functions:
    """A type's functions on the device; `unpack` has one for each group of 32 columns in a unit,
    `floats` one for each word of such a group."""

    layout: Layout
    load: Any
    unpack: tuple[Any, ...]
    integer: Any
    exact: Any
    floats: tuple[Any, ...]


@cache
def functions(name: str) -> Functions:
    """The functions of a type, made from those above."""
    layout = Layout(BLOCKS[name])
    constants = _constants(layout)
    unpack = []
    for group in range(layout.groups):
        scope = constants | {"GROUP": group}
        if layout.block.is_k:
            scope["read_scales"] = device_function(expand(scales.FORMS[name].read, f"{name}_{group}", group=group))
        unpack.append(device_function(expand(_unpack, f"{name}_{group}", **scope)))
    return Functions(
        layout,
        device_function(expand(_load, name, **constants)),
        tuple(unpack),
        device_function(expand(_integer, name, **constants)),
        device_function(expand(_exact, name, **constants)),
        tuple(device_function(expand(_floats, f"{name}_{i}", WORD=i, **constants)) for i in range(8)),
    )
