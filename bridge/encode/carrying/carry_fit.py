"""Fitting a superblock's double-quantized scales to the scales and zero points of a checkpoint.

The codes q are kept. A *unit* is a run of sub-blocks of one superblock that are in the same group, so they share a
scale s and a zero point z. With the sums over the unit's weights

    n,   A = sum (q - z)^2,   B = sum (q - z)

and the GGUF's values d * sc * q - dmin * mn (d, dmin halves, sc, mn small integers), the squared error of the unit's
weights against s * (q - z) is

    alpha = d * sc - s                 error of the scale
    gamma = dmin * mn - d * sc * z     how far the zero point is from where it was
    E     = alpha^2 A - 2 alpha gamma B + gamma^2 n

All functions use float32, in which a half times a six-bit integer is exact, and so is its distance to a half-precision
s. If zero points are kept exactly, `carry_candidates.fit_scaled` fits; otherwise:

With the best min for each scale, a scale's error costs at least alpha^2 (A - B^2 / n). This bound is computed for 64 d;
then, from the least bound up, each d is tried with the best of 64 dmin, until the next bound exceeds the best error:
after 2 (4-bit g128) to 9 (4-bit g64) of them. The winner is polished: neighbouring codes, d and dmin refitted by least
squares, neighbouring halves.

W = s (q - z) is also -s (q' - z') with mirrored codes q' = top - q and z' = top - z. The mins s z' differ from s z and
are often smaller, and so are dmin's steps: each d is tried with both, and the better side halves the error. Compared to
a search of all pairs of halves on both sides the error is under 1% larger for groups of 64 and 128, 3% for 5-bit g64,
and for g32 1% with 4 bits, 5% with 3 and 15% with 2 (test_carry.py has that search).

Scratch arrays are the caller's: a kernel allocates once per call, and the inner loops make no views (each costs two
atomic operations in numba, 100 ns a superblock in all). They are separate arguments, although the lists are long:
unpacking a NamedTuple costs numba two more such operations for each array, and a superblock took 5% longer with
`fit_affine`'s arguments grouped, 15% with those of the functions that it calls.
"""

import numpy as np

from bridge.encode.carrying.carry_candidates import STARTS, best_candidate, candidates
from bridge.system.kernels.half import round_half
from bridge.system.kernels.jit import inner, kernel

_SCALES = 24  # candidates of d that are looked at, at most
_REFITS = 3


@inner
def _best_codes(units, s, z, n, a, b, d, dmin, hi, min_hi, sc, mn):
    """Each unit's best codes for d and dmin: the nearest scale code or a neighbour, and a min; returns the error."""
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
    s11 = s12 = s22 = r1 = r2 = 0.0
    for u in range(units):
        # w' - w = d sc q - dmin mn - s (q - z); with p = q - z: (d sc - s) p - (dmin mn - d sc z)
        zz, aa, bb, nn = float(z[u]), float(a[u]), float(b[u]), float(n[u])
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
def _polish(units, s, z, n, a, b, hi, min_hi, d, dmin, sc, mn, try_sc, try_mn):
    """Improve good d and dmin: codes, least squares, codes; at last the halves next to both.

    Returns the least error, with its d and dmin; sc, mn int32 [units], out: its codes.
    """
    best = np.float32(np.inf)
    best_d, best_dmin = d, dmin
    for step in range(_REFITS + 4):
        if step >= _REFITS:
            which = step - _REFITS
            d = _neighbour(best_d, which & 1) if which < 2 else best_d
            dmin = _neighbour(best_dmin, which & 1) if which >= 2 and best_dmin > 0 else best_dmin
        e = _best_codes(units, s, z, n, a, b, d, dmin, hi, min_hi, try_sc, try_mn)
        if e < best:
            best, best_d, best_dmin = e, d, dmin
            for u in range(units):
                sc[u] = try_sc[u]
                mn[u] = try_mn[u]
        if best == 0:
            break
        if step < _REFITS - 1:
            fine_d, fine_dmin = _refit(units, s, z, n, a, b, try_sc, try_mn)
            d = round_half(np.float32(fine_d))
            dmin = max(round_half(np.float32(fine_dmin)), np.float32(0.0))
            if d <= 0:
                d = best_d
    return best, best_d, best_dmin


@inner
def _fit_one(
    units, s, z, n, a, b, top, hi, min_hi, sc, mn, scale_d, scale_e, min_d, min_e, num, den, spread, target, try_sc,
    try_mn,
):  # fmt: skip
    """Fit one superblock; see `fit_affine`.

    s, z, n, a, b   float32 [units]; z and b become those of the mirrored codes where these are fitted
    top             the largest code, 2^bits - 1
    hi, min_hi      largest scale and min code
    sc, mn          int32 [units], out
    scale_d .. den  float32 [STARTS], scratch; spread, target float32, try_sc, try_mn int32 [units], scratch
    returns         d, dmin (float32, exact halves >= 0); whether the codes are to be mirrored
    """
    zero = np.float32(0.0)
    for u in range(units):
        # with the mins following the scale, what a scale error costs is the spread of the codes
        spread[u] = max(a[u] - b[u] * b[u] / n[u], np.float32(1e-6) * n[u])
        sc[u] = mn[u] = 0
    if not candidates(units, s, spread, hi, scale_d, scale_e, num, den):
        return zero, zero, False
    for c in range(1, STARTS):  # a d found before
        scale_e[c] = np.float32(np.inf) if scale_d[c] == scale_d[c - 1] else scale_e[c]

    best = np.float32(np.inf)
    best_d = best_dmin = zero
    mirror = False
    for _ in range(_SCALES):
        c = best_candidate(scale_e)
        cost = scale_e[c]
        d = scale_d[c]
        if not cost < best:
            break
        scale_e[c] = np.float32(np.inf)
        if d <= 0:
            continue
        inverse = np.float32(1.0) / d
        for side in range(2):
            e = cost
            for u in range(units):
                scaled = d * min(np.rint(s[u] * inverse), np.float32(hi))
                mean = b[u] / n[u]
                miss = scaled - s[u]
                target[u] = scaled * (top - z[u]) - miss * mean if side else scaled * z[u] + miss * mean
            dmin = zero
            if candidates(units, target, n, min_hi, min_d, min_e, num, den):
                m = best_candidate(min_e)
                e += min_e[m]
                dmin = min_d[m]
            else:
                for u in range(units):
                    e += target[u] * target[u] * n[u]
            if e < best:
                best, best_d, best_dmin = e, d, dmin
                mirror = side == 1
    if best_d <= 0:
        return zero, zero, False
    if mirror:
        for u in range(units):
            z[u] = top - z[u]
            b[u] = -b[u]
    _, best_d, best_dmin = _polish(units, s, z, n, a, b, hi, min_hi, best_d, best_dmin, sc, mn, try_sc, try_mn)
    return best_d, best_dmin, mirror


@kernel
def _fit_all(fields, counts, top, hi, min_hi, codes, halves, mirrored):
    """`_fit_one` for all superblocks; see `fit_affine`. codes int32 [2, n, units], halves float32 [2, n], out."""
    most = fields.shape[2]
    s, z, n = np.empty(most, np.float32), np.empty(most, np.float32), np.empty(most, np.float32)
    a, b = np.empty(most, np.float32), np.empty(most, np.float32)
    spread, target = np.empty(most, np.float32), np.empty(most, np.float32)
    scale_d, scale_e = np.empty(STARTS, np.float32), np.empty(STARTS, np.float32)
    min_d, min_e = np.empty(STARTS, np.float32), np.empty(STARTS, np.float32)
    num, den = np.empty(STARTS, np.float32), np.empty(STARTS, np.float32)
    sc, mn = np.empty(most, np.int32), np.empty(most, np.int32)
    try_sc, try_mn = np.empty(most, np.int32), np.empty(most, np.int32)
    for block in range(fields.shape[1]):
        units = counts[block % counts.shape[0]]
        for u in range(units):
            s[u], z[u], n[u] = fields[0, block, u], fields[1, block, u], fields[2, block, u]
            a[u], b[u] = fields[3, block, u], fields[4, block, u]
        halves[0, block], halves[1, block], mirrored[block] = _fit_one(
            units, s, z, n, a, b, top, hi, min_hi, sc, mn,
            scale_d, scale_e, min_d, min_e, num, den, spread, target, try_sc, try_mn,
        )  # fmt: skip
        for u in range(units):
            codes[0, block, u], codes[1, block, u] = sc[u], mn[u]


def fit_affine(
    fields: np.ndarray, counts: np.ndarray, top: int, hi: int, min_hi: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit d, dmin, sc, mn of superblocks with s >= 0; see the module's head.

    fields      float32 [5, n, units]: s, z, n, A and B of each unit
    counts      int64 [blocks of a row]: how many units each superblock of a row has
    top         the largest code, 2^bits - 1
    hi, min_hi  largest scale and min code
    returns     sc and mn int32 [2, n, units], 0 beyond a superblock's units; d and dmin float32 [2, n], exact halves
                >= 0; whether the codes are to be mirrored, bool [n]
    """
    codes = np.zeros((2, *fields.shape[1:]), np.int32)
    halves = np.empty((2, fields.shape[1]), np.float32)
    mirrored = np.empty(fields.shape[1], np.bool_)
    _fit_all(fields, counts, np.float32(top), hi, min_hi, codes, halves, mirrored)
    return codes, halves, mirrored
