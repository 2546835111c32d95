"""Attention of one token over the cache on the device: rotation, storing and the weighted sum in one launch.

    qkv        f32 [(heads + 2 kv_heads) * head_dim], as the products leave it, with biases added; of layers that store
               nothing, and read what another one has stored, [heads * head_dim]
    keys       int32 words of a layer's [kv_heads, rows, head_dim], in a form of kv_cache.py; so are values
    sinks      f32 [heads]: of each query head one more score, of no position
    temperatures  f32 [rows]: what the scores of the token in each position are multiplied by
    parts      f32 [kv_heads, spans, heads of a block * head_dim]: a span's weighted sums, not divided by the weights
    part_sums  f32 [kv_heads, spans, 2 * heads of a block]: each head's highest score, then the sums of the weights
    state      int32: the position of this token is state[POSITION], so that one captured launch serves every token

A block serves one key-value head, all query heads that share it, and one span of the context, or of the window or chunk
that the token attends to; blockIdx is (kv head, span). attention_shape.py says how many spans a grid has. A span is
whole tiles, at least SPAN positions; blocks that a context does not need yet end at once. The first span begins at a
multiple of FIRST positions, up to 3 before a window, whose weights are 0. The block whose span holds the new position
also stores its key and value (attention_vectors.py). Tiles of keys and values are copied to shared memory, each byte
once (kv_tile.py): the next keys are loaded into registers during the weighted sum, the values during the softmax.
Nothing after the last position is read. Within a span, tiles go through an online softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867): by attention_mma.py on tensor cores, otherwise by attention_tile.py. The block that ends last merges
the spans (attention_spans.py), which needs no second launch. The result is written as floats, and as records if a head
is a multiple of 32.
"""

from typing import Any

import numpy as np
from bridge.cuda.attention import attention_mma, attention_shape, attention_spans, attention_tile, attention_vectors
from bridge.cuda.attention.attention_kind import AttentionKind
from bridge.cuda.attention.kv_cache import KVForm
from bridge.cuda.product.activations import store, store_exact
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import (
    ALIGNED,
    bits,
    block_x,
    block_y,
    launch_dependents,
    launches_wait,
    put_4,
    thread_x,
)
from bridge.cuda.toolchain.last_block import last_block
from bridge.cuda.toolchain.launch import Kernel
from bridge.cuda.toolchain.unroll import expand, gathered, registers, unroll
from numba import cuda

POSITION, TOKEN, STEP, STATE = 0, 1, 2, 4  # words of `state`, and its size
FIRST = 4  # rows whose steps fill whole 16 bytes

# set by `kernel`: the least positions of a span; query heads of a block, with those repeated, and their size; positions
# of a tile; threads
SPAN = HEADS = PADDED = HEAD_DIM = TILE = BLOCK = WARPS = 0
TILE_WORDS = SCORE_WORDS = WEIGHT_WORDS = QUERY_PITCH = 0  # of shared memory; words from one query to the next
SUBSETS = MERGERS = SUMS = 0  # pieces of the weighted sums; those of a thread
RECORDS = RECORD_ROUNDS = 0
RECORDED = DEPENDENT = CORES = False
WINDOWED = CHUNKED = SINKS = TEMPERED = STORES = False  # see attention_kind.py
put: Any = None
turn: Any = None
keep: Any = None
split: Any = None
fetch: Any = None
stage: Any = None
score: Any = None
weigh: Any = None
add: Any = None
put_sums: Any = None
store_span: Any = None
merge: Any = None
summed: Any = None

float32 = np.float32
int32: Any = np.int32
_LOW = np.float32(-np.inf)


def recorded(head_dim: int) -> bool:
    """Whether the kernel writes records of its result: no block of 32 may span two heads."""
    return head_dim % 32 == 0


def _attend(qkv, q_norm, k_norm, cos, sin, temperatures, sinks, keys, values, state, parts, part_sums, counters, out,
            records, rows, window, eps, scale, cap):  # fmt: skip
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    thread = int32(cuda.threadIdx.x)
    kv_head = int32(cuda.blockIdx.x)
    span = int32(cuda.blockIdx.y)
    kv_heads = int32(cuda.gridDim.x)
    spans = int32(cuda.gridDim.y)
    position = state[POSITION]
    # pinned to 32 bits: Numba widens sums and products, and registers are scarce
    length = int32(position + 1)
    seen = int32(0)  # the first position that the token attends to
    if CHUNKED:
        seen = int32(position // window * window)
    elif WINDOWED:
        seen = max(int32(length - window), int32(0))
    begin = int32(seen & -FIRST)
    size = max(SPAN, (length - begin + spans - 1) // spans)
    size = int32((size + TILE - 1) // TILE * TILE)
    active = int32((length - begin + size - 1) // size)
    if span >= active:
        return
    first = int32(begin + span * size)
    last = int32(min(length, first + size))
    row = int32(kv_head * rows + first)  # of the cache
    seen = int32(kv_head * rows + seen)
    stop = int32(kv_head * rows + last)
    all_rows = int32(kv_heads * rows)

    # see attention_tile.py; behind the queries lies the key, later the result
    tile = cuda.shared.array(TILE_WORDS, int32, ALIGNED)
    vector = cuda.shared.array((PADDED + 1) * QUERY_PITCH, float32, ALIGNED)
    scores = cuda.shared.array(SCORE_WORDS, float32)
    weights = cuda.shared.array(WEIGHT_WORDS, float32, ALIGNED)
    highest = cuda.shared.array(PADDED, float32)
    total = cuda.shared.array(PADDED, float32)
    shrink = cuda.shared.array(PADDED, float32)
    used = cuda.shared.array(1, int32)  # spans

    newest = STORES and last == length
    count = PADDED + 1 if newest else PADDED
    if TEMPERED:
        scale *= temperatures[position]
    if thread == 0:
        used[0] = active
    if thread < PADDED:
        highest[thread] = _LOW
        total[thread] = float32(0)
        if SINKS and span == 0:
            highest[thread] = sinks[kv_head * HEADS + min(thread, HEADS - 1)]
            total[thread] = float32(1)
    for i in range(thread, int32(WEIGHT_WORDS), int32(BLOCK)):  # some places belong to no head
        put_4(weights, i, int32(0))
    turn(vector, qkv, q_norm, k_norm, cos, sin, kv_head, kv_heads, position, count, eps)
    if newest:
        keep(vector, qkv, keys, values, kv_head, kv_heads, rows, position)
        cuda.syncthreads()  # also makes what was just stored visible to this block
    if CORES:
        split(vector)

    zero = registers()
    for i in unroll(SUMS):
        zero[i] = float32(0)
    sums = gathered(zero, SUMS)
    held = fetch(keys, row, stop, all_rows)
    while row < stop:
        here = min(int32(stop - row), int32(TILE))  # positions of this tile
        stage(tile, held)
        cuda.syncthreads()
        score(tile, vector, scores, here)
        cuda.syncthreads()
        held = fetch(values, row, stop, all_rows)  # not earlier: the scores need the registers
        weigh(scores, weights, highest, total, shrink, int32(seen - row), here, scale, cap)
        stage(tile, held)
        cuda.syncthreads()
        row = int32(row + TILE)
        if row < stop:
            held = fetch(keys, row, stop, all_rows)
        sums = add(tile, weights, shrink, here, sums)
        cuda.syncthreads()
    put_sums(tile, sums)
    cuda.syncthreads()

    kv_head = block_x()
    active = used[0]
    pieces = SUBSETS
    if active > 1:
        store_span(tile, highest, total, parts, part_sums, kv_head * spans + block_y())
        if not last_block(counters, kv_head, active):
            return
        merge(tile, parts, part_sums, highest, total, kv_head * spans, active)
        pieces = MERGERS
    thread = bits(thread_x(), 0, BLOCK - 1)
    begin = kv_head * HEADS * HEAD_DIM
    for i in range(thread, HEADS * HEAD_DIM, BLOCK):
        y = summed(tile, i, pieces) / total[i // HEAD_DIM]
        out[begin + i] = y
        vector[i] = y
    if RECORDED:
        cuda.syncthreads()
        for r in range(RECORD_ROUNDS):
            i = min(r * WARPS + (thread >> 5), RECORDS - 1)
            put(vector[i * 32 + (thread & 31)], kv_head * RECORDS + i, 0, records)


@recipe
def kernel(
    kind: AttentionKind, exact: bool, kv: str = "f16", dependent: bool = False, capability: tuple[int, int] = (0, 0)
) -> Kernel:
    """The kernel for attention of a kind. `exact`: the records are float32; `kv`: how keys and values are stored;
    `capability`: the compute capability that it is for, which decides about tensor cores."""
    form = KVForm(kv, kind.head_dim)
    s = attention_shape.shape(form, kind.group, capability)
    records = kind.group * kind.head_dim // 32
    name = f"{kind.name}_{kv}" + "_exact" * exact + "_mma" * s.cores + "_dependent" * dependent
    tiles = attention_tile.functions(s, kind.windowed, kind.capped)
    if s.cores:
        tiles |= attention_mma.functions(s, kind.windowed, kind.capped)
    function = expand(
        _attend, name, **s.constants, SPAN=attention_shape.SPAN, TILE_WORDS=s.tile_words,
        SCORE_WORDS=s.part_words, WEIGHT_WORDS=s.weight_words, CORES=s.cores,
        RECORDS=records, RECORD_ROUNDS=-(-records // s.warps), WINDOWED=kind.windowed, CHUNKED=kind.chunked,
        SINKS=kind.sinks, TEMPERED=kind.tempered, STORES=kind.stores,
        DEPENDENT=dependent, RECORDED=recorded(kind.head_dim), put=store_exact if exact else store,
        **attention_vectors.functions(s, kind), **attention_spans.functions(s) | tiles,
    )  # fmt: skip
    reals, words, numbers = "float32[::1]", "int32[::1]", ["int32"] * 2 + ["float32"] * 3
    types = [reals] * 7 + [words] * 3 + [reals] * 2 + [words, reals, "uint8[::1]", *numbers]
    oldest = (8, 0) if s.cores else (7, 5)
    return Kernel(function, f"void({', '.join(types)})", s.registers, oldest, dependent)
