"""Correctness of products on tensor cores: 9 to 64 tokens, partial tiles, all epilogues."""

from typing import Any

import numpy as np
import torch
from bridge.cuda import mma
from bridge.cuda.device import require, torch_device
from bridge.cuda.matrix import DeviceMatrix

from bridge.blocks.read import WRITTEN
from gpu_checks.products import EPILOGUES, Judge, random_matrix

SHAPES = [(3, 512), (129, 1280), (2050, 4096)]
SMALL_BLOCKS = [(131, 96)]  # added where a block has 32 columns
TOKENS = (9, 33, 64)
_LIMIT = 1e-4  # relative; 3e-4 for weights not rounded to halves


def check(type: str) -> dict[str, Any]:
    """Products of halves and of bfloat16, and sums of parts with every epilogue."""
    judge, device = Judge(), require("cuda")
    if device.capability < mma.OLDEST:
        return {"wrong": [], "notes": f"not for compute capability {device.capability}"}
    rng, place = np.random.default_rng(0), torch_device(device)

    def values(n: int, columns: int, kind: Any) -> tuple[Any, np.ndarray]:
        x = torch.from_numpy(rng.standard_normal((n, columns)).astype(np.float32)).to(place).to(kind)
        return x, x.double().cpu().numpy()

    for rows, columns in SHAPES + (SMALL_BLOCKS if WRITTEN[type].size == 32 else []):
        tensor, weights = random_matrix(type, rows, columns)
        matrix, halves = DeviceMatrix.upload(tensor, device), weights.astype(np.float16).astype(np.float64)
        for n in TOKENS:
            x, exact = values(n, columns, torch.float16)
            y = torch.full((n + 1, rows), float("nan"), device=place)
            mma.launch(matrix, x, y[:n], device.stream())
            what = f"{type} {rows}x{columns}, {n} tokens"
            judge(what, y[:n], exact @ halves.T, _LIMIT)
            if not bool(y[n].isnan().all()):
                judge.wrong.append(f"{what}: written beyond the end")
    rows, columns = EPILOGUES
    tensor, weights = random_matrix(type, rows, columns)
    matrix, halves = DeviceMatrix.upload(tensor, device), weights.astype(np.float16).astype(np.float64)
    scale, bias, before = (torch.randn(shape, device=place) for shape in ((20,), (rows,), (20, rows)))
    x, exact = values(20, columns, torch.float16)
    ends = [end.double().cpu().numpy() for end in (scale, bias, before)]
    for parts in (1, 3):
        y = before.clone()
        shape = mma.MMAShape(8, parts)
        mma.launch(matrix, x, y, device.stream(), scale, True, bias, shape)
        wanted = exact @ halves.T * ends[0][:, None] + ends[1] + ends[2]
        judge(f"{type}, {parts} parts, scale, bias and sum", y, wanted, _LIMIT)
    x, exact = values(20, columns, torch.bfloat16)
    y = torch.full((20, rows), float("nan"), device=place)
    mma.launch(matrix, x, y, device.stream())
    rounded = torch.from_numpy(weights).float().bfloat16().double().numpy()
    judge(f"{type} in bfloat16", y, exact @ rounded.T, 8 * _LIMIT)
    return {"wrong": judge.wrong, "notes": f"largest relative error {judge.worst:.1e}"}
