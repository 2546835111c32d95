"""Correctness of products on tensor cores: 9 to 64 tokens of halves, any number of int8, partial tiles, epilogues."""

from typing import Any

import numpy as np
import torch
from bridge.cuda.forms.matrix import DeviceMatrix
from bridge.cuda.product import mma, mma_int8
from bridge.cuda.product.halves import floats_by_torch
from bridge.cuda.product.token_records import recorded
from bridge.cuda.toolchain.device import require

from bridge.blocks.read import WRITTEN
from gpu_checks.products import EPILOGUES, Judge, random_matrix, rounded

SHAPES = [(3, 512), (129, 1280), (2050, 4096)]
SMALL_BLOCKS = [(131, 96)]  # added where a block has 32 columns
TOKENS = (9, 33, 64)
INT8 = (9, 24, 65, 200)  # tokens of int8
_LIMIT = 1e-4  # relative; 3e-4 for weights not rounded to halves
_ROUNDED = 2e-3  # where the last bit of a value may round to another code
_MADE = ("norm", "gate", "gate_in_turn")  # what x may go through before, see token_records.py


def check(type: str) -> dict[str, Any]:
    """Products of halves and of bfloat16, and sums of parts with every epilogue."""
    judge, device = Judge(), require("cuda")
    if device.capability < mma.OLDEST:
        return {"wrong": [], "notes": f"not for compute capability {device.capability}"}
    rng, device_name = np.random.default_rng(0), device.place

    def values(n: int, columns: int, kind: Any) -> tuple[Any, np.ndarray]:
        x = torch.from_numpy(rng.standard_normal((n, columns)).astype(np.float32)).to(device_name).to(kind)
        return x, x.double().cpu().numpy()

    for rows, columns in SHAPES + (SMALL_BLOCKS if WRITTEN[type].size == 32 else []):
        tensor, weights = random_matrix(type, rows, columns)
        matrix, halves = DeviceMatrix.upload(tensor, device), weights.astype(np.float16).astype(np.float64)
        for n in TOKENS:
            x, exact = values(n, columns, torch.float16)
            y = torch.full((n + 1, rows), float("nan"), device=device_name)
            mma.launch(matrix, x, y[:n], device.stream())
            what = f"{type} {rows}x{columns}, {n} tokens"
            judge(what, y[:n], exact @ halves.T, _LIMIT)
            if not bool(y[n].isnan().all()):
                judge.fail(f"{what}: written beyond the end")
    rows, columns = EPILOGUES
    tensor, weights = random_matrix(type, rows, columns)
    matrix, halves = DeviceMatrix.upload(tensor, device), weights.astype(np.float16).astype(np.float64)
    scale, bias, before = (torch.randn(shape, device=device_name) for shape in ((20,), (rows,), (20, rows)))
    x, exact = values(20, columns, torch.float16)
    ends = [end.double().cpu().numpy() for end in (scale, bias, before)]
    for parts in (1, 3):
        y = before.clone()
        shape = mma.MMAShape(8, parts)
        mma.launch(matrix, x, y, device.stream(), scale, True, bias, shape)
        wanted = exact @ halves.T * ends[0][:, None] + ends[1] + ends[2]
        judge(f"{type}, {parts} parts, scale, bias and sum", y, wanted, _LIMIT)
    x, exact = values(20, columns, torch.bfloat16)
    y = torch.full((20, rows), float("nan"), device=device_name)
    mma.launch(matrix, x, y, device.stream())
    bfloats = torch.from_numpy(weights).float().bfloat16().double().numpy()
    judge(f"{type} in bfloat16", y, exact @ bfloats.T, 8 * _LIMIT)
    x = torch.randn(33 * columns + 1, device=device_name)[1:].view(33, columns)  # begins between 8 bytes
    judge(f"{type}, a view of floats", tensor.to(device).matmul(x), x.double().cpu().numpy() @ weights.T, _ROUNDED)
    return {"wrong": judge.wrong, "notes": f"largest relative error {judge.worst:.1e}"}


def check_int8(type: str) -> dict[str, Any]:
    """Products of tokens of int8, made of floats, halves, norms and gates, and sums of parts with every epilogue."""
    judge, device = Judge(), require("cuda")
    if device.capability < mma_int8.OLDEST:
        return {"wrong": [], "notes": f"not for compute capability {device.capability}"}
    rng, device_name = np.random.default_rng(0), device.place

    def values(*shape: int) -> Any:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(device_name)

    for rows, columns in SHAPES + (SMALL_BLOCKS if WRITTEN[type].size == 32 else []):
        tensor, weights = random_matrix(type, rows, columns)
        matrix = DeviceMatrix.upload(tensor, device)
        for n in INT8:
            x, y = values(n, columns), torch.full((n + 1, rows), float("nan"), device=device_name)
            mma_int8.launch(matrix, recorded(x, mma_int8.tiles_of(n), device), y[:n], device.stream())
            what = f"{type} {rows}x{columns}, {n} tokens of int8"
            judge(what, y[:n], rounded(x.cpu().numpy(), "int8") @ weights.T, 1e-5)
            if not bool(y[n].isnan().all()):
                judge.fail(f"{what}: written beyond the end")
    rows, columns = EPILOGUES
    tensor, weights = random_matrix(type, rows, columns)
    matrix, weight = DeviceMatrix.upload(tensor, device), values(columns)
    for way, kind in (("plain", torch.float16), ("plain", torch.bfloat16), *((way, torch.float32) for way in _MADE)):
        x = values(20, columns * (2 if way.startswith("gate") else 1)).to(kind)
        more = (weight, 1e-5) if way == "norm" else ()
        y = torch.full((20, rows), float("nan"), device=device_name)
        mma_int8.launch(matrix, recorded(x, 3, device, way, *more), y, device.stream())
        exact = rounded(floats_by_torch(way, x, *more).float().cpu().numpy(), "int8")
        judge(f"{type}, {way}, {kind}", y, exact @ weights.T, 1e-5 if way == "plain" else _ROUNDED)
    bias, before, x = values(rows), values(20, rows), values(20, columns)
    product = rounded(x.cpu().numpy(), "int8") @ weights.T + (bias + before).double().cpu().numpy()
    for parts in (1, 3):
        y, shape = before.clone(), mma.MMAShape(8, parts)
        mma_int8.launch(matrix, recorded(x, 3, device), y, device.stream(), True, bias, shape)
        judge(f"{type}, {parts} parts of int8, bias and sum", y, product, 1e-5)
    return {"wrong": judge.wrong, "notes": f"largest relative error {judge.worst:.1e}"}
