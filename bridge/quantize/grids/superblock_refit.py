"""Moves of a block's d, dmin, sc and m in the metric of H, codes following; see `refine`.

K-quants: each sub-block tries its neighbours (sc + i, m + j), i and j of 1 or 2, m following sc so that the mean
of the line stays; then d and dmin together by least squares. Plain types have d (and m) alone, real numbers: tries
are some hundredths of the code range away.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from bridge.blocks import BlockType
from bridge.quantize.grids.try_lines import least, line_search
from bridge.quantize.refine import line_target, move
from bridge.system.half import round_half
from bridge.system.jit import specialize

_GAIN = np.float32(0.9999)
_ZERO = np.float32(0)
# lines tried side by side, and how many of them share sc; by: is a K-quant, has a minimum
LANES = {(True, True): (32, 5), (True, False): (8, 1), (False, True): (64, 7), (False, False): (8, 1)}

# set per type by `specialize`
size = subs = sub = 0
scale_lo: Any = 0
scale_hi: Any = 0
min_hi: Any = 0
low = high = _ZERO
mins = False
lanes = m_tries = 0
lines: Any = None
scales: Any = None
try_lines: Any = None


def _scales(codes, values, g, hw, sums, sc, mn, fields, hu, hv):
    """d and dmin by least squares for the codes there are, as halves; taken if the exact error falls.

    hw  [size]: W' H as the codes are. With W' = d u + dmin v it says what u H is, which would take a product with H
    """
    d = fields[0]
    dmin = fields[1]
    if d == _ZERO:
        return
    for k in range(size):
        hv[k] = _ZERO
    for j in range(subs if mins else 0):
        m = np.float32(mn[j])
        column = sums[j]
        for k in range(size):
            hv[k] -= m * column[k]
    over = np.float32(1) / d
    auu = auv = avv = ru = rv = 0.0
    for j in range(subs):
        s = np.float32(sc[j])
        v = -np.float32(mn[j])
        for k in range(j * sub, (j + 1) * sub):
            hu[k] = (hw[k] - dmin * hv[k]) * over if mins else hw[k] * over
            u = s * np.float32(codes[k])
            auu += u * hu[k]
            ru += u * g[k]
            if mins:
                auv += u * hv[k]
                avv += v * hv[k]
                rv += v * g[k]
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


def _lines(codes, values, g, hessian, order, push, inverse, sc, mn, d, dmin, forced, own, target, scratch, tried):
    """Each sub-block's best line near its own; `forced`: it must be one of d and dmin, though it were worse.

    scratch float32 [2, sub, lanes], tried float32 [5, lanes]: lines a, c, their errors, and sc and m of each
    """
    for j in range(subs):
        left = line_target(values, g, order[j], inverse[j], own, target)
        bound = np.float32(np.inf) if forced else left * _GAIN
        old_s = np.int32(sc[j])
        old_m = np.int32(mn[j])
        slope = _ZERO
        if mins and dmin > _ZERO:
            mean = _ZERO
            for k in range(sub):
                mean += np.float32(codes[j * sub + k])
            slope = mean / np.float32(sub) * d / dmin
        for lane in range(lanes):
            by = (lane // m_tries + 1) // 2 if lane // m_tries & 1 else -(lane // m_tries // 2)  # 0, 1, -1, 2, -2
            m_by = (lane % m_tries + 1) // 2 if lane % m_tries & 1 else -(lane % m_tries // 2)
            s = min(max(old_s + by, scale_lo), scale_hi)
            m = min(max(old_m + np.int32(np.rint(slope * np.float32(s - old_s))) + m_by, np.int32(0)), min_hi)
            tried[0, lane] = d * np.float32(s)
            tried[1, lane] = -(dmin * np.float32(m)) if mins else _ZERO
            tried[3, lane] = np.float32(s)
            tried[4, lane] = np.float32(m)
        try_lines(target, push[j], tried[0], tried[1], low, high, scratch[0], scratch[1], tried[2])
        best = least(tried[2], bound)
        if best >= 0:
            sc[j] = np.int32(tried[3, best])
            mn[j] = np.int32(tried[4, best])
            move(order[j], scratch[0, :, best], tried[0, best], tried[1, best], codes, values, g, hessian)
        elif forced:
            return False
    return True


def _refit_k(codes, g, hw, hessian, sums, order, push, inverse, sc, mn, d, dmin, tries):
    """hw float32 [rows, size]: W' H of the block; tries float32 [n, 2]: what d and dmin are multiplied with to begin
    again; the first is 1, 1."""
    gathered = np.empty(sub, np.float32)
    target = np.empty(sub, np.float32)
    scratch = np.empty((2, sub, lanes), np.float32)
    tried = np.empty((5, lanes), np.float32)
    hu = np.empty(size, np.float32)
    hv = np.empty(size, np.float32)
    now = np.empty(size, np.float32)
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
                push,
                inverse,
                own_sc,
                own_mn,
                fields[0],
                fields[1],
                t > 0,
                gathered,
                target,
                scratch,
                tried,
            ):
                continue
            for k in range(size):
                now[k] = hw[row, k] + g[row, k] - slope[k]
            scales(own, values, slope, now, sums, own_sc, own_mn, fields, hu, hv)
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


def _refit_plain(codes, g, hw, hessian, sums, order, push, inverse, sc, mn, d, dmin, tries):
    own = np.empty(sub, np.float32)
    target = np.empty(sub, np.float32)
    scratch = np.empty((2, sub, lanes), np.float32)
    tried = np.empty((3, lanes), np.float32)
    values = np.empty(size, np.float32)
    for row in range(codes.shape[0]):
        old_d = d[row, 0]
        old_m = dmin[row, 0]
        for k in range(size):
            values[k] = old_d * np.float32(codes[row, k]) + old_m
        bound = line_target(values, g[row], order[0], inverse[0], own, target) * _GAIN
        for lane in range(lanes):
            at = np.float32(lane // m_tries - _STEPS)
            m_at = np.float32(lane % m_tries - _STEPS)
            tried[0, lane] = round_half(old_d * (np.float32(1) + at * _STEP / high))
            tried[1, lane] = round_half(old_m + (m_at - at) * _STEP * old_d) if mins else _ZERO
        try_lines(target, push[0], tried[0], tried[1], low, high, scratch[0], scratch[1], tried[2])
        best = least(tried[2], bound)
        if best >= 0:
            a, c = tried[0, best], tried[1, best]
            d[row, 0] = a
            dmin[row, 0] = c
            move(order[0], scratch[0, :, best], a, c, codes[row], values, g[row], hessian)


@cache
def refitter(block: BlockType) -> Callable[..., None]:
    """The compiled refit of a type; codes [rows, size] and g are those of one block a row."""
    lanes, m_tries = LANES[block.is_k, block.has_min]
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
        "lanes": lanes,
        "m_tries": m_tries,
        "try_lines": line_search(lanes),
    }
    if not block.is_k:
        return specialize(_refit_plain, block.name, **scope)
    moves = {f.__name__[1:]: specialize(f, block.name, **scope) for f in (_lines, _scales)}
    return specialize(_refit_k, block.name, **scope, **moves)
