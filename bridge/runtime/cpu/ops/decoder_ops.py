"""What a decoder does between its matrix products: look up, normalize, SwiGLU.

Each is a C function of nine int64, as the products are: seven of its own and a range, here of tokens. Hence
a token's whole computation is a table of calls (see program.py), and a batch's may be shared among threads.
"""

from functools import partial
from typing import Any

import numpy as np

from bridge.runtime.cpu.forms import rowmajor
from bridge.system.kernels.jit import CFunction, c_function, inner, maker
from bridge.system.kernels.memory import array_at, floats

LIMIT, SLOPE = np.float32(7.0), np.float32(1.702)  # of gpt-oss's gate

unpack: Any = None  # set by `look_up_function`
activate: Any = None  # set by `function`


@partial(inner, fastmath={"reassoc", "contract"})
def square_sum(x):
    """Sum of squares, in float64."""
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@partial(inner, fastmath={"contract"})
def exp(x):
    """exp of a float32 within 1e-7, in instructions that vectorize (Cephes' expf)."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else np.float32(88.0) if x > np.float32(88.0) else x
    n = np.float32(np.rint(x * np.float32(1.44269504)))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = np.int32(np.int32(np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * r * r + r + np.float32(1.0)) * power


def _look_up(table, row_bytes, tokens, x, hidden, _0, _1, first, last):
    """x[t], float32 [hidden]: the row of a table of blocks that the int64 tokens[t] names, for t in first..last."""
    for t in range(first, last):
        index = array_at(tokens, last, np.int64)[t]
        row = array_at(table + index * row_bytes, (1, row_bytes), np.uint8)
        unpack(row, array_at(x + 4 * hidden * t, (1, hidden), np.float32))


def _norm(x, delta, weight, out, hidden, eps, scale, first, last):
    """x[t] += scale * delta[t] where delta is not 0; out[t] = x[t] / rms(x[t]) * weight, or x[t] where weight is 0.

    eps, scale: the bits of float64. out may be x.
    """
    share = np.float32(np.int64(scale).view(np.float64))
    e = np.int64(eps).view(np.float64)
    for t in range(first, last):
        values = floats(x + 4 * hidden * t, hidden)
        y = floats(out + 4 * hidden * t, hidden)
        if delta:
            d = floats(delta + 4 * hidden * t, hidden)
            for i in range(hidden):
                values[i] += share * d[i]
        if weight:
            w = floats(weight, hidden)
            size = np.float32(1.0 / np.sqrt(square_sum(values) / hidden + e))
            for i in range(hidden):
                y[i] = values[i] * size * w[i]
        else:
            for i in range(hidden):
                y[i] = values[i]


def _layer_norm(x, delta, weight, bias, out, hidden, eps, first, last):
    """As `_norm` with a scale of 1, but of x - mean(x); then + bias, where it is not 0."""
    e = np.int64(eps).view(np.float64)
    w = floats(weight, hidden)
    for t in range(first, last):
        values = floats(x + 4 * hidden * t, hidden)
        y = floats(out + 4 * hidden * t, hidden)
        if delta:
            d = floats(delta + 4 * hidden * t, hidden)
            for i in range(hidden):
                values[i] += d[i]
        total = 0.0
        for i in range(hidden):
            total += values[i]
        mean = np.float32(total / hidden)
        for i in range(hidden):
            y[i] = values[i] - mean
        size = np.float32(1.0 / np.sqrt(square_sum(y) / hidden + e))
        for i in range(hidden):
            y[i] = y[i] * size * w[i]
        if bias:
            b = floats(bias, hidden)
            for i in range(hidden):
                y[i] += b[i]


@inner
def silu_times(gate, up):
    return gate * up / (np.float32(1.0) + exp(-gate))


@inner
def gelu_times(gate, up):
    """gelu(gate) up, with gelu(x) = x / (1 + exp(-2 sqrt(2/pi) (x + 0.044715 x^3))): its tanh form."""
    bent = gate * (np.float32(1.0) + np.float32(0.044715) * gate * gate)
    return gate * up / (np.float32(1.0) + exp(np.float32(-1.5957691216) * bent))


@inner
def erf_times(gate, up):
    """gate (1 + erf(gate / sqrt(2))) / 2 * up, with erf within 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26)."""
    z = abs(gate) * np.float32(0.70710678)
    t = np.float32(1.0) / (np.float32(1.0) + np.float32(0.3275911) * z)
    p = np.float32(1.061405429)
    p = p * t - np.float32(1.453152027)
    p = p * t + np.float32(1.421413741)
    p = p * t - np.float32(0.284496736)
    p = p * t + np.float32(0.254829592)
    tail = np.float32(0.5) * p * t * exp(-z * z)
    return gate * up * (tail if gate < np.float32(0.0) else np.float32(1.0) - tail)


@inner
def relu2_times(gate, up):
    positive = max(gate, np.float32(0.0))
    return positive * positive * up


@inner
def clamp(gate, up):
    """min(gate, 7) sigmoid(1.702 min(gate, 7)) (clip(up, -7, 7) + 1), of gpt-oss."""
    x = min(gate, LIMIT)
    return x * (min(max(up, -LIMIT), LIMIT) + np.float32(1.0)) / (np.float32(1.0) + exp(-SLOPE * x))


@partial(inner, fastmath={"contract"})
def tanh(x):
    """tanh of a float32 within 1e-7 of itself, in instructions that vectorize (Cephes' tanhf)."""
    size = abs(x)
    z = x * x
    p = np.float32(-5.70498872745e-3)
    p = p * z + np.float32(2.06390887954e-2)
    p = p * z - np.float32(5.37397155531e-2)
    p = p * z + np.float32(1.33314422036e-1)
    p = p * z - np.float32(3.33332819422e-1)
    near = p * z * x + x
    far = np.float32(1.0) - np.float32(2.0) / (exp(size + size) + np.float32(1.0))
    return near if size < np.float32(0.625) else far if x > np.float32(0.0) else -far


@inner
def situ_times(gate, up, b, c):
    """b tanh(gate / b) sigmoid(gate) c tanh(up / c), of Kimi K3; where c is 0, up as it is."""
    bent = b * tanh(gate / b) / (np.float32(1.0) + exp(-gate))
    return bent * (c * tanh(up / c) if c > np.float32(0.0) else up)


@inner
def limited_times(gate, up, limit, _):
    """min(silu(gate), limit) clip(up, -limit, limit)."""
    return min(silu_times(gate, np.float32(1.0)), limit) * min(max(up, -limit), limit)


def _numbered(gate, up, inner, stride, first_number, second_number, _0, first, last):
    """gate = activate(gate, up, two numbers), otherwise as `_gated`. The numbers: the bits of float64."""
    b = np.float32(np.int64(first_number).view(np.float64))
    c = np.float32(np.int64(second_number).view(np.float64))
    for t in range(first, last):
        g = floats(gate + 4 * inner * t, inner)
        u = floats(up + (stride if stride else 4 * inner) * t, inner)
        for i in range(inner):
            g[i] = activate(g[i], u[i], b, c)


def _gated(gate, up, inner, stride, _0, _1, _2, first, last):
    """gate = activate(gate, up), float32 [tokens, inner]. In place, and only so: a check for overlap would fail.

    stride: bytes from a row of up to the next; 0: they follow one another
    """
    for t in range(first, last):
        g = floats(gate + 4 * inner * t, inner)
        u = floats(up + (stride if stride else 4 * inner) * t, inner)
        for i in range(inner):
            g[i] = activate(g[i], u[i])


def _ungated(x, _0, inner, _1, _2, _3, _4, first, last):
    """x = activate(x, 1) in place."""
    for t in range(first, last):
        g = floats(x + 4 * inner * t, inner)
        for i in range(inner):
            g[i] = activate(g[i], np.float32(1.0))


def _xielu(x, inner, alpha_n, alpha_p, beta, eps, _0, first, last):
    """x = alpha_p x^2 + beta x in place, or alpha_n (e^min(x, eps) - 1 - x) + beta x where x is not above 0.

    Huang and Schlag 2025, arXiv:2411.13010. alpha_n, ...: the bits of float64.
    """
    below = np.float32(np.int64(alpha_n).view(np.float64))
    above = np.float32(np.int64(alpha_p).view(np.float64))
    share = np.float32(np.int64(beta).view(np.float64))
    most = np.float32(np.int64(eps).view(np.float64))
    for t in range(first, last):
        values = floats(x + 4 * inner * t, inner)
        for i in range(inner):
            v = values[i]
            bent = above * v * v
            if v <= np.float32(0.0):
                bent = below * (np.float32(np.expm1(np.float64(min(v, most)))) - v)
            values[i] = bent + share * v


def _sparsify(x, inner, deviations, _0, _1, _2, _3, first, last):
    """x[t] = max(0, x[t] - c) in place, c so many deviations above the mean. deviations: the bits of a float64."""
    share = np.int64(deviations).view(np.float64)
    for t in range(first, last):
        values = floats(x + 4 * inner * t, inner)
        total = 0.0
        for i in range(inner):
            total += values[i]
        mean = total / inner
        squares = 0.0
        for i in range(inner):
            squares += (values[i] - mean) ** 2
        least = np.float32(mean + share * np.sqrt(squares / inner))
        for i in range(inner):
            values[i] = max(np.float32(0.0), values[i] - least)


def _scale(x, count, factor, _0, _1, _2, _3, first, last):
    """x *= factor, float32 [tokens, count]. factor: the bits of a float64."""
    share = np.float32(np.int64(factor).view(np.float64))
    for t in range(first, last):
        values = floats(x + 4 * count * t, count)
        for i in range(count):
            values[i] *= share


def _add(x, delta, count, stride, _0, _1, _2, first, last):
    """x += delta, float32 [tokens, count]. stride: bytes from a row of delta to the next; 0: one for all tokens."""
    for t in range(first, last):
        values = floats(x + 4 * count * t, count)
        d = floats(delta + stride * t, count)
        for i in range(count):
            values[i] += d[i]


def _add_rows(x, table, start, count, _0, _1, _2, first, last):
    """x[t] += table[start + t], float32 [tokens, count]; start: the address of an int64."""
    position = array_at(start, 1, np.int64)[0]
    for t in range(first, last):
        values = floats(x + 4 * count * t, count)
        row = floats(table + 4 * count * (position + t), count)
        for i in range(count):
            values[i] += row[i]


def _split_gate(both, q, heads, head_dim, _0, _1, _2, first, last):
    """q [tokens, heads, head_dim] of [tokens, heads, 2, head_dim], where each head's gate follows its q."""
    for head in range(first * heads, last * heads):
        source = floats(both + 8 * head_dim * head, head_dim)
        y = floats(q + 4 * head_dim * head, head_dim)
        for i in range(head_dim):
            y[i] = source[i]


@inner
def sigmoid_times(gate, x):
    return x / (np.float32(1.0) + exp(-gate))


@inner
def softplus_times(gate, x):
    """ln(1 + e^gate) x."""
    return x * np.float32(max(gate, np.float32(0.0)) + np.log1p(np.exp(-abs(np.float64(gate)))))


def _gate_heads(gates, x, heads, head_dim, apart, each, _0, first, last):
    """x [tokens, heads, head_dim] = activate(gates, x): `each` of a head, one or head_dim, `apart` elements after the
    first of the head before."""
    for head in range(first * heads, last * heads):
        gate = floats(gates + 4 * apart * head, each)
        y = floats(x + 4 * head_dim * head, head_dim)
        if each == 1:
            factor = activate(gate[0], np.float32(1.0))
            for i in range(head_dim):
                y[i] *= factor
        else:
            for i in range(head_dim):
                y[i] = activate(gate[i], y[i])


def _fit_heads(x, y, heads, size, fitted, _0, _1, first, last):
    """y [tokens, heads, fitted] of x [tokens, heads, size]: heads cut off, or filled with zeros."""
    for head in range(first * heads, last * heads):
        source = floats(x + 4 * size * head, size)
        out = floats(y + 4 * fitted * head, fitted)
        for i in range(fitted):
            out[i] = source[i] if i < size else np.float32(0.0)


FUNCTIONS: dict[str, Any] = {
    "norm": _norm, "layer_norm": _layer_norm, "swiglu": _gated, "geglu": _gated, "gelu": _ungated, "reglu2": _gated,
    "relu2": _ungated, "clamped": _gated, "xielu": _xielu, "sparsify": _sparsify, "scale": _scale, "add": _add,
    "add_rows": _add_rows, "split_gate": _split_gate, "gate_heads": _gate_heads, "softplus_heads": _gate_heads,
    "fit_heads": _fit_heads, "erf_gated": _gated, "erf": _ungated, "situ": _numbered, "limited": _numbered,
}  # fmt: skip
_ACTIVATIONS = {
    "swiglu": silu_times, "geglu": gelu_times, "gelu": gelu_times, "reglu2": relu2_times, "relu2": relu2_times,
    "clamped": clamp, "erf_gated": erf_times, "erf": erf_times, "gate_heads": sigmoid_times,
    "softplus_heads": softplus_times, "situ": situ_times, "limited": limited_times,
}  # fmt: skip
_OF_GATES = {"silu": "swiglu", "gelu": "geglu", "erf": "erf_gated", "relu2": "reglu2"}


@maker
def function(name: str) -> CFunction:
    """One of FUNCTIONS as a C function."""
    return c_function(FUNCTIONS[name], name, activate=_ACTIVATIONS.get(name))


def activation(name: str, gated: bool) -> Any:
    """(x, factors, width) of silu, gelu, erf, relu2 or clamped as a C function; without factors if it is not gated.

    After (x, factors, width, stride) situ takes the bits of two numbers, and limited those of one.
    """
    return function(_OF_GATES.get(name, name) if gated else name)


@maker
def look_up_function(type: str) -> CFunction:
    """The C function that unpacks one row of a table in a type."""
    return c_function(_look_up, type, unpack=rowmajor.dequantize(type))
