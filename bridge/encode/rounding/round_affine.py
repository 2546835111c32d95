"""Floats to affine K-quants: w = d * sc * q - dmin * mn (Q2_K, Q4_K, Q5_K).

Minimizes sum importance * (w - w')^2, with codes always rounded against the stored scales. Stages of one superblock:

1. `_line`    per sub-block, real a and b of  w ~ a * q - b  with b >= 0: from many starts, round codes and solve the
              weighted least squares for them, in turn.
2. `_grids`   with fixed codes the error is a quadratic in (a, b): it is cheap to try many d and dmin and keep the few
              best grids for a = d * sc, b = dmin * mn.
3. `_sweep`   on each grid, (sc, mn) move to neighbours while the exact error, with codes rounded again, falls. The best
              grid gets one sweep with a wide neighbourhood: with few codes or uneven importance the error has many
              local minima.
4. `_refit`   d and dmin by joint least squares for the new codes, then 3 again, while it helps.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from bridge.blocks import BLOCKS
from bridge.encode.rounding.round_loops import add, line_errors, line_fit, line_write, rows_quantizer
from bridge.system.kernels.half import INFINITY, LEAST, ONE, ZERO, round_half
from bridge.system.kernels.jit import UNSET

# tries of d and dmin: the largest scale (min) gets code hi, and d_step (m_step) less at each further try
_D_TRIES, _M_TRIES = 24, 12
_GRIDS = 3  # grids that are searched exactly
_NEAR, _WIDE = 1, 8  # how far a sweep looks, in steps of sc and mn
_ROUNDS = 6  # refits of d and dmin at most
_ENOUGH = 0.999  # a round that gains less is the last

# rows of the array `lines` [5, subs], float32: the line of each sub-block and the error's quadratic around it
_A, _B = 0, 1  # the line a * q - b
_CURVE = 2  # d2 error / da2 / 2 where b follows a: sum w q^2 - (sum w q)^2 / sum w
_MEAN = 3  # the weighted mean code: db/da of the b that follows a
_WEIGHT = 4  # d2 error / db2 / 2: sum w

# set per type by `specialize`
sub = subs = scale_hi = min_hi = starts = 0
high = first = step = d_step = m_step = ZERO
line = dmin_for = grids = sweep = refit = block = UNSET


def _line(x, w, lines, j):
    """Search the best line for one sub-block, into column j of `lines`."""
    lo = ZERO
    hi = x[0]
    weight = ZERO
    for i in range(sub):
        lo = min(lo, x[i])
        hi = max(hi, x[i])
        weight = add(weight, w[i])
    lines[_A, j] = ZERO
    lines[_B, j] = -lo
    lines[_CURVE, j] = lines[_MEAN, j] = ZERO
    lines[_WEIGHT, j] = weight
    sw = np.float64(weight)
    best = np.inf
    if not hi > lo:
        return
    for k in range(starts):
        a = (hi - lo) / (high + first + step * np.float32(k))
        b = -lo
        for _ in range(3):
            e, f_q, f_qq, f_r, f_rq = line_fit(x, w, a, b)
            sq, sqq, sr, srq = np.float64(f_q), np.float64(f_qq), np.float64(f_r), np.float64(f_rq)
            det = sqq * sw - sq * sq
            if det > 1e-6 * sqq * sw:
                da = (sw * srq - sq * sr) / det
                db = (sq * srq - sqq * sr) / det
            elif sqq > 0:  # all codes are equal, so either will do
                da = srq / sqq
                db = np.float64(0)
                det = sqq * sw
                sq = np.float64(0)
            else:
                break
            if b + db < 0:
                db = -np.float64(b)
                da = (srq - b * sq) / sqq
            after = e - 2 * (da * srq - db * sr) + da * da * sqq - 2 * da * db * sq + db * db * sw
            if not a + da > 0 or not after < best * 1.05:
                break
            a = np.float32(a + da)
            b = np.float32(b + db)
            gained = after < best * 0.9999
            if after < best:
                best = after
                lines[_A, j] = a
                lines[_B, j] = b
                lines[_CURVE, j] = np.float32(det / sw)
                lines[_MEAN, j] = np.float32(sq / sw)
            if not gained:
                break


def _dmin_for(lines, follow):
    """The best dmin for the mins `follow` [subs], and its error."""
    b_max = ZERO
    for j in range(subs):
        b_max = max(b_max, follow[j])
    best = INFINITY
    best_dmin = ZERO
    for k in range(_M_TRIES):
        dmin = round_half(b_max / (np.float32(min_hi) - m_step * np.float32(k)))
        if dmin == ZERO and b_max > ZERO:
            dmin = LEAST
        inverse = ONE / dmin if dmin > ZERO else ZERO
        e = ZERO
        for j in range(subs):
            mn = min(np.rint(follow[j] * inverse), np.float32(min_hi))
            off = dmin * mn - follow[j]
            e = add(e, lines[_WEIGHT, j] * off * off)
        if e < best:
            best = e
            best_dmin = dmin
    return best_dmin, best


def _grids(lines, follow, pairs):
    """The most promising (d, dmin), best first, into `pairs` float32 [_GRIDS, 3]: d, dmin, expected extra error."""
    a_max = ZERO
    for j in range(subs):
        a_max = max(a_max, lines[_A, j])
    for p in range(_GRIDS):
        pairs[p, 0] = pairs[p, 1] = ZERO
        pairs[p, 2] = INFINITY
    for k in range(_D_TRIES):
        d = round_half(a_max / (np.float32(scale_hi) - d_step * np.float32(k)))
        if d == ZERO and a_max > ZERO:
            d = LEAST
        inverse = ONE / d if d > ZERO else ZERO
        e = ZERO
        for j in range(subs):
            off = d * min(np.rint(lines[_A, j] * inverse), np.float32(scale_hi)) - lines[_A, j]
            e = add(e, lines[_CURVE, j] * off * off)
            b = lines[_B, j] + lines[_MEAN, j] * off
            follow[j] = b if b > ZERO else ZERO
        if not e < pairs[_GRIDS - 1, 2]:
            continue
        dmin, extra = dmin_for(lines, follow)
        e += extra
        p = _GRIDS
        while p > 0 and e < pairs[p - 1, 2]:
            p -= 1
            if p + 1 < _GRIDS:
                pairs[p + 1, 0], pairs[p + 1, 1], pairs[p + 1, 2] = pairs[p, 0], pairs[p, 1], pairs[p, 2]
        if p < _GRIDS:
            pairs[p, 0], pairs[p, 1], pairs[p, 2] = d, dmin, e


def _sweep(x, w, d, dmin, lines, sc, mn, distance):
    """Move each (sc, mn) to the best within `distance`, then to neighbours while the exact error lessens: their sum."""
    total = 0.0
    for j in range(subs):
        s = sc[j]
        m = mn[j]
        a = d * np.float32(s)
        b = dmin * np.float32(m)
        e, _ = line_errors(x[j], w[j], a, b, a, b)
        slope = lines[_MEAN, j] * d / dmin if dmin > ZERO else ZERO  # steps of mn that follow a step of sc
        reached = distance
        for _ in range(4):
            best_s, best_m, best = s, m, e
            for ds in range(-reached, reached + 1):
                s1 = np.int32(s + ds)
                if s1 < 0 or s1 > scale_hi:
                    continue
                a = d * np.float32(s1)
                middle = np.int32(min(np.rint(np.float32(m) + slope * np.float32(ds)), np.float32(1000)))
                for dm in range(-reached, reached + 1, 2):
                    m1 = min(max(np.int32(middle + dm), np.int32(0)), np.int32(min_hi))
                    m2 = min(max(np.int32(middle + dm + 1), np.int32(0)), np.int32(min_hi))
                    e1, e2 = line_errors(x[j], w[j], a, dmin * np.float32(m1), a, dmin * np.float32(m2))
                    if e1 < best:
                        best_s, best_m, best = s1, m1, e1
                    if e2 < best:
                        best_s, best_m, best = s1, m2, e2
            if not best < e:
                break
            s, m, e = best_s, best_m, best
            reached = _NEAR
        sc[j] = s
        mn[j] = m
        total += e
    return total


def _refit(x, w, d, dmin, lines, sc, mn):
    """d and dmin by joint least squares for the present codes; both non-negative halves."""
    aa = ab = bb = ga = gb = 0.0
    for j in range(subs):
        s = np.float64(sc[j])
        m = np.float64(mn[j])
        _, sq, sqq, sr, srq = line_fit(x[j], w[j], d * np.float32(sc[j]), dmin * np.float32(mn[j]))
        aa += s * s * sqq
        ab += s * m * sq
        bb += m * m * lines[_WEIGHT, j]
        ga += s * srq
        gb -= m * sr
    det = aa * bb - ab * ab
    new_d = np.float64(d)
    new_dmin = np.float64(dmin)
    if det > 1e-9 * aa * bb:
        new_d += (bb * ga + ab * gb) / det
        new_dmin += (ab * ga + aa * gb) / det
    elif aa > 0:
        new_d += ga / aa
    elif bb > 0:
        new_dmin += gb / bb
    return round_half(max(new_d, 0.0)), round_half(max(new_dmin, 0.0))


def _block(x, w, lines, follow, pairs, trial, sc, mn):
    """Search one superblock: x, w float32 [subs, sub] -> d, dmin, and codes into sc, mn int32 [subs]."""
    for j in range(subs):
        line(x[j], w[j], lines, j)
        sc[j] = mn[j] = 0
    grids(lines, follow, pairs)
    best = np.inf
    best_d = best_dmin = ZERO
    for p in range(_GRIDS + 1):
        final = p == _GRIDS
        if final:
            d, dmin = best_d, best_dmin
            for j in range(subs):
                trial[0, j] = sc[j]
                trial[1, j] = mn[j]
        else:
            d, dmin = pairs[p, 0], pairs[p, 1]
            for j in range(subs):
                s = min(np.rint(lines[_A, j] / d), np.float32(scale_hi)) if d > ZERO else ZERO
                b = max(lines[_B, j] + lines[_MEAN, j] * (s * d - lines[_A, j]), ZERO)
                trial[0, j] = np.int32(s)
                trial[1, j] = np.int32(min(np.rint(b / dmin), np.float32(min_hi)) if dmin > ZERO else ZERO)
        reached = np.inf
        for round_ in range(_ROUNDS if final else 1):
            total = sweep(x, w, d, dmin, lines, trial[0], trial[1], _WIDE if final and round_ == 0 else _NEAR)
            if total < best:
                best, best_d, best_dmin = total, d, dmin
                for j in range(subs):
                    sc[j] = trial[0, j]
                    mn[j] = trial[1, j]
            if not final or not total < reached * _ENOUGH:
                break
            reached = total
            new_d, new_dmin = refit(x, w, d, dmin, lines, trial[0], trial[1])
            if new_d == d and new_dmin == dmin:
                break
            d, dmin = new_d, new_dmin
    return best_d, best_dmin


def _workspace():
    """lines, follow, pairs, trial and codes of one superblock."""
    return (
        np.zeros((5, subs), np.float32), np.zeros(subs, np.float32), np.zeros((_GRIDS, 3), np.float32),
        np.zeros((2, subs), np.int32), np.zeros((2, subs), np.int32),
    )  # fmt: skip


def _search(x, w, row, start, scratch, sc, mn):
    lines, follow, pairs, trial, codes = scratch
    d, dmin = block(
        x[row, start : start + subs], w[start : start + subs], lines, follow, pairs, trial, codes[0], codes[1]
    )
    for j in range(subs):
        sc[row, start + j] = codes[0, j]
        mn[row, start + j] = codes[1, j]
    return d, dmin


@cache
def affine_quantizer(name: str, quick: bool = False) -> Callable[..., None]:
    """The compiled loop over rows of Q2_K, Q4_K or Q5_K, see `rows_quantizer`.

    quick  one grid and no wide sweep, in a third of the time: for a start that is going to be moved anyway
    """
    settings: dict[str, Any] = {"_GRIDS": 1, "_WIDE": _NEAR} if quick else {}
    loops = line_errors, line_fit, line_write
    stages = _line, _dmin_for, _grids, _sweep, _refit, _block
    suffix = f"{name}_quick" if quick else name
    return rows_quantizer(BLOCKS[name], suffix, loops, stages, _workspace, _search, settings)
