"""IEEE half precision inside numba kernels, where np.float16 does not exist.

Rounding is to nearest, ties to even, as numpy and ggml do it.
"""

import numpy as np

from bridge.system.kernels.jit import inner, kernel

ZERO, ONE, INFINITY = np.float32(0), np.float32(1), np.float32(np.inf)
LEAST, LARGEST = np.float32(2.0**-24), np.float32(65504.0)  # positive halves
_SMALLEST_NORMAL = np.float32(6.103515625e-05)


@inner
def round_half(x):
    """float32 -> the nearest half, as float32. Beyond the range it saturates at +-65504."""
    x = np.float32(x)
    size = abs(x)
    if not size < LARGEST:
        return np.float32(np.copysign(LARGEST, x))
    if size < _SMALLEST_NORMAL:  # subnormal: a fixed grid of 2^-24
        grid = np.float32(0.75)
        return np.float32(np.copysign((size + grid) - grid, x))
    split = np.float32(8193.0) * x  # Veltkamp: keeps the 11 leading bits
    return np.float32(split - np.float32(split - x))


@kernel
def _half_bits(size, bits, out):
    for i in range(out.shape[0]):
        low = np.uint32(min(size[i], _SMALLEST_NORMAL) * np.float32(2.0**24))  # of subnormal halves
        high = np.uint32((bits[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(13)) - np.uint32(112 << 10)
        sign = (bits[i] >> np.uint32(16)) & np.uint32(0x8000)
        out[i] = sign | (low if size[i] < _SMALLEST_NORMAL else high)


def half_bits(x: np.ndarray) -> np.ndarray:
    """The bits, uint16 [n], of float32 [n] that are finite halves; several times as fast as NumPy converts."""
    out = np.empty(len(x), np.uint16)
    _half_bits(np.abs(x), x.view(np.uint32), out)
    return out
