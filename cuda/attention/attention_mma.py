"""The twin of attention_tile.py on tensor cores, for 8 query heads of a block at a time.

This is for keys and values in halves; attention_mma_q8.py has what is different for q8_0.

    split      queries -> halves and what these leave out, as halves too, in their place
    score      queries times keys         a warp: 8 positions, all heads
    weigh      online softmax             a warp: a head; weights become halves and what these leave out
    add        weights times values       a warp: 16 columns, all heads, every SUBSETS-th part of the positions
    put_sums   a warp's sums -> pieces (attention_spans.py)

Eight heads are rows 0..7 of mma's A, what their halves leave out rows 8..15: both products come at once, and their sum
is as exact as one of float32. With g = lane / 4 and t = lane % 4, a lane takes 16 bytes of the key at position g and of
head g, which are k = 2t, 2t + 1, 2t + 8 and 2t + 9 of two products. Of values it takes columns 2g and 2g + 1 at four
positions: column 2g + i is column g of product i.

In shared memory

    queries  words of two halves [heads, query_pitch]: each is followed by what it leaves out, so that the four
             words of an A lie together; so are
    weights  [8 * EIGHTS, rows + 16]           of heads that there are not: zeros
    scores   f32 [heads, rows]
"""

import math
from functools import cache
from typing import Any

import numpy as np
from bridge.cuda.attention import attention_mma_q8
from bridge.cuda.attention.attention_shape import AttentionShape
from bridge.cuda.attention.attention_tile import capped_score, put_head
from bridge.cuda.toolchain.intrinsics import (
    bits,
    bits_float,
    device_function,
    float_bits,
    high_half,
    low_half,
    mad,
    mma_f16,
    pack_f16,
    prmt,
    put_4,
    put_16,
    shared_4,
    shared_16,
    thread_x,
    warp_max,
    warp_sum,
)
from bridge.cuda.toolchain.unroll import expand, gathered, registers, unroll

# set by `functions`; see attention_shape.py
HEADS = HEAD_DIM = TILE = BLOCK = WARPS = HEAD_ROUNDS = 0
UNITS = PITCH = QUERY_PITCH = SUBSETS = SUMS = 0
EIGHTS = 0  # of heads
WEIGHTS = 0  # words from one head's weights to the next
QUARTERS = SCORE_ROUNDS = 0  # fours of quads of a row
GROUPS = ROUNDS = STEPS = 0  # 16 columns each; of a warp; 16 positions each, of a subset
WINDOWED = CAPPED = False  # see attention_kind.py
put_weights: Any = None
float32 = np.float32
int32: Any = np.int32
_LOW = np.float32(-np.inf)


def _split(queries):
    thread = bits(thread_x(), 0, BLOCK - 1)
    for i in range(thread, int32(HEADS * HEAD_DIM // 2), int32(BLOCK)):
        index = mad(int32(i // (HEAD_DIM // 2)), QUERY_PITCH - HEAD_DIM, int32(2 * i))
        one = bits_float(shared_4(queries, index))
        other = bits_float(shared_4(queries, int32(index + 1)))
        near = pack_f16(one, other)
        put_4(queries, index, near)
        put_4(queries, int32(index + 1), pack_f16(one - low_half(near), other - high_half(near)))


def _score(tile, queries, scores, count):
    """Scores of a tile's positions."""
    lane = bits(thread_x(), 0, 31)
    warp = bits(thread_x(), 5, BLOCK // 32 - 1)
    t = bits(lane, 0, 3)
    g = bits(lane, 2, 7)
    query_at = registers()
    c = registers()
    for r in unroll(SCORE_ROUNDS):
        first = min(int32((warp + r * WARPS) * 8), int32(TILE - 8))
        key_at = mad(int32(first + g), PITCH, t)
        for h in unroll(EIGHTS):
            query_at[h] = mad(min(int32(8 * h + g), int32(HEADS - 1)), QUERY_PITCH // 4, int32(2 * t))
            c[h] = (float32(0), float32(0), float32(0), float32(0))
        for j in unroll(QUARTERS):
            key = shared_16(tile, int32(key_at + 4 * j))
            for h in unroll(EIGHTS):
                even = shared_16(queries, int32(query_at[h] + 8 * j))
                odd = shared_16(queries, int32(query_at[h] + (8 * j + 1)))
                c[h] = mma_f16(c[h], even[0], even[1], even[2], even[3], key[0], key[1])
                c[h] = mma_f16(c[h], odd[0], odd[1], odd[2], odd[3], key[2], key[3])
        for h in unroll(EIGHTS):
            if 8 * h + g < HEADS:
                index = mad(int32(8 * h + g), TILE, int32(first + 2 * t))
                put_4(scores, index, float_bits(c[h][0] + c[h][2]))
                put_4(scores, int32(index + 1), float_bits(c[h][1] + c[h][3]))


def _weigh(scores, weights, highest, total, shrink, low, count, scale, cap):
    """Weights of positions `low` to `count` - 1, from `scale` times their scores; the others' are 0."""
    thread = bits(thread_x(), 0, BLOCK - 1)
    lane = int32(thread & 31)
    score = registers()
    for r in unroll(HEAD_ROUNDS):
        head = int32((thread >> 5) + r * WARPS)
        high = _LOW
        before = _LOW
        for i in unroll(2):
            score[i] = _LOW
        if head < HEADS:  # spare warps read nothing that others store
            before = bits_float(shared_4(highest, head))
            for i in unroll(2):
                if int32(2 * lane + i) < count:
                    score[i] = bits_float(shared_4(scores, mad(head, TILE, int32(2 * lane + i)))) * scale
                    if CAPPED:
                        score[i] = capped_score(score[i], cap)
                    if WINDOWED:
                        score[i] = score[i] if int32(2 * lane + i) >= low else _LOW
                high = max(high, score[i])
        high = max(before, warp_max(high))
        sum = float32(0)
        if head < HEADS:
            one = math.exp(score[0] - high)
            other = math.exp(score[1] - high)
            sum += one + other
            if 2 * lane < TILE:
                put_weights(weights, head, lane, one, other)
        sum = warp_sum(sum)
        if head < HEADS and lane == 0:
            put_head(shrink, total, highest, head, before, high, sum)


def _put_weights(weights, head, lane, one, other):
    """Store the weights of positions 2 * lane and the next: of 16, words t and t + 4 lie together."""
    near = pack_f16(one, other)
    index = mad(bits(lane, 3, 3), 16, mad(bits(lane, 0, 3), 4, int32(2 * bits(lane, 2, 1))))
    index = mad(head, WEIGHTS, index)
    put_4(weights, index, near)
    put_4(weights, int32(index + 1), pack_f16(one - low_half(near), other - high_half(near)))


def _add(tile, weights, shrink, count, sums):
    """A thread's sums, four of two products for each eight heads of each round, with a tile of values added."""
    lane = bits(thread_x(), 0, 31)
    warp = bits(thread_x(), 5, BLOCK // 32 - 1)
    t = bits(lane, 0, 3)
    g = bits(lane, 2, 7)
    factor = registers()
    c = registers()
    x = registers()
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
        value_at = mad(mad(subset, 8 * STEPS, t), 8 * PITCH, mad(group, 8, g))
        for s in unroll(STEPS):
            one = shared_4(tile, int32(value_at + 64 * s * PITCH))
            other = shared_4(tile, int32(value_at + (64 * s + 4) * PITCH))
            one_8 = shared_4(tile, int32(value_at + (64 * s + 32) * PITCH))
            other_8 = shared_4(tile, int32(value_at + (64 * s + 36) * PITCH))
            for h in unroll(EIGHTS):
                w = shared_16(weights, int32(weight_at + (2 * h * WEIGHTS + 4 * s)))
                for i in unroll(2):
                    halves = 0x5410 + 0x2222 * i
                    first, second = prmt(one, other, halves), prmt(one_8, other_8, halves)
                    c[h, i] = mma_f16(c[h, i], w[0], w[1], w[2], w[3], first, second)
        for h in unroll(EIGHTS):
            for i in unroll(2):
                for k in unroll(4):
                    sum[8 * (r * EIGHTS + h) + 4 * i + k] = c[h, i][k]
    return gathered(sum, SUMS)


def _put_sums(pieces, sums):
    """Store a warp's sums."""
    lane = bits(thread_x(), 0, 31)
    warp = bits(thread_x(), 5, BLOCK // 32 - 1)
    t = bits(lane, 0, 3)
    g = bits(lane, 2, 7)
    word = registers()
    for r in unroll(ROUNDS):
        item = int32(warp + r * WARPS)
        for h in unroll(EIGHTS):
            head = int32(8 * h + g)
            if item < GROUPS * SUBSETS and head < HEADS:
                index = mad(mad(int32(item // GROUPS), HEADS, head), UNITS, mad(int32(item % GROUPS), 4, t))
                for e in unroll(4):
                    at = 8 * (r * EIGHTS + h) + e % 2 * 4 + e // 2
                    word[e] = float_bits(sums[at] + sums[at + 2])
                put_16(pieces, index, gathered(word, 4))


@cache
def functions(s: AttentionShape, windowed: bool, capped: bool) -> dict[str, Any]:
    """The functions above, for blocks of a shape."""
    scope = s.constants | {
        "QUARTERS": s.quads // 4, "SCORE_ROUNDS": -(-s.rows // (8 * s.warps)), "GROUPS": s.column_groups,
        "ROUNDS": s.sums // (8 * s.eights), "STEPS": s.rows // (16 * s.subsets), "EIGHTS": s.eights,
        "WEIGHTS": s.rows + 16, "WINDOWED": windowed, "CAPPED": capped,
    }  # fmt: skip
    name = f"mma_{s.form.head_dim}_{s.group}_{s.rows}_{s.threads}"
    if s.form.kind == "q8_0":
        ops = attention_mma_q8.functions(s)
    else:
        ops = {f.__name__[1:]: device_function(expand(f, name, **scope)) for f in (_split, _score, _put_weights, _add)}
    scope["put_weights"] = ops["put_weights"]
    name += f"_{s.form.kind}" + "_window" * windowed + "_cap" * capped
    return ops | {f.__name__[1:]: device_function(expand(f, name, **scope)) for f in (_weigh, _put_sums)}
