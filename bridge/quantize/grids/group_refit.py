"""Moves of a group's scale and zero point in the metric of H, codes following; see `refine`."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from bridge.quantize.grids.try_lines import least, line_search
from bridge.quantize.solve.gptq_solver import Grid
from bridge.quantize.solve.refine import GAIN, Metric, line_target, move
from bridge.system.cpu.row_threads import over_rows
from bridge.system.kernels.half import round_half
from bridge.system.kernels.jit import inlined, specialize

_ZERO = np.float32(0)
_STEPS = 3  # scales tried to either side
_GROUP_STEP = np.float32(0.015)  # of the scale

# set by `specialize`; others: zero points tried with each scale
lanes = others = 0
neighbours: Any = None
try_lines: Any = None


def _neighbours(scale, zero, high, tried):
    """Write lines near scale * (q - zero): slope, offset and zero point in rows 0, 1 and 3; returns its offset."""
    for lane in range(lanes):
        s = round_half(scale * (np.float32(1) + _GROUP_STEP * np.float32(lane // others - _STEPS)))
        z = min(max(zero + np.float32(lane % others - others // 2), _ZERO), high)
        tried[0, lane] = s
        tried[1, lane] = -(s * z)
        tried[3, lane] = z
    return -(scale * zero)


def _refit(codes, g, hessian, order, push, inverse, scales, zeros, low, high):
    n = codes.shape[1]
    gathered, target, values = np.empty(n, np.float32), np.empty(n, np.float32), np.empty(n, np.float32)
    scratch = np.empty((2, n, lanes), np.float32)
    tried = np.empty((4, lanes), np.float32)
    for row in range(codes.shape[0]):
        a = scales[row]
        c = neighbours(a, zeros[row], high, tried)
        for k in range(n):
            values[k] = a * np.float32(codes[row, k]) + c
        bound = line_target(values, g[row], order, inverse, gathered, target) * GAIN
        try_lines(target, push, tried[0], tried[1], low, high, scratch[0], scratch[1], tried[2])
        best = least(tried[2], bound)
        if best >= 0:
            scales[row] = tried[0, best]
            zeros[row] = tried[3, best]
            move(order, scratch[0, :, best], tried[0, best], tried[1, best], codes[row], values, g[row], hessian)


@cache
def _refitter(symmetric: bool) -> Callable[..., None]:
    lanes, others = (8, 1) if symmetric else (32, 3)  # symmetric: zero points stay
    name = "symmetric" if symmetric else "asymmetric"
    specialized = specialize(_neighbours, name, inlined, lanes=lanes, others=others)
    return specialize(_refit, name, lanes=lanes, neighbours=specialized, try_lines=line_search(lanes))


def refit_group(
    symmetric: bool, codes: np.ndarray, g: np.ndarray, metric: Metric, scales: np.ndarray, zeros: np.ndarray, grid: Grid
) -> None:
    """Move one group of each row; updates codes int16 [rows, n], g float32 [rows, n], scales and zero points float32
    [rows]."""
    move = _refitter(symmetric)
    order, push, inverse = metric.order[0], metric.push[0], metric.inverse[0]
    low, high = np.float32(grid.low), np.float32(grid.high)

    def work(r: slice) -> None:
        move(codes[r], g[r], metric.hessian, order, push, inverse, scales[r], zeros[r], low, high)

    over_rows(len(codes), work)
