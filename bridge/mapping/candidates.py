"""The search over d: which code the largest scale (or min) of a superblock gets.

Giving the largest scale s_max the code c makes d = s_max / c and all other codes; least squares refines d,
and the error is taken after d is rounded to a half. So a d that would be subnormal loses to one with smaller
codes, and exact solutions (error 0) are found as such. The loops run over candidates innermost, so that they
vectorize; see `bridge.mapping.fit` for units and weights.
"""

from __future__ import annotations

import numpy as np

from bridge.jit import inlined, inner

CANDIDATES = 128  # room for one candidate per scale code
LANES = 16  # float32 in the widest vectors there are
_TOP_CODES = np.arange(1, 2 * CANDIDATES + 1, dtype=np.float32)  # the code of the largest scale, by candidate


@inlined
def _round_half_branchless(x):
    """`round_half` without branches, so that it vectorizes."""
    split = np.float32(8193.0) * x
    normal = np.float32(split - np.float32(split - x))
    grid = np.float32(0.75)
    subnormal = np.float32((x + grid) - grid)
    rounded = subnormal if abs(x) < np.float32(6.103515625e-05) else normal
    return rounded if abs(rounded) < np.float32(65504.0) else np.float32(np.copysign(np.float32(65504.0), x))


@inlined
def _skipped(top, hi):
    """How many of the codes 1..hi need not be tried for the largest value `top`."""
    return (hi - 1) // 2 if abs(top) > np.float32(6.2e-05) * np.float32(hi + 1) else 0


@inlined
def scale_candidates(units, s, weight, lo, hi, cand_d, cand_e, num, den):
    """For each candidate code of the largest scale: d (a half) and the weighted scale error.

    units     how many units
    s, weight float32 [units]: scales; weights of the squared scale errors
    lo, hi    range of scale codes
    cand_d, cand_e   float32 [CANDIDATES], out: d and sum weight * (d * sc - s)^2
    num, den  float32 [CANDIDATES], scratch
    returns   how many of cand_d, cand_e are filled (0 where all scales are zero)

    The codes are those that the unrounded d gives: the nearest ones. Only the upper half of the codes is
    tried: twice the codes with half the d are the same scales, unless d falls among the subnormals. Loops
    run over a multiple of LANES, so that no remainder is left to scalar code; candidates beyond the count
    get an infinite error.
    """
    top = np.float32(0.0)
    for u in range(units):
        if abs(s[u]) > abs(top):
            top = s[u]
    if top == 0:
        return 0
    skipped = _skipped(top, hi)
    usual = hi - skipped
    count = usual + 1 if lo < -hi else usual  # one code more on the negative side, with a negative d
    padded = (count + LANES - 1) // LANES * LANES
    codes = _TOP_CODES[skipped:]
    for c in range(padded):
        num[c] = np.float32(0.0)
        den[c] = np.float32(0.0)
        cand_e[c] = np.float32(0.0)
    for u in range(units):
        ratio = s[u] / top if lo < 0 or s[u] * top > 0 else np.float32(0.0)
        w = weight[u]
        ws = w * s[u]
        for c in range(padded):
            code = np.rint(ratio * codes[c])
            num[c] += ws * code
            den[c] += w * (code * code)
    for c in range(padded):
        cand_d[c] = _round_half_branchless(num[c] / (den[c] + np.float32(1e-30)))
    for u in range(units):
        scale = s[u]
        ratio = scale / top if lo < 0 or scale * top > 0 else np.float32(0.0)
        w = weight[u]
        for c in range(padded):
            miss = cand_d[c] * np.rint(ratio * codes[c]) - scale
            cand_e[c] += w * (miss * miss)
    if count > usual:
        cand_d[usual] = -cand_d[usual]
    for c in range(padded):
        cand_e[c] = cand_e[c] if c < count else np.float32(np.inf)
    return padded


@inlined
def best_candidate(errors, count):
    """The index of the smallest of `count` errors >= 0, near enough: ties within 1e-5 go to the first.

    For floats >= 0 the order of the bit patterns is that of the values; with the index in the lowest
    seven bits the minimum is one integer reduction, which vectorizes.
    """
    bits = errors.view(np.int32)
    best = np.int32(0x7FFFFFFF)
    for c in range(count):
        best = min(best, np.int32((bits[c] & np.int32(-CANDIDATES)) | np.int32(c)))
    return best & np.int32(CANDIDATES - 1)


@inlined
def scale_codes(units, s, d, lo, hi, sc):
    """Round each scale to its nearest code given d: sc int32 [units], out."""
    for u in range(units):
        sc[u] = np.int32(min(max(np.rint(s[u] / d), np.float32(lo)), np.float32(hi))) if d != 0 else np.int32(0)


@inner
def min_candidates(units, target, n, hi, cand_d, cand_e, num, den):
    """Like `scale_candidates` for mins: targets >= 0 (others clip to code 0), weights n."""
    top = np.float32(0.0)
    for u in range(units):
        top = max(top, target[u])
    if top <= 0:
        return 0
    skipped = _skipped(top, hi)
    count = hi - skipped
    padded = (count + LANES - 1) // LANES * LANES
    codes = _TOP_CODES[skipped:]
    for c in range(padded):
        num[c] = np.float32(0.0)
        den[c] = np.float32(0.0)
        cand_e[c] = np.float32(0.0)
    for u in range(units):
        t = max(target[u], np.float32(0.0))
        ratio = t / top
        w = n[u]
        wt = w * t
        for c in range(padded):
            code = np.rint(ratio * codes[c])
            num[c] += wt * code
            den[c] += w * (code * code)
    for c in range(padded):
        cand_d[c] = _round_half_branchless(num[c] / (den[c] + np.float32(1e-30)))
    for u in range(units):
        t = target[u]
        ratio = max(t, np.float32(0.0)) / top
        w = n[u]
        for c in range(padded):
            miss = cand_d[c] * np.rint(ratio * codes[c]) - t
            cand_e[c] += w * (miss * miss)
    for c in range(padded):
        cand_e[c] = cand_e[c] if c < count else np.float32(np.inf)
    return padded


@inlined
def tied_zero(units, z, hi, min_hi):
    """Whether mn = sc and dmin = d * z hold the zero points exactly: one power of two for all units, or 0."""
    if hi > min_hi:
        return False
    for u in range(units):
        if z[u] != z[0]:
            return False
    whole = np.int64(z[0])
    return whole == z[0] and whole >= 0 and whole & (whole - 1) == 0


@inlined
def _least_squares_of_two(s0, s1, w0, w1, code0, code1):
    """The half d of least w0 (d code0 - s0)^2 + w1 (d code1 - s1)^2."""
    num = w0 * s0 * code0 + w1 * s1 * code1
    den = w0 * (code0 * code0) + w1 * (code1 * code1)
    return _round_half_branchless(num / (den + np.float32(1e-30)))


@inlined
def _error_of_two(s0, s1, w0, w1, code0, code1):
    d = _least_squares_of_two(s0, s1, w0, w1, code0, code1)
    miss0 = d * code0 - s0
    miss1 = d * code1 - s1
    return np.float32(w0 * (miss0 * miss0) + w1 * (miss1 * miss1))


@inlined
def _fit_two(s0, s1, w0, w1, lo, hi, sc, errors):
    """`fit_scaled` for two units, groups of 128: the most common case, in one pass over the candidates."""
    top = s0 if abs(s0) > abs(s1) else s1
    if top == 0:
        sc[0] = 0
        sc[1] = 0
        return np.float32(0.0)
    skipped = _skipped(top, hi)
    count = hi - skipped + (1 if lo < -hi else 0)
    codes = _TOP_CODES[skipped:]
    r0 = s0 / top if lo < 0 or s0 * top > 0 else np.float32(0.0)
    r1 = s1 / top if lo < 0 or s1 * top > 0 else np.float32(0.0)
    padded = (count + LANES - 1) // LANES * LANES
    for c in range(padded):
        error = _error_of_two(s0, s1, w0, w1, np.rint(r0 * codes[c]), np.rint(r1 * codes[c]))
        errors[c] = error if c < count else np.float32(np.inf)
    c = best_candidate(errors, padded)
    code0 = np.rint(r0 * codes[c])
    code1 = np.rint(r1 * codes[c])
    d = _least_squares_of_two(s0, s1, w0, w1, code0, code1)
    if codes[c] > hi:
        d = -d
        code0 = -code0
        code1 = -code1
    sc[0] = np.int32(min(code0, np.float32(hi)))
    sc[1] = np.int32(min(code1, np.float32(hi)))
    return d


@inlined
def fit_scaled(units, s, a, lo, hi, sc, cand_d, cand_e, num, den):
    """Fit d and sc of one superblock where zero points are kept exactly, so that E = sum alpha^2 A.

    s, a float32 [units]; sc int32 [units], out; cand_d .. den float32 [CANDIDATES],
    scratch. Returns d.
    """
    if units == 2:
        return _fit_two(s[0], s[1], a[0], a[1], lo, hi, sc, cand_e)
    count = scale_candidates(units, s, a, lo, hi, cand_d, cand_e, num, den)
    if count == 0:
        for u in range(units):
            sc[u] = 0
        return np.float32(0.0)
    c = best_candidate(cand_e, count)
    scale_codes(units, s, cand_d[c], lo, hi, sc)
    return cand_d[c]
