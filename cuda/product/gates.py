"""Activation functions: what a network makes of gate and up, in kernels and by torch.

    silu      gate / (1 + exp(-gate)) * up
    gelu      gate / (1 + exp(-2 sqrt(2/pi) (gate + 0.044715 gate^3))) * up, its tanh form
    relu2     max(gate, 0)^2 * up
    clamped   g / (1 + exp(-1.702 g)) * (u + 1) of g = min(gate, 7) and u = up from -7 to 7, gpt-oss's
    limited_  min(silu(gate), l) * u, of u = up from -l to l; the name has the bits of l, see `limited`

A network without a gate bends what its first matrix gives, and up is 1. NaN stays NaN.
"""

import math
import re
from functools import cache
from typing import Any

import numpy as np
from bridge.cuda.toolchain.intrinsics import device_function
from bridge.cuda.toolchain.unroll import expand

from bridge.runtime.cpu.ops.decoder_ops import LIMIT, SLOPE

_CUBED, _STEEP = 0.044715, 1.5957691216  # of gelu

MOST = 0.0  # set by `function_of`
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


def _limited(gate, up):
    u = float32(MOST) if up > float32(MOST) else float32(-MOST) if up < float32(-MOST) else up
    g = gate / (float32(1) + math.exp(min(-gate, float32(80))))
    return (float32(MOST) if g > float32(MOST) else g) * u


_FUNCTIONS = {"silu": _silu, "gelu": _gelu, "relu2": _relu2, "clamped": _clamped}
_LIMITED = re.compile("limited_([0-9a-f]{8})")


def limited(activation: str, limit: float) -> str:
    """The name of an activation with a limit; 0: there is none."""
    return f"limited_{float32(limit).view(np.uint32):08x}" if limit else activation


def named_in(text: str) -> str | None:
    """The activation whose name is in a text."""
    name_with_limit = _LIMITED.search(text)
    return name_with_limit[0] if name_with_limit else next((name for name in _FUNCTIONS if name in text), None)


@cache
def function_of(name: str) -> Any:
    """What kernels call for an activation."""
    if (limit := _limit(name)) is not None:
        return device_function(expand(_limited, name.removeprefix("limited_"), MOST=limit))
    return device_function(_FUNCTIONS[name])


def _limit(name: str) -> float | None:
    """The limit in the name of an activation; None: it has none."""
    name_with_limit = _LIMITED.fullmatch(name)
    return None if name_with_limit is None else float(np.uint32(int(name_with_limit[1], 16)).view(float32))


def by_torch(name: str, gate: Any, up: Any = None) -> Any:
    """The same of torch's tensors; `up` None: there is none."""
    import torch

    if (limit := _limit(name)) is not None:
        return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
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
