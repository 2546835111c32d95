"""Floats to the 16 values of a table, w' = a * values[q] (IQ4_NL, IQ4_XS): the loops over one sub-block.

The nearest value is summed up from the gaps between neighbouring values whose middles are below the weight, which
vectorizes. The searches are `round_values`'.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from bridge.blocks.read import WRITTEN
from bridge.encode.rounding.round_loops import add, extremes
from bridge.encode.rounding.round_values import fit_scratch, start_scales, values_quantizer
from bridge.system.kernels.half import ONE, ZERO

# set per type by `specialize`
sub = 0
least = ZERO
middles = gaps = np.zeros(15, np.float32)


def fit(x, w, a, scratch):
    """The error of a scale, and of its values v and residuals r: sums of w v^2, w r v."""
    inverse = ONE / a if a != ZERO else ZERO
    e = svv = srv = ZERO
    for i in range(sub):
        y = x[i] * inverse
        v = least
        for k in range(15):
            v += gaps[k] if y > middles[k] else ZERO
        r = x[i] - a * v
        wv = w[i] * v
        e = add(e, w[i] * r * r)
        svv = add(svv, wv * v)
        srv = add(srv, wv * r)
    return e, svv, srv


def table_write(x, w, a, b, codes, scratch):
    """Write the codes; the plain error, sum of x^2 and weighted error."""
    inverse = ONE / a if a != ZERO else ZERO
    error = signal = weighted = ZERO
    for i in range(sub):
        y = x[i] * inverse
        v = least
        q = ZERO
        for k in range(15):
            v += gaps[k] if y > middles[k] else ZERO
            q += ONE if y > middles[k] else ZERO
        codes[i] = np.uint8(q)
        r = x[i] - a * v
        error = add(error, r * r)
        signal = add(signal, x[i] * x[i])
        weighted = add(weighted, w[i] * r * r)
    return error, signal, weighted


@cache
def table_quantizer(name: str) -> Callable[..., None]:
    """The compiled loop over rows of IQ4_NL or IQ4_XS, see `rows_quantizer`."""
    kind = WRITTEN[name]
    values = np.array(kind.values, np.float32)
    constants: dict[str, Any] = {"least": values[0], "middles": (values[1:] + values[:-1]) / 2, "gaps": np.diff(values)}
    return values_quantizer(kind, (fit_scratch, extremes, start_scales, fit, table_write), constants)
