"""The steps between a decoder's products besides attention: RMS normalization and SwiGLU, each with records.

    norm      y = x / sqrt(mean(x^2) + eps) * weight        one block of threads
    silu      y = gate / (1 + exp(-gate)) * up              a warp for 32 values

for one token. Both write y as floats and as records of 32 values (activations.py): the next product
reads the records, and no extra launch has to make them.
"""

import math
from typing import Any

import numpy as np
from bridge.cuda.product.activations import store, store_exact
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import launch_dependents, launches_wait, warp_sum
from bridge.cuda.toolchain.launch import Kernel
from bridge.cuda.toolchain.unroll import expand, unroll
from numba import cuda

# set per kernel by `expand`
HIDDEN = BLOCK = WARPS = ROUNDS = 0
DEPENDENT = False
put: Any = None

float32 = np.float32
int32: Any = np.int32
_SILU_WARPS = 4  # warps in a block


def norm_threads(hidden: int) -> int:
    """Threads of norm's block: one per value, at most 1024."""
    return min(1024, -(-hidden // 32) * 32)


def _norm(x, weight, y, records, eps):
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    thread = int32(cuda.threadIdx.x)
    warp = thread >> 5
    lane = thread & 31
    part = cuda.shared.array(32, float32)
    squares = float32(0)
    for r in unroll(ROUNDS):
        i = r * BLOCK + thread
        if i < HIDDEN:
            squares += x[i] * x[i]
    squares = warp_sum(squares)
    if lane == 0:
        part[warp] = squares
    cuda.syncthreads()
    squares = warp_sum(part[lane] if lane < WARPS else float32(0))
    inverse = float32(1) / math.sqrt(squares / float32(HIDDEN) + eps)
    for r in range(ROUNDS):
        i = min(r * BLOCK + warp * 32, HIDDEN - 32) + lane  # warps beyond the end do the last block again
        value = x[i] * inverse * weight[i]
        y[i] = value
        put(value, i >> 5, 0, records)


def _silu(gate_up, y, records, inner):
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    thread = int32(cuda.threadIdx.x)
    i = min(int32(cuda.blockIdx.x) * BLOCK + (thread & -32), inner - 32) + (thread & 31)
    gate = gate_up[i]
    value = gate / (float32(1) + math.exp(min(-gate, float32(80)))) * gate_up[inner + i]
    y[i] = value
    put(value, i >> 5, 0, records)


@recipe
def norm_kernel(hidden: int, exact: bool, dependent: bool = False) -> Kernel:
    """norm(x, weight, y, records, eps): x f32 [hidden] -> y and its records. One block; hidden a multiple of 32."""
    block = norm_threads(hidden)
    function = expand(
        _norm, f"{hidden}_{int(exact)}{'_dependent' * dependent}", HIDDEN=hidden, BLOCK=block,
        WARPS=block // 32, ROUNDS=-(-hidden // block), DEPENDENT=dependent,
        put=store_exact if exact else store,
    )  # fmt: skip
    signature = "void(float32[::1], float32[::1], float32[::1], uint8[::1], float32)"
    return Kernel(function, signature, dependent=dependent)


@recipe
def silu_kernel(exact: bool, dependent: bool = False) -> Kernel:
    """silu(gate_up, y, records, inner): f32 [2 * inner], gate first -> y and its records; inner a multiple of 32."""
    name, put = f"{int(exact)}{'_dependent' * dependent}", store_exact if exact else store
    function = expand(_silu, name, BLOCK=32 * _SILU_WARPS, DEPENDENT=dependent, put=put)
    return Kernel(function, "void(float32[::1], float32[::1], uint8[::1], int32)", dependent=dependent)


def silu_grid(inner: int) -> tuple[int, int]:
    """Blocks and threads of silu."""
    return -(-inner // (32 * _SILU_WARPS)), 32 * _SILU_WARPS


def rms(x: Any, weight: Any, eps: float) -> Any:
    """x f32 [..., n] / sqrt(mean(x^2) + eps) * weight, by torch."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt_() * weight
