"""y = What x, where What is never stored: tiles are decoded in registers and multiplied at once.

A lane is one row of tiles; 16 lanes work side by side, so one weight of each meets the same value of x:

    prepared   uint16 [groups, tile columns, n, 16]: word j of the streams of 16 rows of tiles
    x          float32 [tokens, 16 * tile columns]
    y          float32 [tokens, groups * 256]; row (16 g + lane) * 16 + r is row r of a lane's tile

The 256 weights of a tile are a loop over units of equal layout: row u, or rows u and u + 8, or column u.
With AVX-512, 16 weights take about six instructions in 1mad or mul1, twelve in 3inst. Several tokens share the decoded
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from bridge.system.kernels.jit import CFunction, c_function, cgutils, intrinsic, kernel, maker, types
from bridge.system.kernels.memory import LANES, allocate, floats, free, next_line
from bridge.system.threads import pool
from bridge.trellis.streams import TILE
from bridge.trellis.vector import FLOATS, I64, Code, Lanes

WIDTHS = (1, 4)  # tokens at once
ROWS = LANES * TILE  # of a group
_WEIGHTS = TILE * TILE

# set per kernel by `c_function`
multiply_tile: Any = None
width = tile_bytes = 0


@dataclass(frozen=True)
class Units:
    """A tile as a loop: weight t of unit u is at (row[t] + u * row_step, column[t] + u * column_step)."""

    count: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    row_step: int
    column_step: int

    @classmethod
    def of(cls, positions: np.ndarray) -> Units | None:
        """The loop over a tile of 16 x 16; None if there is none."""
        for count in (16, 8):
            row, column = (part.reshape(count, -1) for part in np.divmod(positions, TILE))
            u = np.arange(count)[:, None]
            for steps in ((1, 0), (0, 1)):
                if (row == row[0] + u * steps[0]).all() and (column == column[0] + u * steps[1]).all():
                    return cls(count, tuple(row[0].tolist()), tuple(column[0].tolist()), *steps)
        return None


@cache
def _multiply_tile(code: Code, units: Units, tokens: int, words: int) -> Any:
    """multiply_tile(weights, table, x, x_stride, totals): one tile column of 16 lanes, at addresses.

    totals  float32 [tokens, 16 rows of a tile, 16 lanes], added to
    """
    per_unit = len(units.rows) // code.values  # states
    unit_words = per_unit * code.step // 16
    line = 2 * LANES  # bytes of a word of 16 lanes

    @intrinsic
    def emit_tile(typingctx, weights, table, x, x_stride, totals):
        def emit(context, builder, signature, arguments):
            weights, table, x, x_stride, totals = arguments
            v = Lanes(builder, code, scaled=False)
            xs = [builder.add(x, builder.mul(x_stride, I64(t))) for t in range(tokens)]
            with cgutils.for_range(builder, I64(units.count)) as loop:
                u = loop.index
                base = builder.add(weights, builder.mul(u, I64(unit_words * line)))
                is_last = builder.icmp_signed("==", u, I64(units.count - 1))
                beyond = builder.select(is_last, weights, builder.add(base, I64(unit_words * line)))
                unit_totals = builder.add(totals, builder.mul(u, I64(units.row_step * 4 * LANES)))
                from_ = builder.mul(u, I64(units.column_step * 4))
                places = [builder.add(address, from_) for address in xs]
                rows = sorted(set(units.rows))

                def at(token: int, row: int) -> ir.Value:
                    return builder.add(unit_totals, I64(4 * LANES * (token * TILE + row)))

                sums = {(t, r): v.load(at(t, r), FLOATS, 4) for t in range(tokens) for r in rows}
                loaded: dict[int, ir.Value] = {}

                def word(j: int) -> ir.Value:
                    if j not in loaded:
                        loaded[j] = v.words(beyond if j == unit_words else builder.add(base, I64(j * line)))
                    return loaded[j]

                windows: dict[int, ir.Value] = {}
                for state in range(per_unit):
                    j, right = code.shift(state)
                    if right >= 16:  # all of it is in the first word
                        states = v.states(word(j), v.splat(right - 16))
                    else:
                        if j not in windows:
                            windows[j] = v.window(word(j), word(j + 1))
                        states = v.states(windows[j], v.splat(right))
                    for i, value in enumerate(v.values(states, table)):
                        weight = state * code.values + i
                        for t in range(tokens):
                            key = t, units.rows[weight]
                            scalar = v.broadcast(builder.add(places[t], I64(4 * units.columns[weight])))
                            sums[key] = v.fma(value, scalar, sums[key])
                for (t, r), total in sums.items():
                    v.store(total, at(t, r), 4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), emit

    return emit_tile


def _groups(weights, x, y, columns, table, tokens, y_stride, first, last):
    """Groups first..last-1; tokens a multiple of `width`, columns of tiles."""
    memory = allocate(4 * width * 256 + 64)
    totals_at = next_line(memory)
    totals = floats(totals_at, width * 256)
    x_stride = columns * 64
    for group in range(first, last):
        for start in range(0, tokens, width):
            for i in range(width * 256):
                totals[i] = 0
            tile = weights + group * columns * tile_bytes
            values = x + start * x_stride
            for _ in range(columns):
                multiply_tile(tile, table, values, x_stride, totals_at)
                tile += tile_bytes
                values += 64
            for t in range(width):
                out = floats(y + (start + t) * y_stride + group * 1024, 256)
                for lane in range(16):
                    for r in range(16):
                        out[lane * 16 + r] = totals[t * 256 + r * 16 + lane]
    free(memory)


@maker
def _kernel(code: Code, units: Units, tokens: int, words: int) -> CFunction:
    suffix = f"{code.suffix}_{units.count}{units.row_step}_{units.columns[1]}_{tokens}_{words}"
    scope = {"multiply_tile": _multiply_tile(code, units, tokens, words), "width": tokens}
    return c_function(_groups, f"fused_{suffix}", tile_bytes=words * 2 * LANES, **scope)


@kernel
def _interleave(words, first, last, out):
    """Rows of tiles to lanes; those beyond the last are copies of it."""
    columns, count = words.shape[1], words.shape[2]
    for group in range(first, last):
        for column in range(columns):
            for j in range(count):
                for lane in range(LANES):
                    row = min(group * LANES + lane, words.shape[0] - 1)
                    out[group, column, j, lane] = words[row, column, j]


class Fused:
    """The prepared form of a layer's codes, as large as the codes.

    words  uint16 [tile rows, tile columns, n], see `streams`
    """

    def __init__(self, words: np.ndarray, code: Code, units: Units, table: np.ndarray):
        rows, self.columns, self.count = words.shape
        self.groups = -(-rows // LANES)
        self.code, self.units = code, units
        self.prepared = np.empty((self.groups, self.columns, self.count, LANES), np.uint16)
        _interleave(words, 0, self.groups, self.prepared)
        self.table = table

    def run(self, x: np.ndarray) -> np.ndarray:
        """float32 [tokens, rows]: x float32 [tokens, in], contiguous, times the matrix, without `Code.unit`."""
        tokens = len(x)
        step = WIDTHS[0] if tokens == 1 else WIDTHS[1]
        padded = -(-tokens // step) * step
        if padded != tokens:
            x = np.concatenate([x, np.zeros((padded - tokens, x.shape[1]), np.float32)])
        y = np.empty((padded, self.groups * ROWS), np.float32)
        worth = self.prepared.nbytes * tokens >= pool.MIN_BYTES_TO_SHARE
        pool.share_items(
            worth, _kernel(self.code, self.units, step, self.count), self.prepared.ctypes.data, x.ctypes.data,
            y.ctypes.data, self.columns, self.table.ctypes.data, padded, 4 * y.shape[1], items=self.groups,
        )  # fmt: skip
        return y[:tokens]
