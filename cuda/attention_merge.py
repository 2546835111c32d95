"""The spans of a context put together: the last part of attention, by the block of a head that ends last.

    parts      f32 [kv_heads, spans, heads of a block * head_dim]: a span's weighted sums, not divided by their weights
    part_sums  f32 [kv_heads, spans, 2 * heads of a block]: each head's highest score, and then the sums of the weights

A thread adds up 4 columns of every MERGERS-th span, so that loads of MERGED spans are on their way at once.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from bridge.cuda.attention_shape import AttentionShape
from bridge.cuda.intrinsics import (
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
from bridge.cuda.unroll import expand, registers, unroll
from numba import cuda

# set by `function`; see attention_shape.py
HEADS = UNITS = WARPS = BLOCK = MERGERS = HEAD_ROUNDS = 0
MERGED = 4  # spans whose sums a thread loads together
float32 = np.float32
int32: Any = np.int32
_LOW = np.float32(-np.inf)


def _merge(tile, parts, part_sums, top, total, h, spans, active):
    """MERGERS pieces of the weighted sums to `tile`, and the heads' highest scores and weights to `top` and `total`."""
    thread = bits(thread_x(), 0, BLOCK - 1)
    warp = thread >> 5
    lane = thread & 31
    sums = registers()
    found = registers()
    highest = registers()
    for r in range(HEAD_ROUNDS):
        j = r * WARPS + warp
        high = _LOW
        if j < HEADS:
            for i in range(lane, active, 32):
                high = max(high, part_sums[(h * spans + i) * (2 * HEADS) + j])
        high = warp_max(high)
        weights = float32(0)
        if j < HEADS:
            for i in range(lane, active, 32):
                at = (h * spans + i) * (2 * HEADS) + j
                weights += part_sums[at + HEADS] * math.exp(part_sums[at] - high)
        weights = warp_sum(weights)
        if j < HEADS and lane == 0:
            top[j] = high
            total[j] = weights
    cuda.syncthreads()
    for item in range(thread, MERGERS * HEADS * UNITS, BLOCK):
        merger = item // (HEADS * UNITS)
        at = item % (HEADS * UNITS)
        j = at // UNITS
        for e in unroll(4):
            sums[e] = float32(0)
        for i in range(merger, active, MERGERS * MERGED):
            for u in unroll(MERGED):  # these loads are on their way together
                one = h * spans + min(i + u * MERGERS, active - 1)
                found[u] = load_16(parts, one * (HEADS * UNITS) + at)
                highest[u] = part_sums[one * (2 * HEADS) + j]
            for u in unroll(MERGED):
                if i + u * MERGERS < active:
                    w = math.exp(highest[u] - top[j])
                    for e in unroll(4):
                        sums[e] += w * bits_float(found[u][e])
        put_16(tile, int32(item), (float_bits(sums[0]), float_bits(sums[1]), float_bits(sums[2]), float_bits(sums[3])))
    cuda.syncthreads()


@cache
def function(shape: AttentionShape) -> Any:
    """The function above for blocks of a shape."""
    heads = shape.chunks * shape.share
    expanded = expand(
        _merge,
        f"{shape.form.head_dim}_{shape.group}_{shape.threads}",
        HEADS=shape.group,
        UNITS=shape.units,
        WARPS=shape.warps,
        BLOCK=shape.threads,
        MERGERS=shape.mergers,
        HEAD_ROUNDS=-(-heads // shape.warps),
    )
    return device_function(expanded, True)
