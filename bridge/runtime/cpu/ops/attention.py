"""Attention over a cache of keys and values: rotation, storing, and the weighted sum.

A layer's cache is laid out so that both products read it as rows of 16 values, a panel of `panels.py`:

    keys    [kv_heads, context / 16, head_dim, 16]     16 positions side by side
    values  [kv_heads, head_dim / 16, context, 16]     16 elements side by side

in halves, float32, or int8 with a half scale for 32 elements (q8_0): keys' scales [kv_heads, context / 16,
head_dim / 32, 16], values' [kv_heads, context, head_dim / 32].

The heads that share keys, and several tokens of a prompt, are rows of one product. `ROWS` of them go together over
tiles of `TILE` positions, so that keys and values of a tile come from memory (and are unpacked) once for all of them,
and from the second level's cache for each 8. What a row has summed so far is exp(s - m) v, with its largest score m:
where a tile has a larger one, the sum is multiplied by exp(m - larger m) (flash attention, arXiv:2205.14135). So memory
does not grow with the context, tiles outside a window or a chunk are not read, and a row's result is the same however
a prompt is cut.

A model has 4 to 8 key-value heads, fewer than a server has cores. So where a single token is computed, a context of
more than `SPAN` positions is cut into spans: `attend` stores for each head and span the sum of exp(s - max)
v, with max and the sum of exp(s - max), and `merge` weights the spans by exp(max - largest max). Spans are the same
whatever the number of threads, and so are the results.

The arguments are blocks of int64 words, named below: one for the tokens of a batch, or one for each of
several sequences, each of which has its own cache and a single token.
"""

from functools import cache, partial
from typing import Any

import numpy as np

from bridge.runtime.cpu.machine.panels import TOGETHER, by_rows, panels, unpack
from bridge.runtime.cpu.ops.decoder_ops import exp, square_sum
from bridge.system.kernels.jit import CFunction, c_function, inner, maker, specialize
from bridge.system.kernels.memory import LANES, allocate, array_at, floats, free, next_line, to_half

# words of a layer's block; addresses first. Biases, head norms, sinks, temperatures, slopes, the cap on scores, the
# window and the chunk may be 0, and K: then there are no keys to store. PRODUCTS and PLAIN are latent_attention.py's.
# AHEAD: positions after its own that a token attends to, of those that the batch has. SLOPES: of each head, what a
# score loses for each position between the two tokens
(Q, K, V, Q_BIAS, K_BIAS, V_BIAS, Q_NORM, K_NORM, COS, SIN, KEYS, VALUES, KEY_SCALES, VALUE_SCALES, START, OUT,
 SINKS, TEMPERATURES, HEADS, KV_HEADS, HEAD_DIM, ROTATED, NEIGHBOURS, NORM_LAST, CONTEXT, TOKENS, EPS, SCALE, CAP,
 WINDOW, CHUNK, PRODUCTS, PLAIN, AHEAD, SLOPES, WORDS) = range(36)  # fmt: skip

ROWS = 32  # that go over a tile together
TILE = 128  # positions: 128 KB of keys and values for halves in heads of 256
SPAN = 256  # positions: 32 KB of keys and as much of values for halves in heads of 64
BLOCK = 32  # elements that share a scale in q8_0

# set by `function` and `attend_function`
halves = quantized = False
sizes: Any = None
tile_at: Any = None
key_scores: Any = None
weigh: Any = None
unpack_each: Any = None
unpack_all: Any = None


@inner
def normalize(x, norm, eps):
    """x / rms(x) * weight, in place."""
    w = floats(norm, x.size)
    scale = np.float32(1.0 / np.sqrt(square_sum(x) / x.size + eps))
    for i in range(x.size):
        x[i] = x[i] * scale * w[i]


@inner
def rotate(x, cos, sin, rotated, neighbours):
    """Turn the pairs of the first elements, in place."""
    half = rotated // 2
    step = 2 if neighbours else 1
    other = 1 if neighbours else half
    for i in range(half):
        a = x[step * i]
        b = x[step * i + other]
        x[step * i] = a * cos[i] - b * sin[i]
        x[step * i + other] = a * sin[i] + b * cos[i]


@inner
def _turn(x, bias, norm, cos, sin, head_dim, rotated, neighbours, norm_last, eps):
    """One head, in place: bias, normalization of the head, rotation; `norm_last`: normalization after it."""
    if bias:
        b = floats(bias, head_dim)
        for i in range(head_dim):
            x[i] += b[i]
    if norm and not norm_last:
        normalize(x, norm, eps)
    rotate(x, cos, sin, rotated, neighbours)
    if norm and norm_last:
        normalize(x, norm, eps)


@inner
def largest(x):
    top = np.float32(0.0)
    for i in range(x.size):
        top = max(top, abs(x[i]))
    return top


def _store(blocks, count, _0, _1, _2, _3, _4, first, last):
    """Turn q in place; turn k and store it with v, for tokens first..last of the batch, or sequences of `count`."""
    for item in range(first, last):
        block = blocks + 8 * WORDS * item if count > 1 else blocks
        t = 0 if count > 1 else item
        p = array_at(block, WORDS, np.int64)
        heads, kv_heads, d, context = p[HEADS], p[KV_HEADS], p[HEAD_DIM], p[CONTEXT]
        half = p[ROTATED] // 2
        eps = array_at(block, WORDS, np.float64)[EPS]
        chunks = (d + LANES - 1) // LANES
        scales = (d + BLOCK - 1) // BLOCK
        position = array_at(p[START], 1, np.int64)[0] + t
        cos = floats(p[COS] + 4 * half * position, half)
        sin = floats(p[SIN] + 4 * half * position, half)
        for h in range(heads):
            q = floats(p[Q] + 4 * d * (t * heads + h), d)
            bias = p[Q_BIAS] + 4 * d * h if p[Q_BIAS] else 0
            _turn(q, bias, p[Q_NORM], cos, sin, d, p[ROTATED], p[NEIGHBOURS], p[NORM_LAST], eps)
        for h in range(kv_heads if p[K] else 0):
            k = floats(p[K] + 4 * d * (t * kv_heads + h), d)
            v = floats(p[V] + 4 * d * (t * kv_heads + h), d)
            bias = p[K_BIAS] + 4 * d * h if p[K_BIAS] else 0
            _turn(k, bias, p[K_NORM], cos, sin, d, p[ROTATED], p[NEIGHBOURS], p[NORM_LAST], eps)
            if p[V_BIAS]:
                b = floats(p[V_BIAS] + 4 * d * h, d)
                for i in range(d):
                    v[i] += b[i]
            key = (h * (context // LANES) + position // LANES) * d * LANES + position % LANES
            value = (h * chunks * context + position) * LANES
            if quantized:
                keys8 = array_at(p[KEYS], kv_heads * context * d, np.int8)
                values8 = array_at(p[VALUES], kv_heads * context * chunks * LANES, np.int8)
                key_scales = array_at(p[KEY_SCALES], kv_heads * context * scales, np.uint16)
                value_scales = array_at(p[VALUE_SCALES], kv_heads * context * scales, np.uint16)
                for j in range(scales):
                    part = slice(j * BLOCK, min(d, (j + 1) * BLOCK))
                    step_k = largest(k[part]) / np.float32(127)
                    step_v = largest(v[part]) / np.float32(127)
                    index = ((h * (context // LANES) + position // LANES) * scales + j) * LANES + position % LANES
                    key_scales[index] = to_half(step_k)
                    value_scales[(h * context + position) * scales + j] = to_half(step_v)
                    to_k = np.float32(1) / step_k if step_k > 0 else np.float32(0)
                    to_v = np.float32(1) / step_v if step_v > 0 else np.float32(0)
                    for i in range(j * BLOCK, min(d, (j + 1) * BLOCK)):
                        keys8[key + i * LANES] = np.int8(np.rint(k[i] * to_k))
                        values8[value + i // LANES * context * LANES + i % LANES] = np.int8(np.rint(v[i] * to_v))
            elif halves:
                keys16 = array_at(p[KEYS], kv_heads * context * d, np.uint16)
                values16 = array_at(p[VALUES], kv_heads * context * chunks * LANES, np.uint16)
                for i in range(d):
                    keys16[key + i * LANES] = to_half(k[i])
                    values16[value + i // LANES * context * LANES + i % LANES] = to_half(v[i])
            else:
                keys32 = floats(p[KEYS], kv_heads * context * d)
                values32 = floats(p[VALUES], kv_heads * context * chunks * LANES)
                for i in range(d):
                    keys32[key + i * LANES] = k[i]
                    values32[value + i // LANES * context * LANES + i % LANES] = v[i]


@partial(inner, fastmath={"nnan", "nsz"})  # NaN, which the sum of exp shows, need not be found here
def _top(x):
    """The largest value."""
    top = x[0]
    for i in range(1, x.size):
        top = max(top, x[i])
    return top


@partial(inner, fastmath={"reassoc"})
def _exponentials(x, top):
    """x becomes exp(x - top); its sum."""
    total = np.float32(0)
    for i in range(x.size):
        x[i] = exp(x[i] - top)
        total += x[i]
    return total


@inner
def _softmax(scores, low, visible, cap, top):
    """exp(s - max) over the scores low..visible, zero over the others; max, at least `top`, and the sum.

    cap   c > 0: of c tanh(s / c)
    """
    for i in range(low):
        scores[i] = 0
    for i in range(visible, scores.size):
        scores[i] = 0
    if low >= visible:
        return top, np.float32(0)
    if cap > 0:
        for i in range(low, visible):
            scores[i] = cap - 2 * cap / (exp(np.float32(2) * scores[i] / cap) + np.float32(1.0))
    seen = scores[low:visible]
    top = max(top, _top(seen))
    return top, _exponentials(seen, top)


@inner
def _subtract_distances(scores, slope, position, first):
    """Each score less the slope times its distance from a position; the scores are of `first` and those after it."""
    for i in range(scores.size):
        scores[i] -= slope * np.float32(abs(position - first - i))


@inner
def _first_seen(p, position):
    """The first position that a token attends to: of its window, its chunk, or of all."""
    if p[CHUNK]:
        return position // p[CHUNK] * p[CHUNK]
    return max(0, position + 1 - p[WINDOW]) if p[WINDOW] else 0


@inner
def _end_seen(p, position, end):
    """The position after the last that a token attends to; `end`: after the batch's last."""
    return min(position + 1 + p[AHEAD], end)


def attend(blocks, count, spans, parts, sums, most, _0, first, last):
    """out = softmax(scale q k^T) v for items first..last: `ROWS` rows of `count` blocks, for one span after another.

    spans   address of the number of spans, at most `most`
    parts   address of float32 [count, heads, most, head_dim], and
    sums    of float32 [count, heads, most, 2]: what is left for `merge` of several spans
    """
    parted = array_at(spans, 1, np.int64)[0] > 1
    p = array_at(blocks, WORDS, np.int64)
    heads, kv_heads, d, tokens = p[HEADS], p[KV_HEADS], p[HEAD_DIM], p[TOKENS]
    width, tile_bytes = sizes(p)
    scale = np.float32(array_at(blocks, WORDS, np.float64)[SCALE])
    cap = np.float32(array_at(blocks, WORDS, np.float64)[CAP])
    shared = heads // kv_heads
    per_head = (tokens * shared + ROWS - 1) // ROWS
    groups = kv_heads * per_head
    chunks = (d + LANES - 1) // LANES
    item_bytes = 2 if halves else 4
    most_rows = min(ROWS, (tokens * shared + TOGETHER - 1) // TOGETHER * TOGETHER)
    # sums of exp as float64, maxima, shares, q [rows, width], results [rows, 16 chunks], scores [TOGETHER, TILE]
    memory = allocate(16 * ROWS + 4 * (most_rows * (width + LANES * chunks) + TOGETHER * TILE) + tile_bytes + 64)
    first_byte = next_line(memory)
    totals = array_at(first_byte, ROWS, np.float64)
    tops = floats(first_byte + 8 * ROWS, np.int64(ROWS))
    shares = floats(first_byte + 12 * ROWS, np.int64(ROWS))
    a = first_byte + 16 * ROWS
    c = a + 4 * most_rows * width
    s = c + 4 * most_rows * LANES * chunks
    u = s + 4 * TOGETHER * TILE
    q, results = floats(a, most_rows * width), floats(c, most_rows * LANES * chunks)
    for i in range(q.size):
        q[i] = 0
    for item in range(first, last):
        span = item // (count * groups)
        b = item % (count * groups) // groups
        p = array_at(blocks + 8 * WORDS * b, WORDS, np.int64)
        start = array_at(p[START], 1, np.int64)[0]
        h = item % groups // per_head
        row0 = item % per_head * ROWS
        rows = min(ROWS, tokens * shared - row0)
        begin = max(span * SPAN, _first_seen(p, start + row0 // shared)) // TILE * TILE
        stored = start + tokens
        end = _end_seen(p, start + (row0 + rows - 1) // shared, stored)
        if parted:
            end = min(end, (span + 1) * SPAN)
        if begin >= end and span > 0:  # a sequence that is shorter than others, or a span before its window
            for r in range(rows):
                span_sums = floats(sums + 8 * ((b * heads + h * shared + row0 + r) * most + span), np.int64(2))
                span_sums[0], span_sums[1] = 0, 0
            continue
        for r in range(rows):
            t, head = (row0 + r) // shared, h * shared + (row0 + r) % shared
            source = floats(p[Q] + 4 * width * (t * heads + head), width)
            own_scale = scale
            if p[TEMPERATURES]:
                own_scale *= floats(p[TEMPERATURES] + 4 * (start + t), 1)[0]
            for i in range(width):
                q[r * width + i] = source[i] * own_scale
            tops[r], totals[r] = -np.inf, 0
            if p[SINKS] and span == 0:  # one more score, of no position and no value
                tops[r], totals[r] = floats(p[SINKS] + 4 * head, 1)[0], 1
        for i in range(results.size):
            results[i] = 0
        for tile in range(begin, end, TILE):
            keys, values, stride, step = tile_at(p, h, tile, min(TILE, end - tile), u)
            for row in range(0, rows, TOGETHER):
                group = min(TOGETHER, rows - row)
                low = max(tile, _first_seen(p, start + (row0 + row) // shared)) // LANES * LANES
                high = min(tile + TILE, end, _end_seen(p, start + (row0 + row + group - 1) // shared, stored))
                if low >= high:
                    continue
                key_rows = keys + (low - tile) * width * item_bytes
                key_scores(group, a + 4 * row * width, 4 * width, key_rows, high - low, s)
                for r in range(row, row + group):
                    position = start + (row0 + r) // shared
                    seen = floats(s + 4 * TILE * (r - row), high - low)
                    if p[SLOPES]:
                        head = h * shared + (row0 + r) % shared
                        _subtract_distances(seen, floats(p[SLOPES] + 4 * head, 1)[0], position, low)
                    before = tops[r]
                    stop = min(_end_seen(p, position, stored), high)
                    tops[r], total = _softmax(seen, max(0, _first_seen(p, position) - low), stop - low, cap, before)
                    shares[r] = exp(before - tops[r]) if tops[r] > before else np.float32(1)
                    totals[r] = totals[r] * shares[r] + total
                weigh(
                    group, s, 4 * TILE, values + (low - tile) * stride, stride, step, high - low, chunks,
                    c + 4 * row * LANES * chunks, 4 * LANES * chunks, first_byte + 12 * ROWS + 4 * row,
                )  # fmt: skip
        for r in range(rows):
            t, head = (row0 + r) // shared, h * shared + (row0 + r) % shared
            out = floats(p[OUT] + 4 * d * (t * heads + head), d)
            inverse = np.float32(1.0 / totals[r])
            if parted:
                out = floats(parts + 4 * d * ((b * heads + head) * most + span), d)
                inverse = np.float32(1)
                span_sums = floats(sums + 8 * ((b * heads + head) * most + span), np.int64(2))
                span_sums[0], span_sums[1] = tops[r], np.float32(totals[r])
            for i in range(d):
                out[i] = results[r * LANES * chunks + i] * inverse
    free(memory)


def _sizes(p):
    """Elements of a row of q, and bytes of a tile's keys and values where they are unpacked."""
    d = p[HEAD_DIM]
    return d, 4 * TILE * (d + (d + LANES - 1) // LANES * LANES) if quantized else 0


def _tile_at(p, h, begin, count, memory):
    """Keys and values of a head from position `begin` on: the addresses of their panels of float32 or halves, bytes
    from a row of values to the next, and from a panel of values to the next. int8 is unpacked into `memory`.
    """
    d, context = p[HEAD_DIM], p[CONTEXT]
    chunks = (d + LANES - 1) // LANES
    keys = (h * (context // LANES) + begin // LANES) * d * LANES
    values = (h * chunks * context + begin) * LANES
    if not quantized:
        item_bytes = 2 if halves else 4
        stride = LANES * item_bytes
        return p[KEYS] + keys * item_bytes, p[VALUES] + values * item_bytes, stride, context * stride
    scales = (d + BLOCK - 1) // BLOCK
    key_scales = p[KEY_SCALES] + 2 * (h * (context // LANES) + begin // LANES) * scales * LANES
    for g in range((count + LANES - 1) // LANES):
        for i in range(d):
            row = g * d + i
            unpack_each(
                p[KEYS] + keys + LANES * row, key_scales + 2 * LANES * (g * scales + i // BLOCK), memory + 64 * row
            )
    unpacked = memory + 4 * TILE * d
    value_scales = p[VALUE_SCALES] + 2 * (h * context + begin) * scales
    for j in range(chunks):
        for i in range(count):
            unpack_all(
                p[VALUES] + values + LANES * (j * context + i), value_scales + 2 * (i * scales + j * LANES // BLOCK),
                unpacked + 64 * (j * TILE + i),
            )  # fmt: skip
    return memory, unpacked, 4 * LANES, 4 * LANES * TILE


def _key_scores(rows, q, q_stride, keys, count, out):
    """out float32 [rows, TILE]: q k^T, for `count` positions and those that fill a panel."""
    stride = LANES * (2 if halves else 4)
    d = q_stride // 4
    weigh(rows, q, q_stride, keys, stride, d * stride, d, (count + LANES - 1) // LANES, out, 4 * TILE, np.int64(0))


def _merge(blocks, count, spans, parts, sums, most, _0, first, last):
    """Merge the spans' parts into out, for heads first..last of all blocks; see `_attend`."""
    used = array_at(spans, 1, np.int64)[0]
    for item in range(first, last):
        p = array_at(blocks, WORDS, np.int64)
        heads, d = p[HEADS], p[HEAD_DIM]
        p = array_at(blocks + 8 * WORDS * (item // heads), WORDS, np.int64)
        out = floats(p[OUT] + 4 * d * (item % heads), d)
        span_sums = array_at(sums + 8 * most * item, (used, 2), np.float32)
        top = np.float32(-np.inf)
        for j in range(used):
            if span_sums[j, 1] > 0:
                top = max(top, span_sums[j, 0])
        total = np.float32(0)
        for i in range(d):
            out[i] = 0
        for j in range(used):
            if span_sums[j, 1] > 0:
                weight = exp(span_sums[j, 0] - top)
                total += weight * span_sums[j, 1]
                part = floats(parts + 4 * d * (most * item + j), d)
                for i in range(d):
                    out[i] += weight * part[i]
        inverse = np.float32(1) / total
        for i in range(d):
            out[i] *= inverse


@cache
def weighing(kind: str) -> Any:
    """The products of rows with panels of a kind of cache."""
    return by_rows(partial(panels, halves=kind == "f16"), kind)


def attend_function(kind: str, suffix: str, sizes: Any, tile_at: Any, key_scores: Any, **own: Any) -> CFunction:
    """`attend` as a C function for a kind of cache, on tiles that the three functions describe."""
    scope = {"halves": kind == "f16", "quantized": kind == "q8_0"}
    own |= {"weigh": weighing(kind), "unpack_each": unpack(True), "unpack_all": unpack(False)}
    functions = {"sizes": sizes, "tile_at": tile_at, "key_scores": key_scores}
    functions = {name: specialize(made, kind, inner, **scope, **own) for name, made in functions.items()}
    return c_function(attend, suffix, **functions, **scope, weigh=own["weigh"])


@maker
def function(name: str, kind: str) -> CFunction:
    """ "store", "attend" or "merge" for a kind of cache (f16, q8_0, f32), as a C function."""
    if name == "merge":
        return c_function(_merge)
    if name == "store":
        return c_function(_store, kind, halves=kind == "f16", quantized=kind == "q8_0")
    return attend_function(kind, kind, _sizes, _tile_at, _key_scores)
