"""What attention_mma.py does otherwise for keys and values in q8_0: codes with a step for 32 columns of a position.

    split         as there; 32 columns of a head lie as `score` reads them
    score         a product of 32 columns at a time, times the steps of its positions
    put_weights   float32
    add           weights times the steps of values, then halves and what these leave out; times codes

Codes become halves without rounding: a byte plus 128 is put into the mantissa of 1024, from which 1152 is taken away.
The product of a weight and a step is split as weights are in attention_mma.py, so sums are as exact as there.

With g = lane / 4 and t = lane % 4, a lane takes words t and t + 4 of 32 codes of the key at position g, which are
columns 4t to 4t + 3 and 16 more, and 16 bytes each of the queries. Of values it takes columns 2g and 2g + 1 at
positions t, t + 4, t + 8 and t + 12; their weights lie together.

In shared memory

    queries  as there
    weights  f32 [8 * EIGHTS, rows + 16]          of heads that there are not: zeros
"""

from functools import cache
from typing import Any

import numpy as np
from bridge.cuda.attention.attention_shape import AttentionShape
from bridge.cuda.attention.kv_tile import functions as kv_functions
from bridge.cuda.toolchain.intrinsics import (
    SIGN_BITS,
    bits,
    bits_float,
    device_function,
    float_bits,
    high_half,
    kept,
    low_half,
    mad,
    mma_f16,
    pack_f16,
    prmt,
    put_4,
    shared_4,
    shared_4_further,
    shared_16,
    shl,
    sub_f16,
    thread_x,
    warp_meets,
    xor,
)
from bridge.cuda.toolchain.unroll import expand, gathered, registers, unroll

# set by `functions`; see attention_shape.py
HEADS = HEAD_DIM = TILE = BLOCK = WARPS = 0
PITCH = QUERY_PITCH = SUBSETS = SUMS = 0
BLOCKS = SCORE_ROUNDS = SPLIT_ROUNDS = 0  # of 32 columns; of 8 positions of a warp; of pairs of columns
EIGHTS = GROUPS = ROUNDS = STEPS = WEIGHTS = 0  # see attention_mma.py
STEP_WORDS = STEPS_AT = 0  # of a position; where they begin in a tile
step_of: Any = None
halves: Any = None
float32 = np.float32
int32: Any = np.int32
_IN_1024 = 0x64646464  # upper bytes of halves from 1024 on, whose lower byte counts ones
_ZERO = 0x64806480  # two halves: 1024 + 128


def _halves(codes, in_1024, lower, upper):
    """Two of four codes plus 128, chosen by their places, as halves; `in_1024` is _IN_1024."""
    return sub_f16(prmt(codes, in_1024, 0x4040 + lower + 256 * upper), _ZERO)


def _split(queries):
    for r in range(SPLIT_ROUNDS):  # all lanes of a warp, which has whole blocks of 32 columns
        i = int32(r * BLOCK + bits(thread_x(), 0, BLOCK - 1))
        pair = int32(i % (HEAD_DIM // 2))  # of 16 in 32 columns: half, t, place
        row = int32(i // (HEAD_DIM // 2) * QUERY_PITCH)
        one = float32(0)
        other = float32(0)
        if i < HEADS * HEAD_DIM // 2:
            one = bits_float(shared_4(queries, mad(pair, 2, row)))
            other = bits_float(shared_4(queries, mad(pair, 2, int32(row + 1))))
        near = pack_f16(one, other)
        warp_meets()
        if i < HEADS * HEAD_DIM // 2:
            index = mad(bits(pair, 4, 0xFF), 16, mad(bits(pair, 1, 3), 4, mad(bits(pair, 3, 1), 2, bits(pair, 0, 1))))
            index = mad(index, 2, row)
            put_4(queries, index, near)
            put_4(queries, int32(index + 1), pack_f16(one - low_half(near), other - high_half(near)))


def _score(tile, queries, scores, count):
    """Scores of a tile's positions."""
    lane = bits(thread_x(), 0, 31)
    warp = bits(thread_x(), 5, BLOCK // 32 - 1)
    t = bits(lane, 0, 3)
    g = bits(lane, 2, 7)
    in_1024 = kept(_IN_1024)
    query_at = registers()
    one = registers()
    other = registers()
    for r in unroll(SCORE_ROUNDS):
        first = min(int32((warp + r * WARPS) * 8), int32(TILE - 8))
        key_at = mad(int32(first + g), 4 * PITCH, t)
        position = mad(t, 2, first)
        for h in unroll(EIGHTS):
            query_at[h] = mad(min(int32(8 * h + g), int32(HEADS - 1)), QUERY_PITCH // 4, int32(2 * t))
            one[h] = float32(0)
            other[h] = float32(0)
        for b in unroll(BLOCKS):
            lower = xor(shared_4(tile, int32(key_at + 8 * b)), SIGN_BITS)
            upper = xor(shared_4(tile, int32(key_at + (8 * b + 4))), SIGN_BITS)
            key = halves(lower, in_1024, 0, 1), halves(lower, in_1024, 2, 3)
            more = halves(upper, in_1024, 0, 1), halves(upper, in_1024, 2, 3)
            for h in unroll(EIGHTS):
                even = shared_16(queries, int32(query_at[h] + 8 * b))
                odd = shared_16(queries, int32(query_at[h] + (8 * b + 1)))
                c = (float32(0), float32(0), float32(0), float32(0))
                c = mma_f16(c, even[0], even[1], even[2], even[3], key[0], key[1])
                c = mma_f16(c, odd[0], odd[1], odd[2], odd[3], more[0], more[1])
                one[h] += (c[0] + c[2]) * step_of(tile, position, b)
                other[h] += (c[1] + c[3]) * step_of(tile, int32(position + 1), b)
        for h in unroll(EIGHTS):
            if 8 * h + g < HEADS:
                index = mad(int32(8 * h + g), TILE, position)
                put_4(scores, index, float_bits(one[h]))
                put_4(scores, int32(index + 1), float_bits(other[h]))


def _put_weights(weights, head, lane, one, other):
    """Store the weights of positions 2 * lane and the next: of 16, those of a lane of `add` lie together."""
    index = mad(bits(lane, 3, 3), 16, mad(bits(lane, 0, 1), 8, bits(lane, 1, 3)))
    index = mad(head, WEIGHTS, index)
    put_4(weights, index, float_bits(one))
    put_4(weights, int32(index + 4), float_bits(other))


def _add(tile, weights, shrink, count, sums):
    """A thread's sums, four of two products for each eight heads of each round, with a tile of values added."""
    lane = bits(thread_x(), 0, 31)
    warp = bits(thread_x(), 5, BLOCK // 32 - 1)
    t = bits(lane, 0, 3)
    g = bits(lane, 2, 7)
    columns = mad(bits(g, 0, 1), 0x2222, 0x5410)  # two bytes of each of two words
    in_1024 = kept(_IN_1024)
    factor = registers()
    step = registers()
    c = registers()
    x = registers()
    word = registers()
    sum = registers()
    for h in unroll(EIGHTS):
        factor[h] = bits_float(shared_4(shrink, min(int32(8 * h + g), int32(HEADS - 1))))
    for r in unroll(ROUNDS):
        item = min(int32(warp + r * WARPS), int32(GROUPS * SUBSETS - 1))
        group = int32(item % GROUPS)
        subset = int32(item // GROUPS)
        for h in unroll(EIGHTS):
            for i in unroll(2):
                for k in unroll(4):
                    x[k] = sums[8 * (r * EIGHTS + h) + 4 * i + k] * factor[h]
                c[h, i] = gathered(x, 4)
        weight_at = mad(g, WEIGHTS // 4, mad(subset, 4 * STEPS, t))
        position = mad(subset, 16 * STEPS, t)
        value_at = mad(position, 4 * PITCH, mad(group, 4, bits(g, 1, 3)))
        step_at = mad(position, STEP_WORDS, mad(bits(group, 2, 0xFF), 1, STEPS_AT))
        odd_block = shl(bits(group, 1, 1), 4)
        for s in unroll(STEPS):
            for k in unroll(4):
                steps = shared_4_further(tile, step_at, (16 * s + 4 * k) * STEP_WORDS)
                step[k] = low_half(bits(steps, odd_block, 0xFFFF))
                word[k] = shared_4(tile, int32(value_at + (16 * s + 4 * k) * 4 * PITCH))
            codes = xor(prmt(word[0], word[1], columns), SIGN_BITS)
            codes_8 = xor(prmt(word[2], word[3], columns), SIGN_BITS)
            for h in unroll(EIGHTS):
                w = shared_16(weights, int32(weight_at + (2 * h * WEIGHTS + 4 * s)))
                for k in unroll(4):
                    x[k] = bits_float(w[k]) * step[k]
                near = pack_f16(x[0], x[1])
                rest = pack_f16(x[0] - low_half(near), x[1] - high_half(near))
                near_8 = pack_f16(x[2], x[3])
                rest_8 = pack_f16(x[2] - low_half(near_8), x[3] - high_half(near_8))
                for i in unroll(2):
                    first = halves(codes, in_1024, i, i + 2)
                    c[h, i] = mma_f16(c[h, i], near, rest, near_8, rest_8, first, halves(codes_8, in_1024, i, i + 2))
        for h in unroll(EIGHTS):
            for i in unroll(2):
                for k in unroll(4):
                    sum[8 * (r * EIGHTS + h) + 4 * i + k] = c[h, i][k]
    return gathered(sum, SUMS)


@cache
def functions(s: AttentionShape) -> dict[str, Any]:
    """The functions above, for blocks of a shape."""
    scope = s.constants | {
        "BLOCKS": s.form.head_dim // 32, "SCORE_ROUNDS": -(-s.rows // (8 * s.warps)), "EIGHTS": s.eights,
        "SPLIT_ROUNDS": -(-s.group * s.form.head_dim // (2 * s.threads)), "WEIGHTS": s.rows + 16,
        "GROUPS": s.column_groups, "ROUNDS": s.sums // (8 * s.eights), "STEPS": s.rows // (16 * s.subsets),
        "STEPS_AT": s.steps_at, "step_of": kv_functions(s)["step_of"], "halves": device_function(_halves),
    }  # fmt: skip
    name = f"mma_q8_{s.form.head_dim}_{s.group}_{s.rows}_{s.threads}"
    return {f.__name__[1:]: device_function(expand(f, name, **scope)) for f in (_split, _score, _put_weights, _add)}
