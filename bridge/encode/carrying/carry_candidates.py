"""The search over d, that is, over the code of the largest scale (or min) of a superblock.

If the largest scale s_max gets the code c, d = s_max / c determines all other codes; least squares refines d, and the
error is computed after d is rounded to a half. So a d that would be subnormal loses to one with smaller codes, and
exact solutions have the error 0. Candidates are the innermost loops, so that they vectorize; for units and weights see
`bridge.encode.carrying.carry_fit`.
"""

import numpy as np

from bridge.system.kernels.jit import inlined, kernel

STARTS = 64  # a power of two, and whole vectors
BATCH = 128  # superblocks that `_fit` takes at once
_COARSE = np.float32(6.2e-05)  # a d below it may be subnormal
_MIDDLES = np.arange(0.5, STARTS, dtype=np.float32)  # of the steps from the first start to the last


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
def candidates(units, value, weight, hi, cand_d, cand_e, num, den):
    """For each of STARTS codes of the largest value, including fractions: d (a half) and the error of all values.

    units     how many units
    value, weight   float32 [units]: scales or mins (negative ones get the code 0); weights of squared errors
    hi        the largest code
    cand_d, cand_e   float32 [STARTS], out: d and sum weight * (d * code - value)^2
    num, den  float32 [STARTS], scratch
    returns   whether any value is positive; where none is, nothing is filled

    Codes are rounded with the unrounded d. Starts between whole codes find the vectors of codes at which the largest
    value has an error too: with four values, half steps find nearly all. Only the upper half of the codes is tried:
    twice the codes with half the d are the same values, unless d is subnormal.
    """
    top = np.float32(0.0)
    for u in range(units):
        top = max(top, value[u])
    if top <= 0:
        return False
    skipped = (hi - 1) // 2 if top > _COARSE * np.float32(hi + 1) else 0
    first = np.float32(skipped) + np.float32(0.5)
    step = np.float32(hi - skipped) / np.float32(STARTS)
    inverse = np.float32(1.0) / top
    for c in range(STARTS):
        num[c] = np.float32(0.0)
        den[c] = np.float32(1e-30)
        cand_e[c] = np.float32(0.0)
    for u in range(units):
        v = max(value[u], np.float32(0.0))
        ratio = v * inverse
        w = weight[u]
        for c in range(STARTS):
            code = np.rint(ratio * (first + step * _MIDDLES[c]))
            wc = w * code
            num[c] += wc * v
            den[c] += wc * code
    for c in range(STARTS):
        cand_d[c] = _round_half_branchless(num[c] / den[c])
    for u in range(units):
        v = value[u]
        ratio = max(v, np.float32(0.0)) * inverse
        w = weight[u]
        for c in range(STARTS):
            miss = cand_d[c] * np.rint(ratio * (first + step * _MIDDLES[c])) - v
            cand_e[c] += w * (miss * miss)
    return True


@inlined
def best_candidate(errors):
    """The index of the smallest of STARTS errors >= 0; of errors within 1e-5 of each other, the first.

    Floats >= 0 have the order of their bit patterns; with the index in the lowest six bits the minimum is one integer
    reduction, which vectorizes.
    """
    bits = errors.view(np.int32)
    best = np.int32(0x7FFFFFFF)
    for c in range(STARTS):
        best = min(best, np.int32((bits[c] & np.int32(-STARTS)) | np.int32(c)))
    return best & np.int32(STARTS - 1)


@kernel
def _fit(s, weight, lo, hi, d, code, ratio, num, den, skipped, best, error):
    """`fit_scaled`. ratio float32 [units, BATCH], scratch; num .. error float32 [BATCH], scratch.

    The candidates are those of `candidates`, but superblocks are innermost: a vector holds one candidate of sixteen of
    them. Choices are no branches, so that all loops vectorize.
    """
    last = hi + 1 if lo < -hi else hi  # the code beyond hi means -(hi + 1), with -d
    for batch in range(d.shape[0]):
        top = best  # the largest scales, until the codes begin
        for i in range(BATCH):
            top[i] = s[batch, 0, i]
        for u in range(1, s.shape[1]):
            for i in range(BATCH):
                top[i] = s[batch, u, i] if abs(s[batch, u, i]) > abs(top[i]) else top[i]
        first = np.float32(hi)  # the last code that no superblock of the batch needs
        for i in range(BATCH):
            few = abs(top[i]) > _COARSE * np.float32(hi + 1) or top[i] == 0
            skipped[i] = np.float32((hi - 1) // 2) if few else np.float32(0.0)
            first = min(first, skipped[i])
        for u in range(s.shape[1]):
            for i in range(BATCH):
                usable = top[i] != 0 and (lo < 0 or s[batch, u, i] * top[i] > 0)
                ratio[u, i] = s[batch, u, i] / top[i] if usable else np.float32(0.0)
        for i in range(BATCH):
            d[batch, i] = best[i] = np.float32(0.0)
            error[i] = np.float32(np.inf)
        for c in range(np.int64(first) + 1, last + 1):
            largest = np.float32(c)
            for i in range(BATCH):
                num[i] = np.float32(0.0)
                den[i] = np.float32(1e-30)
            for u in range(s.shape[1]):
                for i in range(BATCH):
                    q = np.rint(ratio[u, i] * largest)
                    num[i] += weight[batch, u, i] * s[batch, u, i] * q
                    den[i] += weight[batch, u, i] * (q * q)
            for i in range(BATCH):
                num[i] = _round_half_branchless(num[i] / den[i])
                den[i] = np.float32(0.0)
            for u in range(s.shape[1]):
                for i in range(BATCH):
                    miss = num[i] * np.rint(ratio[u, i] * largest) - s[batch, u, i]
                    den[i] += weight[batch, u, i] * (miss * miss)
            for i in range(BATCH):
                better = den[i] < error[i] and largest > skipped[i]
                error[i] = den[i] if better else error[i]
                d[batch, i] = num[i] if better else d[batch, i]
                best[i] = largest if better else best[i]
        for i in range(BATCH):
            sign = np.float32(-1.0) if best[i] > hi else np.float32(1.0)
            d[batch, i] *= sign
            best[i] *= sign
        for u in range(s.shape[1]):
            for i in range(BATCH):
                code[batch, u, i] = min(np.rint(ratio[u, i] * best[i]), np.float32(hi))


def fit_scaled(s: np.ndarray, weight: np.ndarray, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
    """Fit superblocks where zero points are kept exactly, so that E = sum alpha^2 A.

    s, weight  float32 [batches, units, BATCH]: scales and A; 0 where a superblock has fewer units
    lo, hi     range of scale codes
    returns    d float32 [batches, BATCH], halves, 0 where all scales are 0; the scale codes, as s
    """
    d, code = np.empty((len(s), BATCH), np.float32), np.empty_like(s)
    _fit(s, weight, lo, hi, d, code, np.empty(s.shape[1:], np.float32), *np.empty((5, BATCH), np.float32))
    return d, code
