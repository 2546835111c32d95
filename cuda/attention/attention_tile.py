"""What attention's blocks do with a tile of keys, and then with the tile of values of the same positions.

    score   queries times keys         a thread: a position, SHARE heads, a slice of the columns
    weigh   online softmax             a warp: a head
    add     weights times values       a thread: 4 columns, SHARE heads, every SUBSETS-th position

Between two of them the block waits at a barrier. They share, in shared memory, where `heads` include the last one
repeated to fill the last chunk (attention_shape.py):

    queries  f32 [heads, head_dim]
    scores   f32 [slices, heads, rows]      of each position, in parts that are still to be added up
    weights  f32 [rows, chunks, 4]          exp(score - highest)
    highest  f32 [heads]                    score of the tiles so far
    total    f32 [heads]                    sum of the weights so far
    shrink   f32 [heads]                    exp(highest before this tile - highest), times which all sums so far are

Registers are scarce. So every function computes its thread's number again, and loops count by themselves: Numba's
range takes a register more.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from bridge.cuda.attention.attention_shape import AttentionShape
from bridge.cuda.attention.kv_tile import functions as kv_functions
from bridge.cuda.toolchain.intrinsics import (
    bits,
    bits_float,
    device_function,
    float_bits,
    mad,
    put_4,
    shared_4,
    shared_16,
    shared_16_further,
    thread_x,
    warp_max,
    warp_sum,
)
from bridge.cuda.toolchain.unroll import expand, gathered, registers, unroll

# set by `functions`; see attention_shape.py
PADDED = TILE = BLOCK = WARPS = 0  # PADDED: heads, with those repeated
SHARE = CHUNKS = UNITS = SUBSETS = SETS = SLICES = 0
SLICE = QUADS = FOURS = 0  # quads (16 bytes) of a slice and of a row; groups of four numbers of a quad
SCORE_ROUNDS = HEAD_ROUNDS = 0
WINDOWED = CAPPED = False  # see attention_kind.py
quad_of: Any = None
floats: Any = None
four: Any = None
float32 = np.float32
int32: Any = np.int32
_LOW = np.float32(-np.inf)


@device_function
def put_head(shrink, total, highest, head, before, high, sum):
    """Store what a tile changed of a head: its highest score was `before` and is `high`; `sum` is of its weights."""
    factor = math.exp(before - high)
    put_4(shrink, head, float_bits(factor))
    put_4(total, head, float_bits(bits_float(shared_4(total, head)) * factor + sum))
    put_4(highest, head, float_bits(high))


@device_function
def capped_score(score, cap):
    """cap * tanh(score / cap)."""
    return cap - float32(2) * cap / (math.exp(float32(2) * score / cap) + float32(1))


def _score(tile, queries, scores, count):
    """Parts of the scores of the first `count` positions of a tile of keys."""
    dot = registers()
    for r in unroll(SCORE_ROUNDS):
        thread = bits(thread_x(), 0, BLOCK - 1)
        item = int32((thread >> 5) + r * WARPS)
        first = int32(item % SETS * 32)
        chunk = int32(item // SETS % CHUNKS)
        part = int32(item // (SETS * CHUNKS))
        row = int32(first + (thread & 31))
        if part < SLICES and first < count and row < TILE:
            for j in unroll(SHARE):
                dot[j] = float32(0)
            quad = int32(part * SLICE)
            end = min(int32(quad + SLICE), int32(QUADS))
            while quad < end:
                words = quad_of(tile, row, quad)
                query = mad(chunk, SHARE * UNITS, int32(quad * FOURS))
                for i in unroll(FOURS):
                    x = floats[i](words)
                    for j in unroll(SHARE):
                        y = shared_16_further(queries, query, j * UNITS + i)
                        for e in unroll(4):
                            dot[j] += x[e] * bits_float(y[e])
                quad = int32(quad + 1)
            thread = bits(thread_x(), 0, BLOCK - 1)
            item = int32((thread >> 5) + r * WARPS)
            index = mad(int32(item // SETS), SHARE * TILE, int32(item % SETS * 32 + (thread & 31)))
            for j in unroll(SHARE):
                put_4(scores, int32(index + j * TILE), float_bits(dot[j]))


def _weigh(scores, weights, highest, total, shrink, low, count, scale, cap):
    """Weights of positions `low` to `count` - 1, from `scale` times their scores; the others' are 0."""
    thread = bits(thread_x(), 0, BLOCK - 1)
    lane = int32(thread & 31)
    score = registers()
    for r in unroll(HEAD_ROUNDS):
        head = int32((thread >> 5) + r * WARPS)
        high = _LOW
        before = _LOW
        for i in unroll(SETS):
            score[i] = _LOW
        if head < PADDED:  # spare warps read nothing that others store
            before = bits_float(shared_4(highest, head))
            for i in unroll(SETS):
                if i * 32 + lane < count:
                    x = float32(0)
                    for part in unroll(SLICES):
                        index = mad(head, TILE, int32(part * (CHUNKS * SHARE * TILE) + i * 32 + lane))
                        x += bits_float(shared_4(scores, index))
                    score[i] = x * scale
                    if CAPPED:
                        score[i] = capped_score(score[i], cap)
                    if WINDOWED:
                        score[i] = score[i] if i * 32 + lane >= low else _LOW
                high = max(high, score[i])
        high = max(before, warp_max(high))
        sum = float32(0)
        if head < PADDED:
            in_row = int32(head // SHARE * 4 + head % SHARE)
            for i in unroll(SETS):
                w = math.exp(score[i] - high)
                sum += w
                if i * 32 + lane < TILE:
                    put_4(weights, mad(int32(i * 32 + lane), 4 * CHUNKS, in_row), float_bits(w))
        sum = warp_sum(sum)
        if head < PADDED and lane == 0:
            put_head(shrink, total, highest, head, before, high, sum)


def _add(tile, weights, shrink, count, sums):
    """A thread's weighted sums, [SHARE, 4], with the first `count` positions of a tile of values added."""
    thread = bits(thread_x(), 0, BLOCK - 1)
    unit = int32(thread % UNITS)
    chunk = int32(thread // UNITS % CHUNKS)
    subset = int32(thread // (UNITS * CHUNKS))
    sum = registers()
    for i in unroll(4 * SHARE):
        sum[i] = sums[i]
    if subset < SUBSETS:
        for j in unroll(SHARE):
            factor = bits_float(shared_4(shrink, mad(chunk, SHARE, j)))
            for e in unroll(4):
                sum[4 * j + e] *= factor
        row = subset
        while row < count:
            w = shared_16(weights, mad(row, CHUNKS, chunk))
            x = four(tile, row, unit)
            for j in unroll(SHARE):
                for e in unroll(4):
                    sum[4 * j + e] += bits_float(w[j]) * x[e]
            row = int32(row + SUBSETS)
    return gathered(sum, 4 * SHARE)


@cache
def functions(s: AttentionShape, windowed: bool, capped: bool) -> dict[str, Any]:
    """`fetch` and `stage` of kv_tile.py, `score`, `weigh` and `add`, for blocks of a shape."""
    form, tile = s.form, kv_functions(s)
    scope = s.constants | {
        "SLICE": -(-s.quads // s.slices),
        "FOURS": s.units // s.quads,
        "SCORE_ROUNDS": -(-s.sets * s.chunks * s.slices // s.warps),
        "WINDOWED": windowed,
        "CAPPED": capped,
        **tile,
    }
    name = f"{form.kind}_{form.head_dim}_{s.group}_{s.rows}_{s.threads}" + "_window" * windowed + "_cap" * capped
    ops = {f.__name__[1:]: device_function(expand(f, name, **scope)) for f in (_score, _weigh, _add)}
    return ops | {name: tile[name] for name in ("fetch", "stage")}
