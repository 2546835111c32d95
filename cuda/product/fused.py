"""y = What x, where What is never stored, on a GPU: the twin of bridge/trellis/fused.py.

For more than 16 tokens, of which every 8 would decode all weights again, rows are decoded once, and torch multiplies.

A block computes a row of tiles, 16 rows of y; each of its SPLIT warps takes every SPLIT-th tile column. A lane has 8
weights of a tile, stored in 8K consecutive bits, which belong to one, two or eight rows:

    words   uint16 [tile rows, columns, n], as in `bridge.trellis.streams`
    x       float32 [tokens, 16 * columns]
    y       float32 [tokens, 16 * tile rows]
    bases   int32 [32]: the column of each lane's first weight; the others are at constant distances from it
    members int32 [16 * 2R]: which sums belong to a row; a lane has R of them, for 1, 2 or 8 rows
    places  int32 [256]: where each lane's weights are in their tile, 16 * row + column
    out     float32, or halves in int16, [16 * tile rows, 16 * columns]: decoded weights

The lanes' sums are added in shared memory, always in the same order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from bridge.cuda.product.halves import halved
from bridge.cuda.product.matmul import product
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.device import Device, Memory, view
from bridge.cuda.toolchain.intrinsics import (
    SIGN_BITS,
    ahead_2,
    bits,
    bits_float,
    block_x,
    device_function,
    dp4a,
    float_bits,
    fma,
    high_half,
    low_half,
    mad,
    or_,
    shl,
    store_2,
    sub,
    thread_x,
    thread_y,
    to_half,
    xor,
)
from bridge.cuda.toolchain.unroll import expand, registers, unroll
from numba import cuda

from bridge.errors import BridgeError
from bridge.trellis.codebooks import BYTES_MEAN, HALVES_FLIP, HALVES_MASK, MUL1_ADDEND, MUL1_FACTOR, SECOND_MAD
from bridge.trellis.vector import Code

_WEIGHTS = 8  # of a lane
_MOST = 8  # tokens in a launch
_MOST_FUSED = 16  # tokens; with more, weights are decoded
_PART = 1 << 25  # weights decoded at a time

# set per kernel by `expand`
STATES = VALUES = STEP = HELD = WORDS = BITS = SPLIT = TOKENS = SUMS = MODE = TABLE_BITS = FACTOR = ADDEND = NUMBER = 0
UNALIGNED = DECODED = HALVES = False
ROW = COLUMN = ()
value_of: Any = None
int32 = np.int32
float32 = np.float32


def _value(state, table):
    """Value NUMBER of a state, without its constant factor."""
    if TABLE_BITS:
        y = state if MODE == "lut" else mad(state, state, state)
        right = 0 if MODE == "lut" else 15 - TABLE_BITS if MODE == "quantlut_sym" else 16 - TABLE_BITS
        entry = table[mad(bits(y, right, 2**TABLE_BITS - 1), VALUES, NUMBER)]
        if MODE == "quantlut_sym" and NUMBER == 0:
            return bits_float(xor(float_bits(entry), shl(bits(y, 15, 1), 31)))
        return entry
    z = mad(state, FACTOR, ADDEND)
    if MODE == "3inst" or MODE == "mcg":
        z = xor(bits(z, 0, HALVES_MASK - 2**32), HALVES_FLIP)
        return low_half(to_half(low_half(z) + high_half(z)))
    if MODE == "2mad":  # the upper word of z * SECOND_MAD, by 16 bits
        high = bits(z, 16, 0xFFFF)
        low = bits(z, 0, 0xFFFF)
        middle = mad(high, SECOND_MAD % 65536, mad(low, SECOND_MAD // 65536, 0))
        middle = mad(bits(mad(low, SECOND_MAD % 65536, 0), 16, 0xFFFF), 1, middle)
        z = mad(mad(high, SECOND_MAD // 65536, bits(middle, 16, 0xFFFF)), 1, z)
    # each byte less 128: the bytes of dp4a are signed
    if MODE == "mul1":
        total = dp4a(xor(z, SIGN_BITS), 0x01010101, 1024 + 512)
        return low_half(to_half(fma(float32(total), float32(MUL1_FACTOR), float32(MUL1_ADDEND))))
    return float32(dp4a(xor(z, SIGN_BITS), 0x01010101, 512 - BYTES_MEAN))


def _fused(words, table, x, y, bases, members, places, out, columns):
    lane = thread_x()
    warp = thread_y()
    row = block_x()
    if not DECODED:
        first_column = bases[lane]
    start = mad(lane, STATES * STEP, 0)
    offset = bits(start, 0, 15)
    word = bits(start, 4, 0xFFFF)
    total = registers()
    for k in unroll(SUMS):
        for t in unroll(TOKENS):
            total[k, t] = float32(0)
    held = registers()
    value = registers()
    column = warp
    while column < int32(columns):
        base = (int32(row) * columns + column) * WORDS
        for j in unroll(HELD):
            index = mad(word, 1, j)
            held[j] = ahead_2(words, base + (sub(index, WORDS) if index >= WORDS else index))
        if UNALIGNED:
            for j in unroll(HELD - 1):
                held[j] = bits(or_(shl(held[j], 16), held[j + 1]), sub(16, offset), 0xFFFF)
        if not DECODED:
            x_column = mad(column, 16, first_column)
        for i in unroll(STATES):
            window = or_(shl(held[i * STEP // 16], 16), held[i * STEP // 16 + 1])
            state = bits(window, 32 - BITS - i * STEP % 16, 2**BITS - 1)
            for v in unroll(VALUES):
                value[v] = value_of[v](state, table)
                if DECODED:
                    cell = places[mad(lane, STATES * VALUES, i * VALUES + v)]
                    to = (int32(row) * 16 + bits(cell, 4, 15)) * (16 * columns) + mad(column, 16, bits(cell, 0, 15))
                    if HALVES:
                        store_2(out, to, to_half(value[v]))
                    else:
                        out[to] = value[v]
                for t in unroll(TOKENS):
                    factor = x[t, mad(x_column, 1, COLUMN[i * VALUES + v])]
                    total[ROW[i * VALUES + v], t] = fma(value[v], factor, total[ROW[i * VALUES + v], t])
        column = mad(column, 1, SPLIT)
    if not DECODED:
        part = cuda.shared.array((SPLIT, TOKENS, 32 * SUMS), np.float32)
        for k in unroll(SUMS):
            for t in unroll(TOKENS):
                part[warp, t, lane * SUMS + k] = total[k, t]
        cuda.syncthreads()
        if warp == 0 and lane < 16:
            for t in unroll(TOKENS):
                result = float32(0)
                for w in range(SPLIT):
                    for m in range(2 * SUMS):
                        result += part[w, t, members[lane * (2 * SUMS) + m]]
                y[t, row * 16 + lane] = result


class Lanes(NamedTuple):
    """How a tile's weights are shared among lanes; see above. `sums`, `columns`: of a lane's weights, in order."""

    bases: np.ndarray
    members: np.ndarray
    sums: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, positions: np.ndarray) -> Lanes:
        """The lanes of a 16 x 16 tile. Raises BridgeError if they are not alike."""
        row, column = (part.reshape(32, _WEIGHTS) for part in np.divmod(positions, 16))
        rows, steps = row - row[:, :1], column - column[:, :1]
        if (rows != rows[0]).any() or (steps != steps[0]).any():
            raise BridgeError("a tile whose weights are in no regular order cannot be multiplied on a GPU")
        distinct = sorted(set(rows[0].tolist()))
        sums = tuple(distinct.index(r) for r in rows[0].tolist())
        of_sum = row[:, [sums.index(k) for k in range(len(distinct))]].reshape(-1)
        members = np.argsort(of_sum, kind="stable").astype(np.int32)
        return cls(column[:, 0].astype(np.int32), members, sums, tuple(steps[0].tolist()))


@recipe
def kernel(
    code: Code, sums: tuple[int, ...], columns: tuple[int, ...], words: int, tokens: int, split: int,
    halves: bool = False,
) -> Any:  # fmt: skip
    """The kernel for a layout and a number of tokens, with `split` warps; for none, it stores the weights."""
    from bridge.cuda.toolchain.launch import Kernel

    states = _WEIGHTS // code.values
    factor, addend = (n - 2**32 if n >= 2**31 else n for n in code.affine)
    last = (states - 1) * code.step // 16
    unaligned = states * code.step % 16 != 0
    scope = {
        "MODE": code.mode, "TABLE_BITS": code.table_bits, "FACTOR": factor, "ADDEND": addend, "VALUES": code.values,
    }  # fmt: skip
    name = f"{code.suffix}_{max(sums)}_{columns[1]}_{tokens}_{split}"
    values = tuple(device_function(expand(_value, f"{name}_{v}", NUMBER=v, **scope)) for v in range(code.values))
    expanded = expand(
        _fused, name + "_f16" * halves, without=("places", "out") if tokens else ("x", "y", "bases", "members"),
        DECODED=not tokens, HALVES=halves, STATES=states, VALUES=code.values, STEP=code.step,
        HELD=last + 2 + unaligned, WORDS=words,
        BITS=code.bits, SPLIT=split, TOKENS=tokens, SUMS=max(sums) + 1, UNALIGNED=unaligned, ROW=sums, COLUMN=columns,
        value_of=values,
    )  # fmt: skip
    more = "float32[:,::1], float32[:,::1], int32[::1], int32[::1]"
    if not tokens:
        more = f"int32[::1], {'int16' if halves else 'float32'}[::1]"
    return Kernel(expanded, f"void(uint16[::1], float32[::1], {more}, int64)")


class FusedOnDevice:
    """A layer's codes in device memory.

    words  uint16 [tile rows, tile columns, n]
    """

    def __init__(self, words: np.ndarray, code: Code, positions: np.ndarray, table: np.ndarray, device: Device):
        self.rows, self.columns, self.count = words.shape
        self.code, self.device, self.lanes = code, device, Lanes.of(positions)

        self.words, self.table, self.bases, self.members, self.places = (
            device.upload(np.ascontiguousarray(array).reshape(-1))
            for array in (words, table, self.lanes.bases, self.lanes.members, positions.astype(np.int32))
        )
        self.memory = Memory(device, self.words, self.table, self.bases, self.members, self.places)

    def run(self, x: Any, y: Any, split: int = 4, halves: bool = False) -> None:
        """Queue y [tokens, rows] = x [tokens, in] What^T, without `Code.unit`; both float32 on the device.

        `halves`: of more tokens than _MOST_FUSED, x and the weights may be rounded to halves.
        """
        if len(x) > _MOST_FUSED:
            return self._run_decoded(x, y, split, halves)
        for first in range(0, len(x), _MOST):
            part, out = x[first : first + _MOST], y[first : first + _MOST]
            fused = kernel(self.code, self.lanes.sums, self.lanes.columns, self.count, len(part), split)
            fused.launch(
                self.rows, (32, split), self.memory.stream(), self.words, self.table, view(part), view(out),
                self.bases, self.members, self.columns,
            )  # fmt: skip

    def _run_decoded(self, x: Any, y: Any, split: int, halves: bool) -> None:
        import torch

        dtype = torch.float16 if halves else torch.float32
        values = halved(x, self.device) if halves else x
        decode = kernel(self.code, self.lanes.sums, self.lanes.columns, self.count, 0, split, halves)
        step = max(1, min(self.rows, _PART // (256 * self.columns)))
        weights = torch.empty((16 * step, 16 * self.columns), dtype=dtype, device=y.device)
        for first in range(0, self.rows, step):
            count = min(step, self.rows - first)
            words = self.words[first * self.columns * self.count : (first + count) * self.columns * self.count]
            out = weights.view(torch.int16) if halves else weights
            decode.launch(
                count, (32, split), self.memory.stream(), words, self.table, self.places, view(out.reshape(-1)),
                self.columns,
            )  # fmt: skip
            y[:, 16 * first : 16 * (first + count)] = product(weights[: 16 * count], values)
