"""Moves of a group's scale and zero point in the metric of H, codes following; see `refine`."""

from __future__ import annotations

import numpy as np

from bridge.jit import kernel
from bridge.mapping.half import round_half
from bridge.quantize.refine import line_codes, line_target, move

_GAIN = np.float32(0.9999)
_ZERO = np.float32(0)
_STEPS = 3  # tries of the scale to either side
_STEP = np.float32(0.015)  # of the scale


@kernel
def refit_groups(codes, g, hessian, order, factor, inverse, scales, zeros, reach, high):
    """codes int16 [rows, n] and g float32 [rows, n] of one group; scales, zeros float32 [rows], changed.

    reach  how far zero points move; 0 for symmetric groups
    """
    n = codes.shape[1]
    target = np.empty(n, np.float32)
    work = np.empty(n, np.float32)
    trial = np.empty(n, np.float32)
    best_codes = np.empty(n, np.float32)
    values = np.empty(n, np.float32)
    most = np.float32(high)
    for row in range(codes.shape[0]):
        scale = scales[row]
        zero = zeros[row]
        for k in range(n):
            values[k] = scale * np.float32(codes[row, k]) - scale * zero
        bound = line_target(values, g[row], order, inverse, target) * _GAIN
        best_scale = scale
        best_zero = zero
        found = False
        for i in range(2 * _STEPS + 1):
            by = (i + 1) // 2 if i & 1 else -(i // 2)
            s = round_half(scale * (np.float32(1) + _STEP * np.float32(by)))
            for k in range(2 * reach + 1):
                z = zero + np.float32((k + 1) // 2 if k & 1 else -(k // 2))
                if z < _ZERO or z > most:
                    continue
                lost = line_codes(target, factor, s, -(s * z), _ZERO, most, bound, work, trial)
                if lost < bound:
                    bound = lost
                    best_scale = s
                    best_zero = z
                    found = True
                    for j in range(n):
                        best_codes[j] = trial[j]
        if found:
            scales[row] = best_scale
            zeros[row] = best_zero
            move(order, best_codes, best_scale, -(best_scale * best_zero), codes[row], values, g[row], hessian)
