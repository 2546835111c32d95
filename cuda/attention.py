"""Attention of one token over the cache on the device: rotation, storing and the weighted sum in one launch.

    qkv     f32 [(heads + 2 kv_heads) * head_dim], as the products left it (biases are in it)
    keys    int32 words of a layer's [kv_heads, rows, head_dim], in a form of kv_forms.py; values likewise
    state   int32: the position of this token is state[POSITION], so that one captured launch serves every token

A block serves one key-value head, all query heads that share it (each key is loaded once for them), and one
span of the context; blockIdx is (kv head, span). Spans are whole tiles and at least SPAN positions, so a short
context is one block a head, a long one up to SPLITS, and none reads on beyond the rows of kv_cache.py. The block
whose span holds the new position also stores its key and value. Within a span, tiles of positions go through an
online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867); spans are put together by the block that ends last
(Dao's flash-decoding), which needs no second launch. The result is written as floats, and as records where a head
is whole blocks of 32.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from bridge.cuda.activations import store, store_exact
from bridge.cuda.intrinsics import round_even, store_1, store_2, to_half, warp_max, warp_sum
from bridge.cuda.kv_forms import Form, functions
from bridge.cuda.launch import Kernel
from bridge.cuda.unroll import expand, registers, unroll
from numba import cuda

POSITION, TOKEN, STEP, STATE = 0, 1, 2, 4  # words of `state`, and its size
SPLITS = 16  # spans of a context, at most; the kernel could do 32
SPAN = 64  # positions of a span, at least

# set by `kernel`: query heads of a block and their size; positions of a tile; threads
HEADS = HEAD_DIM = TILE = BLOCK = WARPS = 0
VECTORS = PITCH = 0  # heads in shared memory, the key among them, and floats from one to the next
HALF = STRIDE = OTHER = 0  # rotary pairs of a head, floats from one to the next, and between its two
WORDS = ITEMS = ROUNDS = 0  # pairs of elements in a head, in all of them, and of a thread
AT_ONCE = 0  # values whose loads are on their way together
NORM_ROUNDS = PER_LANE = SCORE_ROUNDS = BLOCKS = RECORD_ROUNDS = 0
ROW_WORDS = STEP_WORDS = 0  # see kv_forms.py
KEPT = KEPT_ROUNDS = 0  # blocks of 32 of a head, and rounds of the warps over those of key and value
NORMED = RECORDED = QUANTIZED = False
put: Any = None
dot: Any = None
pair: Any = None
keep: Any = None

float32 = np.float32
int32: Any = np.int32
_LOW = np.float32(-np.inf)


def tile(group: int) -> int:
    """Positions that a block works on at a time; a thread for each, and for each query head."""
    return 64 if group <= 4 else 32


def threads(group: int) -> int:
    """Threads of a block."""
    return tile(group) * group


def supported(head_dim: int, group: int) -> bool:
    """Whether keys can be loaded 16 bytes at a time, and a block's threads and shared memory suffice."""
    return head_dim % 8 == 0 and group <= 32 and (group + 1) * (head_dim + 4) <= 10240


def recorded(head_dim: int) -> bool:
    """Whether the kernel makes the records of its result: a block of 32 may not belong to two heads."""
    return head_dim % 32 == 0


def _attend(qkv, q_norm, k_norm, cos, sin, keys, values, state, parts, part_sums, counters, out, records,
            rows, eps, scale):  # fmt: skip
    thread = int32(cuda.threadIdx.x)
    warp = thread >> 5
    lane = thread & 31
    h = int32(cuda.blockIdx.x)
    span = int32(cuda.blockIdx.y)
    kv_heads = int32(cuda.gridDim.x)
    position = state[POSITION]
    # what stays until the end is pinned to 32 bits: Numba widens sums and products, and registers are scarce
    length = int32(position + 1)
    size = max(SPAN, (length + SPLITS - 1) // SPLITS)
    size = int32((size + TILE - 1) // TILE * TILE)
    active = int32((length + size - 1) // size)
    if span >= active:
        return
    first = int32(span * size)
    last = int32(min(length, first + size))

    vector = cuda.shared.array(VECTORS * PITCH, float32)  # queries, then the key, later the result
    weight = cuda.shared.array(HEADS * TILE, float32)
    top = cuda.shared.array(32, float32)
    total = cuda.shared.array(32, float32)
    factor = cuda.shared.array(32, float32)
    flag = cuda.shared.array(1, int32)

    # queries, and the key where it is this block's, to shared memory
    newest = last == length
    count = VECTORS if newest else HEADS
    key_at = int32(kv_heads * HEADS * HEAD_DIM)
    steps = int32(kv_heads * rows * ROW_WORDS)  # where those of q8_0 begin
    for i in range(thread, count * HEAD_DIM, BLOCK):
        j = i // HEAD_DIM
        e = i - j * HEAD_DIM
        source = (h * HEADS + j) * HEAD_DIM if j < HEADS else key_at + h * HEAD_DIM
        vector[j * PITCH + e] = qkv[source + e]
    if thread < 32:
        top[thread] = _LOW
        total[thread] = float32(0)
    cuda.syncthreads()
    if NORMED:
        for r in range(NORM_ROUNDS):
            j = r * WARPS + warp
            squares = float32(0)
            if j < count:
                for i in range(PER_LANE):
                    e = i * 32 + lane
                    if e < HEAD_DIM:
                        x = vector[j * PITCH + e]
                        squares += x * x
            squares = warp_sum(squares)
            if j < count:
                inverse = float32(1) / math.sqrt(squares / float32(HEAD_DIM) + eps)
                for i in range(PER_LANE):
                    e = i * 32 + lane
                    if e < HEAD_DIM:
                        w = q_norm[e] if j < HEADS else k_norm[e]
                        vector[j * PITCH + e] = vector[j * PITCH + e] * inverse * w
        cuda.syncthreads()
    for i in range(thread, count * HALF, BLOCK):
        j = i // HALF
        e = i - j * HALF
        at = j * PITCH + e * STRIDE
        c = cos[position * HALF + e]
        s = sin[position * HALF + e]
        a = vector[at]
        b = vector[at + OTHER]
        vector[at] = a * c - b * s
        vector[at + OTHER] = a * s + b * c
    cuda.syncthreads()
    if newest:
        to = h * rows + position
        if QUANTIZED:
            for r in range(KEPT_ROUNDS):
                item = r * WARPS + warp
                block = item % KEPT
                e = block * 32 + lane
                x = float32(0)
                if item < 2 * KEPT and e < HEAD_DIM:
                    x = vector[HEADS * PITCH + e] if item < KEPT else qkv[key_at + (kv_heads + h) * HEAD_DIM + e]
                step = warp_max(abs(x)) / float32(127)
                code = round_even(x * (float32(1) / step if step > float32(0) else float32(0)))
                byte = to * HEAD_DIM + e
                place = 2 * (steps + to * STEP_WORDS) + block
                if item < KEPT:
                    if e < HEAD_DIM:
                        store_1(keys, byte, code)
                    if lane == 0:
                        store_2(keys, place, to_half(step))
                elif item < 2 * KEPT:
                    if e < HEAD_DIM:
                        store_1(values, byte, code)
                    if lane == 0:
                        store_2(values, place, to_half(step))
        else:
            for i in range(thread, HEAD_DIM, BLOCK):
                keep(keys, to, i, vector[HEADS * PITCH + i])
                keep(values, to, i, qkv[key_at + (kv_heads + h) * HEAD_DIM + i])
        cuda.syncthreads()  # also makes what was just stored visible to this block

    even = registers()  # the weighted sums of this thread's pairs of elements
    odd = registers()
    for r in unroll(ROUNDS):
        even[r] = float32(0)
        odd[r] = float32(0)
    for start in range(first, last, int32(TILE)):
        # scores: a thread for each position and head
        g = int32(thread % HEADS)
        p = int32(thread // HEADS)
        score = _LOW
        if start + p < last:
            score = dot(keys, steps, int32(h * rows + start + p), vector, g * PITCH) * scale
        weight[g * TILE + p] = score
        cuda.syncthreads()
        # softmax so far: a warp for each head; warps to spare look at nothing that others store
        high = _LOW
        before = _LOW
        if warp < HEADS:
            before = top[warp]
            for i in range(SCORE_ROUNDS):
                high = max(high, weight[warp * TILE + i * 32 + lane])
        high = max(before, warp_max(high))
        part = float32(0)
        if warp < HEADS:
            for i in range(SCORE_ROUNDS):
                w = math.exp(weight[warp * TILE + i * 32 + lane] - high)
                weight[warp * TILE + i * 32 + lane] = w
                part += w
        part = warp_sum(part)
        if warp < HEADS and lane == 0:
            shrunk = math.exp(before - high)
            factor[warp] = shrunk
            total[warp] = total[warp] * shrunk + part
            top[warp] = high
        cuda.syncthreads()
        # the weighted sum: a thread for each head and pair of elements
        for r in unroll(ROUNDS):
            item = min(thread + r * BLOCK, ITEMS - 1)
            j = item // WORDS
            here = item - j * WORDS
            x = even[r] * factor[j]
            y = odd[r] * factor[j]
            for i in range(0, last - start if last - start < TILE else TILE, AT_ONCE):
                for u in unroll(AT_ONCE):  # beyond the span the weights are 0, the values finite
                    one, other = pair(values, steps, h * rows + start + i + u, here)
                    w = weight[j * TILE + i + u]
                    x += w * one
                    y += w * other
            even[r] = x
            odd[r] = y
        cuda.syncthreads()

    if active == 1:
        for r in unroll(ROUNDS):
            inverse = float32(1) / total[min(thread + r * BLOCK, ITEMS - 1) // WORDS]
            even[r] *= inverse
            odd[r] *= inverse
    else:
        # leave what this span found; the last block of a head to come here puts the spans together
        to = (h * SPLITS + span) * ITEMS * 2
        for r in unroll(ROUNDS):
            item = thread + r * BLOCK
            if item < ITEMS:
                parts[to + 2 * item] = even[r]
                parts[to + 2 * item + 1] = odd[r]
        if thread < HEADS:
            part_sums[(h * SPLITS + span) * 64 + thread] = top[thread]
            part_sums[(h * SPLITS + span) * 64 + 32 + thread] = total[thread]
        cuda.threadfence()
        cuda.syncthreads()
        if thread == 0:
            flag[0] = int32(cuda.atomic.add(counters, h, int32(1)) == active - 1)
        cuda.syncthreads()
        if flag[0] == 0:
            return
        cuda.threadfence()
        if thread == 0:
            counters[h] = int32(0)
        here = min(warp, HEADS - 1)
        high = _LOW
        part = float32(0)
        if lane < active:
            high = part_sums[(h * SPLITS + lane) * 64 + here]
            part = part_sums[(h * SPLITS + lane) * 64 + 32 + here]
        share = math.exp(high - warp_max(high))
        part = warp_sum(part * share)
        if warp < HEADS:
            weight[warp * 32 + lane] = share / part
        cuda.syncthreads()
        for r in unroll(ROUNDS):
            item = min(thread + r * BLOCK, ITEMS - 1)
            j = item // WORDS
            x = float32(0)
            y = float32(0)
            for i in range(active):
                w = weight[j * 32 + i]
                at = (h * SPLITS + i) * ITEMS * 2 + 2 * item
                x += w * parts[at]
                y += w * parts[at + 1]
            even[r] = x
            odd[r] = y

    to = h * HEADS * HEAD_DIM
    for r in unroll(ROUNDS):
        item = thread + r * BLOCK
        if item < ITEMS:
            out[to + 2 * item] = even[r]
            out[to + 2 * item + 1] = odd[r]
            vector[2 * item] = even[r]
            vector[2 * item + 1] = odd[r]
    if RECORDED:
        cuda.syncthreads()
        for r in range(RECORD_ROUNDS):
            i = min(r * WARPS + warp, BLOCKS - 1)
            put(vector[i * 32 + lane], h * BLOCKS + i, 0, records)


@cache
def kernel(
    head_dim: int, group: int, rotated: int, neighbours: bool, normed: bool, exact: bool, kind: str = "f16"
) -> Kernel:
    """The kernel for heads of that shape. `neighbours`: rotary pairs are (2i, 2i + 1); `normed`: q and k are;
    `exact`: the records are float32; `kind`: how keys and values are kept."""
    form = Form(kind, head_dim)
    own = functions(form)
    kept = -(-head_dim // 32)
    block = threads(group)
    warps = block // 32
    items = group * head_dim // 2
    blocks = group * head_dim // 32
    name = f"{head_dim}_{group}_{rotated}_{int(neighbours)}{int(normed)}{int(exact)}_{kind}"
    function = expand(
        _attend,
        name,
        HEADS=group,
        HEAD_DIM=head_dim,
        TILE=tile(group),
        BLOCK=block,
        WARPS=warps,
        VECTORS=group + 1,
        PITCH=head_dim + 4,  # other banks for each head
        HALF=rotated // 2,
        STRIDE=2 if neighbours else 1,
        OTHER=1 if neighbours else rotated // 2,
        WORDS=head_dim // 2,
        ITEMS=items,
        ROUNDS=-(-items // block),
        AT_ONCE=4 if kind == "q8_0" and items > block else 8,  # more do not fit into registers
        NORM_ROUNDS=-(-(group + 1) // warps),
        PER_LANE=-(-head_dim // 32),
        SCORE_ROUNDS=tile(group) // 32,
        BLOCKS=blocks,
        RECORD_ROUNDS=-(-blocks // warps),
        NORMED=normed,
        RECORDED=recorded(head_dim),
        put=store_exact if exact else store,
        QUANTIZED=kind == "q8_0",
        ROW_WORDS=form.row_words,
        STEP_WORDS=form.step_words,
        KEPT=kept,
        KEPT_ROUNDS=-(-2 * kept // warps),
        dot=own.dot,
        pair=own.pair,
        keep=own.keep,
    )
    floats, words = "float32[::1]", "int32[::1]"
    types = [floats] * 5 + [words] * 3 + [floats] * 2 + [words, floats, "uint8[::1]", "int32", "float32", "float32"]
    return Kernel(function, f"void({', '.join(types)})")
