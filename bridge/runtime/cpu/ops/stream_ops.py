"""Several streams of activations in place of one (AltUp): Baykal et al. 2023, arXiv:2301.13310; Gemma 3n has four.

    m  = tanh(W_router (norm(x) / hidden))              x: the first stream
    predict  s_b <- s_b + sum over a of (W_predict m)[4b + a] s_a     the layer then goes on with s_0
    correct  s_b <- s_b + (1 + (W_correct m)[b]) (y - s_0)            y: what it became, of which m is made anew

States that are mixed by their scores, as Kimi K3 mixes those put aside with the one that goes on:

    blend    sum over i of softmax(g)_i s_i         g_i: the sum of s_i / rms(s_i) * weight

C functions as those of decoder_ops.py. A layer's arguments are a block of int64 words, named below; streams and states
are float32 [tokens, hidden].
"""

import math
from functools import partial
from typing import Any

import numpy as np

from bridge.runtime.cpu.engines.floats import dot_function
from bridge.runtime.cpu.ops.decoder_ops import exp, square_sum
from bridge.system.kernels.jit import CFunction, c_function, inner, maker
from bridge.system.kernels.memory import allocate, array_at, array_on_stack, floats, free

STREAMS = 4
_LEAST = 1e-5  # of the mean square that lengths are divided by
_dot: Any = dot_function("F32")

# words of a layer's block: addresses of the first stream and those of the others, of the state, of what `correct`
# makes of it, of weights; then a size, and the bits of a float64
(STREAM, X, OUT, ROUTER, ROUTER_NORM, PREDICT, CORRECT, SCALE, HIDDEN, EPS, WORDS) = 0, *range(4, 14)  # fmt: skip


@partial(inner, fastmath={"reassoc", "contract"})
def _dot_of_normed(x, weight, router):
    """Sum of x * weight * router."""
    total = np.float32(0)
    for i in range(x.size):
        total += x[i] * weight[i] * router[i]
    return total


@inner
def _mixed(p, eps, x, matrix, rows, out):
    """out [rows] = matrix [rows, 4] times what the router says of x."""
    hidden = p[HIDDEN]
    weight = floats(p[ROUTER_NORM], hidden)
    size = np.float32(1.0 / np.sqrt(square_sum(x) / hidden + eps) / hidden)
    for i in range(rows):
        out[i] = 0
    factors = floats(matrix, STREAMS * rows)
    for j in range(STREAMS):
        router = floats(p[ROUTER] + 4 * hidden * j, hidden)
        modality = np.float32(math.tanh(size * _dot_of_normed(x, weight, router)))
        for i in range(rows):
            out[i] += factors[STREAMS * i + j] * modality


def _predict(block, _0, _1, _2, _3, _4, _5, first, last):
    """The streams before a layer, and X, the first of them."""
    p = array_at(block, WORDS, np.int64)
    eps = array_at(block, WORDS, np.float64)[EPS]
    k = array_on_stack(16, np.float32)
    hidden = p[HIDDEN]
    for t in range(first, last):
        offset = 4 * hidden * t
        s0, s1 = floats(p[STREAM] + offset, hidden), floats(p[STREAM + 1] + offset, hidden)
        s2, s3 = floats(p[STREAM + 2] + offset, hidden), floats(p[STREAM + 3] + offset, hidden)
        x = floats(p[X] + offset, hidden)
        _mixed(p, eps, s0, p[PREDICT], STREAMS * STREAMS, k)
        for i in range(hidden):
            a, b, c, d = s0[i], s1[i], s2[i], s3[i]
            x[i] = a + (k[0] * a + k[1] * b + k[2] * c + k[3] * d)
            s0[i] = x[i]
            s1[i] = b + (k[4] * a + k[5] * b + k[6] * c + k[7] * d)
            s2[i] = c + (k[8] * a + k[9] * b + k[10] * c + k[11] * d)
            s3[i] = d + (k[12] * a + k[13] * b + k[14] * c + k[15] * d)


def _correct(block, _0, _1, _2, _3, _4, _5, first, last):
    """The streams after a layer, of X; OUT = SCALE times the first."""
    p = array_at(block, WORDS, np.int64)
    eps = array_at(block, WORDS, np.float64)[EPS]
    k = array_on_stack(4, np.float32)
    hidden = p[HIDDEN]
    scale = floats(p[SCALE], hidden)
    for t in range(first, last):
        offset = 4 * hidden * t
        s0, s1 = floats(p[STREAM] + offset, hidden), floats(p[STREAM + 1] + offset, hidden)
        s2, s3 = floats(p[STREAM + 2] + offset, hidden), floats(p[STREAM + 3] + offset, hidden)
        x, out = floats(p[X] + offset, hidden), floats(p[OUT] + offset, hidden)
        _mixed(p, eps, x, p[CORRECT], STREAMS, k)
        for i in range(hidden):
            new = x[i] - s0[i]
            s0[i] += (np.float32(1) + k[0]) * new
            s1[i] += (np.float32(1) + k[1]) * new
            s2[i] += (np.float32(1) + k[2]) * new
            s3[i] += (np.float32(1) + k[3]) * new
            out[i] = scale[i] * s0[i]


def _as_long(y, x, hidden, _0, _1, _2, _3, first, last):
    """y[t] brought to the length of x[t]."""
    for t in range(first, last):
        values, other = floats(y + 4 * hidden * t, hidden), floats(x + 4 * hidden * t, hidden)
        mean_square = max(square_sum(values) / hidden, _LEAST)
        factor = np.float32(np.sqrt(square_sum(other) / hidden / mean_square))
        for i in range(hidden):
            values[i] *= factor


def _blend(states, count, weight, out, hidden, eps, _0, first, last):
    """out[t]: the mixture of the rows t of `count` states, of which `states` has the addresses. eps: the bits of a
    float64."""
    e = np.int64(eps).view(np.float64)
    rows = array_at(states, count, np.int64)
    memory = allocate(4 * count)
    shares = floats(memory, count)
    for t in range(first, last):
        top = np.float32(-np.inf)
        for i in range(count):
            row = rows[i] + 4 * hidden * t
            size = np.float32(1.0 / np.sqrt(square_sum(floats(row, hidden)) / hidden + e))
            shares[i] = size * _dot(row, weight, hidden)
            top = max(top, shares[i])
        total = np.float32(0)
        for i in range(count):
            shares[i] = exp(shares[i] - top)
            total += shares[i]
        y = floats(out + 4 * hidden * t, hidden)
        for j in range(hidden):
            y[j] = 0
        for i in range(count):
            values, share = floats(rows[i] + 4 * hidden * t, hidden), shares[i] / total
            for j in range(hidden):
                y[j] += share * values[j]
    free(memory)


FUNCTIONS: dict[str, Any] = {"predict": _predict, "correct": _correct, "as_long": _as_long, "blend": _blend}


@maker
def function(name: str) -> CFunction:
    """One of FUNCTIONS as a C function."""
    return c_function(FUNCTIONS[name])
