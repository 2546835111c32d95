"""Floats to -1, 0 and 1 times a scale (TQ1_0, TQ2_0), from weights to bytes.

If the weights above a threshold are kept, the best scale is a = sum w |x| / sum w over them, and the nearest codes for
it are those of the threshold a / 2. A first threshold comes from the block's root mean square and mean magnitude,
which for normal, Laplace and uniform weights lead close to the best one. Where the greatest weight lies far out, half
of it is tried as well, as ggml does, and another step follows.

Models trained with such weights come out exactly. TQ2_0's fourth code, which means 2, is not used: its readers may not
expect it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from bridge.blocks.read import WRITTEN
from bridge.encode.rounding.ternary_vectors import SIZE, residuals, sums_above, totals
from bridge.system.kernels.half import round_half
from bridge.system.kernels.jit import from_plain, inlined, specialize
from bridge.system.kernels.memory import to_half

_ZERO = np.float32(0)
_HALF = np.float32(0.5)
_SPREAD, _MEAN = np.float32(1.43), np.float32(1.02)  # the threshold: so much of the one less so much of the other
_FAR = np.float32(4)  # times the root mean square
_TOGETHER = 8  # blocks, each step of all of them before the next: a block's own steps wait for each other

# set per type by `specialize`
pack: Any = None


def _rows(x, w, out, sums):
    """x [rows, n, 256], w [n, 256] float32 -> out uint8 [rows * n, nbytes]

    sums float64 [rows, 3]: error, signal, error weighted with w.
    """
    n = x.shape[1]
    blocks = x.reshape(-1, SIZE)
    scale, limit, far = (
        np.zeros(_TOGETHER, np.float32),
        np.zeros(_TOGETHER, np.float32),
        np.zeros(_TOGETHER, np.float32),
    )
    q = np.zeros((_TOGETHER, SIZE), np.uint8)
    nothing = np.zeros(1, np.uint8)
    for first in range(0, len(blocks), _TOGETHER):
        count = min(_TOGETHER, len(blocks) - first)
        for j in range(count):
            total, squares, peak = totals(blocks[first + j])
            sums[(first + j) // n, 1] += squares
            spread = np.sqrt(squares / np.float32(SIZE))
            limit[j] = _SPREAD * spread - _MEAN * (total / np.float32(SIZE))
            far[j] = peak if peak > _FAR * spread else _ZERO
        for j in range(count):
            weight, mass = sums_above(blocks[first + j], w[(first + j) % n], limit[j])
            if far[j] > _ZERO:
                weight_far, mass_far = sums_above(blocks[first + j], w[(first + j) % n], _HALF * far[j])
                if weight_far * weight_far * mass > weight * weight * mass_far:
                    weight, mass = weight_far, mass_far
                weight, mass = sums_above(blocks[first + j], w[(first + j) % n], _HALF * weight / mass)
            scale[j] = weight / mass if mass > _ZERO else _ZERO
        for j in range(count):
            a = round_half(scale[j])
            error, weighted = residuals(blocks[first + j], w[(first + j) % n], _HALF * a, a, q[j])
            sums[(first + j) // n, 0] += error
            sums[(first + j) // n, 2] += weighted
            pack(q[j], nothing, nothing, to_half(a), 0, out[first + j])


@cache
def ternary_quantizer(name: str) -> Callable[..., None]:
    """The compiled loop over rows of TQ1_0 or TQ2_0: x, w, blocks, sums."""
    kind = WRITTEN[name]
    return specialize(_rows, name, pack=from_plain(kind.pack, inlined))
