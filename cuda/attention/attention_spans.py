"""What attention's blocks do once a span of the context is through: sums over threads, then over spans.

put_sums      a thread's weighted sums -> pieces
store_span    the pieces' sums, each head's highest score and sum of weights -> parts, part_sums
merge         those of all spans (Dao's flash-decoding) -> MERGERS pieces, highest scores and sums of weights
summed        the sum of float i of some pieces

pieces     f32 [SUBSETS or MERGERS, heads, head_dim], in the memory of the tile
highest, total   f32 [heads], in shared memory
parts      f32 [kv_heads, spans, heads, head_dim]: weighted sums, not divided by the weights
part_sums  f32 [kv_heads, spans, 2, heads]: highest scores, then sums of weights
"""

import math
from functools import cache
from typing import Any

import numpy as np
from bridge.cuda.attention.attention_shape import AttentionShape
from bridge.cuda.toolchain.intrinsics import (
    bits,
    bits_float,
    device_function,
    float_bits,
    load_16,
    put_16,
    thread_x,
    warp_max,
    warp_sum,
)
from bridge.cuda.toolchain.unroll import expand, gathered, registers, unroll
from numba import cuda

# set by `functions`; see attention_shape.py
HEADS = HEAD_DIM = BLOCK = WARPS = HEAD_ROUNDS = 0
SHARE = CHUNKS = UNITS = SUBSETS = MERGERS = 0
TOGETHER = 4  # spans whose sums a thread loads at once
summed: Any = None
float32 = np.float32
int32: Any = np.int32
_LOW = np.float32(-np.inf)


def _put_sums(pieces, sums):
    """Store a thread's sums, [SHARE, 4]."""
    thread = bits(thread_x(), 0, BLOCK - 1)
    unit = int32(thread % UNITS)
    chunk = int32(thread // UNITS % CHUNKS)
    subset = int32(thread // (UNITS * CHUNKS))
    word = registers()
    for j in unroll(SHARE):
        if subset < SUBSETS and chunk * SHARE + j < HEADS:
            index = (subset * HEADS + chunk * SHARE + j) * UNITS + unit
            for e in unroll(4):
                word[e] = float_bits(sums[4 * j + e])
            put_16(pieces, int32(index), gathered(word, 4))


def _summed(pieces, i, count):
    """The sum of float i of `count` pieces."""
    x = float32(0)
    for piece in range(count):
        x += bits_float(pieces[piece * (HEADS * HEAD_DIM) + i])
    return x


def _store_span(pieces, highest, total, parts, part_sums, span):
    """Store the result of a span; `span` counts those of all key-value heads."""
    thread = bits(thread_x(), 0, BLOCK - 1)
    for i in range(thread, HEADS * HEAD_DIM, BLOCK):
        parts[span * (HEADS * HEAD_DIM) + i] = summed(pieces, i, SUBSETS)
    if thread < HEADS:
        part_sums[span * (2 * HEADS) + thread] = highest[thread]
        part_sums[span * (2 * HEADS) + HEADS + thread] = total[thread]


def _merge(pieces, parts, part_sums, highest, total, first, count):
    """Load `count` spans from `first` on, and add them up in pieces."""
    thread = bits(thread_x(), 0, BLOCK - 1)
    warp = thread >> 5
    lane = thread & 31
    sums = registers()
    loaded = registers()
    high_of = registers()
    for r in range(HEAD_ROUNDS):
        head = r * WARPS + warp
        high = _LOW
        if head < HEADS:
            for i in range(lane, count, 32):
                high = max(high, part_sums[(first + i) * (2 * HEADS) + head])
        high = warp_max(high)
        weights = float32(0)
        if head < HEADS:
            for i in range(lane, count, 32):
                index = (first + i) * (2 * HEADS) + head
                weights += part_sums[index + HEADS] * math.exp(part_sums[index] - high)
        weights = warp_sum(weights)
        if head < HEADS and lane == 0:
            highest[head] = high
            total[head] = weights
    cuda.syncthreads()
    for item in range(thread, MERGERS * HEADS * UNITS, BLOCK):
        merger = item // (HEADS * UNITS)
        index = item % (HEADS * UNITS)
        head = index // UNITS
        for e in unroll(4):
            sums[e] = float32(0)
        for i in range(merger, count, MERGERS * TOGETHER):
            for u in unroll(TOGETHER):
                span = first + min(i + u * MERGERS, count - 1)
                loaded[u] = load_16(parts, span * (HEADS * UNITS) + index)
                high_of[u] = part_sums[span * (2 * HEADS) + head]
            for u in unroll(TOGETHER):
                if i + u * MERGERS < count:
                    w = math.exp(high_of[u] - highest[head])
                    for e in unroll(4):
                        sums[e] += w * bits_float(loaded[u][e])
        put_16(
            pieces, int32(item), (float_bits(sums[0]), float_bits(sums[1]), float_bits(sums[2]), float_bits(sums[3]))
        )
    cuda.syncthreads()


@cache
def functions(s: AttentionShape) -> dict[str, Any]:
    """The functions above, for blocks of a shape."""
    name = f"{s.form.head_dim}_{s.group}_{s.rows}_{s.threads}"
    ops = {"summed": device_function(expand(_summed, name, **s.constants))}
    scope = s.constants | ops
    for function in (_put_sums, _store_span, _merge):
        ops[function.__name__[1:]] = device_function(expand(function, name, **scope))
    return ops
