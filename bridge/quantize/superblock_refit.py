"""Moves of a block's d, dmin, sc and m in the metric of H, codes following; see `refine`.

K-quants: each sub-block tries its neighbours (sc + i, m + j), i and j within `_REACH`, m following sc so that the mean
of the line stays; then d and dmin together by least squares. Plain types have d (and m) alone, real numbers: tries
are some hundredths of the code range away.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from bridge.blocks import BlockType
from bridge.jit import specialize
from bridge.mapping.half import round_half
from bridge.mapping.quantize_loops import add
from bridge.quantize.refine import line_codes, line_target, move

_GAIN = np.float32(0.9999)
_ZERO = np.float32(0)
_REACH = 2

# set per type by `specialize`
size = subs = sub = scale_lo = scale_hi = min_hi = 0
low = high = _ZERO
mins = False
lines: Any = None
scales: Any = None


def _scales(codes, values, g, hessian, sc, mn, fields, along, hu, hv):
    """d and dmin by least squares for the codes there are, as halves; taken if the exact error falls."""
    auu = auv = avv = ru = rv = 0.0
    for k in range(size):
        along[0, k] = np.float32(sc[k // sub]) * np.float32(codes[k])
        along[1, k] = -np.float32(mn[k // sub])
    for i in range(size):
        u = _ZERO
        v = _ZERO
        for k in range(size):
            u = add(u, hessian[i, k] * along[0, k])
            v = add(v, hessian[i, k] * along[1, k])
        hu[i] = u
        hv[i] = v
        auu += along[0, i] * u
        auv += along[0, i] * v
        avv += along[1, i] * v
        ru += along[0, i] * g[i]
        rv += along[1, i] * g[i]
    det = auu * avv - auv * auv
    if mins and det > 1e-9 * auu * avv:
        by_d = (avv * ru - auv * rv) / det
        by_dmin = (auu * rv - auv * ru) / det
    elif auu > 0:
        by_d = ru / auu
        by_dmin = 0.0
    else:
        return
    d = round_half(fields[0] + by_d)
    dmin = round_half(fields[1] + by_dmin) if mins else fields[1]
    if mins and (d < _ZERO or dmin < _ZERO):
        return
    x = np.float64(d - fields[0])
    y = np.float64(dmin - fields[1])
    if not 2 * (x * ru + y * rv) - (x * x * auu + 2 * x * y * auv + y * y * avv) > 1e-6 * abs(x * ru + y * rv):
        return
    fields[0] = d
    fields[1] = dmin
    x32 = np.float32(x)
    y32 = np.float32(y)
    for k in range(size):
        g[k] -= x32 * hu[k] + y32 * hv[k]
        values[k] = d * np.float32(sc[k // sub]) * np.float32(codes[k]) - dmin * np.float32(mn[k // sub])


def _lines(codes, values, g, hessian, order, factor, inverse, sc, mn, d, dmin, forced, scratch):
    """Each sub-block's best line near its own; `forced`: it must be one of d and dmin, though it were worse."""
    target, work, trial, best_codes = scratch[0], scratch[1], scratch[2], scratch[3]
    for j in range(subs):
        left = line_target(values, g, order[j], inverse[j], target)
        bound = np.float32(np.inf) if forced else left * _GAIN
        old_s = np.int32(sc[j])
        old_m = np.int32(mn[j])
        best_s = old_s
        best_m = old_m
        slope = _ZERO
        if mins and dmin > _ZERO:
            mean = _ZERO
            for k in range(sub):
                mean += np.float32(codes[j * sub + k])
            slope = mean / np.float32(sub) * d / dmin
        found = False
        for at in range(2 * _REACH + 1):
            by = (at + 1) // 2 if at & 1 else -(at // 2)  # 0, 1, -1, 2, -2
            s = old_s + by
            if s < scale_lo or s > scale_hi:
                continue
            middle = old_m + np.int32(np.rint(slope * np.float32(by)))
            for m_at in range(2 * _REACH + 1 if mins else 1):
                m = middle + ((m_at + 1) // 2 if m_at & 1 else -(m_at // 2))
                if m < 0 or m > min_hi:
                    continue
                a = d * np.float32(s)
                c = -(dmin * np.float32(m))
                lost = line_codes(target, factor[j], a, c, low, high, bound, work, trial)
                if lost < bound:
                    bound = lost
                    best_s = s
                    best_m = m
                    found = True
                    for k in range(sub):
                        best_codes[k] = trial[k]
        if found:
            sc[j] = best_s
            mn[j] = best_m
            move(order[j], best_codes, d * np.float32(best_s), -(dmin * np.float32(best_m)), codes, values, g, hessian)
        elif forced:
            return False
    return True


def _refit_k(codes, g, hessian, order, factor, inverse, sc, mn, d, dmin, tries):
    """tries float32 [n, 2]: what d and dmin are multiplied with to begin again; the first is 1, 1."""
    scratch = np.empty((4, sub), np.float32)
    along = np.empty((2, size), np.float32)
    hu = np.empty(size, np.float32)
    hv = np.empty(size, np.float32)
    old = np.empty(size, np.float32)
    values = np.empty(size, np.float32)
    slope = np.empty(size, np.float32)
    fields = np.empty(2, np.float32)
    own = np.empty(size, np.int16)
    own_sc = np.empty(subs, np.int32)
    own_mn = np.empty(subs, np.int32)
    best_codes = np.empty(size, np.int16)
    best_sc = np.empty(subs, np.int32)
    best_mn = np.empty(subs, np.int32)
    best_slope = np.empty(size, np.float32)
    for row in range(codes.shape[0]):
        for k in range(size):
            j = k // sub
            old[k] = d[row, 0] * np.float32(sc[row, j]) * np.float32(codes[row, k]) - dmin[row, 0] * np.float32(
                mn[row, j]
            )
        best = 0.0
        best_d = d[row, 0]
        best_dmin = dmin[row, 0]
        for t in range(len(tries)):
            fields[0] = round_half(d[row, 0] * tries[t, 0])
            fields[1] = round_half(dmin[row, 0] * tries[t, 1])
            if t and fields[0] == d[row, 0] and fields[1] == dmin[row, 0]:
                continue
            for k in range(size):
                values[k] = old[k]
                slope[k] = g[row, k]
                own[k] = codes[row, k]
            for j in range(subs):
                s = np.rint(np.float32(sc[row, j]) / tries[t, 0])
                m = np.rint(np.float32(mn[row, j]) / tries[t, 1])
                own_sc[j] = np.int32(min(max(s, np.float32(scale_lo)), np.float32(scale_hi)))
                own_mn[j] = np.int32(min(m, np.float32(min_hi)))
            if not lines(
                own,
                values,
                slope,
                hessian,
                order,
                factor,
                inverse,
                own_sc,
                own_mn,
                fields[0],
                fields[1],
                t > 0,
                scratch,
            ):
                continue
            scales(own, values, slope, hessian, own_sc, own_mn, fields, along, hu, hv)
            rise = 0.0  # of the error
            for k in range(size):
                rise -= (values[k] - old[k]) * (slope[k] + g[row, k])
            if rise < best:
                best = rise
                best_d, best_dmin = fields[0], fields[1]
                for k in range(size):
                    best_codes[k] = own[k]
                    best_slope[k] = slope[k]
                for j in range(subs):
                    best_sc[j] = own_sc[j]
                    best_mn[j] = own_mn[j]
        if best < 0.0:
            d[row, 0], dmin[row, 0] = best_d, best_dmin
            for k in range(size):
                codes[row, k] = best_codes[k]
                g[row, k] = best_slope[k]
            for j in range(subs):
                sc[row, j] = best_sc[j]
                mn[row, j] = best_mn[j]


_STEPS = 3  # tries of d to either side, and of m
_STEP = np.float32(0.25)  # of the step of a code, at the end of the range


def _refit_plain(codes, g, hessian, order, factor, inverse, sc, mn, d, dmin, tries):
    target = np.empty(sub, np.float32)
    work = np.empty(sub, np.float32)
    trial = np.empty(sub, np.float32)
    best_codes = np.empty(sub, np.float32)
    values = np.empty(size, np.float32)
    for row in range(codes.shape[0]):
        old_d = d[row, 0]
        old_m = dmin[row, 0]
        for k in range(size):
            values[k] = old_d * np.float32(codes[row, k]) + old_m
        left = line_target(values, g[row], order[0], inverse[0], target)
        bound = left * _GAIN
        best_d = old_d
        best_m = old_m
        found = False
        for at in range(-_STEPS, _STEPS + 1):
            a = round_half(old_d * (np.float32(1) + np.float32(at) * _STEP / high))
            for m_at in range(-_STEPS if mins else 0, _STEPS + 1 if mins else 1):
                c = round_half(old_m + np.float32(m_at - at) * _STEP * old_d) if mins else _ZERO
                lost = line_codes(target, factor[0], a, c, low, high, bound, work, trial)
                if lost < bound:
                    bound = lost
                    best_d = a
                    best_m = c
                    found = True
                    for k in range(sub):
                        best_codes[k] = trial[k]
        if found:
            d[row, 0] = best_d
            dmin[row, 0] = best_m
            move(order[0], best_codes, best_d, best_m, codes[row], values, g[row], hessian)


@cache
def refitter(block: BlockType) -> Callable[..., None]:
    """The compiled refit of a type; codes [rows, size] and g are those of one block a row."""
    scope: dict[str, Any] = {
        "size": block.size,
        "subs": block.subs,
        "sub": block.sub,
        "scale_lo": np.int32(block.scale_lo),
        "scale_hi": np.int32(block.scale_hi),
        "min_hi": np.int32(block.min_hi),
        "low": np.float32(-block.zero),
        "high": np.float32(block.levels - 1 - block.zero),
        "mins": block.has_min,
    }
    if not block.is_k:
        return specialize(_refit_plain, block.name, **scope)
    moves = {f.__name__[1:]: specialize(f, block.name, **scope) for f in (_lines, _scales)}
    return specialize(_refit_k, block.name, **scope, **moves)
