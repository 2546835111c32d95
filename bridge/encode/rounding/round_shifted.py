"""Floats to shifted ternary points, w' = a * (8 * level + shift), levels -1, 0 and 1 (IQ1_S, IQ1_M).

The shift is 1 or -1 for 32 weights together (IQ1_S) or 8 (IQ1_M): both are tried. The points nearest to the weights
less the shift are looked for by `nearest_points`; the search of scales is `round_values`'.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from bridge.blocks.read import WRITTEN
from bridge.encode.rounding.nearest_points import lists, shifted_snapper
from bridge.encode.rounding.round_loops import add
from bridge.encode.rounding.round_points import start_scales
from bridge.encode.rounding.round_values import values_quantizer
from bridge.system.kernels.half import ONE, ZERO

_STEP = 8  # from level to level

# set per type by `specialize`
sub = subs = shared = 0
lifted = False
near = numbers = values = levels_of = np.zeros(1)
snap: Any = None


def fit(x, w, a, inside):
    """The error of a scale, and of its values v and residuals r: sums of w v^2, w r v.

    Points and shifts are kept in turn for the sub-blocks of a block: at the end, those of the last scale of each.
    """
    chosen, negative, near, numbers, values, turn = inside
    j = turn[0]
    turn[0] = (j + 1) % subs
    inverse = ONE / a if a != ZERO else ZERO
    return snap(x, w, a, inverse, near, numbers, values, chosen[j], negative[j])


def shifted_write(x, w, a, b, codes, scratch):
    """Write the codes that `fit` found last; the plain error, sum of x^2 and weighted error."""
    chosen, negative, _, _, values, turn = scratch[-1]
    j = turn[0]
    turn[0] = (j + 1) % subs
    error = signal = weighted = ZERO
    for p in range(sub // 8):
        minus = negative[j, 8 * p // shared]
        shift = np.float32(1 - 2 * minus)
        number = chosen[j, p]
        for i in range(8):
            column = 8 * p + i
            codes[column] = levels_of[number, i] + np.uint8(3 * minus)
            r = x[column] - a * (values[number, i] + shift)
            error = add(error, r * r)
            signal = add(signal, x[column] * x[column])
            weighted = add(weighted, (w[column] * w[column] if lifted else w[column]) * r * r)
    return error, signal, weighted


def fit_scratch():
    """The points' numbers, the shifts, the tables and whose turn it is."""
    signs = np.zeros((subs, sub // shared), np.int64)
    return np.zeros((subs, sub // 8), np.int64), signs, near, numbers, values, np.zeros(1, np.int64)


@cache
def shifted_quantizer(name: str, lifted: bool) -> Callable[..., None]:
    """The compiled loop over rows of IQ1_S or IQ1_M, see `rows_quantizer` and `points_quantizer`."""
    kind = WRITTEN[name]
    assert kind.points is not None, name
    points = _STEP * (kind.points.astype(np.float32) - 1)
    cells = _STEP * (np.arange(3**8)[:, None] // 3 ** np.arange(7, -1, -1) % 3 - 1).astype(np.float32)
    numbers = lists(points, cells)
    bounds = (-_STEP / 2, _STEP / 2)
    constants = {
        "shared": kind.shifted, "lifted": lifted,
        "near": np.ascontiguousarray(points[numbers].transpose(0, 2, 1)).astype(np.int8), "numbers": numbers,
        "values": points, "levels_of": kind.points, "snap": shifted_snapper(kind.sub, kind.shifted, bounds),
    }  # fmt: skip
    loops = fit_scratch, start_scales, fit, shifted_write
    return values_quantizer(kind, loops, constants)
