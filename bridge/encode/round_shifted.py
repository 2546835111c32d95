"""Floats to shifted ternary points, w' = a * (8 * level + shift), levels -1, 0 and 1 (IQ1_S, IQ1_M).

The shift is 1 or -1 for 32 weights together (IQ1_S) or 8 (IQ1_M): both are tried. The points nearest to the weights
less the shift are looked for by `nearest_points`; the search of scales is `round_values`'.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from bridge.blocks.iq1_s import POINTS
from bridge.blocks.read import WRITTEN
from bridge.encode.nearest_points import lists, snapper
from bridge.encode.round_loops import add
from bridge.encode.round_points import reach
from bridge.encode.round_values import values_quantizer

_ZERO = np.float32(0)
_ONE = np.float32(1)

_STEP = 8  # from level to level
_SHARED = {"IQ1_S": 32, "IQ1_M": 8}  # weights of one shift
_SETTINGS: dict[str, Any] = {"first": 10.0, "step": 1.0, "starts": 1, "refits": 0, "tries": 16, "rounds": 1, "look": 1}

# set per type by `specialize`
sub = subs = shared = 0
near = numbers = values = levels_of = np.zeros(1)
above: Any = None
below: Any = None


def fit(x, w, a, inside):
    """The error of a scale, and of its values v and residuals r: sums of w v^2, w r v. The shifts are kept."""
    found, negative, near, numbers, values = inside
    inverse = _ONE / a if a != _ZERO else _ZERO
    e = _ZERO
    svv = _ZERO
    srv = _ZERO
    for g in range(sub // shared):
        at = g * shared
        t, weights = x[at : at + shared], w[at : at + shared]
        e1, svv1, srv1 = above(t, weights, a, inverse, near, numbers, values, found[g, 0])
        e2, svv2, srv2 = below(t, weights, a, inverse, near, numbers, values, found[g, 1])
        negative[g] = e2 < e1
        e += e2 if e2 < e1 else e1
        svv += svv2 if e2 < e1 else svv1
        srv += srv2 if e2 < e1 else srv1
    return e, svv, srv


def shifted_write(x, w, a, b, codes, scratch):
    """Write the codes; the plain error, sum of x^2 and weighted error."""
    inside = scratch[3]
    found, negative, _, _, values = inside
    fit(x, w, a, inside)
    error = _ZERO
    signal = _ZERO
    weighted = _ZERO
    for g in range(sub // shared):
        minus = 1 if negative[g] else 0
        shift = np.float32(1 - 2 * minus)
        for p in range(shared // 8):
            number = found[g, minus, p]
            for i in range(8):
                at = g * shared + 8 * p + i
                codes[at] = levels_of[number, i] + np.uint8(3 * minus)
                r = x[at] - a * (values[number, i] + shift)
                error = add(error, r * r)
                signal = add(signal, x[at] * x[at])
                weighted = add(weighted, w[at] * r * r)
    return error, signal, weighted


def _workspace():
    """scales, trial, codes; and the points' numbers for either shift, the shifts and the tables."""
    groups = sub // shared
    return (
        np.zeros((2, 3, subs), np.float32),
        np.zeros(subs, np.int32),
        np.zeros(subs, np.int32),
        (np.zeros((groups, 2, shared // 8), np.int64), np.zeros(groups, np.bool_), near, numbers, values),
    )


@cache
def shifted_quantizer(name: str) -> Callable[..., None]:
    """The compiled loop over rows of IQ1_S or IQ1_M, see `rows_quantizer`."""
    points = _STEP * (POINTS.astype(np.float32) - 1)
    cells = _STEP * (np.arange(3**8)[:, None] // 3 ** np.arange(7, -1, -1) % 3 - 1).astype(np.float32)
    numbers = lists(points, cells)
    bounds = (-_STEP / 2, _STEP / 2)
    constants = {
        "shared": _SHARED[name],
        "near": np.ascontiguousarray(points[numbers].transpose(0, 2, 1)).astype(np.int8),
        "numbers": numbers,
        "values": points,
        "levels_of": POINTS,
        "above": snapper(_SHARED[name], 8, bounds, 1.0),
        "below": snapper(_SHARED[name], 8, bounds, -1.0),
    }
    loops = reach, fit, shifted_write
    return values_quantizer(WRITTEN[name], loops, _SETTINGS | constants, _workspace)
