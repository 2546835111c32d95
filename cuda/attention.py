"""Attention of one token over the cache on the device: rotation, storing and the weighted sum in one launch.

    qkv        f32 [(heads + 2 kv_heads) * head_dim], as the products leave it, with biases added
    keys       int32 words of a layer's [kv_heads, rows, head_dim], in a form of kv_cache.py; so are values
    parts      f32 [kv_heads, spans, heads of a block * head_dim]: a span's weighted sums, not divided by the weights
    part_sums  f32 [kv_heads, spans, 2 * heads of a block]: each head's highest score, then the sums of the weights
    state      int32: the position of this token is state[POSITION], so that one captured launch serves every token

A block serves one key-value head, all query heads that share it, and one span of the context; blockIdx is
(kv head, span). attention_shape.py says how many spans a grid has. A span is whole tiles, at least SPAN positions;
blocks that a context does not need yet end at once. The block whose span holds the new position also stores its
key and value (attention_vectors.py). Tiles of keys and values are copied to shared memory, each byte once (kv_tile.py):
the next keys are loaded into registers during the weighted sum, the values during the softmax. Nothing after the
last position is read. Within a span, tiles go through an online softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867); the block that ends last merges the spans (Dao's flash-decoding, `_merge`), which needs
no second launch. The result is written as floats, and as records if a head is a multiple of 32.
"""

import math
from typing import Any

import numpy as np
from bridge.cuda import attention_shape, attention_vectors
from bridge.cuda.activations import store, store_exact
from bridge.cuda.compiler import recipe
from bridge.cuda.intrinsics import (
    ALIGNED,
    bits,
    bits_float,
    block_x,
    block_y,
    device_function,
    float_bits,
    launch_dependents,
    launches_wait,
    load_16,
    mad,
    put_4,
    put_16,
    shared_4,
    shared_16,
    shared_16_further,
    thread_x,
    warp_max,
    warp_sum,
)
from bridge.cuda.kv_cache import KVForm
from bridge.cuda.kv_tile import functions
from bridge.cuda.launch import Kernel
from bridge.cuda.unroll import expand, registers, unroll
from numba import cuda

POSITION, TOKEN, STEP, STATE = 0, 1, 2, 4  # words of `state`, and its size

# set by `kernel`; what is not explained here is in attention_shape.py
# query heads of a block and their size; positions of a tile; threads
SPAN = HEADS = HEAD_DIM = TILE = BLOCK = WARPS = 0
PADDED = 0  # heads, the last one repeated to fill the last chunk
TILE_WORDS = SCORE_WORDS = WEIGHT_WORDS = 0
SHARE = CHUNKS = UNITS = SUBSETS = SETS = SLICES = SLICE = MERGERS = 0
MERGED = 4  # spans whose sums a thread loads together
QUADS = FOURS = 0  # quads (16 bytes) of a row, and groups of four numbers in a quad
SCORE_ROUNDS = HEAD_ROUNDS = RECORDS = RECORD_ROUNDS = 0
RECORDED = DEPENDENT = False
put: Any = None
turn: Any = None
fetch: Any = None
stage: Any = None
quad_of: Any = None
floats: Any = None
four: Any = None
keep: Any = None
merge: Any = None
summed: Any = None

float32 = np.float32
int32: Any = np.int32
_LOW = np.float32(-np.inf)


def recorded(head_dim: int) -> bool:
    """Whether the kernel writes records of its result: no block of 32 may span two heads."""
    return head_dim % 32 == 0


def _attend(qkv, q_norm, k_norm, cos, sin, keys, values, state, parts, part_sums, counters, out, records,
            rows, eps, scale):  # fmt: skip
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    thread = int32(cuda.threadIdx.x)
    warp = thread >> 5
    lane = thread & 31
    h = int32(cuda.blockIdx.x)
    span = int32(cuda.blockIdx.y)
    kv_heads = int32(cuda.gridDim.x)
    spans = int32(cuda.gridDim.y)
    position = state[POSITION]
    # what is needed until the end is pinned to 32 bits: Numba widens sums and products, and registers are scarce
    length = int32(position + 1)
    size = max(SPAN, (length + spans - 1) // spans)
    size = int32((size + TILE - 1) // TILE * TILE)
    active = int32((length + size - 1) // size)
    if span >= active:
        return
    first = int32(span * size)
    last = int32(min(length, first + size))
    begin = int32(h * rows + first)  # rows of the cache
    stop = int32(h * rows + last)
    all_rows = int32(kv_heads * rows)

    tile = cuda.shared.array(TILE_WORDS, int32, ALIGNED)
    vector = cuda.shared.array((PADDED + 1) * HEAD_DIM, float32, ALIGNED)  # queries, then the key, later the result
    scores = cuda.shared.array(SCORE_WORDS, float32)
    weight = cuda.shared.array(WEIGHT_WORDS, float32, ALIGNED)
    top = cuda.shared.array(PADDED, float32)
    total = cuda.shared.array(PADDED, float32)
    factor = cuda.shared.array(PADDED, float32)
    flag = cuda.shared.array(2, int32)

    # load the queries, and the key if this block stores it, to shared memory
    newest = last == length
    count = PADDED + 1 if newest else PADDED
    if thread == 0:
        flag[1] = active
    if thread < PADDED:
        top[thread] = _LOW
        total[thread] = float32(0)
    for i in range(thread, int32(WEIGHT_WORDS), int32(BLOCK)):  # some places belong to no head
        put_4(weight, i, int32(0))
    turn(vector, qkv, q_norm, k_norm, cos, sin, h, kv_heads, position, count, eps)
    if newest:
        keep(vector, qkv, keys, values, h, kv_heads, rows, position)
        cuda.syncthreads()  # also makes what was just stored visible to this block

    dot = registers()
    score = registers()
    acc = registers()  # the weighted sums of this thread's heads and columns
    for j in unroll(SHARE):
        for e in unroll(4):
            acc[j, e] = float32(0)
    held = fetch(keys, begin, stop, all_rows)
    for row in range(begin, stop, int32(TILE)):
        here = min(int32(stop - row), int32(TILE))  # positions of this tile
        stage(tile, held)
        cuda.syncthreads()
        # scores: a thread for a position, some heads and a slice of the columns
        thread = bits(thread_x(), 0, BLOCK - 1)
        for r in unroll(SCORE_ROUNDS):
            item = int32((thread >> 5) + r * WARPS)
            set = int32(item % SETS * 32)
            chunk = int32(item // SETS % CHUNKS)
            part = int32(item // (SETS * CHUNKS))
            p = int32(set + (thread & 31))
            if part < SLICES and set < here and p < TILE:
                for j in unroll(SHARE):
                    dot[j] = float32(0)
                column = int32(part * SLICE)
                for quad in range(column, min(int32(column + SLICE), int32(QUADS))):
                    words = quad_of(tile, p, quad)
                    query = mad(chunk, SHARE * UNITS, int32(quad * FOURS))
                    for i in unroll(FOURS):
                        x = floats[i](words)
                        for j in unroll(SHARE):
                            y = shared_16_further(vector, query, j * UNITS + i)
                            for e in unroll(4):
                                dot[j] += x[e] * bits_float(y[e])
                # computed again: registers are scarce
                thread = bits(thread_x(), 0, BLOCK - 1)
                item = int32((thread >> 5) + r * WARPS)
                place = mad(int32(item // SETS), SHARE * TILE, int32(item % SETS * 32 + (thread & 31)))
                for j in unroll(SHARE):
                    put_4(scores, int32(place + j * TILE), float_bits(dot[j]))
        cuda.syncthreads()
        held = fetch(values, row, stop, all_rows)  # not earlier: the scores need the registers
        # softmax so far, one warp per head; spare warps read nothing that others store
        thread = bits(thread_x(), 0, BLOCK - 1)
        lane = int32(thread & 31)
        for r in unroll(HEAD_ROUNDS):
            j = int32((thread >> 5) + r * WARPS)
            high = _LOW
            before = _LOW
            for i in unroll(SETS):
                score[i] = _LOW
            if j < PADDED:
                before = bits_float(shared_4(top, j))
                for i in unroll(SETS):
                    if i * 32 + lane < here:
                        x = float32(0)
                        for part in unroll(SLICES):
                            place = mad(j, TILE, int32(part * (CHUNKS * SHARE * TILE) + i * 32 + lane))
                            x += bits_float(shared_4(scores, place))
                        score[i] = x * scale
                    high = max(high, score[i])
            high = max(before, warp_max(high))
            sum = float32(0)
            if j < PADDED:
                place = int32(j // SHARE * 4 + j % SHARE)
                for i in unroll(SETS):
                    w = math.exp(score[i] - high)
                    sum += w
                    if i * 32 + lane < TILE:
                        put_4(weight, mad(int32(i * 32 + lane), 4 * CHUNKS, place), float_bits(w))
            sum = warp_sum(sum)
            if j < PADDED and lane == 0:
                shrunk = math.exp(before - high)
                put_4(factor, j, float_bits(shrunk))
                put_4(total, j, float_bits(bits_float(shared_4(total, j)) * shrunk + sum))
                put_4(top, j, float_bits(high))
        stage(tile, held)
        cuda.syncthreads()
        if row + TILE < stop:
            held = fetch(keys, int32(row + TILE), stop, all_rows)
        # the weighted sum: a thread for 4 columns, some heads and a subset of the positions
        thread = bits(thread_x(), 0, BLOCK - 1)
        unit = int32(thread % UNITS)
        own = int32(thread // UNITS % CHUNKS)
        subset = int32(thread // (UNITS * CHUNKS))
        if subset < SUBSETS:
            for j in unroll(SHARE):
                shrunk = bits_float(shared_4(factor, mad(own, SHARE, j)))
                for e in unroll(4):
                    acc[j, e] *= shrunk
            for p in range(subset, here, int32(SUBSETS)):
                weights = shared_16(weight, mad(p, CHUNKS, own))
                values_here = four(tile, p, unit)
                for j in unroll(SHARE):
                    for e in unroll(4):
                        acc[j, e] += bits_float(weights[j]) * values_here[e]
        cuda.syncthreads()

    # add up the subsets in the tile's memory
    h = block_x()
    span = block_y()
    active = flag[1]
    thread = bits(thread_x(), 0, BLOCK - 1)
    warp = int32(thread >> 5)
    lane = int32(thread & 31)
    unit = int32(thread % UNITS)
    own = int32(thread // UNITS % CHUNKS)
    subset = int32(thread // (UNITS * CHUNKS))
    for j in unroll(SHARE):
        if subset < SUBSETS and own * SHARE + j < HEADS:
            at = (subset * HEADS + own * SHARE + j) * UNITS + unit
            put_16(
                tile,
                int32(at),
                (float_bits(acc[j, 0]), float_bits(acc[j, 1]), float_bits(acc[j, 2]), float_bits(acc[j, 3])),
            )
    cuda.syncthreads()
    pieces = SUBSETS
    if active > 1:
        # store this span's result; the last block of a head to get here merges the spans
        to = h * spans + span
        for i in range(thread, HEADS * HEAD_DIM, BLOCK):
            parts[to * (HEADS * HEAD_DIM) + i] = summed(tile, i, SUBSETS)
        if thread < HEADS:
            part_sums[to * (2 * HEADS) + thread] = top[thread]
            part_sums[to * (2 * HEADS) + HEADS + thread] = total[thread]
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
        merge(tile, parts, part_sums, top, total, h, spans, active)
        pieces = MERGERS

    to = h * HEADS * HEAD_DIM
    for i in range(thread, HEADS * HEAD_DIM, BLOCK):
        y = summed(tile, i, pieces) / total[i // HEAD_DIM]
        out[to + i] = y
        vector[i] = y
    if RECORDED:
        cuda.syncthreads()
        for r in range(RECORD_ROUNDS):
            i = min(r * WARPS + warp, RECORDS - 1)
            put(vector[i * 32 + lane], h * RECORDS + i, 0, records)


def _summed(tile, i, count):
    """The sum of float i of `count` pieces."""
    x = float32(0)
    for piece in range(count):
        x += bits_float(tile[piece * (HEADS * HEAD_DIM) + i])
    return x


def _merge(tile, parts, part_sums, top, total, h, spans, active):
    """Copy MERGERS pieces: weighted sums to `tile`, highest scores and weights of the heads to `top` and `total`."""
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
            for u in unroll(MERGED):  # these loads overlap
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


@recipe
def kernel(
    head_dim: int, group: int, rotated: int, neighbours: bool, normed: bool, exact: bool, kind: str = "f16",
    dependent: bool = False,
) -> Kernel:  # fmt: skip
    """The kernel for heads of a shape. `neighbours`: rotary pairs are (2i, 2i + 1); `normed`: q and k are normalized;
    `exact`: the records are float32; `kind`: how keys and values are stored."""
    form = KVForm(kind, head_dim)
    s = attention_shape.shape(form, group)
    records = group * head_dim // 32
    name = f"{head_dim}_{group}_{rotated}_{int(neighbours)}{int(normed)}{int(exact)}_{kind}{'_dependent' * dependent}"
    function = expand(
        _attend, name, **s.constants, SPAN=attention_shape.SPAN, TILE_WORDS=s.tile_words,
        SCORE_WORDS=s.part_words, WEIGHT_WORDS=s.weight_words, SLICE=-(-s.quads // s.slices),
        FOURS=s.units // s.quads, SCORE_ROUNDS=-(-s.sets * s.chunks * s.slices // s.warps), RECORDS=records,
        RECORD_ROUNDS=-(-records // s.warps), DEPENDENT=dependent, RECORDED=recorded(head_dim),
        put=store_exact if exact else store,
        summed=device_function(expand(_summed, f"{head_dim}_{group}", **s.constants)),
        **attention_vectors.functions(s, rotated, neighbours, normed), **functions(s),
        merge=device_function(expand(_merge, f"{head_dim}_{group}_{s.threads}", **s.constants), True),
    )  # fmt: skip
    reals, words = "float32[::1]", "int32[::1]"
    types = [reals] * 5 + [words] * 3 + [reals] * 2 + [words, reals, "uint8[::1]", "int32", "float32", "float32"]
    return Kernel(function, f"void({', '.join(types)})", dependent=dependent)
