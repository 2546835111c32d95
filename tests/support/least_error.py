"""The least squared error of any encoding that keeps the codes: every half is tried. See `carrying/carry_fit.py`."""

from __future__ import annotations

import numpy as np

from bridge.blocks import BlockType
from bridge.checkpoint.grouped import GroupedTensor

_HALVES = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)


def _halves(low: float, high: float) -> np.ndarray:
    return _HALVES[slice(*np.searchsorted(_HALVES, (low, high)))]


def least_scaled_error(t: GroupedTensor, levels: int) -> float:
    """With scale codes 1..levels and exact zero points."""
    total = 0.0
    groups = 256 // t.group_size
    deviation = np.square(t.codes - t.zeros[:, t.groups()], dtype=np.float64)
    weight = deviation.reshape(-1, groups, t.group_size).sum(-1)
    for s, a in zip(t.scales.reshape(-1, groups).astype(np.float64), weight, strict=True):
        d = _halves(s.max() / (levels + 1), 2 * s.max())[:, None]
        code = np.clip(np.rint(s / d), 0, levels)
        total += (a * (d * code - s) ** 2).sum(-1).min()
    return total


def least_q8_0_error(t: GroupedTensor) -> float:
    """In Q8_0, with whatever codes: d of either sign, from where codes are clipped to where hardly any are left."""
    total = 0.0
    for x in t.dequantize().astype(np.float64).reshape(-1, 32):
        d = _halves(abs(x).max() / 129, 2 * abs(x).max())[:, None]
        total += min(np.square(d * np.clip(np.rint(y / d), -128, 127) - y).sum(-1).min() for y in (x, -x))
    return total


def least_affine_error(t: GroupedTensor, block: BlockType) -> float:
    """With scale and min codes of an affine K-quant; d of either sign, codes being mirrored then. Scales > 0."""
    groups = 256 // t.group_size
    s, z = (x.reshape(-1, groups).astype(np.float64) for x in (t.scales, t.zeros))
    p = t.codes.reshape(-1, groups, t.group_size) - z[:, :, None]
    total = 0.0
    for i in range(len(s)):
        sums = np.square(p[i]).sum(-1), p[i].sum(-1)
        least = _least(s[i], z[i], *sums, t.group_size, block, np.inf)
        total += _least(s[i], 2**t.bits - 1 - z[i], sums[0], -sums[1], t.group_size, block, least)
    return total


def _least(s: np.ndarray, z: np.ndarray, a: np.ndarray, b: np.ndarray, n: int, block: BlockType, least: float) -> float:
    """The least error of one superblock and side, or `least` where none is below it.

    For each d, the scale codes next to s / d. A code costs alpha^2 (a - b^2 / n) even with the best of mins: d
    of which this alone is too much are left out. Twice the codes with half the d (and dmin) are the same values,
    so that codes in the upper half suffice.
    """
    d = _halves(s.max() / (block.scale_hi + 1.5), s.max() / (block.scale_hi // 2))[:, None, None]
    code = np.clip(np.rint(s / d) + np.array([[-1], [0], [1]]), 0, block.scale_hi)  # [d, 3, unit]
    alpha = d * code - s
    cost = alpha**2 * (a - b**2 / n)
    target = s * z + alpha * (b / n + z)  # what dmin * mn should be
    bound = cost.min(1).sum(-1)
    for i in np.argsort(bound):
        if bound[i] >= least:
            break
        low, high = target[i].min(0).max(), target[i].max()  # of the largest, with whichever scale code
        dmin = _halves(low / (block.min_hi + 1.5), 1.1 * high / (block.min_hi // 2))[:, None, None]
        mn = np.clip(np.rint(target[i] / dmin), 0, block.min_hi)
        e = (cost[i] + n * (dmin * mn - target[i]) ** 2).min(1).sum(-1)
        least = min(least, e.min(initial=(cost[i] + n * target[i] ** 2).min(0).sum()))
    return least
