"""What attention on latent vectors does head by head for one token, before and after attention: two launches.

    absorb   queries = [K_h q_plain,h, q_rotated,h turned]; the cache gets [norm(c), r turned], a row of its own
    values   out_h = V_h a_h, a_h merged from what each span of the context gave (latent_spans.py)

A block multiplies 16 or 32 KB of a head's matrix by that head's vector, which lies in shared memory; blockIdx is
(piece of the rows, head). A row is read by a power of two of lanes, 16 bytes each at a time.

    weights  halves or f32 [heads, rows, columns], columns filled up with zeros to a multiple of 8

Blocks of one head merge the same spans, from the L2 cache: 128 KB each at 4096 positions, where a block that merged for
8 heads would read 1 MB alone.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from bridge.cuda.attention.attention import POSITION
from bridge.cuda.attention.kv_cache import KVForm, width_of
from bridge.cuda.attention.latent_spans import span_sizes
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import (
    ALIGNED,
    bits,
    bits_float,
    block_x,
    block_y,
    device_function,
    float_bits,
    high_half,
    launch_dependents,
    launches_wait,
    load_4f,
    load_16f,
    low_half,
    mad,
    prefetch_16,
    put_16,
    round_even,
    shared_16,
    store_1,
    store_2,
    store_4,
    stream_16,
    thread_x,
    to_half,
    warp_max,
    warp_sum,
)
from bridge.cuda.toolchain.launch import Kernel
from bridge.cuda.toolchain.unroll import expand, gathered, registers, unroll
from numba import cuda

from bridge.runtime.config.decoder_config import Latent

BLOCK = 256  # threads
_WARPS = BLOCK // 32
_TOGETHER = 8  # spans whose sums a thread loads at once
_ALL_LANES = 0xFFFFFFFF

# set by `kernel`s: sizes of a head; of its matrix; quads (16 bytes) of a row, lanes that read one
HEADS = GROUP = PLAIN = RANK = ROTATED = HALF = ROW = WIDTH = VECTOR = 0
ROWS = COLUMNS = QUADS = LANES = LANE_BITS = LOADS = ROUNDS = FOURS = 0
ROW_WORDS = STEP_WORDS = 0
UNITS = ROW_UNITS = MERGERS = 0
KIND = ""
HALVES = DEPENDENT = False
quads: Any = None
load: Any = None
first_row: Any = None
prefetch: Any = None
multiply: Any = None
keep: Any = None
span_size: Any = None

float32 = np.float32
int32: Any = np.int32
_LOW = np.float32(-np.inf)


class ByHead(NamedTuple):
    """How a block multiplies a head's matrix [rows, columns] of halves or f32."""

    rows: int
    columns: int  # a multiple of 8
    halves: bool
    in_flight: int  # loads of a thread

    @property
    def quads(self) -> int:
        """Loads of 16 bytes of a row."""
        return self.columns // (8 if self.halves else 4)

    @property
    def lanes(self) -> int:
        """Lanes that read a row: a power of two."""
        return min(32, self.quads & -self.quads)

    @property
    def loads(self) -> int:
        """Loads of a lane, of a row."""
        return self.quads // self.lanes

    @property
    def rounds(self) -> int:
        """Rows of a lane."""
        return max(1, self.in_flight // self.loads)

    @property
    def pieces(self) -> int:
        """Blocks of a head."""
        return -(-self.rows // (self.rounds * BLOCK // self.lanes))

    @property
    def supported(self) -> bool:
        """Whether a lane has registers for its loads."""
        return self.loads <= 8


def absorbing(latent: Latent, halves: bool) -> ByHead:
    """How K_h is multiplied."""
    return ByHead(latent.rank, -(-latent.plain // 8) * 8, halves, 4)


def valuing(latent: Latent, halves: bool) -> ByHead:
    """How V_h is multiplied: by fewer blocks, as each merges the spans of its head."""
    return ByHead(latent.value, latent.rank, halves, 8)


def _first_row():
    """The first of a lane's rows."""
    warp = mad(block_x(), ROUNDS * _WARPS, bits(thread_x(), 5, _WARPS - 1))
    return mad(warp, 32 // LANES, bits(thread_x(), LANE_BITS, 32 // LANES - 1))


def _quads(weights, head):
    """What a lane loads, or asks the L2 cache for: [ROUNDS, LOADS]."""
    quad = registers()
    for r in unroll(ROUNDS):
        row = min(int32(first_row() + r * _WARPS * (32 // LANES)), int32(ROWS - 1))
        place = mad(mad(head, ROWS, row), QUADS, bits(thread_x(), 0, LANES - 1))
        for k in unroll(LOADS):
            quad[r * LOADS + k] = load(weights, int32(place + k * LANES))
    return gathered(quad, ROUNDS * LOADS)


def _multiply(weights, x, head, y, y_at):
    """y[y_at + row] = a piece of a head's matrix times x, f32 in shared memory."""
    j = bits(thread_x(), 0, LANES - 1)
    total = registers()
    for r in unroll(ROUNDS):
        total[r] = float32(0)
    w = quads(weights, head)
    for k in unroll(LOADS):
        quad = int32(int32(j + k * LANES) * FOURS)
        for i in unroll(FOURS):
            four = shared_16(x, int32(quad + i))
            for r in unroll(ROUNDS):
                if HALVES:
                    total[r] += low_half(w[r * LOADS + k][2 * i]) * bits_float(four[0])
                    total[r] += high_half(w[r * LOADS + k][2 * i]) * bits_float(four[1])
                    total[r] += low_half(w[r * LOADS + k][2 * i + 1]) * bits_float(four[2])
                    total[r] += high_half(w[r * LOADS + k][2 * i + 1]) * bits_float(four[3])
                else:
                    for e in unroll(4):
                        total[r] += bits_float(w[r * LOADS + k][e]) * bits_float(four[e])
    for r in unroll(ROUNDS):
        for s in unroll(LANE_BITS):
            total[r] += cuda.shfl_xor_sync(_ALL_LANES, total[r], 1 << s)
        row = int32(first_row() + r * _WARPS * (32 // LANES))
        if j == 0 and row < ROWS:
            y[y_at + row] = total[r]


def _absorb(q, k, k_norm, cos, sin, weights, state, queries, cache, rows, eps):
    head = block_y()
    if DEPENDENT:
        launch_dependents()
        prefetch(weights, min(head, int32(HEADS - 1)))
        launches_wait()
    thread = bits(thread_x(), 0, BLOCK - 1)
    angle = mad(state[POSITION], HALF, thread)
    vector = cuda.shared.array(VECTOR, float32, ALIGNED)
    if head < HEADS:
        source = int32(head * (PLAIN + ROTATED))
        for i in range(thread, COLUMNS, BLOCK):
            vector[i] = load_4f(q, source + i) if i < PLAIN else float32(0)
        cuda.syncthreads()
        multiply(weights, vector, head, queries, int32(head * WIDTH))
        if block_x() == 0 and thread < HALF:
            x = load_4f(q, source + PLAIN + 2 * thread)
            y = load_4f(q, source + PLAIN + 2 * thread + 1)
            c = load_4f(cos, angle)
            s = load_4f(sin, angle)
            place = mad(head, WIDTH, int32(RANK + 2 * thread))
            queries[place] = x * c - y * s
            queries[place + 1] = x * s + y * c
    elif block_x() == 0:
        keep(k, k_norm, cos, sin, angle, vector, cache, state[POSITION], rows, eps)


def _keep(k, k_norm, cos, sin, angle, vector, cache, position, rows, eps):
    """Store the new row: its latent part normalized, the other turned. What fills it up is zero from the start."""
    thread = bits(thread_x(), 0, BLOCK - 1)
    warp = thread >> 5
    lane = thread & 31
    parts = cuda.shared.array(_WARPS, float32)
    squares = float32(0)
    for i in range(thread, RANK, BLOCK):
        squares += load_4f(k, i) * load_4f(k, i)
    squares = warp_sum(squares)
    if lane == 0:
        parts[warp] = squares
    cuda.syncthreads()
    squares = float32(0)
    for i in range(_WARPS):
        squares += parts[i]
    inverse = float32(1) / math.sqrt(squares / float32(RANK) + eps)
    for i in range(thread, RANK, BLOCK):
        vector[i] = load_4f(k, i) * inverse * k_norm[i]
    if thread < HALF:
        x = load_4f(k, RANK + 2 * thread)
        y = load_4f(k, RANK + 2 * thread + 1)
        c = load_4f(cos, angle)
        s = load_4f(sin, angle)
        vector[RANK + 2 * thread] = x * c - y * s
        vector[RANK + 2 * thread + 1] = x * s + y * c
    cuda.syncthreads()
    if KIND == "q8_0":
        for block in range(warp, WIDTH // 32, _WARPS):
            e = block * 32 + lane
            x = vector[e] if e < ROW else float32(0)
            step = warp_max(abs(x)) / float32(127)
            code = round_even(x * (float32(1) / step if step > float32(0) else float32(0)))
            store_1(cache, position * WIDTH + e, code)
            if lane == 0:
                store_2(cache, 2 * (rows * ROW_WORDS + position * STEP_WORDS) + block, to_half(step))
    else:
        for i in range(thread, ROW, BLOCK):
            if KIND == "f32":
                store_4(cache, position * WIDTH + i, float_bits(vector[i]))
            else:
                store_2(cache, position * WIDTH + i, to_half(vector[i]))


def _values(parts, part_sums, weights, state, out, spans):
    head = block_y()
    if DEPENDENT:
        launch_dependents()
        prefetch(weights, head)
        launches_wait()
    thread = bits(thread_x(), 0, BLOCK - 1)
    lane = thread & 31
    length = int32(state[POSITION] + 1)
    size = span_size(length, spans)
    active = int32(int32(length + size - 1) // size)
    first = int32(int32(head // GROUP) * spans)  # span, of all groups
    inner = int32(head % GROUP)

    # each warp for itself
    high = _LOW
    for i in range(lane, active, int32(32)):
        high = max(high, part_sums[(first + i) * (2 * GROUP) + inner])
    high = warp_max(high)
    weight = float32(0)
    for i in range(lane, active, int32(32)):
        index = (first + i) * (2 * GROUP) + inner
        weight += part_sums[index + GROUP] * math.exp(part_sums[index] - high)
    inverse = float32(1) / warp_sum(weight)

    pieces = cuda.shared.array(MERGERS * RANK, float32, ALIGNED)
    unit = int32(thread % UNITS)
    merger = int32(thread // UNITS)
    sums = registers()
    loaded = registers()
    high_of = registers()
    if merger < MERGERS:
        for e in unroll(4):
            sums[e] = float32(0)
        for i in range(merger, active, int32(MERGERS * _TOGETHER)):
            for u in unroll(_TOGETHER):
                span = int32(first + min(int32(i + u * MERGERS), int32(active - 1)))
                loaded[u] = load_16f(parts, mad(mad(span, GROUP, inner), ROW_UNITS, unit))
                high_of[u] = part_sums[span * (2 * GROUP) + inner]
            for u in unroll(_TOGETHER):
                if i + u * MERGERS < active:
                    factor = math.exp(high_of[u] - high) * inverse
                    for e in unroll(4):
                        sums[e] += factor * loaded[u][e]
        put_16(
            pieces, mad(merger, UNITS, unit),
            (float_bits(sums[0]), float_bits(sums[1]), float_bits(sums[2]), float_bits(sums[3])),
        )  # fmt: skip
    cuda.syncthreads()
    for i in range(thread, RANK, BLOCK):
        x = pieces[i]
        for m in range(1, MERGERS):
            x += pieces[m * RANK + i]
        pieces[i] = x
    cuda.syncthreads()
    multiply(weights, pieces, head, out, int32(head * ROWS))


@cache
def _products(shape: ByHead) -> dict[str, Any]:
    """The device functions `multiply` and `prefetch` for matrices of a shape."""
    name = f"{shape.rows}_{shape.columns}_{int(shape.halves)}"
    scope: dict[str, Any] = {
        "ROWS": shape.rows, "QUADS": shape.quads, "LANES": shape.lanes, "LANE_BITS": shape.lanes.bit_length() - 1,
        "LOADS": shape.loads, "ROUNDS": shape.rounds, "FOURS": 2 if shape.halves else 1, "HALVES": shape.halves,
    }  # fmt: skip
    scope["first_row"] = device_function(expand(_first_row, name, **scope))
    scope["quads"] = device_function(expand(_quads, name, load=stream_16, **scope))
    prefetch = device_function(expand(_quads, name + "_ahead", load=prefetch_16, **scope))
    return {"multiply": device_function(expand(_multiply, name, **scope)), "prefetch": prefetch}


@recipe
def absorb_kernel(kind: str, heads: int, plain: int, rotated: int, shape: ByHead, dependent: bool) -> Kernel:
    """The kernel absorb(q, k, k_norm, cos, sin, weights, state, queries, cache, rows, eps), of shape (rank, plain)."""
    rank, width = shape.rows, width_of(shape.rows, rotated)
    form = KVForm(kind, width)
    name = f"{kind}_{heads}_{rank}_{rotated}_{plain}_{int(shape.halves)}{'_dependent' * dependent}"
    scope = {"RANK": rank, "ROTATED": rotated, "HALF": rotated // 2, "ROW": rank + rotated, "WIDTH": width}
    keep = expand(_keep, name, KIND=kind, ROW_WORDS=form.row_words, STEP_WORDS=form.step_words, **scope)
    function = expand(
        _absorb, name, HEADS=heads, PLAIN=plain, COLUMNS=shape.columns, VECTOR=max(shape.columns, width),
        DEPENDENT=dependent, keep=device_function(keep), **_products(shape), **scope,
    )  # fmt: skip
    reals, words = "float32[::1]", "int32[::1]"
    matrix = "int16[::1]" if shape.halves else reals
    return Kernel(
        function, f"void({', '.join([*[reals] * 5, matrix, words, reals, words, 'int32', 'float32'])})",
        dependent=dependent,
    )  # fmt: skip


@recipe
def values_kernel(heads: int, group: int, rotated: int, tile: int, shape: ByHead, dependent: bool) -> Kernel:
    """The kernel values(parts, part_sums, weights, state, out, spans), of shape (value, rank); `tile`: positions."""
    rank = shape.columns
    units = rank // 4
    name = f"{heads}_{group}_{rank}_{rotated}_{tile}_{shape.rows}_{int(shape.halves)}{'_dependent' * dependent}"
    function = expand(
        _values, name, GROUP=group, RANK=rank, ROWS=shape.rows, UNITS=units, ROW_UNITS=width_of(rank, rotated) // 4,
        MERGERS=BLOCK // units, DEPENDENT=dependent, span_size=span_sizes(tile), **_products(shape),
    )  # fmt: skip
    reals = "float32[::1]"
    matrix = "int16[::1]" if shape.halves else reals
    return Kernel(
        function, f"void({reals}, {reals}, {matrix}, int32[::1], {reals}, int32)", dependent=dependent
    )  # fmt: skip
