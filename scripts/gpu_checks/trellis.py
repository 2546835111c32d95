"""Correctness of trellis codes on the device: layers of QTIP and EXL3 against their dequantized weights."""

from typing import Any

import numpy as np
import torch
from bridge.cuda.toolchain.device import require, torch_device

from bridge.trellis import BitshiftCodebook
from bridge.trellis.packed import exl3_layer, qtip_layer
from gpu_checks.products import Judge

SHAPE = (512, 768)
TOKENS = (1, 8, 20)  # 8 in a launch
BITS = (1, 2, 3, 4)
WAYS = ("1mad", "2mad", "3inst", "quantlut_sym", "mcg", "mul1")  # the last two, and 3inst's constants, are EXL3's
_LIMIT = 1e-5  # relative


def check(mode: str) -> dict[str, Any]:
    """All bit widths of a codebook. Codes are random: every sequence of bits is a path through the trellis."""
    judge, device = Judge(), require("cuda")
    for bits in BITS if mode != "quantlut_sym" else BITS[1:]:
        layer = random_layer(mode, bits)
        weights, moved = layer.dequantize().astype(np.float64), layer.to(device)
        for n in TOKENS:
            x = np.random.default_rng(n).standard_normal((n, layer.shape[1])).astype(np.float32)
            y = moved.matmul(torch.from_numpy(x).to(torch_device(device)))
            judge(f"{mode}, {bits} bits, {n} tokens", y, x @ weights.T, _LIMIT)
        half = torch.from_numpy(x).to(torch_device(device)).half()
        judge(f"{mode}, {bits} bits, float16", moved.matmul(half), x @ weights.T, 0.01)
    return {"wrong": judge.wrong, "notes": f"largest relative error {judge.worst:.1e}"}


def random_layer(mode: str, bits: int) -> Any:
    """A layer of EXL3 for its own modes, otherwise of QTIP."""
    rng = np.random.default_rng(bits)
    out, columns = SHAPE
    su, sv = (rng.choice([-1.0, 1.0], n).astype(np.float32) for n in (columns, out))
    pair = mode == "quantlut_sym"
    table = rng.standard_normal((512, 2)).astype(np.float16).astype(np.float32) if pair else None
    book = BitshiftCodebook(16, bits, 1 + pair, 9 * pair, mode, table, name=mode)
    words = rng.integers(-(1 << 15), 1 << 15, out * columns * bits // 16).astype(np.int16)
    if mode in ("mcg", "mul1"):
        return exl3_layer(mode, words.reshape(columns // 16, out // 16, 16 * bits), book, su, sv / np.float32(64))
    return qtip_layer(mode, words, book, (16, 16), su, sv / np.float32(64))
