"""Moves of a group's scale and zero point in the metric of H, codes following; see `refine`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from bridge.quantize.grids.try_lines import least, line_search
from bridge.quantize.refine import line_target, move
from bridge.system.half import round_half
from bridge.system.jit import specialize

_GAIN = np.float32(0.9999)
_ZERO = np.float32(0)
_STEPS = 3  # tries of the scale to either side
_STEP = np.float32(0.015)  # of the scale

# set by `specialize`
lanes = zero_tries = 0
try_lines: Any = None


def _refit(codes, g, hessian, order, push, inverse, scales, zeros, high):
    n = codes.shape[1]
    own = np.empty(n, np.float32)
    target = np.empty(n, np.float32)
    scratch = np.empty((2, n, lanes), np.float32)
    tried = np.empty((4, lanes), np.float32)
    values = np.empty(n, np.float32)
    most = np.float32(high)
    for row in range(codes.shape[0]):
        scale = scales[row]
        zero = zeros[row]
        for k in range(n):
            values[k] = scale * np.float32(codes[row, k]) - scale * zero
        bound = line_target(values, g[row], order, inverse, own, target) * _GAIN
        for lane in range(lanes):
            s = round_half(scale * (np.float32(1) + _STEP * np.float32(lane // zero_tries - _STEPS)))
            z = min(max(zero + np.float32(lane % zero_tries - zero_tries // 2), _ZERO), most)
            tried[0, lane] = s
            tried[1, lane] = -(s * z)
            tried[3, lane] = z
        try_lines(target, push, tried[0], tried[1], _ZERO, most, scratch[0], scratch[1], tried[2])
        best = least(tried[2], bound)
        if best >= 0:
            scales[row] = tried[0, best]
            zeros[row] = tried[3, best]
            move(order, scratch[0, :, best], tried[0, best], tried[1, best], codes[row], values, g[row], hessian)


@cache
def refitter(symmetric: bool) -> Callable[..., None]:
    """refit(codes, g, hessian, order, push, inverse, scales, zeros, high), compiled.

    codes int16 [rows, n] and g float32 [rows, n] of one group; scales, zeros float32 [rows], changed; the rest as in
    `refine.Metric`. Zero points of symmetric groups stay.
    """
    count, tries = (8, 1) if symmetric else (32, 3)
    name = "symmetric" if symmetric else "asymmetric"
    return specialize(_refit, name, lanes=count, zero_tries=tries, try_lines=line_search(count))
