"""The fast Walsh-Hadamard transform: log2(size) passes of sums and differences, compiled."""

import numpy as np

from bridge.system.kernels.jit import inlined, kernel

_COLUMNS = 32  # taken together, so that memory is read in whole lines


@inlined
def _levels(x, first, count, h, end):
    """The passes of distances h, 2h ... below `end` over x[first : first + count]."""
    while h < end:
        for start in range(first, first + count, 2 * h):
            low = x[start : start + h]  # slices, so that LLVM sees two runs that it can vectorize
            high = x[start + h : start + 2 * h]
            for i in range(h):
                a = low[i]
                b = high[i]
                low[i] = a + b
                high[i] = a - b
        h *= 2


@inlined
def _of_eight(x, first, count, scale):
    """The passes of distances 1, 2 and 4, in one; count is a multiple of 8."""
    for i in range(first, first + count, 8):
        a0 = x[i] + x[i + 1]
        a1 = x[i] - x[i + 1]
        a2 = x[i + 2] + x[i + 3]
        a3 = x[i + 2] - x[i + 3]
        a4 = x[i + 4] + x[i + 5]
        a5 = x[i + 4] - x[i + 5]
        a6 = x[i + 6] + x[i + 7]
        a7 = x[i + 6] - x[i + 7]
        b0 = a0 + a2
        b1 = a1 + a3
        b2 = a0 - a2
        b3 = a1 - a3
        b4 = a4 + a6
        b5 = a5 + a7
        b6 = a4 - a6
        b7 = a5 - a7
        x[i] = (b0 + b4) * scale
        x[i + 1] = (b1 + b5) * scale
        x[i + 2] = (b2 + b6) * scale
        x[i + 3] = (b3 + b7) * scale
        x[i + 4] = (b0 - b4) * scale
        x[i + 5] = (b1 - b5) * scale
        x[i + 6] = (b2 - b6) * scale
        x[i + 7] = (b3 - b7) * scale


@kernel
def walsh_hadamard(x, size, scale):
    """float32 [n * size], in place: each run of `size`, a power of two, transformed and scaled."""
    for first in range(0, x.size, size):
        if size < 8:
            for i in range(first, first + size):
                x[i] *= scale
            _levels(x, first, size, 1, size)
        else:
            _of_eight(x, first, size, scale)
            _levels(x, first, size, 8, size)


@kernel
def walsh_hadamard_columns(x, size, scale):
    """float32 [n * size, columns], in place: the same down each column."""
    rows, columns = x.shape
    held = np.empty(size * _COLUMNS, np.float32)
    for first in range(0, rows, size):
        for start in range(0, columns, _COLUMNS):
            width = min(_COLUMNS, columns - start)
            for r in range(size):
                row = held[r * _COLUMNS : r * _COLUMNS + width]
                stored = x[first + r, start : start + width]
                for c in range(width):
                    row[c] = stored[c] * scale
            _levels(held, 0, held.size, _COLUMNS, held.size)
            for r in range(size):
                row = held[r * _COLUMNS : r * _COLUMNS + width]
                stored = x[first + r, start : start + width]
                for c in range(width):
                    stored[c] = row[c]
