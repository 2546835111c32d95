"""Correctness of products: all types against float64, with outputs poisoned before and guarded behind."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from bridge.cuda import bench
from bridge.cuda.forms import dequantize
from bridge.cuda.forms.matrix import DeviceMatrix
from bridge.cuda.product import matvec, matvec_shape
from bridge.cuda.product.activations import Records
from bridge.cuda.toolchain.device import require, view

from bridge.blocks.read import WRITTEN
from bridge.runtime import QuantTensor
from bridge.runtime.bench import random_tensor
from gpu_checks import runner

SHAPES = [(1, 256), (3, 512), (129, 1280), (1000, 2304), (2050, 4096)]
SMALL_BLOCKS = [(5, 32), (131, 96)]  # added where a block has 32 columns
EPILOGUES = (1000, 2304)
COLUMNS = range(1, 9)
THREADS, PRODUCTS = 8, 200  # products of each thread
ROWS_OF_CONFIGURATIONS = 71
TRIED = {"Q4_K": (1, 4), "Q6_K": (1, 4), "Q8_0": (1, 4), "Q4_0": (1,), "Q2_K": (1,), "Q3_K": (1,), "Q5_K": (1,),
         "Q4_1": (1,)}  # columns, with all configurations  # fmt: skip


def difference(one: Any, other: Any) -> float:
    """|one - other| / |other|."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def rounded(x: np.ndarray, precision: str) -> np.ndarray:
    """x in float64 as the records store it: int8 in steps that map the largest of 32 values to -128."""
    if precision == "f32":
        return x.astype(np.float64)
    blocks = x.reshape(-1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    sign = np.where((blocks == largest).any(-1, keepdims=True), np.float32(-1), np.float32(1))
    codes = np.rint(np.minimum(blocks * (np.float32(128) * sign / largest), np.float32(127)))
    steps = (largest * np.float32(1 / 128) * sign).astype(np.float64)
    return (codes * steps).reshape(x.shape)


class Judge:
    """Collects wrong results, and the largest error of those that are right to float32."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.worst = 0.0

    def __call__(self, what: str, result: Any, expected: np.ndarray, limit: float) -> None:
        """Check that `result`, a torch tensor, is the expected one up to a relative error."""
        error = difference(result.double().cpu().numpy(), expected)
        if limit <= 1e-4:  # halves aside
            self.worst = max(self.worst, error)
        if error < limit:  # NaN is wrong too
            runner.case()
        else:
            self.fail(f"{what}: error {error:.2e}")

    def fail(self, wrong: str) -> None:
        """Note a wrong case."""
        self.wrong.append(wrong)
        runner.case(wrong)


def check(type: str, precision: str) -> dict[str, Any]:
    """Products of 1 to 8 columns, epilogues, and the weights as floats."""
    judge, device = Judge(), require("cuda")
    for shape in SHAPES + (SMALL_BLOCKS if WRITTEN[type].size == 32 else []):
        _products(judge, type, precision, shape, device)
    _epilogues(judge, type, precision, device)
    _silu(judge, type, precision, device)
    _floats(judge, type, device)
    return {"wrong": judge.wrong, "notes": f"largest relative error {judge.worst:.1e}"}


def _products(judge: Judge, type: str, precision: str, shape: tuple[int, int], device: Any) -> None:
    rng = np.random.default_rng(0)
    rows, columns = shape
    device_name = device.place
    matrix, weights = random_matrix(type, rows, columns)
    uploaded = DeviceMatrix.upload(matrix, device)
    for n in COLUMNS:
        x = rng.standard_normal((n, columns)).astype(np.float32)
        records = Records(columns, n, device, precision)
        records.quantize(torch.from_numpy(x).to(device_name), n, device.stream())
        y = torch.full((n + 1, rows), float("nan"), device=device_name)
        matvec.launch(uploaded, records, view(y[:n]), n, device.stream())
        what = f"{type} {rows}x{columns}, {n} columns, {precision}"
        exact = rounded(x, precision)
        expected = exact @ weights.T
        # a sum of one row may cancel: what counts is its error beside the size of what is added
        added = np.sqrt(exact**2 @ (weights**2).T)
        judge(what, y[:n], expected, 1e-5 * max(1.0, float(np.linalg.norm(added) / np.linalg.norm(expected))))
        if not bool(y[n].isnan().all()):
            judge.fail(f"{what}: written beyond the end")


def _epilogues(judge: Judge, type: str, precision: str, device: Any) -> None:
    """y += W x + bias, for x of all three types."""
    rng = np.random.default_rng(1)
    rows, columns = EPILOGUES
    device_name = device.place
    matrix, weights = random_matrix(type, rows, columns)
    uploaded = DeviceMatrix.upload(matrix, device)
    bias, before = (torch.randn(shape, device=device_name) for shape in ((rows,), (1, rows)))
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.from_numpy(rng.standard_normal((1, columns)).astype(np.float32)).to(device_name).to(kind)
        records = Records(columns, 1, device, precision).quantize(x, 1, device.stream())
        y = before.clone()
        matvec.launch(uploaded, records, view(y), 1, device.stream(), accumulate=True, bias=view(bias))
        product = rounded(x.float().cpu().numpy(), precision) @ weights.T
        judge(f"{type} {kind} in, bias and sum", y, product + (bias + before).double().cpu().numpy(), 1e-5)


def _silu(judge: Judge, type: str, precision: str, device: Any) -> None:
    """silu(gate x) * (up x), both matrices the same."""
    rows, columns = EPILOGUES
    device_name = device.place
    matrix, weights = random_matrix(type, rows, columns)
    pair = DeviceMatrix.upload([matrix, random_matrix(type, rows, columns)[0]], device, interleave=True)
    x = np.random.default_rng(2).standard_normal((1, columns)).astype(np.float32)
    x *= np.float32(3 / np.abs(x @ weights.T).max())  # so that silu is neither 0 nor the identity
    records = Records(columns, 1, device, precision)
    records.quantize(torch.from_numpy(x).to(device_name), 1, device.stream())
    y = torch.full((1, rows), float("nan"), device=device_name)
    matvec.launch_activated(pair, records, view(y), 1, device.stream())
    product = rounded(x, precision) @ weights.T
    judge(f"{type} silu", y, product / (1 + np.exp(-product)) * product, 1e-4)


def _floats(judge: Judge, type: str, device: Any) -> None:
    """A tile of the weights in all three types, and rows of them."""
    rows, columns = EPILOGUES
    device_name = device.place
    matrix, weights = random_matrix(type, rows, columns)
    uploaded = DeviceMatrix.upload(matrix, device)
    first, count = rows * 3 // 10, rows // 2
    for kind, limit in ((torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)):
        out = torch.full((count, columns), float("nan"), dtype=kind, device=device_name)
        dequantize.tile(uploaded, first, count, out, device.stream())
        judge(f"{type} tile in {kind}", out, weights[first : first + count], limit)
    ids = torch.tensor([rows - 1, 0, rows // 2], dtype=torch.int32, device=device_name)
    out = torch.full((3, columns), float("nan"), device=device_name)
    dequantize.rows(uploaded, view(ids), view(out), 3, device.stream())
    judge(f"{type} rows", out, weights[ids.cpu().numpy()], 1e-6)


def check_tensors() -> dict[str, Any]:
    """QuantTensor.to with floats and codes: few and many tokens, also beyond the range of halves."""
    judge, device = Judge(), require("cuda")
    rows, columns = EPILOGUES
    values = torch.from_numpy(np.random.default_rng(4).standard_normal((rows, columns)).astype(np.float32))
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    tensors = [QuantTensor(t, t, (rows, columns), values.to(k).view(torch.uint8).numpy()) for t, k in kinds.items()]
    for tensor in (*tensors, random_matrix("Q4_K", rows, columns)[0]):
        moved, weights = tensor.to(device), tensor.dequantize().astype(np.float64)
        for n in (1, 20):
            x = 1e5 * np.random.default_rng(n).standard_normal((n, columns)).astype(np.float32)
            for precision, limit in (("f32", 1e-5), ("int8", 0.02)):
                for factor in (1, -2):  # the second time, launches are those of the first with other addresses
                    y = moved.matmul(torch.from_numpy(factor * x).to(device.place), precision=precision)
                    judge(f"{tensor.type} on the device, {n} columns, {precision}", y, factor * x @ weights.T, limit)
    return {"wrong": judge.wrong, "notes": f"largest relative error of floats {judge.worst:.1e}"}


def check_one() -> dict[str, Any]:
    """One product of one tensor."""
    tensor, weights = random_matrix("Q4_0", 8, 64)
    x, judge = np.arange(64, dtype=np.float32), Judge()
    y = tensor.to("cuda").matvec(torch.from_numpy(x).to(require("cuda").place), precision="f32")
    judge("one product", y, weights @ x, 1e-5)
    return {"wrong": judge.wrong, "notes": f"relative error {judge.worst:.1e}"}


def check_threads() -> dict[str, Any]:
    """Products with one tensor in many threads at once, of which each second one has a stream of its own."""
    judge, device = Judge(), require("cuda")
    tensor, weights = random_matrix("Q4_K", *EPILOGUES)
    moved, device_name = copy.deepcopy(tensor.to(device)), device.place

    def multiply(number: int) -> list[tuple[Any, np.ndarray]]:
        rng = np.random.default_rng(number)
        stream = torch.cuda.Stream() if number % 2 else torch.cuda.current_stream()
        pairs = []
        with torch.cuda.stream(stream):
            for _ in range(PRODUCTS):
                x = rng.standard_normal(EPILOGUES[1]).astype(np.float32)
                pairs.append((moved.matvec(torch.from_numpy(x).to(device_name), precision="f32").cpu(), weights @ x))
        return pairs

    with ThreadPoolExecutor(THREADS) as pool:
        for number, products in enumerate(pool.map(multiply, range(THREADS))):
            for y, expected in products:
                judge(f"thread {number}", y, expected, 1e-5)
    return {"wrong": judge.wrong, "notes": f"largest relative error {judge.worst:.1e}"}


def check_configurations(type: str) -> dict[str, Any]:
    """Every configuration that is timed later computes the right product; this compiles them too."""
    device = require("cuda")
    device_name = device.place
    rows, columns = ROWS_OF_CONFIGURATIONS, bench.LARGE[1]
    matrix, weights = random_matrix(type, rows, columns)
    uploaded = DeviceMatrix.upload(matrix, device)
    judge = Judge()
    for n in TRIED[type]:
        x = np.random.default_rng(3).standard_normal((n, columns)).astype(np.float32)
        records = Records(columns, n, device).quantize(torch.from_numpy(x).to(device_name), n, device.stream())
        expected = rounded(x, "int8") @ weights.T
        for shape in matvec_shape.shapes_to_try(uploaded, n):
            y = torch.full((n, rows), float("nan"), device=device_name)
            matvec.launch(uploaded, records, view(y), n, device.stream(), shape=shape)
            judge(f"{type}, {n} columns, {shape}", y, expected, 1e-5)
    return {"wrong": judge.wrong, "notes": f"largest relative error {judge.worst:.1e}"}


def random_matrix(type: str, rows: int, columns: int) -> tuple[Any, np.ndarray]:
    """A tensor of random codes and its weights in float64."""
    tensor = random_tensor(type, rows, columns)
    if type == "NVFP4":
        tensor.factors = np.array([0.7], np.float32)
    return tensor, tensor.dequantize().astype(np.float64)
