"""What products of 9 and more tokens multiply, made in one launch: halves of at most 8, and what to multiply sums by.

    plain   x
    norm    x / sqrt(mean(x^2) + eps) * weight
    gate    what an activation of gates.py makes of gate and up, from x that holds both, one after the other or column
            by column in turn, or gate alone; x may be sums of halves that are still to be multiplied by their token's
            scale

Halves end at 65504 and lose bits below 2^-14, so each token is scaled. A block of threads takes a token, a thread 8
values at a time. It goes through it twice, first for the largest magnitude, and the second time finds it in the L2
cache: 4 bytes (gate: 8) read and 2 written for a value. Torch's own steps, one after the other, take 26 (norm: 50,
gate: 54).
"""

import math
from typing import Any, NamedTuple

import numpy as np
from bridge.cuda.norm import rms
from bridge.cuda.product import gates
from bridge.cuda.product.gates import function_of
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.device import Device, view
from bridge.cuda.toolchain.intrinsics import load_16f, or_, shl, store_16, to_half, warp_max, warp_sum
from bridge.cuda.toolchain.launch import Kernel
from bridge.cuda.toolchain.unroll import expand, gathered, registers, unroll
from numba import cuda

LARGEST = 8.0  # of a token's halves
_LEAST = 1e-30  # of the factors
_THREADS = 256

# set per kernel by `expand`
WARPS = THREADS = 0
NORM = GATE = IN_TURN = ALONE = SCALED = False
four: Any = None
activate: Any = None

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
    value = registers()
    if ALONE:
        for k in unroll(4):
            value[k] = activate(one[k] * factor, float32(1))
        return gathered(value, 4)
    other = load_16f(x, row // 4 + (i // 2 + 1 if IN_TURN else (columns + i) // 4))
    gates = (one[0], one[2], other[0], other[2]) if IN_TURN else one
    ups = (one[1], one[3], other[1], other[3]) if IN_TURN else other
    for k in unroll(4):
        value[k] = activate(gates[k] * factor, ups[k] * factor)
    return gathered(value, 4)


def _halve(x, weight, factors, values, scale, columns, eps):
    thread = int32(cuda.threadIdx.x)
    token = int32(cuda.blockIdx.x)
    row = token * columns * 2 if GATE and not ALONE else token * columns
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
def kernel(way: str, scaled: bool = False, activation: str = "silu") -> Kernel:
    """The kernel halve(x, weight, factors, values, scale, columns, eps): "plain", "norm", "gate", "gate_in_turn" or
    "gate_alone", with an activation of gates.py; where it is `scaled`, a token's x is multiplied by its factor."""
    from bridge.cuda.toolchain.intrinsics import device_function

    gate = way.startswith("gate")
    scope = {"GATE": gate, "IN_TURN": way == "gate_in_turn", "ALONE": way == "gate_alone", "NORM": way == "norm"}
    name = way + f"_{activation}" * gate
    four = device_function(expand(_four, name, activate=function_of(activation), **scope))
    function = expand(
        _halve, name + "_scaled" * scaled, four=four, THREADS=_THREADS, WARPS=_THREADS // 32, SCALED=scaled, **scope
    )
    signature = "void(float32[::1], float32[::1], float32[::1], int16[::1], float32[::1], int64, float32)"
    return Kernel(function, signature)


def halved(x: Any, device: Device) -> Halves:
    """x f32 [n, columns], contiguous; it is copied if it begins between 16 bytes, as a view into another tensor may."""
    return _launch("plain", x.clone() if x.data_ptr() % 16 else x, x.shape[1], device)


def normed(x: Any, weight: Any, eps: float, device: Device) -> Halves:
    """x f32 [n, columns] / sqrt(mean(x^2) + eps) * weight."""
    return _launch("norm", x, x.shape[1], device, weight, eps)


def gated(x: Any, way: str, device: Device, scale: Any = None, activation: str = "silu") -> Halves:
    """The activation of gate and up, f32 [n, 2 * columns]: one after the other (way "gate") or in turn for every column
    ("gate_in_turn"); or of f32 [n, columns] ("gate_alone"). `scale` f32 [n], by which x is still to be multiplied, or
    None."""
    columns = x.shape[1] // (1 if way == "gate_alone" else 2)
    return _launch(way, x, columns, device, factors=scale, activation=activation)


def _launch(
    way: str, x: Any, columns: int, device: Device, weight: Any = None, eps: float = 0.0, factors: Any = None,
    activation: str = "silu",
) -> Halves:  # fmt: skip
    import torch

    n = x.shape[0]
    halves = Halves(torch.empty((n, columns), dtype=torch.float16, device=x.device), torch.empty(n, device=x.device))
    inputs = (device.placeholder() if array is None else view(array) for array in (x.reshape(-1), weight, factors))
    arrays = *inputs, view(halves.values.reshape(-1)), view(halves.scale)
    halve = kernel(way, factors is not None, activation)
    halve.launch(n, _THREADS, device.stream(), *arrays, columns, np.float32(eps))
    return halves


def floats_by_torch(way: str, x: Any, weight: Any = None, eps: float = 0.0, activation: str = "silu") -> Any:
    """The values of a way, f32 [n, columns], by torch."""
    if way == "norm":
        return rms(x, weight, eps)
    if way == "plain":
        return x
    if way == "gate_alone":
        return gates.by_torch(activation, x)
    return gates.by_torch(activation, *((x[:, ::2], x[:, 1::2]) if way == "gate_in_turn" else x.chunk(2, dim=1)))


def by_torch(x: Any) -> Halves:
    """x [n, columns] of any float type, by torch."""
    x = x.float()
    scale = (x.abs().amax(dim=1) / LARGEST).clamp_min(_LEAST)
    return Halves((x / scale[:, None]).half(), scale)
