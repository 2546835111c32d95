"""Activation functions: what a network makes of gate and up, in kernels and by torch.

    silu      gate / (1 + exp(-gate)) * up
    gelu      gate / (1 + exp(-2 sqrt(2/pi) (gate + 0.044715 gate^3))) * up, its tanh form
    relu2     max(gate, 0)^2 * up
    clamped   g / (1 + exp(-1.702 g)) * (u + 1) of g = min(gate, 7) and u = up from -7 to 7, gpt-oss's

A network without a gate bends what its first matrix gives, and up is 1. NaN stays NaN.
"""

import math
from typing import Any

import numpy as np
from bridge.cuda.toolchain.intrinsics import device_function

from bridge.runtime.cpu.ops.decoder_ops import LIMIT, SLOPE

_CUBED, _STEEP = 0.044715, 1.5957691216  # of gelu

float32 = np.float32


def _sigmoid(x):
    return float32(1) / (float32(1) + math.exp(min(-x, float32(80))))


sigmoid = device_function(_sigmoid)


def _silu(gate, up):
    return gate / (float32(1) + math.exp(min(-gate, float32(80)))) * up


def _gelu(gate, up):
    bent = gate * (float32(1) + float32(_CUBED) * gate * gate)
    return gate / (float32(1) + math.exp(min(float32(-_STEEP) * bent, float32(80)))) * up


def _relu2(gate, up):
    positive = float32(0) if gate < float32(0) else gate
    return positive * positive * up


def _clamped(gate, up):
    g = float32(LIMIT) if gate > float32(LIMIT) else gate
    u = float32(LIMIT) if up > float32(LIMIT) else float32(-LIMIT) if up < float32(-LIMIT) else up
    return g / (float32(1) + math.exp(min(float32(-SLOPE) * g, float32(80)))) * (u + float32(1))


ACTIVATIONS = {
    name: device_function(function)
    for name, function in (("silu", _silu), ("gelu", _gelu), ("relu2", _relu2), ("clamped", _clamped))
}


def by_torch(name: str, gate: Any, up: Any = None) -> Any:
    """The same of torch's tensors; `up` None: there is none."""
    import torch

    if name == "clamped":
        gate, up = gate.clamp(max=float(LIMIT)), up.clamp(float(-LIMIT), float(LIMIT)) + 1
        return gate * torch.sigmoid(float(SLOPE) * gate) * up
    if name == "relu2":
        bent = gate.clamp(min=0).square()
    elif name == "gelu":
        bent = torch.nn.functional.gelu(gate, approximate="tanh")
    else:
        bent = torch.nn.functional.silu(gate)
    return bent if up is None else bent * up
