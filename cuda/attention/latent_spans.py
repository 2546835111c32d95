"""Attention of one token over rows that all heads share: softmax(scale q . [c, r]) c, span by span of the context.

    queries    f32 [heads, width]
    cache      int32 words of rows [c, r], in a form of kv_cache.py; width: rank + rotated numbers, with zeros up to a
               multiple of 32
    parts      f32 [groups, spans, heads of a group, width]: a span's weighted sums, not divided by the weights; columns
               from the rank on mean nothing
    part_sums  f32 [groups, spans, 2 * heads of a group]: each head's highest score, then the sums of the weights

A block serves a group of up to 8 heads and a span; blockIdx is (group, span). It is attention.py's, but that keys and
values are one tile: each is copied to shared memory once, and the next one loaded into registers meanwhile. Groups read
the same rows at about the same time, so all but one find them in the L2 cache. The spans are merged by those who read
them (latent_heads.py): a last block alone would read 32 KB for each span of DeepSeek V2 Lite's 16 heads.

On tensor cores halves are multiplied, as attention_mma.py does it, but for two things:

    score   a warp: 8 positions, all heads, a slice of the columns; the slices are summed by `weigh`
    q8_0    becomes halves on its way to shared memory, which adds 2^-12 to the 2^-8 of its codes

Otherwise, and for f32, the functions are those of attention_tile.py. There the columns from the rank on are summed too.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from bridge.cuda.attention import attention_mma, attention_shape, attention_spans, attention_tile, kv_tile
from bridge.cuda.attention.attention import POSITION
from bridge.cuda.attention.attention_shape import AttentionShape
from bridge.cuda.attention.attention_tile import put_head
from bridge.cuda.attention.kv_cache import KVForm, width_of
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import (
    ALIGNED,
    SIGN_BITS,
    bits,
    bits_float,
    block_x,
    block_y,
    device_function,
    float_bits,
    fma,
    high_half,
    launch_dependents,
    launches_wait,
    load_4f,
    load_16,
    low_half,
    mad,
    mma_f16,
    pack_f16,
    prmt,
    put_4,
    put_16,
    shared_4,
    shared_16,
    shl,
    thread_x,
    warp_max,
    warp_sum,
    xor,
)
from bridge.cuda.toolchain.launch import Kernel
from bridge.cuda.toolchain.unroll import expand, gathered, registers, unroll
from numba import cuda

GROUP = 8  # heads of a block, at most: rows 0..7 of mma's A
_CORES_ROWS = 16  # positions of a tile on tensor cores
_TILE = 20_000  # bytes of a tile, at most
_SHARED = 48 << 10  # bytes of shared memory that a kernel may declare

# set by `kernel` and `_core_functions`; see attention_shape.py
HEADS = PADDED = ALL_HEADS = HEAD_DIM = ROW_UNITS = TILE = BLOCK = SPAN = 0
TILE_WORDS = SCORE_WORDS = WEIGHT_WORDS = SUMS = 0
PITCH = QUERY_PITCH = WEIGHTS = SETS = SLICES = SLICE = QUARTERS = 0
CODES = LOADS = STEP_WORDS = 0  # of q8_0: quads (16 codes) of a row; loads of a thread; words of a row's steps
TEMPERED = DEPENDENT = CORES = False
split: Any = None
fetch: Any = None
stage: Any = None
score: Any = None
weigh: Any = None
add: Any = None
put_sums: Any = None
store_span: Any = None
span_size: Any = None

float32 = np.float32
int32: Any = np.int32
_LOW = np.float32(-np.inf)


@dataclass(frozen=True)
class LatentShape(AttentionShape):
    """A block's shape; `form` is that of a tile, which on tensor cores has halves where the cache may have q8_0."""

    rank: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block; on tensor cores the columns are shared by warps."""
        return attention_shape.THREADS if self.cores else super().threads

    @property
    def registers(self) -> int:
        """Registers that a thread may have: with fewer, some are spilled as the next tile is loaded early."""
        return 128 if self.threads <= 512 else 64

    @property
    def column_groups(self) -> int:
        """Groups of 16 columns that are summed."""
        return self.rank // 16

    @property
    def quarters(self) -> int:
        """Fours of quads of a row."""
        return self.quads // 4

    @property
    def slices(self) -> int:
        """Parts of a row that different warps multiply with the queries."""
        return min(self.warps // (self.rows // 8), self.quarters) if self.cores else super().slices

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        words = self.tile_words + self.part_words + self.weight_words + 3 * GROUP
        return 4 * (words + self.chunks * self.share * self.query_pitch)


def group_of(heads: int) -> int:
    """Heads of a group: so many that groups are alike, where they can be."""
    return -(-heads // -(-heads // GROUP))


@cache
def shape(kind: str, heads: int, rank: int, rotated: int, capability: tuple[int, int]) -> LatentShape | None:
    """The shape of a block for GPUs of a compute capability; None where there is none."""
    width, group = width_of(rank, rotated), group_of(heads)
    if capability >= (8, 0) and kind != "f32":
        chosen = LatentShape(KVForm("f16", width), group, _CORES_ROWS, True, rank)
    else:
        form = KVForm(kind, width)
        quads = form.row_words // 4 | 1
        rows = min(attention_shape.ROWS, 1 << (_TILE // (16 * quads + 4 * form.step_words)).bit_length() - 1)
        chosen = LatentShape(form, group, rows, False, rank)
    fits = rank % 16 == 0 and rank <= 512 and chosen.threads <= 1024 and chosen.shared <= _SHARED
    return chosen if fits else None


def _span_size(length, spans):
    """Positions of a span: whole tiles."""
    size = max(int32(SPAN), int32(int32(length + spans - 1) // spans))
    return int32(int32(size + TILE - 1) // TILE * TILE)


def span_sizes(tile: int) -> Any:
    """The device function span_size(length, spans) for tiles of so many positions."""
    return device_function(expand(_span_size, str(tile), SPAN=attention_shape.SPAN, TILE=tile))


def _attend(queries, cache, temperatures, state, parts, part_sums, rows, scale):
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    thread = int32(cuda.threadIdx.x)
    spans = int32(cuda.gridDim.y)
    position = state[POSITION]
    length = int32(position + 1)
    size = span_size(length, spans)
    row = int32(block_y() * size)
    stop = int32(min(length, int32(row + size)))
    if row >= stop:
        return
    if TEMPERED:
        scale = scale * temperatures[position]

    tile = cuda.shared.array(TILE_WORDS, int32, ALIGNED)
    queries_here = cuda.shared.array(PADDED * QUERY_PITCH, int32, ALIGNED)
    scores = cuda.shared.array(SCORE_WORDS, float32)
    weights = cuda.shared.array(WEIGHT_WORDS, float32, ALIGNED)
    highest = cuda.shared.array(PADDED, float32)
    total = cuda.shared.array(PADDED, float32)
    shrink = cuda.shared.array(PADDED, float32)

    if thread < PADDED:
        highest[thread] = _LOW
        total[thread] = float32(0)
    for i in range(thread, int32(WEIGHT_WORDS), int32(BLOCK)):  # some places belong to no head
        put_4(weights, i, int32(0))
    for i in range(thread, int32(TILE_WORDS), int32(BLOCK)):  # some are no sum's
        put_4(tile, i, int32(0))
    held = fetch(cache, row, stop, rows)
    first_head = int32(block_x() * HEADS)
    for i in range(thread, int32(PADDED * ROW_UNITS), int32(BLOCK)):
        head = min(int32(first_head + min(int32(i // ROW_UNITS), int32(HEADS - 1))), int32(ALL_HEADS - 1))
        unit = int32(i % ROW_UNITS)
        target = mad(int32(i // ROW_UNITS), QUERY_PITCH // 4, unit)
        put_16(queries_here, target, load_16(queries, mad(head, ROW_UNITS, unit)))
    cuda.syncthreads()
    if CORES:
        split(queries_here)
        cuda.syncthreads()

    zero = registers()
    for i in unroll(SUMS):
        zero[i] = float32(0)
    sums = gathered(zero, SUMS)
    while row < stop:
        count = min(int32(stop - row), int32(TILE))  # positions of this tile
        stage(tile, held)
        cuda.syncthreads()
        row = int32(row + TILE)
        if row < stop:
            held = fetch(cache, row, stop, rows)
        score(tile, queries_here, scores, count)
        cuda.syncthreads()
        weigh(scores, weights, highest, total, shrink, int32(0), count, scale, float32(0))
        cuda.syncthreads()
        sums = add(tile, weights, shrink, count, sums)
        cuda.syncthreads()
    put_sums(tile, sums)
    cuda.syncthreads()
    store_span(tile, highest, total, parts, part_sums, mad(block_x(), spans, block_y()))


def _fetch(cache, row, stop, rows):
    """This thread's quads of codes of a tile that begins at `row`, each with the word that has its step.

    The cache has `rows` rows in all. For rows from `stop` on, the last quad before them is loaded.
    """
    quad = registers()
    first = mad(row, CODES, bits(thread_x(), 0, BLOCK - 1))
    last = int32(stop * CODES - 1)
    for k in unroll(LOADS):
        i = min(int32(first + k * BLOCK), last)
        block = int32(int32(i % CODES) >> 1)
        word = mad(rows, 4 * CODES, mad(int32(i // CODES), STEP_WORDS, int32(block >> 1)))
        quad[k] = (*load_16(cache, i), bits(float_bits(load_4f(cache, word)), shl(block & 1, 4), 0xFFFF))
    return gathered(quad, LOADS)


def _stage(tile, held):
    """Write what `fetch` returned to shared memory, as halves."""
    thread = bits(thread_x(), 0, BLOCK - 1)
    x = registers()
    word = registers()
    for k in unroll(LOADS):
        i = int32(thread + k * BLOCK)
        if i < TILE * CODES:
            step = low_half(held[k][4])
            zero = step * float32(-32768 - 128)  # exact
            for w in unroll(4):
                codes = xor(held[k][w], SIGN_BITS)  # each plus 128
                for b in unroll(4):  # in the mantissa of 32768, a code needs no conversion
                    x[b] = fma(bits_float(prmt(codes, 0x47000000, 0x7404 + 16 * b)), step, zero)
                word[2 * w] = pack_f16(x[0], x[1])
                word[2 * w + 1] = pack_f16(x[2], x[3])
            index = mad(int32(i // CODES), PITCH, int32(i % CODES * 2))
            put_16(tile, index, (word[0], word[1], word[2], word[3]))
            put_16(tile, int32(index + 1), (word[4], word[5], word[6], word[7]))


def _score(tile, queries, scores, count):
    """Parts of the scores of a tile's positions, [SLICES, HEADS, TILE]; see attention_mma.py."""
    lane = bits(thread_x(), 0, 31)
    warp = bits(thread_x(), 5, BLOCK // 32 - 1)
    t = bits(lane, 0, 3)
    g = bits(lane, 2, 7)
    first = int32(warp % SETS * 8)
    part = int32(warp // SETS)
    key_at = mad(int32(first + g), PITCH, mad(part, 4 * SLICE, t))
    query_at = mad(min(g, int32(HEADS - 1)), QUERY_PITCH // 4, mad(part, 8 * SLICE, int32(2 * t)))
    if part < SLICES:
        c = (float32(0), float32(0), float32(0), float32(0))
        for j in unroll(SLICE):
            if part * SLICE + j < QUARTERS:
                key = shared_16(tile, int32(key_at + 4 * j))
                even = shared_16(queries, int32(query_at + 8 * j))
                odd = shared_16(queries, int32(query_at + (8 * j + 1)))
                c = mma_f16(c, even[0], even[1], even[2], even[3], key[0], key[1])
                c = mma_f16(c, odd[0], odd[1], odd[2], odd[3], key[2], key[3])
        if g < HEADS:
            index = mad(mad(part, HEADS, g), TILE, int32(first + 2 * t))
            put_4(scores, index, float_bits(c[0] + c[2]))
            put_4(scores, int32(index + 1), float_bits(c[1] + c[3]))


def _weigh(scores, weights, highest, total, shrink, low, count, scale, cap):
    """Weights of the first `count` of 16 positions, from `scale` times their scores; the others' are 0.

    A warp has a head, a lane two positions.
    """
    lane = bits(thread_x(), 0, 31)
    head = bits(thread_x(), 5, BLOCK // 32 - 1)
    score = registers()
    before = _LOW
    high = _LOW
    for i in unroll(2):
        score[i] = _LOW
    if head < HEADS:
        before = bits_float(shared_4(highest, head))
        for i in unroll(2):
            if int32(2 * lane + i) < count:
                x = float32(0)
                for part in unroll(SLICES):
                    x += bits_float(shared_4(scores, mad(head, TILE, int32(2 * lane + (part * HEADS * TILE + i)))))
                score[i] = x * scale
            high = max(high, score[i])
    high = max(before, warp_max(high))
    sum = float32(0)
    if head < HEADS:
        one = math.exp(score[0] - high)
        other = math.exp(score[1] - high)
        sum += one + other
        if 2 * lane < TILE:
            near = pack_f16(one, other)
            index = mad(head, WEIGHTS, mad(bits(lane, 0, 3), 4, int32(2 * bits(lane, 2, 1))))
            put_4(weights, index, near)
            put_4(weights, int32(index + 1), pack_f16(one - low_half(near), other - high_half(near)))
    sum = warp_sum(sum)
    if head < HEADS and lane == 0:
        put_head(shrink, total, highest, head, before, high, sum)


@cache
def _core_functions(s: LatentShape, kind: str) -> dict[str, Any]:
    """What differs from attention_mma.py's functions, for a cache of a kind."""
    width = s.form.head_dim
    codes = width // 16
    scope = s.constants | {
        "QUARTERS": s.quarters, "SLICE": -(-s.quarters // s.slices), "SETS": s.rows // 8, "WEIGHTS": s.rows + 16,
        "CODES": codes, "LOADS": -(-s.rows * codes // s.threads),
        "STEP_WORDS": KVForm(kind, width).step_words,
    }  # fmt: skip
    name, own = f"latent_{kind}_{width}_{s.group}", [_score, _weigh, *([_fetch, _stage] if kind == "q8_0" else [])]
    tile = {name: kv_tile.functions(s)[name] for name in ("fetch", "stage")}
    return tile | {f.__name__[1:]: device_function(expand(f, name, **scope)) for f in own}


@recipe
def kernel(
    kind: str, heads: int, rank: int, rotated: int, tempered: bool, dependent: bool, capability: tuple[int, int]
) -> Kernel:
    """The kernel attend(queries, cache, temperatures, state, parts, part_sums, rows, scale) of a supported shape."""
    s = shape(kind, heads, rank, rotated, capability)
    assert s is not None
    width = s.form.head_dim
    name = f"latent_{kind}_{heads}_{rank}_{rotated}{'_mma' * s.cores}"
    tiles = (
        attention_mma.functions(s, False, False) | _core_functions(s, kind)
        if s.cores
        else attention_tile.functions(s, False, False)
    )
    function = expand(
        _attend, name + "_tempered" * tempered + "_dependent" * dependent, **s.constants,
        ALL_HEADS=heads, ROW_UNITS=width // 4, TILE_WORDS=s.tile_words, SCORE_WORDS=s.part_words,
        WEIGHT_WORDS=s.weight_words, CORES=s.cores,
        TEMPERED=tempered, DEPENDENT=dependent, span_size=span_sizes(s.rows),
        **attention_spans.functions(s) | tiles,
    )  # fmt: skip
    reals, words = "float32[::1]", "int32[::1]"
    types = [reals, words, reals, words, reals, reals, "int32", "float32"]
    return Kernel(function, f"void({', '.join(types)})", s.registers, (8, 0) if s.cores else (7, 5), dependent)
