"""What attention's blocks do with a token's queries, key and value before they look at the cache.

    vector  f32 in shared memory, QUERY_PITCH for each: the queries of a key-value head, the last one repeated to fill
            the last chunk (attention_shape.py), and then, in the block whose span holds the new position, the key

`turn` loads them, normalizes them where the model does, before or after it rotates their pairs; `keep` stores the new
key and value in the cache (kv_cache.py). All threads of a block take part in both.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from bridge.cuda.attention.attention_kind import AttentionKind
from bridge.cuda.attention.attention_shape import AttentionShape
from bridge.cuda.toolchain.intrinsics import (
    bits,
    bits_float,
    device_function,
    float_bits,
    load_4f,
    mad,
    put_4,
    round_even,
    shared_4,
    store_1,
    store_2,
    store_4,
    thread_x,
    to_half,
    warp_max,
    warp_sum,
)
from bridge.cuda.toolchain.unroll import expand
from numba import cuda

# set by `functions`: query heads of a block, with those repeated, and their size; threads
HEADS = PADDED = HEAD_DIM = QUERY_PITCH = BLOCK = WARPS = 0
HALF = STRIDE = OTHER = 0  # rotary pairs of a head; floats from one pair to the next, and between the two of a pair
NORM_ROUNDS = PER_LANE = 0
ROW_WORDS = STEP_WORDS = 0  # see kv_cache.py
KEPT = KEPT_ROUNDS = 0  # blocks of 32 of a head, and rounds that the warps take to store key and value
KIND = ""
NORMED = NORMS_LAST = QUANTIZED = False
normalize: Any = None
rotate: Any = None
keep_one: Any = None
float32 = np.float32
int32: Any = np.int32


def _turn(vector, qkv, q_norm, k_norm, cos, sin, kv_head, kv_heads, position, count, eps):
    """Load and turn the first `count` of the queries and the key; usable after the barrier at the end."""
    thread = bits(thread_x(), 0, BLOCK - 1)
    for i in range(thread, int32(count * HEAD_DIM), int32(BLOCK)):
        j = int32(i // HEAD_DIM)
        source = mad(kv_head, HEADS, min(j, int32(HEADS - 1))) if j < PADDED else mad(kv_heads, HEADS, kv_head)
        put_4(vector, mad(j, QUERY_PITCH - HEAD_DIM, i), float_bits(load_4f(qkv, mad(int32(source - j), HEAD_DIM, i))))
    cuda.syncthreads()
    if NORMED and not NORMS_LAST:
        normalize(vector, q_norm, k_norm, count, eps)
    if HALF:
        rotate(vector, cos, sin, position, count)
    if NORMS_LAST:
        normalize(vector, q_norm, k_norm, count, eps)


def _normalize(vector, q_norm, k_norm, count, eps):
    """Each head / rms(head) * weight."""
    thread = bits(thread_x(), 0, BLOCK - 1)
    warp = thread >> 5
    lane = thread & 31
    for r in range(NORM_ROUNDS):
        j = r * WARPS + warp
        squares = float32(0)
        if j < count:
            for i in range(PER_LANE):
                e = i * 32 + lane
                if e < HEAD_DIM:
                    x = vector[j * QUERY_PITCH + e]
                    squares += x * x
        squares = warp_sum(squares)
        if j < count:
            inverse = float32(1) / math.sqrt(squares / float32(HEAD_DIM) + eps)
            for i in range(PER_LANE):
                e = i * 32 + lane
                if e < HEAD_DIM:
                    w = q_norm[e] if j < PADDED else k_norm[e]
                    vector[j * QUERY_PITCH + e] = vector[j * QUERY_PITCH + e] * inverse * w
    cuda.syncthreads()


def _rotate(vector, cos, sin, position, count):
    """Turn the pairs of the first elements."""
    thread = bits(thread_x(), 0, BLOCK - 1)
    for i in range(thread, int32(count * HALF), int32(BLOCK)):
        j = int32(i // HALF)
        e = int32(i - j * HALF)
        one = mad(j, QUERY_PITCH, int32(e * STRIDE))
        other = int32(one + OTHER)
        c = load_4f(cos, mad(position, HALF, e))
        s = load_4f(sin, mad(position, HALF, e))
        a = bits_float(shared_4(vector, one))
        b = bits_float(shared_4(vector, other))
        put_4(vector, one, float_bits(a * c - b * s))
        put_4(vector, other, float_bits(a * s + b * c))
    cuda.syncthreads()


def _keep(vector, qkv, keys, values, kv_head, kv_heads, rows, position):
    """Store the new key and value."""
    thread = bits(thread_x(), 0, BLOCK - 1)
    warp = thread >> 5
    lane = thread & 31
    key_at = int32(kv_heads * HEADS * HEAD_DIM)
    steps = int32(kv_heads * rows * ROW_WORDS)  # where the steps of q8_0 begin
    row = kv_head * rows + position
    if QUANTIZED:
        for r in range(KEPT_ROUNDS):
            item = r * WARPS + warp
            block = item % KEPT
            e = block * 32 + lane
            x = float32(0)
            if item < 2 * KEPT and e < HEAD_DIM:
                value_at = key_at + (kv_heads + kv_head) * HEAD_DIM
                x = vector[PADDED * QUERY_PITCH + e] if item < KEPT else qkv[value_at + e]
            step = warp_max(abs(x)) / float32(127)
            code = round_even(x * (float32(1) / step if step > float32(0) else float32(0)))
            byte = row * HEAD_DIM + e
            half = 2 * (steps + row * STEP_WORDS) + block
            if item < KEPT:
                if e < HEAD_DIM:
                    store_1(keys, byte, code)
                if lane == 0:
                    store_2(keys, half, to_half(step))
            elif item < 2 * KEPT:
                if e < HEAD_DIM:
                    store_1(values, byte, code)
                if lane == 0:
                    store_2(values, half, to_half(step))
    else:
        for i in range(thread, HEAD_DIM, BLOCK):
            keep_one(keys, row, i, vector[PADDED * QUERY_PITCH + i])
            keep_one(values, row, i, qkv[key_at + (kv_heads + kv_head) * HEAD_DIM + i])


def _keep_one(cache, row, e, value):
    """Store number e of a row, unchanged."""
    if KIND == "f32":
        store_4(cache, row * HEAD_DIM + e, float_bits(value))
    else:
        store_2(cache, row * HEAD_DIM + e, to_half(value))


@cache
def functions(shape: AttentionShape, kind: AttentionKind, threads: int | None = None) -> dict[str, Any]:
    """`turn` and `keep` for blocks of a shape, or of another number of threads."""
    form, threads, half = shape.form, threads or shape.threads, kind.rotated // 2
    blocks, warps = -(-form.head_dim // 32), threads // 32
    scope = shape.constants
    scope |= {
        "BLOCK": threads, "WARPS": warps, "HALF": half, "STRIDE": 2 if kind.neighbours else 1,
        "OTHER": 1 if kind.neighbours else half, "NORM_ROUNDS": -(-(scope["PADDED"] + 1) // warps),
        "PER_LANE": blocks, "ROW_WORDS": form.row_words, "KEPT": blocks, "KEPT_ROUNDS": -(-2 * blocks // warps),
        "NORMED": kind.normed, "NORMS_LAST": kind.norms_last, "QUANTIZED": form.kind == "q8_0",
    }  # fmt: skip
    scope["keep_one"] = device_function(expand(_keep_one, f"{form.kind}_{form.head_dim}", **scope))
    name = f"{kind.name}_{form.kind}_{threads}"
    for part in (_normalize, _rotate):
        scope[part.__name__[1:]] = device_function(expand(part, name, **scope))
    return {f.__name__[1:]: device_function(expand(f, name, **scope)) for f in (_turn, _keep)}
