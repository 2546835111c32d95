"""RMS norms of layers with a state, x / sqrt(mean(x^2) + eps) * weight, each in place.

end     of a delta net's heads, times silu(z), or of Mamba-2's groups       a block for each of a token
split   of what Mamba's second matrix makes: steps, keys, queries           a warp for each of a token
"""

import math
from typing import Any

import numpy as np
from bridge.cuda.norm import norm_threads
from bridge.cuda.recurrent.functions import silu
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import launch_dependents, launches_wait, warp_sum
from bridge.cuda.toolchain.launch import Kernel
from bridge.cuda.toolchain.unroll import expand, registers, unroll
from numba import cuda

from bridge.runtime.config.recurrent_config import DELTA, RecurrentConfig

# set per kernel by `expand`
PARTS = WIDTH = BLOCK = WARPS = ROUNDS = RANK = KEY_DIM = 0
GATED = DEPENDENT = False

float32 = np.float32
int32: Any = np.int32


def _end(y, weight, z, eps):
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    thread = int32(cuda.threadIdx.x)
    lane = thread & 31
    start = int32(cuda.blockIdx.x) * WIDTH
    token = int32(cuda.blockIdx.y)
    row = token * (PARTS * WIDTH) + start
    sums = cuda.shared.array(32, float32)
    value = registers()
    squares = float32(0)
    for r in unroll(ROUNDS):
        i = r * BLOCK + thread
        value[r] = y[row + i] if i < WIDTH else float32(0)
        squares += value[r] * value[r]
    squares = warp_sum(squares)
    if lane == 0:
        sums[thread >> 5] = squares
    cuda.syncthreads()
    squares = warp_sum(sums[lane] if lane < WARPS else float32(0))
    inverse = float32(1) / math.sqrt(squares / float32(WIDTH) + eps)
    for r in unroll(ROUNDS):
        i = r * BLOCK + thread
        if i < WIDTH:
            if GATED:
                y[row + i] = value[r] * inverse * weight[i] * silu(z[token, start + i])
            else:
                y[row + i] = value[r] * inverse * weight[start + i]


def _split(low, weight, steps, eps):
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    lane = int32(cuda.threadIdx.x) & 31
    part = int32(cuda.threadIdx.x) >> 5
    token = int32(cuda.blockIdx.x)
    start = RANK + (part - 1) * KEY_DIM if part else 0
    size = KEY_DIM if part else RANK
    row = token * (RANK + 2 * KEY_DIM) + start
    squares = float32(0)
    for i in range(lane, size, 32):
        squares += low[row + i] * low[row + i]
    inverse = float32(1) / math.sqrt(warp_sum(squares) / float32(size) + eps)
    for i in range(lane, size, 32):
        value = low[row + i] * inverse * weight[start + i]
        if part:
            low[row + i] = value
        else:
            steps[token * RANK + i] = value


def end_parts(c: RecurrentConfig) -> tuple[int, int]:
    """How many parts of a token are normalized, and their width."""
    parts = c.heads if c.kind == DELTA else c.groups
    return parts, c.values // parts


@recipe
def end_kernel(c: RecurrentConfig, dependent: bool = False) -> Kernel:
    """end(y, weight, z, eps) of y f32 [n, values], in place; a grid of (parts, n), `norm_threads(width)` threads.

    weight  f32 [value_dim] of a delta net, [values] of Mamba-2
    z       f32 [n, values] of a delta net, ignored otherwise
    """
    (parts, width), gated = end_parts(c), c.kind == DELTA
    block = norm_threads(width)
    function = expand(
        _end, f"{parts}_{width}_{int(gated)}{'_dependent' * dependent}", PARTS=parts, WIDTH=width, BLOCK=block,
        WARPS=block // 32, ROUNDS=-(-width // block), GATED=gated, DEPENDENT=dependent,
    )  # fmt: skip
    signature = "void(float32[::1], float32[::1], float32[:,::1], float32)"
    return Kernel(function, signature, dependent=dependent)


@recipe
def split_kernel(c: RecurrentConfig, dependent: bool = False) -> Kernel:
    """split(low, weight, steps, eps) of low f32 [n, rank + 2 * key_dim] and the weights of all; n blocks of 96 threads.

    Keys and queries are normalized in place, steps f32 [n, rank] apart, as they are multiplied again.
    """
    name = f"{c.rank}_{c.key_dim}{'_dependent' * dependent}"
    function = expand(_split, name, RANK=c.rank, KEY_DIM=c.key_dim, DEPENDENT=dependent)
    return Kernel(function, "void(float32[::1], float32[::1], float32[::1], float32)", dependent=dependent)
