"""Attention on latent vectors (MLA, DeepSeek V2, arXiv:2405.04434), absorbed: the cache holds these alone.

    c = norm(latent part of W_kv x);  r = rotated part of it, turned           stored: a row [c, r], padded to 16
    q_h = [K_h q_plain,h, turned q_rotated,h]                                  K_h [rank, plain]: attn_k_b
    a_h = sum over positions of softmax(scale q_h . [c, r]) c
    out_h = V_h a_h                                                            V_h [value, rank]: attn_v_b

All heads read the same rows, so heads and tokens of a prompt are rows of one product, as in attention.py, whose blocks,
tiles, spans and `merge` this shares. There, HEAD_DIM is the rank. Rows of 576 halves, as DeepSeek's are, take
1/28 of what its 128 heads' keys and values would.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from bridge.runtime.cpu.engines.floats import dot_function
from bridge.runtime.cpu.machine.panels import by_rows, dots
from bridge.runtime.cpu.ops import attention as attn
from bridge.runtime.cpu.ops.attention import BLOCK, TILE, WORDS, largest, normalize, rotate
from bridge.system.kernels.jit import CFunction, c_function, inner, maker
from bridge.system.kernels.memory import LANES, array_at, floats, to_half

# set by `function`, `heads_function` and `attention.attend_function`
halves = quantized = False
dot: Any = None
multiply: Any = None
unpack_all: Any = None


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
        rotate(row[rank:], cos, sin, rotated, p[attn.NEIGHBOURS])
        for h in range(heads):
            part = floats(p[attn.PRODUCTS] + 4 * ((plain + rotated) * (t * heads + h) + plain), rotated)
            q = floats(p[attn.Q] + 4 * (width * (t * heads + h) + rank), rotated)
            rotate(part, cos, sin, rotated, p[attn.NEIGHBOURS])
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


def _sizes(p):
    """Elements of a row of q, and bytes of a tile's rows where they are unpacked."""
    width = _width(p)
    return width, 4 * TILE * width if quantized else 0


def _tile_at(p, h, begin, count, memory):
    """The rows from position `begin` on, as attention's `_tile_at`: as keys, and as values again."""
    width, item_bytes = _width(p), 2 if halves else 4
    if not quantized:
        rows = p[attn.KEYS] + begin * width * item_bytes
        return rows, rows, width * item_bytes, LANES * item_bytes
    for i in range(count):
        codes = p[attn.KEYS] + width * (begin + i)
        scales = p[attn.KEY_SCALES] + 2 * _scales(p) * (begin + i)
        for j in range(width // LANES):
            unpack_all(codes + LANES * j, scales + 2 * (j * LANES // BLOCK), memory + 4 * (width * i + LANES * j))
    return memory, memory, 4 * width, 4 * LANES


def _key_scores(rows, q, q_stride, keys, count, out):
    """out float32 [rows, TILE]: products of q with `count` rows of the cache."""
    multiply(rows, q, q_stride, keys, q_stride // 2 if halves else q_stride, count, out, 4 * TILE)


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
    multiply = by_rows(partial(dots, halves=scope["halves"]), f"dots_{kind}")
    return attn.attend_function(kind, f"latent_{kind}", _sizes, _tile_at, _key_scores, multiply=multiply)


@maker
def heads_function(kind: str) -> CFunction:
    """The C function that multiplies by a matrix for each head, of F32, F16 or BF16."""
    return c_function(_by_head, kind, dot=dot_function(kind))
