"""Floats to -1, 0 and 1 times a scale (TQ1_0, TQ2_0): the loops over one block. The search is `round_values`'.

Models trained with such weights come out exactly. TQ2_0's fourth code, which means 2, is not used: its readers may not
expect it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from bridge.blocks.read import WRITTEN
from bridge.encode.round_loops import add, extremes, scaled_write
from bridge.encode.round_values import reach, values_quantizer

_ZERO = np.float32(0)
_ONE = np.float32(1)
_HALF = np.float32(0.5)

# the greatest weight is tried as 1, 2.5 and 4 times the scale
_SETTINGS = {"first": 1.0, "step": 1.5, "starts": 3, "refits": 2, "rounds": 2, "signs": 1}

# set per type by `specialize`
sub = 0


def fit(x, w, a, scratch):
    """The error of a scale, and of its codes q and residuals r: sums of w q^2, w r q."""
    middle = _HALF * a
    e = _ZERO
    sqq = _ZERO
    srq = _ZERO
    for i in range(sub):
        q = (_ONE if x[i] > middle else _ZERO) - (_ONE if x[i] < -middle else _ZERO)
        r = x[i] - a * q
        wq = w[i] * q
        e = add(e, w[i] * r * r)
        sqq = add(sqq, wq * q)
        srq = add(srq, wq * r)
    return e, sqq, srq


@cache
def ternary_quantizer(name: str) -> Callable[..., None]:
    """The compiled loop over rows of TQ1_0 or TQ2_0, see `rows_quantizer`."""
    return values_quantizer(replace(WRITTEN[name], levels=3), (extremes, reach, fit, scaled_write), _SETTINGS)
