"""Attention over a cache of keys and values: rotation, storing, and the weighted sum.

A layer's cache is laid out so that both products read it as rows of 16 values, the form of `memory.panel`:

    keys    [kv_heads, context / 16, head_dim, 16]     16 positions side by side
    values  [kv_heads, head_dim / 16, context, 16]     16 elements side by side

in halves, float32, or int8 with a half scale for 32 elements (q8_0): keys' scales [kv_heads, context / 16,
head_dim / 32, 16], values' [kv_heads, context, head_dim / 32]. The heads that share keys, and several tokens
of a prompt, are rows of one product, 8 at a time: each row group reads the cache once.

A model has 4 to 8 key-value heads, fewer than a server has cores. So where a single token is computed, a context of
more than `SPAN` positions is cut into spans: `attend` stores for each head and span the sum of exp(s - max)
v, with max and the sum of exp(s - max), and `merge` weights the spans by exp(max - largest max). Spans are the same
whatever the number of threads, and so are the results.

The arguments are blocks of int64 words, named below: one for the tokens of a batch, or one for each of
several sequences, each of which has its own cache and a single token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bridge.runtime.cpu.ops.decoder_ops import exp, square_sum
from bridge.system.kernels.jit import CFunction, c_function, inner, maker, specialize
from bridge.system.kernels.memory import allocate, array_at, floats, free, from_half, next_line, panel, to_half

# words of a layer's block; addresses first. Biases, head norms, sinks, temperatures, the cap on scores, the window and
# the chunk may be 0, and K: then there are no keys to store. PRODUCTS and PLAIN are latent_attention.py's
(Q, K, V, Q_BIAS, K_BIAS, V_BIAS, Q_NORM, K_NORM, COS, SIN, KEYS, VALUES, KEY_SCALES, VALUE_SCALES, START, OUT,
 SINKS, TEMPERATURES, HEADS, KV_HEADS, HEAD_DIM, ROTATED, NEIGHBOURS, NORM_LAST, CONTEXT, TOKENS, EPS, SCALE, CAP,
 WINDOW, CHUNK, PRODUCTS, PLAIN, WORDS) = range(34)  # fmt: skip

LANES = 16
ROWS = 8
SPAN = 256  # positions: 32 KB of keys and as much of values for halves in heads of 64
BLOCK = 32  # elements that share a scale in q8_0

# set by `function`
halves = quantized = False
_panel: Any = None
panel_1: Any = None
panel_2: Any = None
panel_4: Any = None
panel_8: Any = None


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
def _total(x):
    """The sum, in float64."""
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i])
    return total


@inner
def softmax(scores, low, visible, cap, sink):
    """exp(s - max) over the scores low..visible, zero over the others; max and the sum.

    cap   c > 0: of c tanh(s / c)
    sink  one more score, of no position, which max and sum include; -inf: there is none
    """
    for i in range(low):
        scores[i] = 0
    for i in range(visible, scores.size):
        scores[i] = 0
    if low >= visible:
        return sink, 1.0 if sink > -np.inf else 0.0
    if cap > 0:
        for i in range(low, visible):
            scores[i] = cap - 2 * cap / (exp(np.float32(2) * scores[i] / cap) + np.float32(1.0))
    seen = scores[low:visible]
    top = max(sink, _top(seen))
    for i in range(seen.size):
        seen[i] = exp(seen[i] - top)
    total = np.float64(exp(sink - top)) if sink > -np.inf else 0.0
    return top, total + _total(seen)


@inner
def _first_seen(p, position):
    """The first position that a token attends to: of its window, its chunk, or of all."""
    if p[CHUNK]:
        return position // p[CHUNK] * p[CHUNK]
    return max(0, position + 1 - p[WINDOW]) if p[WINDOW] else 0


def _attend(blocks, count, spans, parts, sums, most, _0, first, last):
    """out = softmax(scale q k^T) v for items first..last: row groups of `count` blocks, for one span after another.

    spans   address of the number of spans, at most `most`
    parts   address of float32 [count, heads, most, head_dim], and
    sums    of float32 [count, heads, most, 2]: what is left for `merge` of several spans
    """
    parted = array_at(spans, 1, np.int64)[0] > 1
    p = array_at(blocks, WORDS, np.int64)
    heads, kv_heads, d, context, tokens = p[HEADS], p[KV_HEADS], p[HEAD_DIM], p[CONTEXT], p[TOKENS]
    scale = np.float32(array_at(blocks, WORDS, np.float64)[SCALE])
    cap = np.float32(array_at(blocks, WORDS, np.float64)[CAP])
    shared = heads // kv_heads
    per_head = (tokens * shared + ROWS - 1) // ROWS
    groups = kv_heads * per_head
    chunks = (d + LANES - 1) // LANES
    scales = (d + BLOCK - 1) // BLOCK
    width = SPAN
    if not parted:
        for b in range(count):
            p = array_at(blocks + 8 * WORDS * b, WORDS, np.int64)
            start = array_at(p[START], 1, np.int64)[0]
            width = max(width, (start + tokens + LANES - 1) // LANES * LANES)
    # sums of exp [ROWS] as float64, maxima [ROWS], q [ROWS, d], scores [ROWS, width], part [ROWS, LANES], a panel
    panel_size = max(d, width) * LANES if quantized else 0
    memory = allocate(12 * ROWS + 4 * (ROWS * (d + width + LANES) + panel_size) + 64)
    first_byte = next_line(memory)
    totals = array_at(first_byte, ROWS, np.float64)
    tops = floats(first_byte + 8 * ROWS, np.int64(ROWS))
    a = first_byte + 12 * ROWS
    s = a + 4 * ROWS * d
    c = s + 4 * ROWS * width
    u = c + 4 * ROWS * LANES
    q, part, unpacked = floats(a, ROWS * d), floats(c, np.int64(ROWS * LANES)), floats(u, panel_size)
    for i in range(ROWS * d):
        q[i] = 0
    stride = 2 * LANES if halves else 4 * LANES
    for item in range(first, last):
        span = item // (count * groups)
        b = item % (count * groups) // groups
        p = array_at(blocks + 8 * WORDS * b, WORDS, np.int64)
        start = array_at(p[START], 1, np.int64)[0]
        h = item % groups // per_head
        row0 = item % per_head * ROWS
        rows = min(ROWS, tokens * shared - row0)
        begin = span * width
        end = min(start + (row0 + rows - 1) // shared + 1, begin + width)
        outside = parted and begin > 0 and begin + width <= _first_seen(p, start)
        if begin >= end or outside:  # a sequence that is shorter than others, or a span before its window
            for r in range(rows):
                span_sums = floats(sums + 8 * ((b * heads + h * shared + row0 + r) * most + span), np.int64(2))
                span_sums[0], span_sums[1] = 0, 0
            continue
        for r in range(rows):
            t = (row0 + r) // shared
            source = floats(p[Q] + 4 * d * (t * heads + h * shared + (row0 + r) % shared), d)
            own_scale = scale
            if p[TEMPERATURES]:
                own_scale *= floats(p[TEMPERATURES] + 4 * (start + t), 1)[0]
            for i in range(d):
                q[r * d + i] = source[i] * own_scale
        columns = (end - begin + LANES - 1) // LANES * LANES
        for g in range(begin // LANES, (begin + columns) // LANES):
            offset = (h * (context // LANES) + g) * d * LANES
            if quantized:
                keys8 = array_at(p[KEYS] + offset, (d, LANES), np.int8)
                scales_at = p[KEY_SCALES] + 2 * (h * (context // LANES) + g) * scales * LANES
                key_scales = array_at(scales_at, (scales, LANES), np.uint16)
                for i in range(d):
                    for lane in range(LANES):
                        unpacked[i * LANES + lane] = np.float32(keys8[i, lane]) * from_half(
                            key_scales[i // BLOCK, lane]
                        )
                rows16 = u
            else:
                rows16 = p[KEYS] + offset * (2 if halves else 4)
            _panel(rows, a, 4 * d, rows16, stride, d, s + 4 * (LANES * g - begin), 4 * width)
        for r in range(rows):
            seen = start + (row0 + r) // shared + 1
            low = min(max(0, _first_seen(p, seen - 1) - begin), columns)
            scores = floats(s + 4 * width * r, columns)
            sink = np.float32(-np.inf)
            if p[SINKS] and begin == 0:
                sink = floats(p[SINKS] + 4 * (h * shared + (row0 + r) % shared), 1)[0]
            tops[r], totals[r] = softmax(scores, low, min(seen - begin, columns), cap, sink)
        for j in range(chunks):
            offset = ((h * chunks + j) * context + begin) * LANES
            if quantized:
                values8 = array_at(p[VALUES] + offset, (end - begin, LANES), np.int8)
                scales_at = p[VALUE_SCALES] + 2 * (h * context + begin) * scales
                value_scales = array_at(scales_at, (end - begin, scales), np.uint16)
                for i in range(end - begin):
                    step = from_half(value_scales[i, j * LANES // BLOCK])
                    for lane in range(LANES):
                        unpacked[i * LANES + lane] = np.float32(values8[i, lane]) * step
                rows16 = u
            else:
                rows16 = p[VALUES] + offset * (2 if halves else 4)
            _panel(rows, s, 4 * width, rows16, stride, end - begin, c, 4 * LANES)
            for r in range(rows):
                head = h * shared + (row0 + r) % shared
                if parted:
                    out = floats(parts + 4 * d * ((b * heads + head) * most + span), d)
                    inverse = np.float32(1)
                    span_sums = floats(sums + 8 * ((b * heads + head) * most + span), np.int64(2))
                    span_sums[0], span_sums[1] = tops[r], np.float32(totals[r])
                else:
                    out = floats(p[OUT] + 4 * d * ((row0 + r) // shared * heads + head), d)
                    inverse = np.float32(1.0 / totals[r])
                for i in range(j * LANES, min(d, (j + 1) * LANES)):
                    out[i] = part[r * LANES + i - j * LANES] * inverse
    free(memory)


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


def panel_of_rows(rows, a, a_stride, b, b_stride, count, c, c_stride):
    """The narrowest of the compiled products that has `rows` rows; those beyond are computed and not used."""
    if rows > 4:
        panel_8(a, a_stride, b, b_stride, count, c, c_stride)
    elif rows > 2:
        panel_4(a, a_stride, b, b_stride, count, c, c_stride)
    elif rows > 1:
        panel_2(a, a_stride, b, b_stride, count, c, c_stride)
    else:
        panel_1(a, a_stride, b, b_stride, count, c, c_stride)


def by_rows(make: Callable[[int], Any], suffix: str) -> Any:
    """`panel_of_rows` for the products that `make` compiles for so many rows."""
    return specialize(panel_of_rows, suffix, inner, **{f"panel_{rows}": make(rows) for rows in (1, 2, 4, 8)})


@maker
def function(name: str, kind: str) -> CFunction:
    """ "store", "attend" or "merge" for a kind of cache (f16, q8_0, f32), as a C function."""
    if name == "merge":
        return c_function(_merge)
    scope: dict[str, Any] = {"halves": kind == "f16", "quantized": kind == "q8_0"}
    if name == "store":
        return c_function(_store, kind, **scope)
    return c_function(_attend, kind, _panel=by_rows(partial(panel, halves=kind == "f16"), kind), **scope)
