"""Kernels that round sub-blocks of a row onto a table of values or a codebook, in a full metric.

A *unit* is what is rounded at once: one column for tables (IQ4, FP4), a point of 4 columns (IQ3_S), or the 8 columns
that share a parity of signs or a point of 8 (the others). With H^-1 = U^T U, columns in the order in which they are
rounded, a unit's residual r costs

    r M r^T,  M = D D^T,  D the inverse of U's block of the unit

and moves later columns by  -e U,  e = r D, so that what it costs is the sum of e^2.

Within a unit, the nearest point in M's diagonal is found by `nearest_points`; then signs are flipped wherever that is
cheaper in all of M, in pairs where their number is kept even. Points without stored signs (IQ1) are compared in all of
M: those near the unit's cell, and near where that leads. What a sub-block has besides its scale, a mirrored table or a
shift of 32 weights, is its *variant*: 0 or 1.

    a scale is tried by rounding the whole sub-block at it, errors fed forward (`try_scales`)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from bridge.blocks import BlockType
from bridge.blocks.read import WRITTEN
from bridge.encode.nearest_points import looker, snapper
from bridge.encode.round_points import EVEN, codebook
from bridge.system.half import round_half
from bridge.system.jit import inlined, specialize, uncounted

_ZERO = np.float32(0)
_ONE = np.float32(1)
_INFINITY = np.float32(np.inf)
_TINY = np.float32(1e-37)  # a zero whose sign matters
_FLIPS = 3  # at most, of signs or pairs of them
_CELLS = 3  # whose points are compared, at most
_STEP = np.float32(0.03)  # between tries of a scale that is a float
_LARGEST = np.float32(65504)
_GAIN = np.float32(0.9999)  # a change is made only if its cost is below this share of the old one
_DESCENTS = 4  # passes over the units of a run at most

# set per type by `specialize`
sub = subs = unit = width = scale_lo = scale_hi = odd = variants = nothing = 0
least = most = 0
share = _ONE
even = coded = fixed = mirrored = shifted = False
scales = np.zeros(1, np.float32)
snap: Any = None
look: Any = None
round_unit: Any = None
round_sub: Any = None
scale_of: Any = None
variant_of: Any = None
try_scales: Any = None
refit_run: Any = None


def _scale_of(d, sc):
    if fixed:
        return d * scales[sc]
    return share * d * np.float32(odd * sc + odd - 1) if coded else d


def _variant_of(q):
    """The variant of a sub-block that has a value q: values are 1 above a multiple of 8, or below."""
    return 1 if shifted and np.int64(q) & 7 == 7 else 0


def _round_value(w, a, m, variant, q, scratch):
    """The value of the table nearest to w [1] over a; returns what it costs. Tables are listed in halves."""
    nearest = scratch[0]
    y = w[0] / a if a != _ZERO else _ZERO
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
    inverse = _ONE / a if a != _ZERO else _ZERO
    best = _INFINITY
    for negative in range(2):
        if shifted and negative != variant:
            continue
        shift = np.float32(-2 * negative)
        least = _INFINITY
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
    near, numbers, values, t, v, found, r, g, by = scratch
    inverse = _ONE / a if a != _ZERO else _ZERO
    minuses = 0
    cheapest = 0
    lowest = _INFINITY
    for i in range(unit):
        t[i] = abs(w[i])
        v[i] = m[i, i]
        minuses += 1 if w[i] < _ZERO else 0
        cost = v[i] * t[i]
        if cost < lowest:
            lowest, cheapest = cost, i
    if even and minuses & 1:
        t[cheapest] = -max(t[cheapest], _TINY)
    snap(t, v, a, inverse, near, numbers, values, found)
    for i in range(unit):
        size = values[found[i // width], i % width]
        q[i] = -size if (w[i] < _ZERO) != (t[i] < _ZERO) else size
        r[i] = w[i] - a * q[i]
    for i in range(unit):
        g[i] = _ZERO
    for k in range(unit):
        for i in range(unit):
            g[i] += r[k] * m[k, i]
    for _ in range(_FLIPS):
        best = _ZERO
        first = 0
        second = 0
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
        if best == _ZERO:
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
    total = _ZERO
    for i in range(unit):
        total += r[i] * g[i]
    return total


def _round_sub(w, factor, metric, inverse, a, variant, bound, q, e, scratch):
    """Round w [sub], which is overwritten, at scale a -> values q and errors e [sub]; the cost, or more than bound."""
    total = _ZERO
    for u in range(sub // unit):
        at = u * unit
        total += round_unit(w[at : at + unit], a, metric[u], variant, q[at : at + unit], scratch)
        if total >= bound:
            break
        for i in range(unit):
            by = _ZERO
            for k in range(i + 1):
                by += (w[at + k] - a * q[at + k]) * inverse[u, k, i]
            e[at + i] = by
        for i in range(unit):
            by = e[at + i]
            for k in range(at + unit, sub):
                w[k] -= by * factor[at + i, k]
    return total


def _try_scales(w, factor, metric, inverse, d, sc, reach, bound, q, e, work, scratch):
    """Round w [sub] at the scales next to sc, or to d -> (cost, d, sc); values q and errors e [sub] of the best.

    Scales are at most `reach` steps away. Unless one costs less than `bound`, q and e keep what they hold.
    """
    copy, trial_q, trial_e = work[0], work[1], work[2]
    best_d, best_sc = d, sc
    for variant in range(variants):
        for tried in range(2 * reach + 1):
            step = (tried + 1) // 2 if tried & 1 else -(tried // 2)  # the nearest first
            new_d, new_sc = d, sc
            if coded:
                new_sc = (-sc if mirrored and variant else sc) + step
                if new_sc < scale_lo or new_sc > scale_hi:
                    continue
            else:
                new_d = round_half(min(max(d * (_ONE + _STEP * np.float32(step)), -_LARGEST), _LARGEST))
                new_d = -new_d if variant else new_d
            for i in range(sub):
                copy[i] = w[i]
            a = scale_of(new_d, new_sc)
            cost = round_sub(copy, factor, metric, inverse, a, variant, bound, trial_q, trial_e, scratch)
            if cost < bound:
                bound, best_d, best_sc = cost, new_d, new_sc
                for i in range(sub):
                    q[i] = trial_q[i]
                    e[i] = trial_e[i]
    return bound, best_d, best_sc


def _round_run(weight, columns, factor, metric, inverse, d, sc, reach, codes, errors, buffers):
    """Round a run: weight [rows, n], overwritten, in the order of columns int [n], counted from the run's first.

    factor [n, n]: U; metric, inverse [n / unit, unit, unit]: M and D of units; codes, errors [rows, n] in that order
    """
    scratch, work, q = buffers
    n = weight.shape[1]
    units = sub // unit
    for row in range(weight.shape[0]):
        w = weight[row]
        for s in range(n // sub):
            at = s * sub
            j = columns[at] // sub
            own = slice(at, at + sub)
            some = slice(s * units, (s + 1) * units)
            for i in range(sub):
                q[i] = np.float32(nothing)
            e = errors[row, own]
            _, new_d, new_sc = try_scales(
                w[own], factor[own, own], metric[some], inverse[some], d[row, 0], np.int64(sc[row, j]), reach,
                _INFINITY, q, e, work, scratch,
            )  # fmt: skip
            sc[row, j] = new_sc
            if not coded:
                d[row, 0] = new_d
            for i in range(sub):
                codes[row, at + i] = np.int16(q[i])
                by = errors[row, at + i]
                for k in range(at + sub, n):
                    w[k] -= by * factor[at + i, k]


def _refit_run(
    codes, g, hessian, order, factor, metric, inverse, within, squares, undo, d, sc, reach, tries, buffers, saved
):
    """Round the sub-blocks of a run again, each against all other errors, then d, then units: see `CodebookGrid.refit`.

    order [subs, sub]; factor, within [subs, sub, sub]: U and H^-1 of each sub-block in that order; metric, inverse as
    in `_round_run`; squares, undo [n / unit, unit, unit]: H and H^-1 of each unit, from the first column to the last
    """
    scratch, work, q = buffers
    values, slope, moved, numbers, own_sc, best_values, best_slope, best_numbers, best_sc = saved
    e, target, present = work[3], work[4], work[5]
    n = codes.shape[1]
    units = sub // unit
    for row in range(codes.shape[0]):
        kept = _ZERO  # the best try's change of the error
        best_d = d[row, 0]
        start_d = best_d
        for j in range(subs):
            best_sc[j] = sc[row, j]
            a = scale_of(start_d, np.int64(sc[row, j]))
            for i in range(sub):
                best_numbers[j * sub + i] = np.float32(codes[row, j * sub + i])
                best_values[j * sub + i] = a * best_numbers[j * sub + i]
                best_slope[j * sub + i] = g[row, j * sub + i]
        for t in range(len(tries)):
            own_d = best_d if t == 0 else round_half(best_d * tries[t])
            change = kept
            for k in range(n):
                values[k], slope[k], numbers[k] = best_values[k], best_slope[k], best_numbers[k]
            for j in range(subs):
                own_sc[j] = best_sc[j]
            for j in range(subs):
                now = _ZERO
                for i in range(sub):
                    present[i] = slope[order[j, i]]
                for i in range(sub):
                    by = _ZERO
                    for k in range(sub):
                        by += within[j, i, k] * present[k]
                    target[i] = values[order[j, i]] + by
                    now += by * present[i]
                some = slice(j * units, (j + 1) * units)
                bound = now * _GAIN if t == 0 else _INFINITY
                cost, new_d, new_sc = try_scales(
                    target, factor[j], metric[some], inverse[some], own_d, np.int64(own_sc[j]), reach, bound, q, e,
                    work, scratch,
                )  # fmt: skip
                if not cost < bound:
                    continue
                own_sc[j] = new_sc
                if not coded:
                    own_d = new_d
                change += cost - now
                a = scale_of(new_d, new_sc)
                for i in range(sub):
                    c = order[j, i]
                    numbers[c] = q[i]
                    by = a * q[i] - values[c]
                    values[c] = a * q[i]
                    for k in range(n):
                        slope[k] -= by * hessian[c, k]
            # d by least squares
            along = _ZERO
            for k in range(n):
                moved[k] = _ZERO
            for c in range(n):
                along += values[c] * slope[c]
                for k in range(n):
                    moved[k] += values[c] * hessian[c, k]
            curve = _ZERO
            for k in range(n):
                curve += values[k] * moved[k]
            if not fixed and curve > _ZERO and own_d != _ZERO:
                new_d = round_half(min(max(own_d * (_ONE + along / curve), -_LARGEST), _LARGEST))
                by = new_d / own_d - _ONE
                gain = by * (np.float32(2) * along - by * curve)
                if gain > _ZERO and new_d != _ZERO:
                    change -= gain
                    for j in range(subs):
                        a = scale_of(new_d, np.int64(own_sc[j]))
                        for i in range(sub):
                            values[j * sub + i] = a * numbers[j * sub + i]
                    for k in range(n):
                        slope[k] -= by * moved[k]
                    own_d = new_d
            if t == 0 or change < kept:
                kept, best_d = change, own_d
                for k in range(n):
                    best_values[k], best_slope[k], best_numbers[k] = values[k], slope[k], numbers[k]
                for j in range(subs):
                    best_sc[j] = own_sc[j]
        d[row, 0] = best_d
        for j in range(subs):
            sc[row, j] = best_sc[j]
        for _ in range(_DESCENTS):
            changed = False
            for u in range(n // unit):
                at = u * unit
                a = scale_of(best_d, np.int64(best_sc[at // sub]))
                if a == _ZERO:
                    continue
                now = _ZERO
                for i in range(unit):
                    by = _ZERO
                    for k in range(unit):
                        by += undo[u, i, k] * best_slope[at + k]
                    target[i] = best_values[at + i] + by
                    now += by * best_slope[at + i]
                variant = variant_of(best_numbers[at])
                cost = round_unit(target[:unit], a, squares[u], variant, q[:unit], scratch)
                if not cost < now * _GAIN:
                    continue
                for i in range(unit):
                    by = a * q[i] - best_values[at + i]
                    if by == _ZERO:
                        continue
                    changed = True
                    best_numbers[at + i] = q[i]
                    best_values[at + i] = a * q[i]
                    for k in range(n):
                        best_slope[k] -= by * hessian[at + i, k]
            if not changed:
                break
        for k in range(n):
            codes[row, k] = np.int16(best_numbers[k])
            g[row, k] = best_slope[k]


@dataclass(frozen=True)
class Rounding:
    """The compiled kernels of a type.

    unit      columns that are rounded at once
    run       `_round_run`; refit: `_refit_run`
    search    `_round_value`, `_round_point` or `_round_shifted`, for kernels
    buffers   makes what a thread writes to: their argument `buffers`
    """

    unit: int
    run: Callable[..., None]
    refit: Callable[..., None]
    search: Any
    buffers: Callable[[], Any]


@cache
def rounding(name: str) -> Rounding:
    """The kernels of a type by its name."""
    block = WRITTEN[name]
    points = block.numbered and not name.startswith("IQ1")
    search: dict[str, Any]
    if points:
        parts = codebook(name)
        width = parts.values.shape[1]
        unit = 8 if name in EVEN else width
        tables: Any = (parts.near, parts.numbers, parts.values)
        function = _round_point
        search = {"snap": snapper(8, width, parts.bounds), "width": width, "even": name in EVEN}
    elif block.numbered:
        parts, unit = codebook(name), 8
        tables = (parts.near, parts.numbers, parts.values)
        function = _round_shifted
        search = {"look": looker(parts.bounds)}
    else:
        unit, tables = 1, (_nearest_table(block),)
        function = _round_value
        search = {"least": 2 * min(values_of_codes(block)), "most": 2 * max(values_of_codes(block))}
    coded, (scale_lo, scale_hi) = block.subs > 1 or bool(block.scales), scale_range(block)
    shifted = name == "IQ1_S"  # 32 weights, a sub-block
    mirrored = unit == 1 and not block.scales and (not coded or scale_lo < 0)
    constants: dict[str, Any] = {
        "sub": block.sub, "subs": block.subs, "unit": unit, "odd": 2 if block.odd_scales else 1, "coded": coded,
        "scale_lo": scale_lo, "scale_hi": scale_hi, "share": np.float32(block.unit), "fixed": bool(block.scales),
        "scales": np.array(block.scales or [0], np.float32), "mirrored": mirrored, "shifted": shifted,
        "variants": 2 if mirrored or shifted else 1, "nothing": 1 if block.numbered and not points else 0,
    }  # fmt: skip
    constants["scale_of"] = specialize(_scale_of, name, inlined, **constants)
    constants["variant_of"] = specialize(_variant_of, name, inlined, **constants)
    constants["round_unit"] = specialize(function, name, uncounted, **constants, **search)
    constants["round_sub"] = specialize(_round_sub, name, uncounted, **constants)
    constants["try_scales"] = specialize(_try_scales, name, uncounted, **constants)

    def buffers() -> Any:
        own = tuple(np.zeros(8, np.float32) for _ in range(2)), tuple(np.zeros(8, np.float32) for _ in range(3))
        scratch = tables
        if points:
            scratch = (*tables, *own[0], np.zeros(8, np.int64), *own[1])
        elif block.numbered:
            scratch = (*tables, *own[0])
        return scratch, np.zeros((6, block.sub), np.float32), np.zeros(block.sub, np.float32)

    run, refit = (specialize(function, name, **constants) for function in (_round_run, _refit_run))
    return Rounding(unit, run, refit, constants["round_unit"], buffers)


def values_of_codes(block: BlockType) -> tuple[int, ...]:
    """The value of each code: that of its table, or the code counted from the type's zero."""
    return block.values or tuple(q - block.zero for q in range(block.levels))


def scale_range(block: BlockType) -> tuple[int, int]:
    """The least and the greatest scale code; of types of stored scales, as bytes without sign."""
    if block.scales:
        return (0 if block.scales[0] else 1), block.no_scale - 1
    return block.scale_lo, block.scale_hi


def _nearest_table(block: BlockType) -> np.ndarray:
    """float32: the nearest value to each half interval, from the least value's on; middles of values are halves."""
    values = np.unique(values_of_codes(block))
    halves = np.arange(2 * values[0], 2 * values[-1] + 1) / 2 + 0.25
    return values[np.abs(halves[:, None] - values).argmin(1)].astype(np.float32)
