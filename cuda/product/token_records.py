"""Tokens as int8 for mma_int8.py: x rounded in blocks of 32 columns as in activations.py, in the order of fragments.

Tokens go in tiles of 8, a kernel takes `tiles` of them, a *group*, at a time, and columns in steps of 4 blocks. What a
group has of a step lies in one piece, tile by tile, so that it is copied to shared memory as it is:

       0..1023   256 bytes a block, 32 a token: words 0, 4, 1, 5, 2, 6, 3, 7 of its columns
    1024..1279    64 bytes a block,  8 a token: the step d, and d times the sum of the codes, float32

Tokens and blocks that do not exist, up to a whole group and step, are zeros. A warp makes a block at a time. Values
are x, x / sqrt(mean(x^2) + eps) * weight ("norm": each block of threads sums up its token's squares), or what an
activation makes, as in halves.py.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from bridge.cuda.product.activations import rounded
from bridge.cuda.product.gates import function_of
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.device import Device, kind, view
from bridge.cuda.toolchain.intrinsics import (
    bits,
    bits_float,
    block_x,
    block_y,
    device_function,
    float_bits,
    low_half,
    mad,
    or_,
    shl,
    store_1,
    store_4,
    thread_x,
    thread_y,
    warp_sum,
)
from bridge.cuda.toolchain.unroll import expand
from numba import cuda

from bridge.errors import BridgeError

TILE = 8  # tokens of mma.sync
BLOCKS = 4  # in a step
CHUNK = 1280  # bytes of a tile and step
_WARPS = 8  # in a block of threads
_TURNS = 4  # blocks that a warp makes

# set per kernel by `expand`
KIND = WAY = "plain"
NORM = False
activate: Any = None
value_at: Any = None

float32 = np.float32
int32: Any = np.int32


class TokenRecords(NamedTuple):
    """uint8 [groups * steps * tiles * CHUNK] in device memory: `n` tokens of `columns` values, `tiles` in a group."""

    buffer: Any
    n: int
    columns: int
    tiles: int

    @property
    def steps(self) -> int:
        return -(-self.columns // (32 * BLOCKS))


def _value_at(x, token, columns, i):
    """Value i of a token."""
    if WAY == "gate":
        return activate(x[token * columns * 2 + i], x[token * columns * 2 + columns + i])
    if WAY == "gate_in_turn":
        return activate(x[(token * columns + i) * 2], x[(token * columns + i) * 2 + 1])
    if WAY == "gate_alone":
        return activate(x[token * columns + i], float32(1))
    if KIND == "f32":
        return x[token * columns + i]
    if KIND == "bf16":
        return bits_float(shl(x[token * columns + i], 16))
    return low_half(x[token * columns + i])


def _record(x, weight, records, tokens, columns, tiles, steps, eps):
    lane = thread_x()
    warp = thread_y()
    token = block_x()  # a grid has more than 65,535 blocks in this direction alone
    inverse = float32(1)
    if NORM:
        sums = cuda.shared.array(_WARPS, np.float32)
        square = float32(0)
        if token < tokens:
            for i in range(int32(warp * 32 + lane), columns, 32 * _WARPS):
                value = value_at(x, token, columns, i)
                square += value * value
        square = warp_sum(square)
        if lane == 0:
            sums[warp] = square
        cuda.syncthreads()
        square = float32(0)
        for i in range(_WARPS):
            square += sums[i]
        inverse = float32(1) / math.sqrt(square / float32(columns) + eps)
    tile = bits(token, 3, 0x0FFFFFFF)
    group = int32(tile // int32(tiles))
    tile = int32(tile - group * int32(tiles))
    token_in_tile = bits(token, 0, 7)
    # byte 4 w + j of a block is byte j of word w: words go to places 0, 2, 4, 6, 1, 3, 5, 7
    byte = or_(or_(shl(bits(lane, 2, 3), 3), shl(bits(lane, 4, 1), 2)), bits(lane, 0, 3))
    for k in range(_TURNS):
        block = mad(block_y(), _WARPS * _TURNS, mad(int32(k), _WARPS, warp))
        if block < int32(steps) * 4:
            value = float32(0)
            i = mad(block, 32, lane)
            if token < tokens and i < columns:
                value = value_at(x, token, columns, i) * inverse
                if NORM:
                    value *= weight[i]
            code, step = rounded(value)
            total = warp_sum(code)
            index = mad(mad(group, int32(steps), bits(block, 2, 0x0FFFFFFF)), int32(tiles), tile) * CHUNK
            store_1(records, index + (bits(block, 0, 3) * 256 + token_in_tile * 32 + byte), code)
            if lane == 0:
                index = (index + 1024 + bits(block, 0, 3) * 64 + token_in_tile * 8) // 4
                store_4(records, index, float_bits(step))
                store_4(records, index + 1, float_bits(step * float32(total)))


@recipe
def kernel(way: str, kind: str, activation: str = "silu") -> Any:
    """The kernel record(x, weight, records, tokens, columns, tiles, steps, eps): "plain" for x of "f32", "f16" or
    "bf16", for "f32" also "norm", and "gate", "gate_in_turn" and "gate_alone" with an activation of gates.py."""
    from bridge.cuda.toolchain.launch import Kernel

    name = way + f"_{activation}" * way.startswith("gate") + f"_{kind}"
    value = device_function(expand(_value_at, name, WAY=way, KIND=kind, activate=function_of(activation)))
    expanded = expand(_record, name, NORM=way == "norm", value_at=value)
    element = "float32" if kind == "f32" else "int16"
    return Kernel(expanded, f"void({element}[::1], float32[::1], uint8[::1], int64, int64, int64, int64, float32)")


def recorded(
    x: Any, tiles: int, device: Device, way: str = "plain", weight: Any = None, eps: float = 0.0,
    activation: str = "silu",
) -> TokenRecords:  # fmt: skip
    """Records of x [n, columns], of gates and ups [n, 2 * columns], contiguous; see `kernel` for its type."""
    import torch

    n, columns = x.shape[0], x.shape[1] // (2 if way in ("gate", "gate_in_turn") else 1)
    x_kind = kind(x)
    if columns % 32 or x_kind is None or (way != "plain" and x_kind != "f32"):
        raise BridgeError(f"x is {x.dtype} {list(x.shape)}; must be floats of a multiple of 32 columns")
    records = TokenRecords(None, n, columns, tiles)
    tokens = -(-n // (TILE * tiles)) * TILE * tiles
    nbytes = tokens // TILE * records.steps * CHUNK
    records = records._replace(buffer=torch.empty(nbytes, dtype=torch.uint8, device=x.device))
    grid = tokens, -(-records.steps * BLOCKS // (_WARPS * _TURNS))
    arrays = view(x.reshape(-1)), device.placeholder() if weight is None else view(weight), view(records.buffer)
    sizes = n, columns, tiles, records.steps
    kernel(way, x_kind, activation).launch(grid, (32, _WARPS), device.stream(), *arrays, *sizes, np.float32(eps))
    return records
