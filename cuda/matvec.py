"""Products of a quantized matrix with up to eight columns of activations, one launch, every weight read once.

A warp takes `rows` rows (x is loaded once for them) and walks along them, each lane a unit of 32 or 64 columns at a
time; `split` warps may share these rows, each with its part of the columns. First come the loads of `units` units
of all rows, then the arithmetic, then shuffles add up the lanes.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from bridge.cuda.activations import FLOAT_RECORD, FLOAT_TILE, RECORD, TILE, Records
from bridge.cuda.intrinsics import (
    bits,
    bits_float,
    cached_8,
    cached_8f,
    cached_16,
    cached_16f,
    multiply_add,
    warp_sum,
)
from bridge.cuda.matrix import DeviceMatrix
from bridge.cuda.superblock import functions
from bridge.cuda.unroll import expand, gathered, registers, unroll
from numba import cuda

from bridge.errors import BridgeError

# set per kernel by `expand`
ROWS = UNITS = SPLIT = WARPS = TOKENS = GROUPS = 0
EXACT = ACCUMULATE = BIAS = SILU = False
load: Any = None
unpack: Any = ()
integer: Any = None
exact: Any = None
int32 = np.int32
float32 = np.float32


class Configuration(NamedTuple):
    """How a kernel shares the work; see above. `warps` are those of a block."""

    rows: int
    units: int
    split: int
    warps: int


def _product(weights, sixteenth, x, y, bias, rows, units):
    lane = int32(cuda.threadIdx.x)
    warp = int32(cuda.threadIdx.y)
    first = int32((cuda.blockIdx.x * (WARPS // SPLIT) + warp // SPLIT) * ROWS)
    end = int32(units)
    base = registers()
    total = registers()
    for r in unroll(ROWS):
        # a row too many is computed and not stored
        base[r] = multiply_add(min(int32(first + r), int32(rows - 1)), end, 0)
        for c in unroll(TOKENS):
            total[r, c] = float32(0)
    held = registers()
    group = registers()
    unit = registers()
    begin = int32(warp % SPLIT * (32 * UNITS))
    while begin < end:
        for u in unroll(UNITS):
            # beyond the end the last unit is taken again, and counts nothing
            unit[u] = min(int32(begin + lane + 32 * u), int32(end - 1))
            for r in unroll(ROWS):
                held[u, r] = load(weights, sixteenth, int32(base[r] + unit[u]))
        for u in unroll(UNITS):
            inside = int32(begin + lane + 32 * u) < end
            for g in unroll(GROUPS):
                for r in unroll(ROWS):
                    group[r] = unpack[g](held[u, r], unit[u])
                block = multiply_add(unit[u], GROUPS, g)
                tile = bits(block, 5, 0x07FFFFFF)
                place = bits(block, 0, 31)
                for c in unroll(TOKENS):
                    if EXACT:
                        at = multiply_add(tile, FLOAT_TILE // 16, place)
                        quad = registers()
                        for k in unroll(8):
                            quad[k] = cached_16f(x, at + (c * (FLOAT_RECORD // 16) + 32 * k))
                        at = multiply_add(tile, FLOAT_TILE // 8, place)
                        sums = cached_8f(x, at + (c * (FLOAT_RECORD // 8) + 512))
                        for r in unroll(ROWS):
                            value = exact(group[r], gathered(quad, 8), sums[0], sums[1])
                            total[r, c] += value if inside else float32(0)
                    else:
                        at = multiply_add(tile, TILE // 16, place)
                        low = cached_16(x, at + c * (RECORD // 16))
                        high = cached_16(x, at + (c * (RECORD // 16) + 32))
                        at = multiply_add(tile, TILE // 8, place)
                        scale = cached_8(x, at + (c * (RECORD // 8) + 128))
                        step = bits_float(scale[0]) if inside else float32(0)
                        for r in unroll(ROWS):
                            total[r, c] += integer(group[r], low, high, step, scale[1])
        begin = int32(begin + 32 * UNITS * SPLIT)
    for r in unroll(ROWS):
        for c in unroll(TOKENS):
            total[r, c] = warp_sum(total[r, c])
    if SPLIT > 1:
        shared = cuda.shared.array((WARPS, ROWS * TOKENS), np.float32)
        if lane == 0:
            for r in unroll(ROWS):
                for c in unroll(TOKENS):
                    shared[warp, r * TOKENS + c] = total[r, c]
        cuda.syncthreads()
        for r in unroll(ROWS):
            for c in unroll(TOKENS):
                total[r, c] = shared[warp // SPLIT * SPLIT, r * TOKENS + c]
                for s in unroll(1, SPLIT):
                    total[r, c] += shared[warp // SPLIT * SPLIT + s, r * TOKENS + c]
    if lane == 0 and warp % SPLIT == 0:
        for r in unroll(ROWS):
            if first + r < rows:
                for c in unroll(TOKENS):
                    value = total[r, c]
                    if SILU:
                        if r % 2 == 1:
                            gate = total[r - 1, c]
                            y[c, (first + r) >> 1] = gate / (float32(1) + math.exp(-gate)) * value
                    else:
                        if BIAS:
                            value += bias[first + r]
                        if ACCUMULATE:
                            value += y[c, first + r]
                        y[c, first + r] = value


def configuration(matrix: DeviceMatrix, n: int, exact: bool = False) -> Configuration:
    """The one that is used for n columns; `silu` products need an even number of rows a warp, as it always has."""
    return Configuration(2, 1, 1, 4)


@cache
def kernel(type: str, n: int, shape: Configuration, exact: bool, epilogue: str) -> Any:
    """The kernel of a type for n columns; `epilogue` is "", or names of "bias" and "accumulate", or "silu"."""
    from bridge.cuda.launch import Kernel

    own = functions(type)
    suffix = f"{type}_{n}_{'f32' if exact else 'int8'}_{'_'.join(map(str, shape))}{epilogue and '_'}{epilogue}"
    expanded = expand(
        _product,
        suffix,
        TOKENS=n,
        ROWS=shape.rows,
        UNITS=shape.units,
        SPLIT=shape.split,
        WARPS=shape.warps,
        GROUPS=own.layout.groups,
        EXACT=exact,
        ACCUMULATE="accumulate" in epilogue,
        BIAS="bias" in epilogue,
        SILU="silu" in epilogue,
        load=own.load,
        unpack=own.unpack,
        integer=own.integer,
        exact=own.exact,
    )
    return Kernel(expanded, "void(uint8[::1], int64, uint8[::1], float32[:,::1], float32[::1], int64, int64)")


def launch(
    matrix: DeviceMatrix,
    records: Records,
    y: Any,
    n: int,
    stream: Any,
    accumulate: bool = False,
    bias: Any = None,
    shape: Configuration | None = None,
) -> None:
    """Queue y = W x for the first n columns of the records; y float32 [n, rows], contiguous, on the device.

    `accumulate` adds to what is in y, `bias` float32 [rows] is added to every column.
    """
    epilogue = "_".join(name for name, wanted in (("bias", bias is not None), ("accumulate", accumulate)) if wanted)
    _launch(matrix, records, y, n, stream, bias, epilogue, shape)


def launch_silu(
    matrix: DeviceMatrix, records: Records, y: Any, n: int, stream: Any, shape: Configuration | None = None
) -> None:
    """Queue y[r] = silu(gate r . x) * (up r . x), the matrix uploaded with interleave; y float32 [n, rows/2]."""
    _launch(matrix, records, y, n, stream, None, "silu", shape)


def _launch(matrix, records, y, n, stream, bias, epilogue, shape) -> None:
    if records.columns != matrix.columns or not 1 <= n <= records.max_n:
        raise BridgeError(
            f"{matrix.name}: {n} columns of {records.columns} values; 1 to {records.max_n} of {matrix.columns} are "
            f"wanted"
        )
    shape = shape or configuration(matrix, n, records.exact)
    sets = -(-matrix.rows // shape.rows)
    grid = -(-sets * shape.split // shape.warps)
    kernel(matrix.type, n, shape, records.exact, epilogue).launch(
        grid,
        (32, shape.warps),
        stream,
        matrix.buffer,
        matrix.spaced // 16,
        records.buffer,
        y,
        matrix.device.nothing() if bias is None else bias,
        matrix.rows,
        matrix.units,
    )
