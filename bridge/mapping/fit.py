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
a half-precision s. Where zero points are kept exactly, `candidates.fit_scaled` does; elsewhere:

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
from bridge.mapping.candidates import best_candidate, candidates, scale_codes
from bridge.mapping.half import round_half


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


@inlined
def _keep(units, try_sc, try_mn, sc, mn):
    """Make the codes on trial the best ones."""
    for u in range(units):
        sc[u] = try_sc[u]
        mn[u] = try_mn[u]


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
    count = candidates(units, s, spread, hi, cand_d, cand_e, num, den)
    if count == 0:
        return zero, zero

    best = np.float32(np.inf)
    best_d = zero
    best_dmin = zero
    if constant:  # mn = sc and dmin = d * z keep the one zero point, if not exactly; try that first
        c = best_candidate(cand_e, count)
        scale_codes(units, s, cand_d[c], hi, try_sc)
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
        scale_codes(units, s, d, hi, try_sc)
        for u in range(units):
            scaled = d * np.float32(try_sc[u])
            target[u] = scaled * z[u] + (scaled - s[u]) * b[u] / n[u]
        mins = candidates(units, target, n, min_hi, cand_d, cand_e, num, den)
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
                    _keep(units, try_sc, try_mn, sc, mn)
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
                _keep(units, try_sc, try_mn, sc, mn)
    if best > 0:  # the halves next to d and dmin
        for which in range(4):
            d = _neighbour(best_d, which & 1) if which < 2 else best_d
            dmin = _neighbour(best_dmin, which & 1) if which >= 2 and best_dmin > 0 else best_dmin
            e = _best_codes(units, s, z, n, a, b, d, dmin, hi, min_hi, try_sc, try_mn)
            if e < best:
                best = e
                best_d = d
                best_dmin = dmin
                _keep(units, try_sc, try_mn, sc, mn)
    return best_d, best_dmin
