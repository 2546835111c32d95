"""Fitting a superblock's double-quantized scales to the scales and zero points of a checkpoint.

The codes q stay. A *unit* is a run of sub-blocks of one superblock that lie in the same group, so they
share a scale s and a zero point z. With the sums over the unit's weights

    n,   A = sum (q - z)^2,   B = sum (q - z)

and what the GGUF will hold, d * sc * q - dmin * mn (d, dmin halves, sc, mn small integers), the squared
error of the unit's weights against s * (q - z) is

    alpha = d * sc - s                 error of the scale
    gamma = dmin * mn - d * sc * z     how far the zero point is from where it was
    E     = alpha^2 A - 2 alpha gamma B + gamma^2 n

All functions work on float32: a half times a six-bit integer is exact there, and so is its distance to
a half-precision s. The search is over the code c given to the largest scale: d = s_max / c makes all
other codes, least squares refines d, and E is taken after d is rounded to a half. So a d that would be
subnormal loses to one with smaller codes, and exact solutions (E = 0) are found as such. The loops run
over candidates innermost, so that they vectorize.

The few best candidates for the scales, each with the few best for the mins, are then polished together:
neighbouring codes, d and dmin refitted by least squares, halves next to them. How many: measured. Two of
each where a superblock has up to 4 units (4-bit g128: 1.8e-4 of the source's noise, nearly whatever the
effort); four beyond (4-bit g32: 0.85% instead of 1.1% with one) and for the four-bit scales of Q2_K (2-bit
g64: 0.20% instead of 0.27% with two; a search of all pairs of d and dmin gets to 0.17% in 4 ms a superblock).

Scratch arrays are the caller's, one by one: a kernel allocates once per call, and no view is made in the
inner loops (each costs two atomic operations in numba, 100 ns a superblock in all).
"""

from __future__ import annotations

import numpy as np

from bridge.jit import inlined, inner
from bridge.mapping.half import round_half

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
        cand_d[c] = _round_half_branchless(num[c] / den[c])
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
def _min_candidates(units, target, n, hi, cand_d, cand_e, num, den):
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


@inner
def affine_error(units, s, z, n, a, b, d, dmin, sc, mn):
    """sum of E over the units (see the module's head), float32."""
    total = np.float32(0.0)
    for u in range(units):
        alpha = d * np.float32(sc[u]) - s[u]
        gamma = dmin * np.float32(mn[u]) - d * np.float32(sc[u]) * z[u]
        total += alpha * alpha * a[u] - np.float32(2.0) * alpha * gamma * b[u] + gamma * gamma * n[u]
    return total


@inner
def _best_codes(units, s, z, n, a, b, d, dmin, hi, min_hi, sc, mn):
    """Given d and dmin, the best pair of codes of each unit: the nearest scale code or a neighbour, with the
    min code that suits it. Returns the error."""
    total = np.float32(0.0)
    for u in range(units):
        near = np.int32(np.rint(s[u] / d))
        best = np.float32(np.inf)
        for step in range(-1, 2):
            code = min(max(near + step, 0), hi)
            alpha = d * np.float32(code) - s[u]
            zero = d * np.float32(code) * z[u]
            low = np.int32(0)
            if dmin != 0:
                wanted = np.rint((zero + alpha * b[u] / n[u]) / dmin)
                low = np.int32(min(max(wanted, np.float32(0.0)), np.float32(min_hi)))
            gamma = dmin * np.float32(low) - zero
            e = alpha * alpha * a[u] - np.float32(2.0) * alpha * gamma * b[u] + gamma * gamma * n[u]
            if e < best:
                best = e
                sc[u] = code
                mn[u] = low
        total += best
    return total


@inner
def _refit(units, s, z, n, a, b, sc, mn):
    """The d and dmin of least squared error for given codes (float64; dmin 0 where all mins are 0)."""
    s11 = 0.0
    s12 = 0.0
    s22 = 0.0
    r1 = 0.0
    r2 = 0.0
    for u in range(units):
        # w' - w = d sc q - dmin mn - s (q - z); with p = q - z: (d sc - s) p - (dmin mn - d sc z)
        zz = float(z[u])
        aa = float(a[u])
        bb = float(b[u])
        nn = float(n[u])
        s1 = bb + nn * zz  # sum q
        s2 = aa + 2.0 * zz * bb + nn * zz * zz  # sum q^2
        s11 += sc[u] * sc[u] * s2
        s12 -= sc[u] * mn[u] * s1
        s22 += mn[u] * mn[u] * nn
        r1 += sc[u] * s[u] * (aa + zz * bb)  # sum q (q - z)
        r2 -= mn[u] * s[u] * bb
    if s11 <= 0.0:
        return 0.0, 0.0
    det = s11 * s22 - s12 * s12
    if s22 <= 0.0 or det <= 1e-9 * s11 * s22:
        return r1 / s11, 0.0
    return (r1 * s22 - r2 * s12) / det, (s11 * r2 - s12 * r1) / det


@inner
def _neighbour(x, up):
    """The half next to a positive half, upward or downward, staying positive."""
    step = np.float32(5.9604645e-08)
    if x >= np.float32(6.103515625e-05):
        step = np.float32(2.0) ** (np.floor(np.log2(x)) - np.float32(10.0))
    return round_half(x + step if up else max(x - step, np.float32(5.9604645e-08)))


@inner
def fit_affine(
    units, s, z, n, a, b, hi, min_hi, sc, mn, cand_d, cand_e, num, den, spread, target, kept_d, kept_e, try_sc, try_mn
):
    """Fit d, dmin, sc, mn of one superblock (s, z >= 0); see the module's head.

    s, z, n, a, b   float32 [units]
    hi, min_hi      largest scale and min code
    sc, mn          int32 [units], out
    cand_d .. kept_e   float32 [CANDIDATES], scratch; try_sc, try_mn int32 [units], scratch
    returns         d, dmin (float32, exact halves)
    """
    zero = np.float32(0.0)
    for u in range(units):
        # with the mins following the scale, what a scale error costs is the spread of the codes
        spread[u] = max(a[u] - b[u] * b[u] / n[u], np.float32(1e-6) * n[u])
        sc[u] = 0
        mn[u] = 0
    constant = True
    for u in range(1, units):
        if z[u] != z[0]:
            constant = False
    count = scale_candidates(units, s, spread, np.int64(0), hi, cand_d, cand_e, num, den)
    if count == 0:
        return zero, zero

    best = np.float32(np.inf)
    best_d = zero
    best_dmin = zero
    if constant:  # mn = sc and dmin = d * z keep the one zero point, if not exactly; try that first
        c = best_candidate(cand_e, count)
        scale_codes(units, s, cand_d[c], np.int64(0), hi, try_sc)
        best_d = cand_d[c]
        best_dmin = round_half(best_d * z[0])
        for u in range(units):
            sc[u] = try_sc[u]
            mn[u] = min(try_sc[u], min_hi)
        best = affine_error(units, s, z, n, a, b, best_d, best_dmin, sc, mn)

    for c in range(count):
        kept_d[c] = cand_d[c]
        kept_e[c] = cand_e[c]
    effort = 2 if units <= 4 and hi > 15 else 4
    for _ in range(effort):
        c = best_candidate(kept_e, count)
        if not kept_e[c] < best:
            break
        d = kept_d[c]
        kept_e[c] = np.float32(np.inf)
        scale_codes(units, s, d, np.int64(0), hi, try_sc)
        for u in range(units):
            scaled = d * np.float32(try_sc[u])
            target[u] = scaled * z[u] + (scaled - s[u]) * b[u] / n[u]
        mins = _min_candidates(units, target, n, min_hi, cand_d, cand_e, num, den)
        for _ in range(min(effort, max(mins, 1))):
            dmin = zero
            if mins > 0:
                m = best_candidate(cand_e, mins)
                dmin = cand_d[m]
                if not cand_e[m] < np.inf:
                    break
                cand_e[m] = np.float32(np.inf)
            e = _best_codes(units, s, z, n, a, b, d, dmin, hi, min_hi, try_sc, try_mn)
            trial_d = d
            for _ in range(3):
                if e < best:
                    best = e
                    best_d = trial_d
                    best_dmin = dmin
                    for u in range(units):
                        sc[u] = try_sc[u]
                        mn[u] = try_mn[u]
                fine_d, fine_dmin = _refit(units, s, z, n, a, b, try_sc, try_mn)
                fine_d32 = round_half(np.float32(fine_d))
                fine_dmin32 = round_half(np.float32(fine_dmin))
                if fine_d32 <= 0 or fine_dmin32 < 0 or (fine_d32 == trial_d and fine_dmin32 == dmin):
                    break
                trial_d = fine_d32
                dmin = fine_dmin32
                e = _best_codes(units, s, z, n, a, b, trial_d, dmin, hi, min_hi, try_sc, try_mn)
            if e < best:
                best = e
                best_d = trial_d
                best_dmin = dmin
                for u in range(units):
                    sc[u] = try_sc[u]
                    mn[u] = try_mn[u]
    if best > 0:  # the halves next to d and dmin
        for which in range(4):
            d = _neighbour(best_d, which & 1) if which < 2 else best_d
            dmin = _neighbour(best_dmin, which & 1) if which >= 2 and best_dmin > 0 else best_dmin
            e = _best_codes(units, s, z, n, a, b, d, dmin, hi, min_hi, try_sc, try_mn)
            if e < best:
                best = e
                best_d = d
                best_dmin = dmin
                for u in range(units):
                    sc[u] = try_sc[u]
                    mn[u] = try_mn[u]
    return best_d, best_dmin


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
