"""Floats to types whose codes are looked up: w = d * values[q] (IQ4_NL), w = unit * d * factor(sc) * values[q], where
factor is sc (IQ4_XS) or 2 * sc + 1 (IQ1, IQ2, IQ3).

The search is leaner than that of K-quants, because the nearest values cost more than rounding does:

    scale   per sub-block: the nearest values at several scales, each followed by least squares
    grid    per block: the d whose scales' codes fit those scales best, by their quadratics
    sweep   per sub-block: the best of the one or two codes about its scale, by its error; then d by least squares, and
            perhaps again

At 1 to 3 bits, the least weighted error is not what a model needs. It shrinks all weights by that error, and errors
along the weights cost more than others, because inputs are correlated along them: so d is lifted at the end, by a share
(`BlockType.lift_share`) of the shrinking, which is the error over the weights' own squares. And the few columns that
have most of the importance get all the precision, which other texts than the imatrix' do not reward: so the search
weighs errors with the root of the importance. `quantize` wants neither, since it knows the inputs.

What the nearest values are is up to `fit` and `write`, which `round_table` has for tables and `round_points` for
codebooks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bridge.blocks import BlockType
from bridge.encode.rounding.round_loops import add, extremes, greater, lesser, rows_quantizer
from bridge.system.kernels.half import INFINITY, LEAST, ONE, ZERO, round_half
from bridge.system.kernels.jit import UNSET, inlined

# rows of the array `scales` [2, 3, subs], float32, for either sign: the scale, its error, and sum w v^2
_SCALE, _ERROR, _CURVE = 0, 1, 2
_MOST, _SPREAD = np.float32(1.35), np.float32(0.7)  # the tries of d: the first, times the plain choice; their range

# set per type by `specialize`
sub = subs = scale_lo = scale_hi = starts = refits = tries = rounds = compared = signs = odd = 0
lifted = False
low = high = first = step = unit = lift_share = ZERO
fit = factor = nearest = expected = scale = grid = sweep = lift = block = UNSET


def _factor(sc):
    """What a scale code multiplies d by."""
    return unit * np.float32(odd * sc + odd - 1)


def _nearest(ratio):
    """The scale code, not yet clipped and as a float, whose factor is nearest to a ratio of scale and d."""
    return (ratio / unit - np.float32(odd - 1)) / np.float32(odd)


def start_scales(x, w):
    """What is tried in parts as a scale: the weight that is clipped first, for a positive scale and a negative one."""
    bottom, peak = extremes(x)
    return max(peak, bottom / low * high), -max(-peak / low * high, -bottom)


def _expected(a, error, curve, d, inverse):
    """The error of the scale code whose product with d is nearest to the scale a, which has this error."""
    code = lesser(greater(np.rint(nearest(a * inverse)), np.float32(scale_lo)), np.float32(scale_hi))
    off = d * unit * (code * np.float32(odd) + np.float32(odd - 1)) - a
    return error + curve * off * off


def _scale(x, w, scales, j, scratch):
    """Search the best scale of one sub-block, of either sign if codes have one, into column j of `scales`."""
    parted = start_scales(x, w)
    for negative in range(signs):
        full = parted[negative]
        best = INFINITY
        scales[negative, _SCALE, j] = full
        scales[negative, _ERROR, j] = INFINITY
        scales[negative, _CURVE, j] = ZERO
        for k in range(starts + refits):
            a = full / (first + step * np.float32(k)) if k < starts else scales[negative, _SCALE, j]
            e, svv, srv = fit(x, w, a, scratch)
            da = srv / svv if svv > ZERO else ZERO
            after = e - srv * da
            if after < best:
                best = after
                scales[negative, _SCALE, j] = a + da
                scales[negative, _ERROR, j] = after
                scales[negative, _CURVE, j] = svv
            elif k >= starts:
                break


def _grid(scales, tried):
    """The d, a half, of the least expected error; all tries at once, as vectors."""
    signed = ZERO
    for j in range(subs):
        for negative in range(signs):
            better = signs == 1 or scales[negative, _ERROR, j] <= scales[1 - negative, _ERROR, j]
            if better and abs(scales[negative, _SCALE, j]) > abs(signed):
                signed = scales[negative, _SCALE, j]
    top = factor(scale_lo if signs == 2 else scale_hi)
    d, inverse, errors = tried
    for k in range(tries):
        part = np.float32(k // signs) / np.float32(tries // signs)
        half = round_half(signed / top * (_MOST - _SPREAD * part))
        if half == ZERO and signed != ZERO:
            half = LEAST
        d[k] = -half if k % signs else half
        inverse[k] = ONE / d[k] if d[k] != ZERO else ZERO
        errors[k] = ZERO
    last = signs - 1
    for j in range(subs):
        a0, e0, c0 = scales[0, _SCALE, j], scales[0, _ERROR, j], scales[0, _CURVE, j]
        a1, e1, c1 = scales[last, _SCALE, j], scales[last, _ERROR, j], scales[last, _CURVE, j]
        for k in range(tries):
            errors[k] += lesser(expected(a0, e0, c0, d[k], inverse[k]), expected(a1, e1, c1, d[k], inverse[k]))
    best = INFINITY
    best_d = ZERO
    for k in range(tries):
        if errors[k] < best:
            best, best_d = errors[k], d[k]
    return best_d


def _sweep(x, w, d, scales, sc, scratch):
    """The best code about each scale into `sc`: the sum of the errors, and d by least squares for their values."""
    inverse = ONE / d if d != ZERO else ZERO
    total = curve = gradient = 0.0
    for j in range(subs):
        best = INFINITY
        best_v = best_r = ZERO
        best_s = np.int32(scale_lo)
        for negative in range(signs):
            code = np.rint(nearest(scales[negative, _SCALE, j] * inverse) - np.float32(0.5 * (compared - 1)))
            from_s = np.int32(min(max(code, np.float32(scale_lo)), np.float32(scale_hi + 1 - compared)))
            for s in range(from_s, from_s + compared):
                e, svv, srv = fit(x[j], w[j], d * factor(s), scratch)
                if e < best:
                    best, best_v, best_r, best_s = e, svv, srv, np.int32(s)
        sc[j] = best_s
        f = np.float64(factor(best_s))
        total += float(best)
        curve += f * f * best_v
        gradient += f * best_r
    return total, round_half(d + gradient / curve) if curve > 0 else d


def _lift(x, w, d, error):
    """d made larger by a part of what it shrinks weights: as if the product of weights and errors cost more."""
    signal = ZERO
    for j in range(subs):
        for i in range(sub):
            signal = add(signal, w[j, i] * x[j, i] * x[j, i])
    return round_half(d * (ONE + lift_share * np.float32(error) / signal)) if signal > ZERO else d


def _block(x, w, scales, tried, trial, sc, scratch):
    """Search one superblock: x, w float32 [subs, sub] -> d, d as it is stored, and codes into sc int32 [subs]."""
    for j in range(subs):
        scale(x[j], w[j], scales, j, scratch)
        sc[j] = 0
    best = np.inf
    best_d = ZERO
    d = grid(scales, tried)
    for _ in range(rounds):
        total, after = sweep(x, w, d, scales, trial, scratch)
        if total < best:
            best, best_d = total, d
            for j in range(subs):
                sc[j] = trial[j]
        if after == d:
            break
        d = after
    return best_d, lift(x, w, best_d, best) if lifted else best_d


def _single(x, w, scales, tried, trial, sc, scratch):
    """The best half d of one block without sub-blocks, twice; x and w float32 [1, sub]."""
    scale(x[0], w[0], scales, 0, scratch)
    best = INFINITY
    best_d = ZERO
    for negative in range(signs):
        d = round_half(scales[negative, _SCALE, 0])
        for _ in range(rounds):
            e, svv, srv = fit(x[0], w[0], d, scratch)
            if e < best:
                best, best_d = e, d
            after = round_half(d + srv / svv) if svv > ZERO else d
            if after == d:
                break
            d = after
    return best_d, best_d


def fit_scratch():
    """What `fit` writes to: nothing."""
    return ()


def _workspace():
    """scales, tries of d, trial and codes of one superblock, and what `fit` writes to."""
    return (
        np.zeros((2, 3, subs), np.float32),
        (np.zeros(tries, np.float32), np.zeros(tries, np.float32), np.zeros(tries, np.float32)),
        np.zeros(subs, np.int32), np.zeros(subs, np.int32), fit_scratch(),
    )  # fmt: skip


def _search(x, w, row, start, scratch, sc, mn):
    scales, tried, trial, codes, values = scratch
    _, d = block(x[row, start : start + subs], w[start : start + subs], scales, tried, trial, codes, values)
    for j in range(subs):
        sc[row, start + j] = codes[j]
    return d, ZERO


def values_quantizer(
    kind: BlockType,
    loops: Sequence[Any],
    constants: dict[str, Any],
    search: Any = _search,
) -> Callable[..., None]:
    """The compiled loop over rows of a type, see `rows_quantizer`.

    loops      `fit_scratch`, `start_scales`, `fit`, what these use, and last what writes the codes
    constants  of the loops
    """
    stages = (_factor, _nearest, _expected, _scale, _grid, _sweep, _lift, _block) if kind.is_k else (_scale, _single)
    signs = 2 if kind.scale_lo < 0 or not kind.is_k else 1
    settings = {"signs": signs, "lift_share": kind.lift_share} | constants
    suffix = kind.name + "_lifted" * constants.get("lifted", False)
    return rows_quantizer(kind, suffix, loops, stages, _workspace, search, settings, inlined)
