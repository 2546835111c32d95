"""Attention on latent vectors (MLA, DeepSeek V2, arXiv:2405.04434), absorbed: the cache holds these alone.

    c = norm(latent part of W_kv x);  r = rotated part of it, turned           stored: a row [c, r], padded to 16
    q_h = [K_h q_plain,h, turned q_rotated,h]                                  K_h [rank, plain]: attn_k_b
    a_h = sum over positions of softmax(scale q_h . [c, r]) c
    out_h = V_h a_h                                                            V_h [value, rank]: attn_v_b

All heads read the same rows, so up to 8 heads (or tokens of a prompt) are rows of one product, as in attention.py,
whose blocks, spans and `merge` this shares. There, HEAD_DIM is the rank. Rows of 576 halves, as DeepSeek's are, take
1/28 of what its 128 heads' keys and values would.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from bridge.runtime.cpu.engines.floats import dot_function
from bridge.runtime.cpu.ops import attention as attn
from bridge.runtime.cpu.ops.attention import (
    BLOCK,
    LANES,
    ROWS,
    SPAN,
    WORDS,
    by_rows,
    largest,
    normalize,
    rotate,
    softmax,
)
from bridge.system.kernels import ir
from bridge.system.kernels.jit import CFunction, c_function, cgutils, inner, intrinsic, maker, types
from bridge.system.kernels.memory import (
    allocate,
    array_at,
    call_intrinsic,
    floats,
    fma,
    free,
    from_half,
    next_line,
    panel,
    rows_together,
    to_half,
)

# set by `function` and `heads_function`
halves = quantized = False
dot: Any = None
_dots: Any = None
_panel: Any = None


@cache
def _dots_of(rows: int, halves: bool) -> Any:
    """dots(a, a_stride, b, b_stride, count, c, c_stride): c[r, t] = sum over i of a[r, i] * b[t, i].

    r < rows, t < count. Rows of b fill its stride, a multiple of 16 elements. a and c are float32, b is float32 or
    halves; strides in bytes.
    """
    item = ir.F16 if halves else ir.F32

    @intrinsic
    def multiply(typingctx, a, a_stride, b, b_stride, count, c, c_stride):
        def emit(context, builder, signature, arguments):
            a, a_stride, b, b_stride, count, c, c_stride = arguments
            vector, stored, nbytes = ir.VectorType(ir.F32, LANES), ir.VectorType(item, LANES), 2 if halves else 4
            reduce = f"llvm.vector.reduce.fadd.v{LANES}f32"
            zero = ir.Constant(vector, [0.0] * LANES)
            chunks = builder.udiv(b_stride, ir.I64(LANES * nbytes))
            for group in rows_together(rows):
                totals = [cgutils.alloca_once(builder, vector) for _ in group]
                starts = [builder.add(a, builder.mul(a_stride, ir.I64(r))) for r in group]
                targets = [builder.add(c, builder.mul(c_stride, ir.I64(r))) for r in group]
                with cgutils.for_range(builder, count) as position:
                    row = builder.add(b, builder.mul(b_stride, position.index))
                    for total in totals:
                        builder.store(zero, total)
                    with cgutils.for_range(builder, chunks) as loop:
                        address = builder.add(row, builder.mul(loop.index, ir.I64(LANES * nbytes)))
                        values = builder.load(builder.inttoptr(address, stored.as_pointer()), align=nbytes)
                        values = builder.fpext(values, vector) if halves else values
                        for start, total in zip(starts, totals, strict=True):
                            address = builder.add(start, builder.mul(loop.index, ir.I64(4 * LANES)))
                            factors = builder.load(builder.inttoptr(address, vector.as_pointer()), align=4)
                            builder.store(fma(builder, factors, values, builder.load(total)), total)
                    for target, total in zip(targets, totals, strict=True):
                        address = builder.add(target, builder.shl(position.index, ir.I64(2)))
                        parts = ir.F32(0.0), builder.load(total)
                        dot = call_intrinsic(builder, reduce, ir.F32, *parts, fastmath=("reassoc",))
                        builder.store(dot, builder.inttoptr(address, ir.F32.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), emit

    return multiply


@inner
def _width(p):
    """Elements of a row of the cache."""
    return (p[attn.HEAD_DIM] + p[attn.ROTATED] + LANES - 1) // LANES * LANES


def _store(blocks, count, _0, _1, _2, _3, _4, first, last):
    """Norm, turn and store the rows of tokens first..last of the batch, or sequences of `count`; turn q's parts.

    Of each head, PRODUCTS has [plain, rotated] elements; Q, with rows as wide as the cache's, gets the turned ones.
    """
    for item in range(first, last):
        block = blocks + 8 * WORDS * item if count > 1 else blocks
        t = 0 if count > 1 else item
        p = array_at(block, WORDS, np.int64)
        rank, rotated, heads, plain, width = p[attn.HEAD_DIM], p[attn.ROTATED], p[attn.HEADS], p[attn.PLAIN], _width(p)
        position = array_at(p[attn.START], 1, np.int64)[0] + t
        cos = floats(p[attn.COS] + 2 * rotated * position, rotated // 2)
        sin = floats(p[attn.SIN] + 2 * rotated * position, rotated // 2)
        row = floats(p[attn.K] + 4 * (rank + rotated) * t, rank + rotated)
        normalize(row[:rank], p[attn.K_NORM], array_at(block, WORDS, np.float64)[attn.EPS])
        rotate(row[rank:], cos, sin, rotated, True)
        for h in range(heads):
            part = floats(p[attn.PRODUCTS] + 4 * ((plain + rotated) * (t * heads + h) + plain), rotated)
            q = floats(p[attn.Q] + 4 * (width * (t * heads + h) + rank), rotated)
            rotate(part, cos, sin, rotated, True)
            for i in range(rotated):
                q[i] = part[i]
        offset = width * position
        if quantized:
            codes = array_at(p[attn.KEYS] + offset, rank + rotated, np.int8)
            scales = array_at(p[attn.KEY_SCALES] + 2 * _scales(p) * position, _scales(p), np.uint16)
            for j in range(_scales(p)):
                end = min(rank + rotated, (j + 1) * BLOCK)
                step = largest(row[j * BLOCK : end]) / np.float32(127)
                scales[j] = to_half(step)
                inverse = np.float32(1) / step if step > 0 else np.float32(0)
                for i in range(j * BLOCK, end):
                    codes[i] = np.int8(np.rint(row[i] * inverse))
        elif halves:
            stored16 = array_at(p[attn.KEYS] + 2 * offset, rank + rotated, np.uint16)
            for i in range(rank + rotated):
                stored16[i] = to_half(row[i])
        else:
            stored32 = floats(p[attn.KEYS] + 4 * offset, rank + rotated)
            for i in range(rank + rotated):
                stored32[i] = row[i]


@inner
def _scales(p):
    """Scales of a row of a q8_0 cache."""
    return (p[attn.HEAD_DIM] + p[attn.ROTATED] + BLOCK - 1) // BLOCK


def _attend(blocks, count, spans, parts, sums, most, _0, first, last):
    """out = softmax(scale q [c, r]) c; arguments and items as in attention.py, with one key-value head."""
    parted = array_at(spans, 1, np.int64)[0] > 1
    p = array_at(blocks, WORDS, np.int64)
    heads, rank, tokens, width = p[attn.HEADS], p[attn.HEAD_DIM], p[attn.TOKENS], _width(p)
    scale = np.float32(array_at(blocks, WORDS, np.float64)[attn.SCALE])
    cap = np.float32(array_at(blocks, WORDS, np.float64)[attn.CAP])
    groups = (tokens * heads + ROWS - 1) // ROWS
    reach = SPAN
    if not parted:
        for b in range(count):
            p = array_at(blocks + 8 * WORDS * b, WORDS, np.int64)
            start = array_at(p[attn.START], 1, np.int64)[0]
            reach = max(reach, (start + tokens + LANES - 1) // LANES * LANES)
    # sums of exp [ROWS] as float64, maxima [ROWS], q [ROWS, width], scores [ROWS, reach], part [ROWS, LANES], rows
    panel_size = reach * width if quantized else 0
    memory = allocate(12 * ROWS + 4 * (ROWS * (width + reach + LANES) + panel_size) + 64)
    first_byte = next_line(memory)
    totals = array_at(first_byte, ROWS, np.float64)
    tops = floats(first_byte + 8 * ROWS, np.int64(ROWS))
    a = first_byte + 12 * ROWS
    s = a + 4 * ROWS * width
    c = s + 4 * ROWS * reach
    u = c + 4 * ROWS * LANES
    q, part, unpacked = floats(a, ROWS * width), floats(c, np.int64(ROWS * LANES)), floats(u, panel_size)
    for i in range(ROWS * width):
        q[i] = 0
    item_bytes = 2 if halves else 4
    for item in range(first, last):
        span = item // (count * groups)
        b = item % (count * groups) // groups
        p = array_at(blocks + 8 * WORDS * b, WORDS, np.int64)
        start = array_at(p[attn.START], 1, np.int64)[0]
        row0 = item % groups * ROWS
        rows = min(ROWS, tokens * heads - row0)
        begin = span * reach
        end = min(start + (row0 + rows - 1) // heads + 1, begin + reach)
        if begin >= end:  # a sequence that is shorter than others
            for r in range(rows):
                span_sums = floats(sums + 8 * ((b * heads + row0 + r) * most + span), np.int64(2))
                span_sums[0], span_sums[1] = 0, 0
            continue
        for r in range(rows):
            source = floats(p[attn.Q] + 4 * width * (row0 + r), width)
            own_scale = scale
            if p[attn.TEMPERATURES]:
                own_scale *= floats(p[attn.TEMPERATURES] + 4 * (start + (row0 + r) // heads), 1)[0]
            for i in range(width):
                q[r * width + i] = source[i] * own_scale
        stored = p[attn.KEYS] + begin * width * item_bytes
        if quantized:
            for i in range(end - begin):
                codes = array_at(p[attn.KEYS] + width * (begin + i), width, np.int8)
                steps = array_at(p[attn.KEY_SCALES] + 2 * _scales(p) * (begin + i), _scales(p), np.uint16)
                for j in range(_scales(p)):
                    step = from_half(steps[j])
                    for k in range(j * BLOCK, min(width, (j + 1) * BLOCK)):
                        unpacked[width * i + k] = np.float32(codes[k]) * step
            stored = u
        stride = width * item_bytes
        _dots(rows, a, 4 * width, stored, stride, end - begin, s, 4 * reach)
        for r in range(rows):
            seen = start + (row0 + r) // heads + 1
            scores = floats(s + 4 * reach * r, end - begin)
            tops[r], totals[r] = softmax(scores, 0, min(seen - begin, end - begin), cap, np.float32(-np.inf))
        for j in range(rank // LANES):
            _panel(rows, s, 4 * reach, stored + LANES * item_bytes * j, stride, end - begin, c, 4 * LANES)
            for r in range(rows):
                if parted:
                    index = (b * heads + row0 + r) * most + span
                    out = floats(parts + 4 * rank * index, rank)
                    inverse = np.float32(1)
                    span_sums = floats(sums + 8 * index, np.int64(2))
                    span_sums[0], span_sums[1] = tops[r], np.float32(totals[r])
                else:
                    out = floats(p[attn.OUT] + 4 * rank * (row0 + r), rank)
                    inverse = np.float32(1.0 / totals[r])
                for i in range(LANES):
                    out[j * LANES + i] = part[r * LANES + i] * inverse
    free(memory)


def _by_head(weights, x, y, sizes, tokens, _0, _1, first, last):
    """y[t, h] = W[h] x[t, h], for rows first..last of all heads' matrices, numbered through.

    sizes  the address of seven int64: rows and columns of a head's matrix, bytes of a row; elements from one token of x
           to the next, and from one head to the next; the same of y
    """
    z = array_at(sizes, 7, np.int64)
    rows, columns, row_bytes = z[0], z[1], z[2]
    for item in range(first, last):
        h = item // rows
        for t in range(tokens):
            value = dot(weights + row_bytes * item, x + 4 * (z[3] * t + z[4] * h), columns)
            floats(y + 4 * (z[5] * t + z[6] * h + item % rows), np.int64(1))[0] = value


@maker
def function(name: str, kind: str) -> CFunction:
    """ "store" or "attend" for a kind of cache (f16, q8_0, f32), as a C function."""
    scope: dict[str, Any] = {"halves": kind == "f16", "quantized": kind == "q8_0"}
    if name == "store":
        return c_function(_store, kind, **scope)
    dots = by_rows(partial(_dots_of, halves=kind == "f16"), f"dots_{kind}")
    panels = by_rows(partial(panel, halves=kind == "f16"), kind)
    return c_function(_attend, kind, _dots=dots, _panel=panels, **scope)


@maker
def heads_function(kind: str) -> CFunction:
    """The C function that multiplies by a matrix for each head, of F32, F16 or BF16."""
    return c_function(_by_head, kind, dot=dot_function(kind))
