"""The steps between a decoder's products besides attention: RMS normalization and activations, each with records.

    norm          y = x / sqrt(mean(x^2) + eps) * weight        one block of threads for a token
    activation    y = of gate and up, or of gate: gates.py      a warp for 32 values

Both write y as floats and as records of 32 values (activations.py): the next product reads the records, and no extra
launch has to make them.
"""

import math
from typing import Any

import numpy as np
from bridge.cuda.product.activations import Records, store, store_exact
from bridge.cuda.product.gates import function_of
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.device import view
from bridge.cuda.toolchain.intrinsics import device_function, launch_dependents, launches_wait, warp_sum
from bridge.cuda.toolchain.launch import Kernel
from bridge.cuda.toolchain.unroll import expand, unroll
from numba import cuda

# set per kernel by `expand`
HIDDEN = BLOCK = WARPS = ROUNDS = 0
DEPENDENT = GATED = ADDED = POST = CENTERED = WEIGHTED = BIASED = False
block_sum: Any = None
activate: Any = None
put: Any = None

float32 = np.float32
int32: Any = np.int32
_WARPS = 4  # of an activation's block


def norm_threads(hidden: int) -> int:
    """Threads of norm's block: one per value, at most 1024."""
    return min(1024, -(-hidden // 32) * 32)


def _block_sum(value, part):
    """The sum of a block's values, in all its threads; part: f32 [32] in shared memory."""
    thread = int32(cuda.threadIdx.x)
    value = warp_sum(value)
    cuda.syncthreads()  # what was summed before has been read
    if thread & 31 == 0:
        part[thread >> 5] = value
    cuda.syncthreads()
    value = part[thread & 31] if thread & 31 < WARPS else float32(0)
    total = warp_sum(value)  # not returned at once: Python 3.12 would put a call and a return into both branches above
    return total


def _norm(x, added, post, weight, bias, y, records, eps, post_eps, share):
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    thread = int32(cuda.threadIdx.x)
    token = int32(cuda.blockIdx.x)
    row = int32(token * HIDDEN)
    part = cuda.shared.array(32, float32)
    inverse = float32(1)
    mean = float32(0)
    if ADDED:
        if POST:
            squares = float32(0)
            for r in unroll(ROUNDS):
                i = r * BLOCK + thread
                if i < HIDDEN:
                    squares += added[row + i] * added[row + i]
            share /= math.sqrt(block_sum(squares, part) / float32(HIDDEN) + post_eps)
        for r in unroll(ROUNDS):
            i = r * BLOCK + thread
            if i < HIDDEN:
                value = share * added[row + i]
                if POST:
                    value *= post[i]
                x[row + i] += value
    if CENTERED:
        total = float32(0)
        for r in unroll(ROUNDS):
            i = r * BLOCK + thread
            if i < HIDDEN:
                total += x[row + i]
        mean = block_sum(total, part) / float32(HIDDEN)
    if WEIGHTED:
        squares = float32(0)
        for r in unroll(ROUNDS):
            i = r * BLOCK + thread
            if i < HIDDEN:
                squares += (x[row + i] - mean) * (x[row + i] - mean)
        inverse = float32(1) / math.sqrt(block_sum(squares, part) / float32(HIDDEN) + eps)
    else:
        cuda.syncthreads()
    for r in range(ROUNDS):
        i = min(r * BLOCK + (thread & -32), HIDDEN - 32) + (thread & 31)  # warps beyond the end do the last block again
        value = x[row + i]
        if WEIGHTED:
            value = (value - mean) * inverse * weight[i]
        if BIASED:
            value += bias[i]
        y[row + i] = value
        put(value, i >> 5, token, records)


def _activation(gate_up, y, records, inner):
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    thread = int32(cuda.threadIdx.x)
    i = min(int32(cuda.blockIdx.x) * BLOCK + (thread & -32), inner - 32) + (thread & 31)
    value = activate(gate_up[i], gate_up[inner + i] if GATED else float32(1))
    y[i] = value
    put(value, i >> 5, 0, records)


@recipe
def norm_kernel(
    hidden: int, exact: bool, dependent: bool = False, added: str = "", centered: bool = False, weighted: bool = True,
    biased: bool = False,
) -> Kernel:  # fmt: skip
    """norm(x, added, post, weight, bias, y, records, eps, post_eps, share): x f32 [n * hidden], changed -> y and its
    records.

    added  "": nothing is added to x; "as it is": share * added is, or "normed": share * rms(added) * post

    A block for each of up to 8 tokens; hidden a multiple of 32.
    """
    block = norm_threads(hidden)
    name = f"{hidden}_{int(exact)}{int(centered)}{int(weighted)}{int(biased)}_{added.replace(' ', '_')}"
    scope = {"HIDDEN": hidden, "BLOCK": block, "WARPS": block // 32, "ROUNDS": -(-hidden // block)}
    function = expand(
        _norm, f"{name}{'_dependent' * dependent}", **scope, ADDED=bool(added), POST=added == "normed",
        CENTERED=centered, WEIGHTED=weighted, BIASED=biased, DEPENDENT=dependent,
        block_sum=device_function(expand(_block_sum, str(block), WARPS=block // 32)),
        put=store_exact if exact else store,
    )  # fmt: skip
    arrays = ", ".join(["float32[::1]"] * 6)
    return Kernel(function, f"void({arrays}, uint8[::1], float32, float32, float32)", dependent=dependent)


def norm(
    x: Any, y: Any, records: Records, eps: float, weight: Any, bias: Any = None, added: Any = None, post: Any = None,
    post_eps: float = 0.0, share: float = 1.0, centered: bool = False, dependent: bool = False,
) -> None:  # fmt: skip
    """Queue y = x / sqrt(mean(x^2) + eps) * weight + bias with records, after x += share * added.

    x, y and what is added are f32 [n, hidden] of torch, the others [hidden]. Without a weight y is x; with `post`, what
    is added is normalized too, with `post_eps`; `centered`: means are subtracted first, of x alone.
    """
    (n, hidden), device = x.shape, records.device
    how = "" if added is None else "as it is" if post is None else "normed"
    kernel = norm_kernel(hidden, records.exact, dependent, how, centered, weight is not None, bias is not None)
    given = x, added, post, weight, bias, y
    arrays = [device.placeholder() if array is None else view(array).reshape(-1) for array in given]
    numbers = np.float32(eps), np.float32(post_eps), np.float32(share)
    kernel.launch(n, norm_threads(hidden), device.stream(), *arrays, records.buffer, *numbers)


@recipe
def activation_kernel(exact: bool, dependent: bool = False, activation: str = "silu", gated: bool = True) -> Kernel:
    """activation(gate_up, y, records, inner): f32 [2 * inner], gate first, or [inner] where it is not `gated` -> y and
    its records; inner a multiple of 32."""
    name = f"{activation}_{int(exact)}{'_ungated' * (not gated)}{'_dependent' * dependent}"
    function = expand(
        _activation, name, BLOCK=32 * _WARPS, DEPENDENT=dependent, GATED=gated, activate=function_of(activation),
        put=store_exact if exact else store,
    )  # fmt: skip
    return Kernel(function, "void(float32[::1], float32[::1], uint8[::1], int32)", dependent=dependent)


def activation_grid(inner: int) -> tuple[int, int]:
    """Blocks and threads of an activation."""
    return -(-inner // (32 * _WARPS)), 32 * _WARPS


def rms(x: Any, weight: Any, eps: float) -> Any:
    """x f32 [..., n] / sqrt(mean(x^2) + eps) * weight, by torch."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt_() * weight


def cap(scores: Any, most: float) -> Any:
    """most * tanh(scores / most) in place, by torch; as they are where `most` is 0."""
    return scores.div_(most).tanh_().mul_(most) if most else scores
