"""Floats to points of a codebook, w' = a * values[q] (IQ2, IQ3): the loops over one sub-block.

The signs are stored apart, so the point nearest to |w| is looked for, by `nearest_points`. Where only seven signs of
eight are stored, an odd number of minuses is mended at the weight where that costs least.

Searches of scales are `round_values`'.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from bridge.blocks.read import WRITTEN
from bridge.encode.rounding.nearest_points import lists, snapper
from bridge.encode.rounding.round_loops import add, greater
from bridge.encode.rounding.round_values import values_quantizer
from bridge.system.kernels.half import INFINITY, ONE, ZERO
from bridge.system.kernels.jit import UNSET

_TINY = np.float32(1e-37)  # a zero whose sign matters

# set per type by `specialize`
sub = subs = width = levels = 0
even = lifted = False
near = numbers = values = codes_of = np.zeros(1)
snap = block = UNSET


def fold(x, w, t):
    """|x| into t, but less than 0 where the sign differs from x's."""
    for i in range(sub):
        t[i] = abs(x[i])
    if even:
        for start in range(0, sub, 8):
            minuses = 0
            least = INFINITY
            cheapest = start
            for i in range(start, start + 8):
                minuses += 1 if x[i] < ZERO else 0
                cost = w[i] * t[i]
                if cost < least:
                    least, cheapest = cost, i
            if minuses & 1:
                t[cheapest] = -max(t[cheapest], _TINY)


def start_scales(x, w):
    """What is tried in parts as a scale: between the root of the weights' mean square and the greatest of them."""
    squares = weight = peak = ZERO
    for i in range(sub):
        squares = add(squares, w[i] * x[i] * x[i])
        weight = add(weight, w[i])
        peak = greater(peak, abs(x[i]))
    scale = np.sqrt(peak * np.sqrt(squares / weight))
    return scale, scale


def fit(t, w, a, inside):
    """The error of a scale, and of its values v and residuals r: sums of w v^2, w r v."""
    inverse = ONE / a if a != ZERO else ZERO
    _, chosen, near, numbers, values, _ = inside
    return snap(t, w, a, inverse, near, numbers, values, chosen)


def points_write(x, w, a, b, codes, scratch):
    """Write the codes; the plain error, sum of x^2 and weighted error."""
    inside = scratch[-1]
    t, chosen, _, _, values, searched = inside
    fold(x, w, t[0])
    fit(t[0], w, a * searched[0], inside)
    error = signal = weighted = ZERO
    for p in range(sub // width):
        for i in range(width):
            column = width * p + i
            minus = (x[column] < ZERO) != (t[0, column] < ZERO)
            codes[column] = codes_of[chosen[p], i] + (np.uint8(levels) if minus else np.uint8(0))
            r = t[0, column] - a * values[chosen[p], i]
            error = add(error, r * r)
            signal = add(signal, x[column] * x[column])
            weighted = add(weighted, (w[column] * w[column] if lifted else w[column]) * r * r)
    return error, signal, weighted


def fit_scratch():
    """The folded weights, points' numbers and tables, and what d was over what it is."""
    return (
        np.zeros((subs, sub), np.float32), np.zeros(sub // width, np.int64), near, numbers, values,
        np.ones(1, np.float32),
    )  # fmt: skip


def _search(x, w, row, start, scratch, sc, mn):
    scales, tried, trial, codes, inside = scratch
    t, searched = inside[0], inside[-1]
    for j in range(subs):
        fold(x[row, start + j], w[start + j], t[j])
    before, d = block(t, w[start : start + subs], scales, tried, trial, codes, inside)
    searched[0] = before / d if d != ZERO else ONE
    for j in range(subs):
        sc[row, start + j] = codes[j]
    return d, ZERO


@dataclass(frozen=True)
class Codebook:
    """A type's points as `nearest_points` takes them.

    codes    uint8 [points, width]: the number of each coordinate's level
    bounds   between the levels
    """

    codes: np.ndarray
    near: np.ndarray
    numbers: np.ndarray
    values: np.ndarray
    bounds: tuple[float, ...]


@cache
def codebook(name: str) -> Codebook:
    """The codebook of a type of IQ1, IQ2 or IQ3; of IQ1, with a shift of 1."""
    kind = WRITTEN[name]
    assert kind.points is not None, name
    width = kind.points.shape[1]
    levels = np.array(kind.values[: len(kind.values) // 2])
    n = len(levels)
    points = levels[kind.points].astype(np.float32)
    cells = levels[np.arange(n**width)[:, None] // n ** np.arange(width - 1, -1, -1) % n].astype(np.float32)
    numbers = lists(points, cells)
    near = np.ascontiguousarray(points[numbers].transpose(0, 2, 1)).astype(np.int8)
    return Codebook(kind.points, near, numbers, points, tuple(((levels[1:] + levels[:-1]) / 2).tolist()))


@cache
def points_quantizer(name: str, lifted: bool) -> Callable[..., None]:
    """The compiled loop over rows of a type of IQ2 or IQ3, see `rows_quantizer`.

    lifted  whether d is, and weights' importance is given by its root, see `round_values`
    """
    kind, parts = WRITTEN[name], codebook(name)
    width = parts.values.shape[1]
    constants = {
        "width": width, "levels": len(parts.bounds) + 1, "even": kind.even_signs, "lifted": lifted, "near": parts.near,
        "numbers": parts.numbers, "values": parts.values, "codes_of": parts.codes,
        "snap": snapper(kind.sub, width, parts.bounds),
    }  # fmt: skip
    return values_quantizer(kind, (fit_scratch, fold, start_scales, fit, points_write), constants, _search)
