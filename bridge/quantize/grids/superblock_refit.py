"""Moves of a K-quant block's d, dmin, sc and m in the metric of H, codes following; see `refine`.

Each sub-block tries lines (sc + i, m + j) near its own, i and j up to 2, m following sc so that the mean of the line
stays; then d and dmin are fitted together by least squares.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from bridge.blocks import BlockType
from bridge.quantize.grids.try_lines import least, line_search
from bridge.quantize.solve.refine import GAIN, line_target, move
from bridge.system.kernels.half import ZERO, round_half
from bridge.system.kernels.jit import UNSET, specialize

# set per type by `specialize`
size = subs = sub = 0
scale_lo: Any = 0
scale_hi: Any = 0
min_hi: Any = 0
low = high = ZERO
mins = False
lanes = m_tries = 0
lines = scales = try_lines = UNSET


def _scales(codes, values, g, hw, sums, sc, mn, fields, hu, hv):
    """d and dmin by least squares for the present codes, as halves; taken if the exact error falls.

    hw  [size]: W' H of the present codes. With W' = d u + dmin v it gives u H without another product with H
    """
    d = fields[0]
    dmin = fields[1]
    if d == ZERO:
        return
    for k in range(size):
        hv[k] = ZERO
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
    if mins and (d < ZERO or dmin < ZERO):
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


def _lines(codes, values, g, hessian, order, push, inverse, sc, mn, d, dmin, forced, gathered, target, scratch, tried):
    """Each sub-block's best line near its own; `forced`: a line of d and dmin even if it is worse.

    scratch float32 [2, sub, lanes], tried float32 [5, lanes]: lines a, c, their errors, and sc and m of each
    """
    for j in range(subs):
        left = line_target(values, g, order[j], inverse[j], gathered, target)
        bound = np.float32(np.inf) if forced else left * GAIN
        old_s = np.int32(sc[j])
        old_m = np.int32(mn[j])
        slope = ZERO
        if mins and dmin > ZERO:
            mean = ZERO
            for k in range(sub):
                mean += np.float32(codes[j * sub + k])
            slope = mean / np.float32(sub) * d / dmin
        for lane in range(lanes):
            by = (lane // m_tries + 1) // 2 if lane // m_tries & 1 else -(lane // m_tries // 2)  # 0, 1, -1, 2, -2
            m_by = (lane % m_tries + 1) // 2 if lane % m_tries & 1 else -(lane % m_tries // 2)
            s = min(max(old_s + by, scale_lo), scale_hi)
            m = min(max(old_m + np.int32(np.rint(slope * np.float32(s - old_s))) + m_by, np.int32(0)), min_hi)
            tried[0, lane] = d * np.float32(s)
            tried[1, lane] = -(dmin * np.float32(m)) if mins else ZERO
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
    """hw float32 [rows, size]: W' H of the block; tries float32 [n, 2]: factors of d and dmin to start over
    with; the first is 1, 1."""
    gathered, target = np.empty(sub, np.float32), np.empty(sub, np.float32)
    scratch = np.empty((2, sub, lanes), np.float32)
    tried = np.empty((5, lanes), np.float32)
    hu, hv, now = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    old, values, fields = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(2, np.float32)
    slope, best_slope = np.empty(size, np.float32), np.empty(size, np.float32)
    trial_codes, best_codes = np.empty(size, np.int16), np.empty(size, np.int16)
    trial_sc, best_sc = np.empty(subs, np.int32), np.empty(subs, np.int32)
    trial_mn, best_mn = np.empty(subs, np.int32), np.empty(subs, np.int32)
    for row in range(codes.shape[0]):
        for k in range(size):
            s, m = np.float32(sc[row, k // sub]), np.float32(mn[row, k // sub])
            old[k] = d[row, 0] * s * np.float32(codes[row, k]) - dmin[row, 0] * m
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
                trial_codes[k] = codes[row, k]
            for j in range(subs):
                s = np.rint(np.float32(sc[row, j]) / tries[t, 0])
                m = np.rint(np.float32(mn[row, j]) / tries[t, 1])
                trial_sc[j] = np.int32(min(max(s, np.float32(scale_lo)), np.float32(scale_hi)))
                trial_mn[j] = np.int32(min(m, np.float32(min_hi)))
            if not lines(
                trial_codes, values, slope, hessian, order, push, inverse, trial_sc, trial_mn, fields[0], fields[1],
                t > 0, gathered, target, scratch, tried,
            ):  # fmt: skip
                continue
            for k in range(size):
                now[k] = hw[row, k] + g[row, k] - slope[k]
            scales(trial_codes, values, slope, now, sums, trial_sc, trial_mn, fields, hu, hv)
            rise = 0.0  # of the error
            for k in range(size):
                rise -= (values[k] - old[k]) * (slope[k] + g[row, k])
            if rise < best:
                best = rise
                best_d, best_dmin = fields[0], fields[1]
                for k in range(size):
                    best_codes[k] = trial_codes[k]
                    best_slope[k] = slope[k]
                for j in range(subs):
                    best_sc[j] = trial_sc[j]
                    best_mn[j] = trial_mn[j]
        if best < 0.0:
            d[row, 0], dmin[row, 0] = best_d, best_dmin
            for k in range(size):
                codes[row, k] = best_codes[k]
                g[row, k] = best_slope[k]
            for j in range(subs):
                sc[row, j] = best_sc[j]
                mn[row, j] = best_mn[j]


@cache
def refitter(block: BlockType) -> Callable[..., None]:
    """The compiled refit of a K-quant; codes [rows, size] and g: one block per row."""
    lanes, m_tries = (32, 5) if block.has_min else (8, 1)  # lines tried side by side; of these, with the same sc
    scope: dict[str, Any] = {name: np.int32(getattr(block, name)) for name in ("scale_lo", "scale_hi", "min_hi")}
    scope |= {"size": block.size, "subs": block.subs, "sub": block.sub, "mins": block.has_min}
    scope |= {"low": np.float32(-block.zero), "high": np.float32(block.levels - 1 - block.zero)}
    scope |= {"lanes": lanes, "m_tries": m_tries, "try_lines": line_search(lanes)}
    moves = {f.__name__[1:]: specialize(f, block.name, **scope) for f in (_lines, _scales)}
    return specialize(_refit_k, block.name, **scope, **moves)
