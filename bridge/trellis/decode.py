"""Trellis streams to floats, tile by tile: 16 states at a time in vectors, then each weight to its place.

Where a tile has no multiple of 16 states (hand-made files), numpy looks them up in a table of all states instead.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from bridge.system.cpu import targets
from bridge.system.kernels.jit import CFunction, c_function, cgutils, intrinsic, maker, types
from bridge.system.kernels.memory import LANES, allocate, array_at, free, next_line
from bridge.system.threads import pool
from bridge.trellis.codebooks import BitshiftCodebook
from bridge.trellis.streams import states_of
from bridge.trellis.vector import I64, Code, Lanes

# set per kernel by `c_function`
decode_states: Any = None


@cache
def _decode_states(code: Code) -> Any:
    """decode_states(ring, table, out, count): `count` times 16 states to float32 [16 * count, V], at addresses."""

    @intrinsic
    def emit_all(typingctx, ring, table, out, count):
        def emit(context, builder, signature, arguments):
            ring, table, out, count = arguments
            v = Lanes(builder, code)
            places = [code.shift(i) for i in range(LANES)]
            right = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [ir.IntType(32)(r) for _, r in places])
            with cgutils.for_range(builder, count) as loop:
                address = builder.add(ring, builder.mul(loop.index, I64(2 * code.step)))
                high, low = (v.words(builder.add(address, I64(2 * i))) for i in range(2))
                windows = v.pick(v.window(high, low), [word for word, _ in places])
                values = v.values(v.states(windows, right), table)
                target = builder.add(out, builder.mul(loop.index, I64(4 * LANES * code.values)))
                for i in range(code.values):  # interleave the lanes of two values
                    vector = values[i]
                    if code.values == 2:
                        lanes = [lane // 2 + LANES * (lane % 2) for lane in range(i * LANES, i * LANES + LANES)]
                        mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [ir.IntType(32)(n) for n in lanes])
                        vector = builder.shuffle_vector(*values, mask)
                    v.store(vector, builder.add(target, I64(4 * LANES * i)), 4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), emit

    return emit_all


def _tiles(words, out, table, order, columns, sizes, _, first, last):
    """Rows of tiles first..last-1; sizes: a tile's words, rows, columns, sixteens of states, and
    whether its weights come row by row; else `order` says which weight is at row * width + column."""
    size = array_at(sizes, 5, np.int64)
    count, height, width, groups, in_order = size[0], size[1], size[2], size[3], size[4]
    weights = height * width
    index = array_at(order, weights, np.int32)
    memory = allocate(4 * weights + 2 * (count + 2 * 16) + 64)
    values_at = next_line(memory)
    ring_at = values_at + 4 * weights
    values, ring = array_at(values_at, weights, np.float32), array_at(ring_at, count + 2 * 16, np.uint16)
    for row in range(first, last):
        stored = array_at(words + row * columns * count * 2, (columns, count), np.uint16)
        start = row * columns * height * width
        target = array_at(out + 4 * start, columns * height * width, np.float32)
        for column in range(columns):
            for j in range(count):
                ring[j] = stored[column, j]
            for j in range(17):
                ring[count + j] = ring[j % count]
            decode_states(ring_at, table, values_at, groups)
            base = column * width
            for r in range(height):  # row by row; if the tile is stored that way, whole vectors are copied
                offset = base + r * columns * width
                if in_order and width == 16:
                    for c in range(16):
                        target[offset + c] = values[r * 16 + c]
                else:
                    for c in range(width):
                        target[offset + c] = values[index[r * width + c]]
    free(memory)


@maker
def _kernel(code: Code) -> CFunction:
    return c_function(_tiles, f"decode_{code.suffix}", decode_states=_decode_states(code))


def decode(
    words: np.ndarray, step: int, book: BitshiftCodebook, positions: np.ndarray, tile: tuple[int, int],
    out: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """float32 [tile rows * height, tile columns * width]: the values of streams; see `streams` for the layout.

    out  what to decode into, contiguous

    The pool's threads share the rows of tiles out.
    """
    rows, columns, count = words.shape
    height, width = tile
    if out is None:
        out = np.empty((rows * height, columns * width), np.float32)
    states = count * 16 // step
    if states % LANES:
        values = book.lut[states_of(words, step, book.L)].reshape(rows, columns, -1)
        placed = np.empty_like(values)
        placed[..., positions] = values
        out[:] = placed.reshape(rows, columns, height, width).transpose(0, 2, 1, 3).reshape(out.shape)
        return out
    code = Code.of(book, step, targets.chosen())
    words = np.ascontiguousarray(words)
    order = np.argsort(positions).astype(np.int32)
    in_order = np.array_equal(order, np.arange(len(order)))
    sizes = np.array([count, height, width, states // LANES, in_order], np.int64)
    table = code.table(book)
    pool.share_items(
        words.nbytes >= pool.MIN_BYTES_TO_SHARE, _kernel(code), words.ctypes.data, out.ctypes.data, table.ctypes.data,
        order.ctypes.data, columns, sizes.ctypes.data, items=rows,
    )  # fmt: skip
    return out
