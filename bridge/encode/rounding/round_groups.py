"""Floats to the groups of a checkpoint: w = scale * (q - zero), the scale a half, the zero point a whole number.

Minimizes sum importance * (w - w')^2 of each group, with codes rounded to nearest. A start is a share of the range from
the least to the greatest weight; from there, least squares for the scale and the zero point, and codes, in turn. The
search costs 35 ns a weight. Of the error of the whole range with a middle of -max to max, and of the least to the
greatest weight, it leaves in groups of 32 74% and 81% with 4 bits, 32% and 67% with 2.
"""

import numpy as np

from bridge.checkpoint.grouped import GroupedTensor
from bridge.encode.rounding.round_loops import add, greater, lesser
from bridge.system.cpu.row_threads import over_rows
from bridge.system.kernels.half import INFINITY, LARGEST, LEAST, ONE, ZERO, round_half
from bridge.system.kernels.jit import kernel

_STEP = np.float32(0.045)  # of the shares
_STARTS = {8: 3}  # with 256 codes, narrower ranges are worse
_MOST_STARTS = 16
_ROUNDS = 4  # of codes and least squares, at most
_ROWS = 64  # that are worth a thread


@kernel
def _fit(x, w, high, middle, least, starts, scales, zeros):
    """The scale and zero point of each row of x [groups, n]; w [n]. middle: the zero point of all, or -1."""
    n = x.shape[1]
    for row in range(x.shape[0]):
        bottom, peak = ZERO, ZERO
        for i in range(n):
            bottom = lesser(bottom, x[row, i])
            peak = greater(peak, x[row, i])
        full = (peak - bottom) / high
        if middle > ZERO:
            full = max(-bottom / middle, peak / (high - middle))
        best = INFINITY
        for k in range(starts if full > ZERO else 1):
            share = ONE - _STEP * np.float32(k)
            s = max(round_half(full * share), LEAST)
            z = middle if middle > ZERO else min(max(np.rint(-bottom * share / s), least), high)
            if k == 0:
                scales[row], zeros[row] = s if full <= LARGEST else INFINITY, z
                if not full <= LARGEST:
                    break
            for _ in range(_ROUNDS):
                over = ONE / s
                e, sw, sc, scc, sr, src = ZERO, ZERO, ZERO, ZERO, ZERO, ZERO
                for i in range(n):
                    c = np.rint(x[row, i] * over) + z
                    c = c if c > ZERO else ZERO
                    c = (c if c < high else high) - z
                    r = x[row, i] - s * c
                    wc, wr = w[i] * c, w[i] * r
                    e = add(e, wr * r)
                    sw = add(sw, w[i])
                    sc = add(sc, wc)
                    scc = add(scc, wc * c)
                    sr = add(sr, wr)
                    src = add(src, wr * c)
                if not e < best:
                    break
                best, scales[row], zeros[row] = e, s, z
                moved = z
                det = scc * sw - sc * sc
                if middle < ZERO and det > np.float32(1e-4) * scc * sw:
                    b = (scc * sr - sc * src) / det  # w = (s + a) c + b
                    a = (sw * src - sc * sr) / det
                    if s + a > ZERO:
                        moved = min(max(np.rint(z - b / (s + a)), least), high)
                by = z - moved  # the codes less the new zero point are c + by
                squares = scc + by * (sc + sc + by * sw)
                if not squares > ZERO:
                    break
                s = max(round_half((s * (scc + by * sc) + src + by * sr) / squares), LEAST)
                z = moved


def fit_groups(
    weights: np.ndarray, importance: np.ndarray, bits: int, symmetric: bool, least: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The scales, halves, and zero points of groups, float32 [groups].

    weights     float32 [groups, n]
    importance  float32 [n]
    symmetric   all zero points are the middle code; else they are chosen, from `least` on

    The scale is infinite where halves end before the range of the weights does.
    """
    scales, zeros = np.empty((2, len(weights)), np.float32)
    high, middle = np.float32((1 << bits) - 1), np.float32(1 << (bits - 1) if symmetric else -1)
    starts = _STARTS.get(bits, _MOST_STARTS)

    def work(rows: slice) -> None:
        _fit(weights[rows], importance, high, middle, np.float32(least), starts, scales[rows], zeros[rows])

    over_rows(len(weights), work, _ROWS)
    return scales, zeros


def round_to_groups(
    name: str, weights: np.ndarray, bits: int, symmetric: bool, size: int = 32, least: int = 0
) -> GroupedTensor:
    """Weights float32 [out, in] in groups of `size` columns, which divide them; see `fit_groups`."""
    groups = np.ascontiguousarray(weights).reshape(-1, size)
    scales, zeros = fit_groups(groups, np.ones(size, np.float32), bits, symmetric, least)
    steps = groups / scales[:, None]
    np.rint(steps, out=steps)
    steps += zeros[:, None]
    codes = steps.clip(0, (1 << bits) - 1, out=steps).astype(np.uint8).reshape(weights.shape)
    shape = len(weights), weights.shape[1] // size
    return GroupedTensor(name, bits, codes, scales.reshape(shape), zeros.reshape(shape), size)
