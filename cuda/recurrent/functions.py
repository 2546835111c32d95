"""What the kernels of this folder call."""

import math
from typing import Any

import numpy as np
from bridge.cuda.toolchain.intrinsics import device_function, load_4f, mad

float32 = np.float32
int32: Any = np.int32


def _silu(x):
    return x / (float32(1) + math.exp(-x))


def _softplus(x):
    """ln(1 + e^x); x itself where e^x is beyond float32's precision."""
    return x if x > float32(20) else math.log1p(math.exp(x))


def _element(rows, token, column):
    """rows[token, column] by an index of 32 bits: Numba's has 64, and may be negative."""
    return load_4f(rows, mad(token, int32(rows.shape[1]), column))


silu, softplus, element = (device_function(function) for function in (_silu, _softplus, _element))
