"""The codebooks of the types IQ1, IQ2 and IQ3, which are the `gguf` package's.

A codebook is a list of points of 4 or 8 coordinates, each one of a few levels: 256 points of 4 coordinates out of 8
levels for IQ3_XXS, 2048 points of 8 out of 3 for IQ1_S. A block holds the points' numbers, and signs or shifts.

The functions here are called by `pack` and `unpack`, and so compiled with them.
"""

from typing import Any

import numpy as np


def levels_of(quant: Any) -> tuple[int, ...]:
    """The levels of a codebook of gguf.quants, ascending."""
    return tuple(int(level) for level in quant.grid_map)


def points_of(quant: Any) -> np.ndarray:
    """uint8 [points, coordinates]: the number of each coordinate's level, for a codebook of gguf.quants."""
    quant.init_grid()
    return np.searchsorted(quant.grid_map, quant.grid.reshape(quant.grid_shape)).astype(np.uint8)


def numbers_of(points: np.ndarray) -> np.ndarray:
    """int16 [levels ** coordinates]: the number of the point with such coordinates, read as digits; -1 for none."""
    levels, width = int(points.max()) + 1, points.shape[1]
    numbers = np.full(levels**width, -1, np.int16)
    numbers[points.astype(np.int64) @ levels ** np.arange(width - 1, -1, -1)] = np.arange(len(points))
    return numbers


def digits(q, first, width, levels):
    """The codes q[at : at + width] without their signs, read as digits."""
    number = 0
    for i in range(width):
        number = number * levels + q[first + i] % levels
    return number


def signs(q, first, levels):
    """A byte of the signs of q[at : at + 8]: bit i is set where code at + i is one of the second `levels`."""
    byte = 0
    for i in range(8):
        byte |= (q[first + i] // levels) << i
    return byte


def even_signs(seven):
    """A byte of signs of which seven are stored: the eighth makes the number of set bits even."""
    parity = seven ^ (seven >> 4)
    parity ^= parity >> 2
    parity ^= parity >> 1
    return seven | ((parity & 1) << 7)
