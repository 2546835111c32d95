"""Floats to scaled K-quants: w = d * sc * (q - zero), d and sc of either sign (Q3_K, Q6_K).

The stages are those of `round_affine`, with one number less per sub-block. Codes reach one step further below zero than
above, so both signs of a sub-block's scale are searched and kept until the grid decides between them.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from bridge.blocks import BLOCKS
from bridge.encode.rounding.round_loops import (
    add,
    extremes,
    line_errors,
    line_fit,
    line_write,
    rows_quantizer,
)
from bridge.system.kernels.half import INFINITY, LEAST, ONE, ZERO, round_half
from bridge.system.kernels.jit import UNSET

# d: the largest scale gets code 1.5 * scale_lo, so is clipped, and scale_lo / 64 less at each further try; either sign
_TRIES, _D_MOST, _D_STEP = 96, np.float32(1.5), np.float32(1 / 64)
_GRIDS = 4  # grids that are searched exactly
_GRID_ROUNDS = 2  # rounds on each of them, and on the best
_SHAKE = np.float32(1 / 80)  # how far off the best d is tried again
_NEAR = 1  # how far a sweep looks, in steps of sc
_ROUNDS = 6
_ENOUGH = 0.999  # a round that gains less is the last

# rows of the array `scales` [2, 3, subs], float32, for either sign: the scale, its error, and sum w q^2
_SCALE, _ERROR, _CURVE = 0, 1, 2

# set per type by `specialize`
sub = subs = scale_lo = scale_hi = starts = wide = grid_wide = shakes = 0
low = high = first = step = coarse = ZERO
scale = grids = sweep = refit = block = UNSET


def _scale(x, w, scales, j):
    """Search the best positive and negative scale of one sub-block, into column j of `scales`."""
    bottom, peak = extremes(x)
    for negative in range(2):
        sign = -ONE if negative else ONE
        # the scale at which nothing is clipped
        full = sign * max(peak / (low if negative else high) * sign, bottom / (high if negative else low) * sign)
        best = INFINITY
        scales[negative, _SCALE, j] = full
        scales[negative, _ERROR, j] = INFINITY
        scales[negative, _CURVE, j] = ZERO
        for k in range(starts):
            a = full * low / (low + first + step * np.float32(k))
            for _ in range(3):
                e, _, sqq, _, srq = line_fit(x, w, a, ZERO)
                if not sqq > ZERO:
                    if e < best:
                        best = e
                        scales[negative, _SCALE, j] = a
                        scales[negative, _ERROR, j] = e
                    break
                da = srq / sqq
                after = e - srq * da
                if not after < best * np.float32(1.05):
                    break
                a += da
                gained = after < best * np.float32(0.9999)
                if after < best:
                    best = after
                    scales[negative, _SCALE, j] = a
                    scales[negative, _ERROR, j] = after
                    scales[negative, _CURVE, j] = sqq
                if not gained:
                    break


def _grids(scales, tries):
    """Candidates for d and their expected errors into `tries` float32 [_TRIES, 2]; how many of them to search.

    Usually the few of least expected error. But if most scales are much smaller than the largest, the grid is coarse
    for them and their quadratics are unreliable: then all are searched.
    """
    largest = signed = ZERO
    for j in range(subs):
        better = 0 if scales[0, _ERROR, j] < scales[1, _ERROR, j] else 1
        if abs(scales[better, _SCALE, j]) > largest:
            signed = scales[better, _SCALE, j]
            largest = abs(signed)
    small = 0
    for j in range(subs):
        better = 0 if scales[0, _ERROR, j] < scales[1, _ERROR, j] else 1
        small += 1 if abs(scales[better, _SCALE, j]) * coarse < largest else 0
    for k in range(_TRIES):
        d = round_half(signed / (np.float32(scale_lo) * (_D_MOST - _D_STEP * np.float32(k >> 1))))
        if d == ZERO and largest > ZERO:
            d = LEAST
        if k & 1:
            d = -d
        inverse = ONE / d if d != ZERO else ZERO
        e = ZERO
        for j in range(subs):
            a = scales[0, _SCALE, j]
            off = d * min(max(np.rint(a * inverse), np.float32(scale_lo)), np.float32(scale_hi)) - a
            e0 = scales[0, _ERROR, j] + scales[0, _CURVE, j] * off * off
            a = scales[1, _SCALE, j]
            off = d * min(max(np.rint(a * inverse), np.float32(scale_lo)), np.float32(scale_hi)) - a
            e1 = scales[1, _ERROR, j] + scales[1, _CURVE, j] * off * off
            e = add(e, e0 if e0 < e1 else e1)
        tries[k, 0], tries[k, 1] = d, e
    if 2 * small > subs:
        return _TRIES
    for p in range(_GRIDS):  # the least to the front
        least = p
        for k in range(p, _TRIES):
            if tries[k, 1] < tries[least, 1]:
                least = k
        d, e = tries[least, 0], tries[least, 1]
        tries[least, 0], tries[least, 1] = tries[p, 0], tries[p, 1]
        tries[p, 0], tries[p, 1] = d, e
    tries[_GRIDS - 1, 0] = round_half(signed / np.float32(scale_lo))  # the plain choice, never left out
    return _GRIDS


def _sweep(x, w, d, scales, sc, distance):
    """Move each sc to the best within `distance` of itself and of either sign's best scale: the sum of the errors."""
    inverse = ONE / d if d != ZERO else ZERO
    total = 0.0
    for j in range(subs):
        best_s = sc[j]
        a = d * np.float32(best_s)
        best, _ = line_errors(x[j], w[j], a, ZERO, a, ZERO)
        for around in range(3):
            middle = sc[j]
            if around < 2:
                a = np.rint(scales[around, _SCALE, j] * inverse)
                middle = np.int32(min(max(a, np.float32(scale_lo)), np.float32(scale_hi)))
                if abs(middle - sc[j]) <= 1:
                    continue
            first_s = max(np.int32(middle - np.int32(distance)), np.int32(scale_lo))
            last_s = min(np.int32(middle + np.int32(distance)), np.int32(scale_hi))
            for s in range(first_s, last_s + 1, 2):
                s1 = np.int32(s)
                s2 = min(np.int32(s + 1), np.int32(scale_hi))
                e1, e2 = line_errors(x[j], w[j], d * np.float32(s1), ZERO, d * np.float32(s2), ZERO)
                if e1 < best:
                    best_s, best = s1, e1
                if e2 < best:
                    best_s, best = s2, e2
            if first_s == scale_lo and last_s == scale_hi:
                break
        sc[j] = best_s
        total += best
    return total


def _refit(x, w, d, sc):
    """d by least squares for the present codes, a half."""
    curve = gradient = 0.0
    for j in range(subs):
        s = np.float64(sc[j])
        _, _, sqq, _, srq = line_fit(x[j], w[j], d * np.float32(sc[j]), ZERO)
        curve += s * s * sqq
        gradient += s * srq
    return round_half(d + gradient / curve) if curve > 0 else d


def _block(x, w, scales, tries, trial, sc):
    """Search one superblock: x, w float32 [subs, sub] -> d, and codes into sc int32 [subs]."""
    for j in range(subs):
        scale(x[j], w[j], scales, j)
        sc[j] = 0
    count = grids(scales, tries)
    best = np.inf
    best_d = ZERO
    for p in range(count + 1 + shakes):
        final = p >= count
        d = best_d if final else tries[p, 0]
        if p > count:  # a little off the best d, by +1, -1, +2, -2, .. parts
            parts = (p - count + 1) // 2
            d = round_half(d * (ONE + _SHAKE * np.float32(parts if (p - count) & 1 else -parts)))
        for j in range(subs):
            trial[j] = sc[j] if final else 0
        reached = np.inf
        for round_ in range(_ROUNDS if final else (_GRID_ROUNDS if count == _GRIDS else 1)):
            total = sweep(x, w, d, scales, trial, _NEAR if round_ or p > count else (wide if final else grid_wide))
            if total < best:
                best, best_d = total, d
                for j in range(subs):
                    sc[j] = trial[j]
            if not total < reached * _ENOUGH:
                break
            reached = total
            new_d = refit(x, w, d, trial)
            if new_d == d:
                break
            d = new_d
    return best_d


def _workspace():
    """scales, tries, trial and codes of one superblock."""
    return (
        np.zeros((2, 3, subs), np.float32), np.zeros((_TRIES, 2), np.float32), np.zeros(subs, np.int32),
        np.zeros(subs, np.int32),
    )  # fmt: skip


def _search(x, w, row, start, scratch, sc, mn):
    scales, tries, trial, codes = scratch
    d = block(x[row, start : start + subs], w[start : start + subs], scales, tries, trial, codes)
    for j in range(subs):
        sc[row, start + j] = codes[j]
    return d, ZERO


@cache
def scaled_quantizer(name: str) -> Callable[..., None]:
    """The compiled loop over rows of Q3_K or Q6_K, see `rows_quantizer`."""
    loops = extremes, line_errors, line_fit, line_write
    stages = _scale, _grids, _sweep, _refit, _block
    return rows_quantizer(BLOCKS[name], name, loops, stages, _workspace, _search)
