"""Products of many vectors in float32: rows are widened tile by tile, and each tile multiplies all vectors.

A tile of 64 rows is laid out with 16 rows side by side, and is multiplied in parts of so many columns that a part stays
in the second-level cache while all vectors, eight at a time, pass over it. So each weight is widened once a product,
and a step of the innermost loop makes 128 multiplications of a load of weights and eight of x.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge.runtime.cpu.engines.floats import wide_rows_function
from bridge.runtime.cpu.machine.panels import panels
from bridge.system.kernels import ir
from bridge.system.kernels.jit import CFunction, c_function, intrinsic, maker, types
from bridge.system.kernels.memory import LANES, allocate, array_at, floats, free, next_line
from bridge.system.threads.pool import MIN_BYTES_TO_SHARE, share_items
from bridge.system.threads.words import call

TILE = 64  # rows
_PART = 1024  # columns: 256 KB of a tile

# words of a product: addresses of the rows, of what widens them (rowmajor.py's `rows_function`, or one of floats.py),
# of x float32 [vectors, columns] and y float32 [vectors, rows], then sizes
(RAW, WIDEN, X, Y, ROW_BYTES, ROWS, COLUMNS, VECTORS, WORDS) = range(9)

# set by `tiles_function`
panels_8: Any = None
panels_4: Any = None
panels_1: Any = None


@intrinsic
def transpose(typingctx, rows, row_bytes, out):
    """16 x 16 float32 at rows, so many bytes apart -> out float32 [16, 16], transposed."""

    def emit(context, builder, signature, arguments):
        rows, row_bytes, out = arguments
        vector = ir.VectorType(ir.F32, LANES)

        def pointer(address):
            return builder.inttoptr(address, vector.as_pointer())

        starts = [builder.add(rows, builder.mul(row_bytes, ir.I64(i))) for i in range(LANES)]
        values = [builder.load(pointer(start), align=4) for start in starts]
        for step in (1, 2, 4, 8):  # blocks of `step` x `step` change places across the diagonal
            low = [lane + (LANES - step if lane & step else 0) for lane in range(LANES)]
            high = [lane + (LANES if lane & step else step) for lane in range(LANES)]
            masks = [ir.Constant(ir.VectorType(ir.I32, LANES), order) for order in (low, high)]
            for i in range(LANES):
                if not i & step:
                    pair = values[i], values[i + step]
                    values[i], values[i + step] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        for i, value in enumerate(values):
            builder.store(value, pointer(builder.add(out, ir.I64(4 * LANES * i))), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _tiles(product, _0, _1, _2, _3, _4, _5, first, last):
    """The tiles first..last-1 of a product's rows: y = x W^T."""
    p = array_at(product, WORDS, np.int64)
    rows, columns, vectors = p[ROWS], p[COLUMNS], p[VECTORS]
    panel = 4 * LANES * columns
    padded = columns + LANES
    memory = allocate(4 * TILE * (2 * padded + vectors) + 4 * 64)
    ones = next_line(memory)
    factors = floats(ones, np.int64(LANES))
    for i in range(LANES):
        factors[i] = 1
    widened = ones + 64
    tile = next_line(widened + 4 * TILE * padded)
    sums = next_line(tile + 4 * TILE * padded)
    for item in range(first, last):
        begin = item * TILE
        count = min(TILE, rows - begin)
        groups = -(-count // LANES)
        call(p[WIDEN], p[RAW] + begin * p[ROW_BYTES], widened, p[ROW_BYTES], columns, 0, 0, 0, 0, count)
        for group in range(groups):
            for i in range(0, columns, LANES):  # what is beyond the columns is written over, or is not used
                place = LANES * columns * group + i
                transpose(widened + 4 * place, 4 * columns, tile + 4 * (LANES * columns * group + LANES * i))
        totals = floats(sums, vectors * TILE)
        for i in range(vectors * TILE):
            totals[i] = 0
        for start in range(0, columns, _PART):
            length, weights = min(_PART, columns - start), tile + 4 * LANES * start
            v = 0
            while v < vectors:
                x, y = p[X] + 4 * (v * columns + start), sums + 4 * v * TILE
                if vectors - v >= 8:
                    panels_8(x, 4 * columns, weights, 4 * LANES, panel, length, groups, y, 4 * TILE, ones)
                    v += 8
                elif vectors - v >= 4:
                    panels_4(x, 4 * columns, weights, 4 * LANES, panel, length, groups, y, 4 * TILE, ones)
                    v += 4
                else:
                    panels_1(x, 4 * columns, weights, 4 * LANES, panel, length, groups, y, 4 * TILE, ones)
                    v += 1
        for v in range(vectors):
            out = floats(p[Y] + 4 * (v * rows + begin), count)
            for row in range(count):
                out[row] = totals[v * TILE + row]
    free(memory)


@maker
def tiles_function() -> CFunction:
    """The C function that multiplies tiles of rows, see above."""
    return c_function(_tiles, **{f"panels_{n}": panels(n, False) for n in (1, 4, 8)})


def multiply(raw: np.ndarray, widen: CFunction, x: np.ndarray, y: np.ndarray) -> None:
    """y = x W^T for rows uint8 [rows, row bytes] that `widen` makes float32; x and y as an engine's."""
    rows, row_bytes = raw.shape
    vectors, columns = x.shape
    addresses = raw.ctypes.data, widen.address, x.ctypes.data, y.ctypes.data
    product = np.array([*addresses, row_bytes, rows, columns, vectors], np.int64)
    share_items(
        raw.nbytes * vectors >= MIN_BYTES_TO_SHARE, tiles_function(), product.ctypes.data, items=-(-rows // TILE)
    )


def product(rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x W^T for rows float32 [rows, columns]: float32 [vectors, rows]."""
    y = np.empty((len(x), len(rows)), np.float32)
    multiply(np.ascontiguousarray(rows).view(np.uint8), wide_rows_function("F32"), np.ascontiguousarray(x), y)
    return y
