"""ModelOpt's integers and compressed-tensors' MXFP8 for tests, one weight after another, as the formats define them."""

from __future__ import annotations

import math

import numpy as np
import torch

Arrays = dict[str, np.ndarray]


def int4_tensors(
    name: str, weight: np.ndarray, group_size: int = 128, multiplied: np.ndarray | None = None
) -> tuple[Arrays, np.ndarray]:
    """A module of 4-bit integers, and its weights; `multiplied`: what its input is multiplied by, [in]."""
    out, columns = weight.shape
    scales = np.zeros((out, columns // group_size), np.float32)
    packed = np.zeros((out // 2, columns), np.uint8)
    values = np.zeros((out, columns), np.float32)
    for row in range(out):
        for group in range(columns // group_size):
            run = slice(group * group_size, (group + 1) * group_size)
            scale = scales[row, group] = np.float32(np.abs(weight[row, run]).max() / 7)
            for k in range(run.start, run.stop):
                code = min(max(round(float(weight[row, k] / scale)), -8), 7)
                packed[row // 2, k] |= code % 16 << (4 if row % 2 else 0)
                values[row, k] = np.float32(code) * scale
    tensors = {f"{name}.weight": packed, f"{name}.weight_scale": scales}
    if multiplied is not None:
        tensors[f"{name}.pre_quant_scale"] = multiplied.astype(np.float32)
        values = values * multiplied.astype(np.float32)
    return tensors, values


def int8_tensors(name: str, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
    """A module of 8-bit integers, a scale a row, and its weights."""
    scales = (np.abs(weight).max(1) / 127).astype(np.float32)
    codes = np.clip(np.rint(weight / scales[:, None]), -128, 127).astype(np.int8)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales}, codes.astype(np.float32) * scales[:, None]


def mxfp8_tensors(name: str, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
    """A module of 8-bit floats with a byte of exponent for every 32, still U8 as numpy has them; its weights."""
    out, columns = weight.shape
    exponents = np.zeros((out, columns // 32), np.uint8)
    codes = np.zeros((out, columns), np.uint8)
    values = np.zeros((out, columns), np.float32)
    for row in range(out):
        for group in range(columns // 32):
            run = slice(32 * group, 32 * group + 32)
            exponent = math.floor(math.log2(np.abs(weight[row, run]).max())) - 8  # E4M3 ends at 448 = 1.75 * 2^8
            rounded = torch.from_numpy(np.ldexp(weight[row, run], -exponent)).to(torch.float8_e4m3fn)
            exponents[row, group] = exponent + 127
            codes[row, run] = rounded.view(torch.uint8).numpy()
            values[row, run] = np.ldexp(rounded.float().numpy(), exponent)
    return {f"{name}.weight": codes, f"{name}.weight_scale": exponents}, values
