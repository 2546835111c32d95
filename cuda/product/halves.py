"""What products of 9 and more tokens multiply, made in one launch: halves of at most 8, and what to multiply sums by.

    plain   x
    norm    x / sqrt(mean(x^2) + eps) * weight
    gate    gate / (1 + exp(-gate)) * up, from x that holds both, one after the other or column by column in turn; x
            may be sums of halves that are still to be multiplied by their token's scale

Halves end at 65504 and lose bits below 2^-14, so each token is scaled. A block of threads takes a token, a thread 8
values at a time. It goes through it twice, first for the largest magnitude, and the second time finds it in the L2
cache: 4 bytes (gate: 8) read and 2 written for a value. Torch's own steps, one after the other, take 26 (norm: 50,
gate: 54).
"""

import math
from typing import Any, NamedTuple

import numpy as np
from bridge.cuda.norm import rms
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.device import Device, view
from bridge.cuda.toolchain.intrinsics import SIMULATED, load_16f, or_, shl, store_16, to_half, warp_max, warp_sum
from bridge.cuda.toolchain.launch import Kernel
from bridge.cuda.toolchain.unroll import expand, gathered, registers, unroll
from numba import cuda

LARGEST = 8.0  # of a token's halves
_LEAST = 1e-30  # of the factors
_THREADS = 256

# set per kernel by `expand`
WARPS = THREADS = 0
NORM = GATE = IN_TURN = SCALED = False
four: Any = None
gated_value: Any = None

float32 = np.float32
int32: Any = np.int32


class Halves(NamedTuple):
    """Tokens as float16 [n, columns], to be multiplied by scale float32 [n]."""

    values: Any
    scale: Any


def _four(x, row, columns, i, factor):
    """Values i to i + 3 of a token whose numbers begin at `row`."""
    one = load_16f(x, row // 4 + (i // 2 if IN_TURN else i // 4))
    if not GATE:
        return one
    other = load_16f(x, row // 4 + (i // 2 + 1 if IN_TURN else (columns + i) // 4))
    gates = (one[0], one[2], other[0], other[2]) if IN_TURN else one
    ups = (one[1], one[3], other[1], other[3]) if IN_TURN else other
    value = registers()
    for k in unroll(4):
        value[k] = gated_value(gates[k] * factor, ups[k] * factor)
    return gathered(value, 4)


def _gated_value(gate, up):
    return gate / (float32(1) + math.exp(min(-gate, float32(80)))) * up


def _halve(x, weight, factors, values, scale, columns, eps):
    thread = int32(cuda.threadIdx.x)
    token = int32(cuda.blockIdx.x)
    row = token * columns * 2 if GATE else token * columns
    factor = factors[token] if SCALED else float32(1)
    most = float32(0)
    squares = float32(0)
    value = registers()
    word = registers()
    for i in range(8 * thread, columns, 8 * THREADS):
        for h in unroll(2):
            quad = four(x, row, columns, i + 4 * h, factor)
            for k in unroll(4):
                value[4 * h + k] = quad[k]
        for k in unroll(8):
            if NORM:
                squares += value[k] * value[k]
                value[k] *= weight[i + k]
            most = max(most, abs(value[k]))
    highest = cuda.shared.array(WARPS, np.float32)
    sums = cuda.shared.array(WARPS, np.float32)
    most = warp_max(most)
    squares = warp_sum(squares)
    if (thread & 31) == 0:
        highest[thread >> 5] = most
        sums[thread >> 5] = squares
    cuda.syncthreads()
    squares = float32(0)
    for i in range(WARPS):
        most = max(most, highest[i])
        squares += sums[i]
    inverse = float32(1)
    if NORM:
        inverse = float32(1) / math.sqrt(squares / float32(columns) + eps)
    step = max(most * inverse * float32(1 / LARGEST), float32(_LEAST))
    inverse /= step
    for i in range(8 * thread, columns, 8 * THREADS):
        for h in unroll(2):
            quad = four(x, row, columns, i + 4 * h, factor)
            for k in unroll(4):
                value[4 * h + k] = quad[k] * weight[i + 4 * h + k] if NORM else quad[k]
        for k in unroll(4):
            word[k] = or_(to_half(value[2 * k] * inverse), shl(to_half(value[2 * k + 1] * inverse), 16))
        store_16(values, (token * columns + i) // 8, gathered(word, 4))
    if thread == 0:
        scale[token] = step


@recipe
def kernel(way: str, scaled: bool = False) -> Kernel:
    """The kernel halve(x, weight, factors, values, scale, columns, eps): "plain", "norm", "gate", or "gate_in_turn";
    where it is `scaled`, a token's x is multiplied by its factor."""
    from bridge.cuda.toolchain.intrinsics import device_function

    scope = {"GATE": way.startswith("gate"), "IN_TURN": way == "gate_in_turn", "NORM": way == "norm"}
    four = device_function(expand(_four, way, gated_value=device_function(_gated_value), **scope))
    function = expand(
        _halve, way + "_scaled" * scaled, four=four, THREADS=_THREADS, WARPS=_THREADS // 32, SCALED=scaled, **scope
    )
    signature = "void(float32[::1], float32[::1], float32[::1], int16[::1], float32[::1], int64, float32)"
    return Kernel(function, signature)


def halved(x: Any, device: Device) -> Halves:
    """x f32 [n, columns], contiguous; it is copied if it begins between 16 bytes, as a view into another tensor may."""
    return _launch("plain", x.clone() if x.data_ptr() % 16 else x, x.shape[1], device)


def normed(x: Any, weight: Any, eps: float, device: Device) -> Halves:
    """x f32 [n, columns] / sqrt(mean(x^2) + eps) * weight."""
    return _launch("norm", x, x.shape[1], device, weight, eps)


def gated(both: Any, in_turn: bool, device: Device, scale: Any = None) -> Halves:
    """silu(gate) * up of f32 [n, 2 * columns]: gate first, or `in_turn` (gate, up) for every column; `scale` f32 [n],
    by which `both` is still to be multiplied, or None."""
    return _launch("gate_in_turn" if in_turn else "gate", both, both.shape[1] // 2, device, factors=scale)


def _launch(
    way: str, x: Any, columns: int, device: Device, weight: Any = None, eps: float = 0.0, factors: Any = None
) -> Halves:
    import torch

    if SIMULATED:  # a thread of Python for each of a block, and for every token a block
        return by_torch(way, x if factors is None else x * factors[:, None], weight, eps)
    n = x.shape[0]
    halves = Halves(torch.empty((n, columns), dtype=torch.float16, device=x.device), torch.empty(n, device=x.device))
    inputs = (device.placeholder() if array is None else view(array) for array in (x.reshape(-1), weight, factors))
    arrays = *inputs, view(halves.values.reshape(-1)), view(halves.scale)
    kernel(way, factors is not None).launch(n, _THREADS, device.stream(), *arrays, columns, np.float32(eps))
    return halves


def floats_by_torch(way: str, x: Any, weight: Any = None, eps: float = 0.0) -> Any:
    """The values of a way, f32 [n, columns], by torch."""
    import torch

    if way == "norm":
        return rms(x, weight, eps)
    if way == "plain":
        return x
    gate, up = (x[:, ::2], x[:, 1::2]) if way == "gate_in_turn" else x.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def by_torch(way: str, x: Any, weight: Any = None, eps: float = 0.0) -> Halves:
    """The Halves of a way, by torch."""
    x = floats_by_torch(way, x, weight, eps)
    scale = (x.abs().amax(dim=1) / LARGEST).clamp_min(_LEAST)
    return Halves((x / scale[:, None]).half(), scale)
