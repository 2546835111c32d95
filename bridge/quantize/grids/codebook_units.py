"""Kernels that round a unit of a row onto a table of values or a codebook, in a full metric.

A *unit* is what is rounded at once: one column for tables (IQ4, FP4), a point of 4 columns (IQ3_S), or the 8 columns
that share a parity of signs or a point of 8 (the others). Its residual r costs  r M r^T.

The nearest point in M's diagonal is found by `nearest_points`; then signs are flipped wherever that is cheaper in all
of M, in pairs where their number is kept even. Points without stored signs (IQ1) are compared in all of M: those near
the unit's cell, and near where that leads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge.blocks import BlockType
from bridge.blocks.read import WRITTEN
from bridge.encode.rounding.nearest_points import looker, snapper
from bridge.encode.rounding.round_points import codebook
from bridge.system.kernels.half import INFINITY, ONE, ZERO
from bridge.system.kernels.jit import UNSET, specialize, uncounted

_TINY = np.float32(1e-37)  # a zero whose sign matters
_FLIPS = 3  # at most, of signs or pairs of them
_CELLS = 3  # whose points are compared, at most

# set per type by `specialize`
unit = width = least = most = 0
even = shifted = False
snap = look = UNSET


def _round_value(w, a, m, variant, q, scratch):
    """The value of the table nearest to w [1] over a; returns what it costs. Tables are listed in halves."""
    nearest = scratch[0]
    y = w[0] / a if a != ZERO else ZERO
    half = np.int64(np.floor(min(max(y + y, np.float32(least)), np.float32(most))))
    q[0] = nearest[half - least]
    r = w[0] - a * q[0]
    return r * r * m[0, 0]


def _round_shifted(w, a, m, variant, q, scratch):
    """The value of a ternary point with its shift near w [8] over a, in the metric m [8, 8]; returns what it costs.

    Of the points that `nearest_points` lists for a cell, the one that costs least is taken, and then the same is done
    for the cell that its gradient leads to, while that helps. Where a shift is the unit's own, both are tried.
    """
    near, numbers, values, t, point = scratch
    inverse = ONE / a if a != ZERO else ZERO
    best = INFINITY
    for negative in range(2):
        if shifted and negative != variant:
            continue
        shift = np.float32(-2 * negative)
        least = INFINITY
        for i in range(8):
            t[i] = w[i] * inverse - shift
        for _ in range(_CELLS):
            cost = look(t, w, a, inverse, shift, m, near, numbers, values, point)
            if not cost < least:
                break
            least = cost
            if cost < best:
                best = cost
                for i in range(8):
                    q[i] = point[i] + shift
    return best


def _round_point(w, a, m, variant, q, scratch):
    """The value of points near w [unit] over a, in the metric m [unit, unit]; returns what they cost."""
    near, numbers, values, t, v, indices, r, g, by = scratch
    inverse = ONE / a if a != ZERO else ZERO
    minuses = cheapest = 0
    lowest = INFINITY
    for i in range(unit):
        t[i] = abs(w[i])
        v[i] = m[i, i]
        minuses += 1 if w[i] < ZERO else 0
        cost = v[i] * t[i]
        if cost < lowest:
            lowest, cheapest = cost, i
    if even and minuses & 1:
        t[cheapest] = -max(t[cheapest], _TINY)
    snap(t, v, a, inverse, near, numbers, values, indices)
    for i in range(unit):
        size = values[indices[i // width], i % width]
        q[i] = -size if (w[i] < ZERO) != (t[i] < ZERO) else size
        r[i] = w[i] - a * q[i]
    for i in range(unit):
        g[i] = ZERO
    for k in range(unit):
        for i in range(unit):
            g[i] += r[k] * m[k, i]
    for _ in range(_FLIPS):
        best = ZERO
        first = second = 0
        for i in range(unit):
            by[i] = np.float32(2) * a * q[i]  # of the residual
            v[i] = by[i] * (np.float32(2) * g[i] + by[i] * m[i, i])
        for i in range(unit):
            if even:
                for k in range(i):
                    cost = v[i] + v[k] + np.float32(2) * by[i] * by[k] * m[i, k]
                    if cost < best:
                        best, first, second = cost, i, k
            elif v[i] < best:
                best, first, second = v[i], i, i
        if best == ZERO:
            break
        for i in range(unit):
            g[i] += by[first] * m[first, i]
            if second != first:
                g[i] += by[second] * m[second, i]
        r[first] += by[first]
        q[first] = -q[first]
        if second != first:
            r[second] += by[second]
            q[second] = -q[second]
    total = ZERO
    for i in range(unit):
        total += r[i] * g[i]
    return total


@dataclass(frozen=True)
class UnitRounding:
    """How the units of a type are rounded.

    unit      columns that are rounded at once
    function  `_round_value`, `_round_point` or `_round_shifted`, for kernels
    scratch   makes its argument of this name
    """

    unit: int
    function: Any
    scratch: Callable[[], Any]


def unit_rounding(name: str, shifted: bool) -> UnitRounding:
    """The kernel of a type by its name; `shifted`: units take the shift of their sub-block."""
    block = WRITTEN[name]
    if not block.numbered:
        values = values_of_codes(block)
        value = specialize(_round_value, name, uncounted, least=2 * min(values), most=2 * max(values))
        nearest = _nearest_table(block)
        return UnitRounding(1, value, lambda: (nearest,))
    points = codebook(name)
    tables = points.near, points.numbers, points.values

    def floats(count: int) -> list[np.ndarray]:
        return [np.zeros(8, np.float32) for _ in range(count)]

    if block.shifted:
        ternary = specialize(_round_shifted, name, uncounted, look=looker(points.bounds), shifted=shifted)
        return UnitRounding(8, ternary, lambda: (*tables, *floats(2)))
    width, even = points.values.shape[1], block.even_signs
    unit = 8 if even else width
    scope = {"snap": snapper(8, width, points.bounds), "width": width, "unit": unit, "even": even}
    point = specialize(_round_point, name, uncounted, **scope)
    return UnitRounding(unit, point, lambda: (*tables, *floats(2), np.zeros(8, np.int64), *floats(3)))


def values_of_codes(block: BlockType) -> tuple[int, ...]:
    """The value of each code: that of its table, or the code counted from the type's zero."""
    return block.values or tuple(q - block.zero for q in range(block.levels))


def _nearest_table(block: BlockType) -> np.ndarray:
    """float32: the nearest value to each half interval, from the least value's on; middles of values are halves."""
    values = np.unique(values_of_codes(block))
    halves = np.arange(2 * values[0], 2 * values[-1] + 1) / 2 + 0.25
    return values[np.abs(halves[:, None] - values).argmin(1)].astype(np.float32)
