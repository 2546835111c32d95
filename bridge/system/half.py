"""IEEE half precision inside numba kernels, where np.float16 does not exist.

Rounding is to nearest, ties to even, as numpy and ggml do it.
"""

import numpy as np

from bridge.system.jit import inner

_LARGEST = np.float32(65504.0)
_SMALLEST_NORMAL = np.float32(6.103515625e-05)


@inner
def round_half(x):
    """float32 -> the nearest half, as float32. Beyond the range it saturates at +-65504."""
    x = np.float32(x)
    size = abs(x)
    if not size < _LARGEST:
        return np.float32(np.copysign(_LARGEST, x))
    if size < _SMALLEST_NORMAL:  # subnormal: a fixed grid of 2^-24
        grid = np.float32(0.75)
        return np.float32(np.copysign((size + grid) - grid, x))
    split = np.float32(8193.0) * x  # Veltkamp: keeps the 11 leading bits
    return np.float32(split - np.float32(split - x))
