"""Floats to plain types: w = d * (q - zero) (Q2_0, Q4_0, Q5_0, Q8_0) and w = d * q + m (Q4_1, Q5_1).

As for K-quants, the stored block's error is minimized: d and m are halves before any code is rounded against them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from bridge.blocks import TYPES
from bridge.encode.rounding.round_loops import (
    add,
    extremes,
    greater,
    lesser,
    line_errors,
    line_fit,
    line_write,
    rows_quantizer,
)  # fmt: skip
from bridge.system.kernels.half import INFINITY, LEAST, ONE, ZERO, round_half
from bridge.system.kernels.jit import kernel

_STEP = np.float32(0.75 * 2.0**-10)  # of a half to its neighbour, relative

_SHIFTS, _SHIFT = 3, np.float32(0.35)  # starts of m, in steps of d
_HOPELESS = np.float32(1.5)  # a start this much above the best is given up
_WINDOW = 2  # steps to either side of the best line that are tried again
# Q8_0: 128 is the code of the widest weight with d negated; fewer codes cost 1.6% each, but each d
# gives the block other codes, and the best of six is a fifth below the average
_Q8_0_CODES = np.array([127, -128, 126, -127.4, 125, 124], np.float32)
_Q8_0_LOW, _Q8_0_HIGH = np.float32(-128), np.float32(127)

# set per type by `specialize`
sub = starts = 0
low = high = first = step = ZERO
block: Any = None


def _scaled(x, w):
    """The best half d for one block, and 0 for m."""
    bottom, peak = extremes(x)
    best = INFINITY
    best_d = ZERO
    if not peak > bottom:
        return best_d, ZERO
    for negative in range(2):
        sign = -ONE if negative else ONE
        full = sign * max(peak / (low if negative else high) * sign, bottom / (high if negative else low) * sign)
        for k in range(starts):
            a = full * low / (low + first + step * np.float32(k))
            d0 = round_half(a)
            if d0 == ZERO:
                d0 = np.float32(np.copysign(LEAST, a))
            _, _, sqq, _, srq = line_fit(x, w, d0, ZERO)
            d1 = round_half(d0 + srq / sqq) if sqq > ZERO else d0
            e0, e1 = line_errors(x, w, d0, ZERO, d1, ZERO)
            if e0 < best:
                best, best_d = e0, d0
            if e1 < best:
                best, best_d = e1, d1
    for _ in range(4):  # neighbouring halves, and least squares again
        _, _, sqq, _, srq = line_fit(x, w, best_d, ZERO)
        gap = max(abs(best_d) * _STEP, LEAST)
        e0, e1 = line_errors(x, w, round_half(best_d - gap), ZERO, round_half(best_d + gap), ZERO)
        d = best_d
        if e0 < best:
            best, d = e0, round_half(best_d - gap)
        if e1 < best:
            best, d = e1, round_half(best_d + gap)
        if sqq > ZERO:
            refined = round_half(best_d + srq / sqq)
            e0, _ = line_errors(x, w, refined, ZERO, refined, ZERO)
            if e0 < best:
                best, d = e0, refined
        if d == best_d:
            break
        best_d = d
    return best_d, ZERO


def _affine(x, w):
    """The best halves d >= 0 and m for one block."""
    lo = x[0]
    hi = x[0]
    weight = ZERO
    for i in range(sub):
        lo = lesser(lo, x[i])
        hi = greater(hi, x[i])
        weight = add(weight, w[i])
    sw = np.float64(weight)
    best = INFINITY
    best_d = ZERO
    best_m = round_half(lo)
    for k in range(starts * _SHIFTS):  # spread, and shift of the least weight
        a = round_half((hi - lo) / (high + first + step * np.float32(k // _SHIFTS)))
        b = -round_half(lo + a * _SHIFT * np.float32(k % _SHIFTS - _SHIFTS // 2))
        last = INFINITY
        for _ in range(4):
            e, f_q, f_qq, f_r, f_rq = line_fit(x, w, a, b)
            if e < best:
                best, best_d, best_m = e, a, -b
            if not e < last or (last < INFINITY and e > best * _HOPELESS):
                break
            last = e
            sq, sqq, sr, srq = np.float64(f_q), np.float64(f_qq), np.float64(f_r), np.float64(f_rq)
            det = sqq * sw - sq * sq
            if not det > 1e-6 * sqq * sw:
                break
            new_b = round_half(b + (sq * srq - sqq * sr) / det)
            new_a = round_half(a + (srq + sq * (np.float64(new_b) - b)) / sqq)  # given the m that is stored
            if (new_a == a and new_b == b) or not new_a > 0:
                break
            a, b = new_a, new_b
    # around the best, in steps of half a code at the far end and a quarter at the near: codes, least squares, codes
    d, m = best_d, best_m
    for i in range(-_WINDOW, _WINDOW + 1):
        a = d * (ONE + np.float32(i) * np.float32(0.5) / high)
        for k in range(-_WINDOW, _WINDOW + 1):
            b = np.float32(k) * np.float32(0.25) * d - m
            _, sq, sqq, sr, srq = line_fit(x, w, a, b)
            det = sqq * weight - sq * sq
            if not det > np.float32(1e-4) * sqq * weight:
                continue
            b1 = round_half(b + (sq * srq - sqq * sr) / det)
            a1 = round_half(a + (srq + sq * (b1 - b)) / sqq)
            if a1 > ZERO:
                e1, e2 = line_errors(x, w, a1, b1, a1, -m)
                if e1 < best:
                    best, best_d, best_m = e1, a1, -b1
                if e2 < best:
                    best, best_d, best_m = e2, a1, m
    for _ in range(4):  # neighbouring halves
        d, m = best_d, best_m
        gap_d = max(abs(d) * _STEP, LEAST)
        gap_m = max(abs(m) * _STEP, LEAST)
        for dm in range(-1, 2):
            m1 = round_half(m + np.float32(dm) * gap_m)
            # the d that best goes with this m, and with this m and the codes of either end
            _, _, f_qq, _, f_rq = line_fit(x, w, d, -m1)
            a = d + f_rq / f_qq if f_qq > ZERO else (hi - m1) / high
            a = round_half(max(a, ZERO))
            e1, e2 = line_errors(x, w, a, -m1, round_half(a + gap_d), -m1)
            if e1 < best:
                best, best_d, best_m = e1, a, m1
            if e2 < best:
                best, best_d, best_m = e2, round_half(a + gap_d), m1
            e1, e2 = line_errors(x, w, round_half(max(a - gap_d, ZERO)), -m1, d, -m1)
            if e1 < best:
                best, best_d, best_m = e1, round_half(max(a - gap_d, ZERO)), m1
            if e2 < best:
                best, best_d, best_m = e2, d, m1
        if best_d == d and best_m == m:
            break
    return best_d, best_m


@kernel
def _rows_q8_0(x, w, q, sc, mn, d, dmin, sums):
    """`round_loops._rows` for Q8_0, with a few halves only: with 256 codes there is little to gain.

    One function, because nearly every first conversion waits for its compilation, which costs twice as much for the
    same loops as functions of their own.
    """
    for row in range(x.shape[0]):
        for n in range(x.shape[1]):
            bottom, peak = ZERO, ZERO
            for i in range(32):
                bottom = lesser(bottom, x[row, n, i])
                peak = greater(peak, x[row, n, i])
            widest = peak if peak > -bottom else bottom
            best = INFINITY
            a = ZERO
            for k in range(6 if widest != ZERO else 0):
                if k < 3:
                    a1 = round_half(widest / _Q8_0_CODES[2 * k])
                    a2 = round_half(widest / _Q8_0_CODES[2 * k + 1])
                elif abs(a) < np.float32(2.0**-14):  # subnormal: the halves lie far apart
                    a1 = np.float32(k - 2) * LEAST
                    a2 = -a1
                else:
                    break
                i1 = ONE / a1 if a1 != ZERO else ZERO
                i2 = ONE / a2 if a2 != ZERO else ZERO
                e1 = e2 = ZERO
                for i in range(32):
                    code = np.rint(x[row, n, i] * i1)
                    code = code if code > _Q8_0_LOW else _Q8_0_LOW
                    code = code if code < _Q8_0_HIGH else _Q8_0_HIGH
                    r = x[row, n, i] - a1 * code
                    e1 = add(e1, w[n, i] * r * r)
                    code = np.rint(x[row, n, i] * i2)
                    code = code if code > _Q8_0_LOW else _Q8_0_LOW
                    code = code if code < _Q8_0_HIGH else _Q8_0_HIGH
                    r = x[row, n, i] - a2 * code
                    e2 = add(e2, w[n, i] * r * r)
                if e1 < best:
                    best, a = e1, a1
                if e2 < best:
                    best, a = e2, a2
            d[row, n] = a
            inverse = ONE / a if a != ZERO else ZERO
            error = signal = weighted = ZERO
            for i in range(32):
                code = np.rint(x[row, n, i] * inverse)
                code = code if code > _Q8_0_LOW else _Q8_0_LOW
                code = code if code < _Q8_0_HIGH else _Q8_0_HIGH
                q[row, n, i] = np.uint8(code - _Q8_0_LOW)
                r = x[row, n, i] - a * code
                error = add(error, r * r)
                signal = add(signal, x[row, n, i] * x[row, n, i])
                weighted = add(weighted, w[n, i] * r * r)
            sums[row, 0] += error
            sums[row, 1] += signal
            sums[row, 2] += weighted


def _workspace():
    return ()


def _search(x, w, row, start, scratch, sc, mn):
    return block(x[row, start], w[start])


@cache
def plain_quantizer(name: str) -> Callable[..., None]:
    """The compiled loop over rows of a plain type, see `rows_quantizer`."""
    kind = TYPES[name]
    if kind.search is None:  # Q8_0
        return _rows_q8_0
    loops = extremes, line_errors, line_fit, line_write
    stage = _affine if kind.has_min else _scaled
    return rows_quantizer(kind, name, loops, [stage], _workspace, _search)
