"""Moves of a run with a single line in the metric of H, codes following; see `refine`.

Groups try scales near their own with zero points near their own. GGUF's plain types have d (and m) alone, real
numbers: tries are some hundredths of the code range away.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from bridge.quantize.gptq_solver import Grid
from bridge.quantize.grids.try_lines import least, line_search
from bridge.quantize.refine import GAIN, Metric, line_target, move
from bridge.system.half import round_half
from bridge.system.jit import inlined, specialize
from bridge.system.row_threads import over_rows

_ZERO = np.float32(0)
_STEPS = 3  # tries of the slope to either side
_GROUP_STEP = np.float32(0.015)  # of the scale
_PLAIN_STEP = np.float32(0.25)  # of the step of a code, at the end of the range

# set by `specialize`; others: tries of the second parameter for each slope
lanes = others = 0
neighbours: Any = None
try_lines: Any = None


def _group(scale, zero, high, tried):
    """Write lines near scale * (q - zero): slope, offset and zero point in rows 0, 1 and 3; returns its offset."""
    for lane in range(lanes):
        s = round_half(scale * (np.float32(1) + _GROUP_STEP * np.float32(lane // others - _STEPS)))
        z = min(max(zero + np.float32(lane % others - others // 2), _ZERO), high)
        tried[0, lane] = s
        tried[1, lane] = -(s * z)
        tried[3, lane] = z
    return -(scale * zero)


def _plain(d, m, high, tried):
    """The same near d * q + m, with m in row 3."""
    for lane in range(lanes):
        at = np.float32(lane // others - _STEPS)
        m_at = np.float32(lane % others - _STEPS)
        tried[0, lane] = round_half(d * (np.float32(1) + at * _PLAIN_STEP / high))
        tried[1, lane] = round_half(m + (m_at - at) * _PLAIN_STEP * d) if others > 1 else _ZERO
        tried[3, lane] = tried[1, lane]
    return m


def _refit(codes, g, hessian, order, push, inverse, slopes, seconds, low, high):
    n = codes.shape[1]
    own = np.empty(n, np.float32)
    target = np.empty(n, np.float32)
    scratch = np.empty((2, n, lanes), np.float32)
    tried = np.empty((4, lanes), np.float32)
    values = np.empty(n, np.float32)
    for row in range(codes.shape[0]):
        a = slopes[row]
        c = neighbours(a, seconds[row], high, tried)
        for k in range(n):
            values[k] = a * np.float32(codes[row, k]) + c
        bound = line_target(values, g[row], order, inverse, own, target) * GAIN
        try_lines(target, push, tried[0], tried[1], low, high, scratch[0], scratch[1], tried[2])
        best = least(tried[2], bound)
        if best >= 0:
            slopes[row] = tried[0, best]
            seconds[row] = tried[3, best]
            move(order, scratch[0, :, best], tried[0, best], tried[1, best], codes[row], values, g[row], hessian)


# by kind: the lines that are tried, how many, and how many of them share a slope
_KINDS = {
    "symmetric": (_group, 8, 1),  # zero points stay
    "asymmetric": (_group, 32, 3),
    "plain": (_plain, 8, 1),
    "plain with minimum": (_plain, 64, 7),
}


@cache
def _refitter(kind: str) -> Callable[..., None]:
    tries, lanes, others = _KINDS[kind]
    name = kind.replace(" ", "_")
    own = specialize(tries, name, inlined, lanes=lanes, others=others)
    return specialize(_refit, name, lanes=lanes, neighbours=own, try_lines=line_search(lanes))


def refit_lines(
    kind: str, codes: np.ndarray, g: np.ndarray, metric: Metric, slopes: np.ndarray, seconds: np.ndarray, grid: Grid
) -> None:
    """Move one run of each row; updates codes int16 [rows, n], g float32 [rows, n], and float32 [rows] of slopes (scale
    or d) and seconds (zero point or m, 0 in types without it)."""
    move = _refitter(kind)
    order, push, inverse = metric.order[0], metric.push[0], metric.inverse[0]
    low, high = np.float32(grid.low), np.float32(grid.high)

    def work(r: slice) -> None:
        move(codes[r], g[r], metric.hessian, order, push, inverse, slopes[r], seconds[r], low, high)

    over_rows(len(codes), work)
