"""Correctness of trellis codes on the device: layers of QTIP and EXL3 against their dequantized weights."""

from typing import Any

import numpy as np
import torch
from bridge.cuda.toolchain.device import require

from gpu_checks.products import Judge
from scripts.speed.bench_trellis import random_layer

SHAPE = (512, 768)
TOKENS = (1, 8, 20)  # 8 in a launch
BITS = (1, 2, 3, 4)
WAYS = ("1mad", "2mad", "3inst", "quantlut_sym", "mcg", "mul1")  # the last two, and 3inst's constants, are EXL3's
_LIMIT = 1e-5  # relative


def check(mode: str) -> dict[str, Any]:
    """Layers of all bit widths of a codebook."""
    judge, device = Judge(), require("cuda")
    for bits in BITS if mode != "quantlut_sym" else BITS[1:]:
        layer = random_layer(mode, bits, *SHAPE, scale=1 / 64)
        weights, moved = layer.dequantize().astype(np.float64), layer.to(device)
        for n in TOKENS:
            x = np.random.default_rng(n).standard_normal((n, layer.shape[1])).astype(np.float32)
            y = moved.matmul(torch.from_numpy(x).to(device.place))
            judge(f"{mode}, {bits} bits, {n} tokens", y, x @ weights.T, _LIMIT)
        half = torch.from_numpy(x).to(device.place).half()
        judge(f"{mode}, {bits} bits, float16", moved.matmul(half), x @ weights.T, 0.01)
    return {"wrong": judge.wrong, "notes": f"largest relative error {judge.worst:.1e}"}
