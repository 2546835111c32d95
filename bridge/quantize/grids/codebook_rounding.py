"""Kernels that round sub-blocks of a row onto a table of values or a codebook, in a full metric.

Units (`codebook_units`) are rounded one after the other. With H^-1 = U^T U, columns in the order in which they are
rounded, a unit's residual r costs

    r M r^T,  M = D D^T,  D the inverse of U's block of the unit

and moves later columns by  -e U,  e = r D, so that what it costs is the sum of e^2.

What a sub-block has besides its scale, a mirrored table or a shift of 32 weights, is its *variant*: 0 or 1. A scale is
tried by rounding the whole sub-block at it, errors fed forward (`_try_scales`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from bridge.blocks import BlockType
from bridge.blocks.read import WRITTEN
from bridge.quantize.grids.codebook_units import UnitRounding, unit_rounding
from bridge.system.kernels.half import INFINITY, LARGEST, ONE, ZERO, round_half
from bridge.system.kernels.jit import UNSET, inlined, specialize, uncounted

_STEP = np.float32(0.03)  # between tries of a scale that is a float
_GAIN = np.float32(0.9999)  # a change is made only if its cost is below this share of the old one
_DESCENTS = 4  # passes over the units of a run at most

# set per type by `specialize`
sub = subs = unit = scale_lo = scale_hi = odd = variants = nothing = 0
share = ONE
coded = fixed = mirrored = shifted = False
scales = np.zeros(1, np.float32)
round_unit = round_sub = scale_of = variant_of = try_scales = UNSET


def _scale_of(d, sc):
    if fixed:
        return d * scales[sc]
    return share * d * np.float32(odd * sc + odd - 1) if coded else d


def _variant_of(q):
    """The variant of a sub-block that has a value q: values are 1 above a multiple of 8, or below."""
    return 1 if shifted and np.int64(q) & 7 == 7 else 0


def _round_sub(w, factor, metric, inverse, a, variant, bound, q, e, scratch):
    """Round w [sub], which is overwritten, at scale a -> values q and errors e [sub]; the cost, or more than bound."""
    total = ZERO
    for u in range(sub // unit):
        start = u * unit
        total += round_unit(w[start : start + unit], a, metric[u], variant, q[start : start + unit], scratch)
        if total >= bound:
            break
        for i in range(unit):
            by = ZERO
            for k in range(i + 1):
                by += (w[start + k] - a * q[start + k]) * inverse[u, k, i]
            e[start + i] = by
        for i in range(unit):
            by = e[start + i]
            for k in range(start + unit, sub):
                w[k] -= by * factor[start + i, k]
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
                new_d = round_half(min(max(d * (ONE + _STEP * np.float32(step)), -LARGEST), LARGEST))
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
            start = s * sub
            j = columns[start] // sub
            span = slice(start, start + sub)
            some = slice(s * units, (s + 1) * units)
            for i in range(sub):
                q[i] = np.float32(nothing)
            e = errors[row, span]
            _, new_d, new_sc = try_scales(
                w[span], factor[span, span], metric[some], inverse[some], d[row, 0], np.int64(sc[row, j]), reach,
                INFINITY, q, e, work, scratch,
            )  # fmt: skip
            sc[row, j] = new_sc
            if not coded:
                d[row, 0] = new_d
            for i in range(sub):
                codes[row, start + i] = np.int16(q[i])
                by = errors[row, start + i]
                for k in range(start + sub, n):
                    w[k] -= by * factor[start + i, k]


def _refit_run(
    codes, g, hessian, order, factor, metric, inverse, within, squares, undo, d, sc, reach, tries, buffers, saved
):
    """Round the sub-blocks of a run again, each against all other errors, then d, then units: see `CodebookGrid.refit`.

    order [subs, sub]; factor, within [subs, sub, sub]: U and H^-1 of each sub-block in that order; metric, inverse as
    in `_round_run`; squares, undo [n / unit, unit, unit]: H and H^-1 of each unit, from the first column to the last
    """
    scratch, work, q = buffers
    values, slope, moved, numbers, trial_sc, best_values, best_slope, best_numbers, best_sc = saved
    e, target, present = work[3], work[4], work[5]
    n = codes.shape[1]
    units = sub // unit
    for row in range(codes.shape[0]):
        best_change = ZERO  # the best try's change of the error
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
            trial_d = best_d if t == 0 else round_half(best_d * tries[t])
            change = best_change
            for k in range(n):
                values[k], slope[k], numbers[k] = best_values[k], best_slope[k], best_numbers[k]
            for j in range(subs):
                trial_sc[j] = best_sc[j]
            for j in range(subs):
                now = ZERO
                for i in range(sub):
                    present[i] = slope[order[j, i]]
                for i in range(sub):
                    by = ZERO
                    for k in range(sub):
                        by += within[j, i, k] * present[k]
                    target[i] = values[order[j, i]] + by
                    now += by * present[i]
                some = slice(j * units, (j + 1) * units)
                bound = now * _GAIN if t == 0 else INFINITY
                cost, new_d, new_sc = try_scales(
                    target, factor[j], metric[some], inverse[some], trial_d, np.int64(trial_sc[j]), reach, bound, q, e,
                    work, scratch,
                )  # fmt: skip
                if not cost < bound:
                    continue
                trial_sc[j] = new_sc
                if not coded:
                    trial_d = new_d
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
            along = ZERO
            for k in range(n):
                moved[k] = ZERO
            for c in range(n):
                along += values[c] * slope[c]
                for k in range(n):
                    moved[k] += values[c] * hessian[c, k]
            curve = ZERO
            for k in range(n):
                curve += values[k] * moved[k]
            if not fixed and curve > ZERO and trial_d != ZERO:
                new_d = round_half(min(max(trial_d * (ONE + along / curve), -LARGEST), LARGEST))
                by = new_d / trial_d - ONE
                gain = by * (np.float32(2) * along - by * curve)
                if gain > ZERO and new_d != ZERO:
                    change -= gain
                    for j in range(subs):
                        a = scale_of(new_d, np.int64(trial_sc[j]))
                        for i in range(sub):
                            values[j * sub + i] = a * numbers[j * sub + i]
                    for k in range(n):
                        slope[k] -= by * moved[k]
                    trial_d = new_d
            if t == 0 or change < best_change:
                best_change, best_d = change, trial_d
                for k in range(n):
                    best_values[k], best_slope[k], best_numbers[k] = values[k], slope[k], numbers[k]
                for j in range(subs):
                    best_sc[j] = trial_sc[j]
        d[row, 0] = best_d
        for j in range(subs):
            sc[row, j] = best_sc[j]
        for _ in range(_DESCENTS):
            changed = False
            for u in range(n // unit):
                start = u * unit
                a = scale_of(best_d, np.int64(best_sc[start // sub]))
                if a == ZERO:
                    continue
                now = ZERO
                for i in range(unit):
                    by = ZERO
                    for k in range(unit):
                        by += undo[u, i, k] * best_slope[start + k]
                    target[i] = best_values[start + i] + by
                    now += by * best_slope[start + i]
                variant = variant_of(best_numbers[start])
                cost = round_unit(target[:unit], a, squares[u], variant, q[:unit], scratch)
                if not cost < now * _GAIN:
                    continue
                for i in range(unit):
                    by = a * q[i] - best_values[start + i]
                    if by == ZERO:
                        continue
                    changed = True
                    best_numbers[start + i] = q[i]
                    best_values[start + i] = a * q[i]
                    for k in range(n):
                        best_slope[k] -= by * hessian[start + i, k]
            if not changed:
                break
        for k in range(n):
            codes[row, k] = np.int16(best_numbers[k])
            g[row, k] = best_slope[k]


@dataclass(frozen=True)
class Rounding:
    """The compiled kernels of a type.

    units     how its units are rounded
    run       `_round_run`; refit: `_refit_run`
    buffers   makes what a thread writes to: their argument `buffers`
    """

    units: UnitRounding
    run: Callable[..., None]
    refit: Callable[..., None]
    buffers: Callable[[], Any]


@cache
def rounding(name: str) -> Rounding:
    """The kernels of a type by its name."""
    block = WRITTEN[name]
    shifted = block.shifted == block.sub
    units = unit_rounding(name, shifted)
    unit = units.unit
    coded, (scale_lo, scale_hi) = block.subs > 1 or bool(block.scales), scale_range(block)
    mirrored = unit == 1 and not block.scales and (not coded or scale_lo < 0)
    constants: dict[str, Any] = {
        "sub": block.sub, "subs": block.subs, "unit": unit, "odd": 2 if block.odd_scales else 1, "coded": coded,
        "scale_lo": scale_lo, "scale_hi": scale_hi, "share": np.float32(block.unit), "fixed": bool(block.scales),
        "scales": np.array(block.scales or [0], np.float32), "mirrored": mirrored, "shifted": shifted,
        "variants": 2 if mirrored or shifted else 1, "nothing": 1 if block.shifted else 0,
        "round_unit": units.function,
    }  # fmt: skip
    constants["scale_of"] = specialize(_scale_of, name, inlined, **constants)
    constants["variant_of"] = specialize(_variant_of, name, inlined, **constants)
    constants["round_sub"] = specialize(_round_sub, name, uncounted, **constants)
    constants["try_scales"] = specialize(_try_scales, name, uncounted, **constants)

    def buffers() -> Any:
        return units.scratch(), np.zeros((6, block.sub), np.float32), np.zeros(block.sub, np.float32)

    run, refit = (specialize(function, name, **constants) for function in (_round_run, _refit_run))
    return Rounding(units, run, refit, buffers)


def scale_range(block: BlockType) -> tuple[int, int]:
    """The least and the greatest scale code; of types of stored scales, as bytes without sign."""
    if block.scales:
        return (0 if block.scales[0] else 1), block.no_scale - 1
    return block.scale_lo, block.scale_hi
