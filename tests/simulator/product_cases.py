"""Products on CUDA in the simulator, against float64; tests/cuda/test_simulator.py runs this file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bridge.cuda import bench
from bridge.cuda.forms import dequantize
from bridge.cuda.forms.matrix import DeviceMatrix
from bridge.cuda.product import activations, halves, matmul, matvec, matvec_kernel, mma, mma_int8, products
from bridge.cuda.product.activations import Records
from bridge.cuda.product.matvec_shape import MatvecShape
from bridge.cuda.product.token_records import recorded
from bridge.cuda.toolchain import device as devices
from bridge.cuda.toolchain.intrinsics import (
    SIMULATED,
    bits,
    bits_float,
    copies_end,
    copies_wait,
    copy_16,
    dp2a,
    dp4a,
    float_bits,
    fma,
    high_half,
    low_half,
    mad,
    mma_bf16,
    mma_f16,
    mma_s8,
    mma_s8_short,
    or_,
    pack_bf16,
    pack_f16,
    prmt,
    ror,
    round_even,
    shared_16,
    shl,
    signed_byte,
    sub,
    thread_x,
    to_half,
    xor,
)
from bridge.cuda.toolchain.launch import Kernel
from numba import cuda

from bridge.blocks import TYPES
from bridge.errors import BridgeError
from bridge.runtime import QuantTensor
from tests.support.random_blocks import ALL, FACTOR, assert_product, random_matrix, round32, rounded
from tests.support.simulator import on_host

pytestmark = pytest.mark.proof
# cases that compiled kernels are spared: tests/cuda/test_products.py has them run the same products
on_request = [] if SIMULATED else [pytest.mark.exhaustive]
SMALL = MatvecShape(2, 1, 1, 1 if SIMULATED else 4)  # a thread of Python for each of a block


made: dict[tuple[bytes, str], Records] = {}  # of x that many products have


def product(matrix: DeviceMatrix, x: np.ndarray, precision: str = "int8", **options) -> np.ndarray:
    y = np.full((len(x), matrix.rows), np.nan, np.float32)
    key = x.tobytes(), precision
    if not SIMULATED or key not in made:
        made[key] = Records(matrix.columns, len(x), "cuda", precision).quantize(x, len(x))
    records = made[key]
    matvec.launch(matrix, records, y, len(x), 0, **{"shape": SMALL} | options)
    return y


if SIMULATED:  # whose threads tests/support/simulator_threads.py sees to

    def _neighbours(a, barrier):
        i = cuda.threadIdx.x
        shared = cuda.shared.array(64, np.int32)
        if i == 63:
            return
        shared[i] = i
        if barrier == 2:
            a[i + 1] = 1  # one is beyond the end, the others come to the barrier
        for _ in range(2):
            if barrier:
                cuda.syncthreads()
            x = shared[(i + 1) % 63]
            y = shared[(i + 62) % 63]
            if barrier:
                cuda.syncthreads()
            shared[i] = x + y
        a[i] = shared[i]

    def test_threads_of_the_simulator_wait_at_a_barrier_for_those_that_have_not_ended():
        found = np.zeros(63, np.int32)
        cuda.jit(_neighbours)[1, 64](found, 1)
        i = np.arange(63)
        assert (found == (i + 2) % 63 + (i + 61) % 63 + 2 * i).all()
        again = np.zeros(63, np.int32)
        cuda.jit(_neighbours)[1, 64](again, 0)
        assert (again != found).any()

    def test_what_a_thread_of_the_simulator_raises_ends_the_launch():
        with pytest.raises(IndexError, match=r"tid=\[62, 0, 0\] .*out of bounds"):
            cuda.jit(_neighbours)[1, 64](np.zeros(63, np.int32), 2)


@ALL
@pytest.mark.parametrize("precision", [pytest.param(name, marks=on_request) for name in ("int8", "f32")])
def test_products_of_every_type_equal_float64(block, precision):
    """3 rows and pairs of them, 2 superblocks: 16 of 32 lanes."""
    tensor, weights = random_matrix(block, 3, 512, factors=FACTOR)
    x = np.random.default_rng(1).standard_normal((1, 512)).astype(np.float32)
    y = product(DeviceMatrix.upload(tensor, "cuda"), x, precision)
    assert_product(y, rounded(x) if precision == "int8" else x, weights)


@pytest.mark.parametrize(
    ("rows", "columns", "shape"),
    [
        (1, 256, MatvecShape(2, 1, 1, 1)),  # one row, one superblock
        (5, 256, MatvecShape(4, 1, 1, 2)),  # rows that do not fill the last warps
        # columns that do not fill the last units, shared by two warps
        *([] if SIMULATED else [(1, 2304, MatvecShape(1, 2, 2, 2))]),
        (2, 512, MatvecShape(2, 4, 1, 1)),  # more units at a time than there are
    ],
)
def test_odd_shapes(rows, columns, shape):
    for name in ("Q4_K", "Q8_0") if columns < 512 else ("Q4_K",):
        tensor, weights = random_matrix(TYPES[name], rows, columns)
        x = np.random.default_rng(2).standard_normal((1, columns)).astype(np.float32)
        assert_product(product(DeviceMatrix.upload(tensor, "cuda"), x, shape=shape), rounded(x), weights)


@pytest.mark.parametrize("precision", ["int8", pytest.param("f32", marks=on_request)])
@pytest.mark.parametrize(
    ("name", "rows", "columns", "n", "units", "split"),
    [
        pytest.param("Q5_K", 1, 256, 8, 1, 1, marks=pytest.mark.exhaustive),  # half a warp has nothing to do
        # rows in two pairs, columns that do not fill the last 16 units, a half with 2 of 3
        pytest.param("Q4_0", 3, 768, 5, 1, 2, marks=pytest.mark.exhaustive),
        pytest.param("Q8_0", 2, 512, 3, 1, 1, marks=on_request),  # by a kernel for four
        *([] if SIMULATED else [("Q4_1", 2, 1536, 6, 2, 1)]),  # many values to round for threads of Python
    ],
)
def test_several_columns(name, rows, columns, n, units, split, precision):
    tensor, weights = random_matrix(TYPES[name], rows, columns)
    x = np.random.default_rng(3).standard_normal((n, columns)).astype(np.float32)
    y = product(DeviceMatrix.upload(tensor, "cuda"), x, precision, shape=MatvecShape(2, units, split, split))
    assert_product(y, rounded(x) if precision == "int8" else x, weights)


def test_bias_accumulation_and_silu_of_alternating_rows():
    gate, gate_weights = random_matrix(TYPES["Q4_0"], 3, 96, seed=0)
    up, up_weights = random_matrix(TYPES["Q4_0"], 3, 96, seed=1)
    x = np.random.default_rng(4).standard_normal((1, 96)).astype(np.float32)
    records = Records(96, 1, "cuda").quantize(x, 1)
    one, other = (rounded(x) @ weights.T for weights in (gate_weights, up_weights))
    y = np.zeros((1, 3), np.float32)
    pair = DeviceMatrix.upload([gate, up], "cuda", interleave=True)
    matvec.launch_silu(pair, records, y, 1, 0, SMALL)
    np.testing.assert_allclose(y, one / (1 + np.exp(-one)) * other, rtol=1e-4, atol=1e-6)
    with pytest.raises(BridgeError, match=r"Q4_0: MatvecShape\(rows=1.* separates gate from up"):
        matvec.launch_silu(pair, records, y, 1, 0, SMALL._replace(rows=1))
    both = DeviceMatrix.upload([gate, up], "cuda")
    y = np.ones((1, 6), np.float32)
    bias = np.arange(6, dtype=np.float32)
    matvec.launch(both, records, y, 1, 0, accumulate=True, bias=bias, shape=SMALL)
    np.testing.assert_allclose(y, np.concatenate([one, other], 1) + 1 + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["int8", pytest.param("f32", marks=on_request)])
@pytest.mark.parametrize(
    "shape", [MatvecShape(2, 1, 1, 4), pytest.param(MatvecShape(2, 1, 2, 4), marks=pytest.mark.exhaustive)]
)
def test_a_product_makes_the_records_of_the_next_one_and_is_normalized_after_it(precision, shape):
    """Each record by the last of 4 or 8 blocks of threads; twice, for what counts them must be zero again."""
    first, first_weights = random_matrix(TYPES["Q4_0"], 64, 32, seed=0)
    then, then_weights = random_matrix(TYPES["Q4_0"], 4, 64, seed=1)
    rng = np.random.default_rng(5)
    gain = rng.uniform(0.5, 1.5, 64).astype(np.float32)
    before = rng.standard_normal((1, 64)).astype(np.float32)
    made, counters, squares = Records(64, 1, "cuda", precision), np.zeros(2, np.int32), np.zeros(4, np.float32)
    one, other = (DeviceMatrix.upload(tensor, "cuda") for tensor in (first, then))
    for _ in range(1 if SIMULATED else 2):
        x = rng.standard_normal((1, 32)).astype(np.float32)
        y, z = before.copy(), np.zeros((1, 4), np.float32)
        records = Records(32, 1, "cuda", precision).quantize(x, 1)
        recorded = matvec.Recorded(made, counters, gain, squares)
        matvec.launch(one, records, y, 1, 0, accumulate=True, shape=shape, recorded=recorded)
        assert_product(y - before, x if precision == "f32" else rounded(x), first_weights, 1e-5)
        again = Records(64, 1, "cuda", precision).quantize(y * gain, 1)
        np.testing.assert_array_equal(on_host(made.buffer), on_host(again.buffer))
        np.testing.assert_allclose(squares[:2], (y.astype(np.float64) ** 2).reshape(2, 32).sum(1), rtol=1e-6)
        assert not counters.any()
        matvec.launch(other, made, z, 1, 0, shape=SMALL, normed=matvec.Normed(squares, 0.25))
        scaled = y * gain if precision == "f32" else rounded(y * gain)
        assert_product(z * np.sqrt((y.astype(np.float64) ** 2).mean() + 0.25), scaled, then_weights)
    with pytest.raises(BridgeError, match=r"Q4_0: 2 columns, .* and records of 32 rows do not go"):
        matvec_kernel.kernel("Q4_0", 2, shape, False, "recorded")


@pytest.mark.parametrize("precision", ["int8", pytest.param("f32", marks=on_request)])
def test_rows_of_two_types_are_multiplied_in_one_launch(precision, monkeypatch):
    """Blocks of both, and rows that do not fill the last ones; with and without what surrounds a product."""
    (one, one_weights), (other, other_weights) = (
        random_matrix(TYPES[name], rows, 256, seed) for seed, (name, rows) in enumerate((("Q4_K", 5), ("Q6_K", 3)))
    )
    monkeypatch.setattr(matvec, "choose_shape", lambda *given: SMALL)
    matrices = DeviceMatrix.upload(one, "cuda"), DeviceMatrix.upload(other, "cuda")
    x = np.random.default_rng(8).standard_normal((1, 256)).astype(np.float32)
    records = Records(256, 1, "cuda", precision).quantize(x, 1)
    given = x if precision == "f32" else rounded(x)
    y = np.full((1, 5), np.nan, np.float32), np.full((1, 3), np.nan, np.float32)
    matvec.launch_pair(matrices, records, y, 0)
    for found, weights in zip(y, (one_weights, other_weights), strict=True):
        assert_product(found, given, weights)
    bias = np.arange(5, dtype=np.float32), np.arange(3, dtype=np.float32)
    sums = np.array([24, 40, 64, 0, 0, 0, 0, 0], np.float32)
    matvec.launch_pair(matrices, records, y, 0, bias, matvec.Normed(sums, 0.5))
    for found, weights, offset in zip(y, (one_weights, other_weights), bias, strict=True):
        assert_product(found - offset, given, weights)  # divided by the root of 128 / 256 + 1 / 2
    with pytest.raises(BridgeError, match=r"1 columns of 512 values; must be 1 to 1 of 256"):
        matvec.launch_pair(matrices, Records(512, 1, "cuda"), y, 0)


def test_gated_values_are_recorded_where_they_are_made():
    pair = DeviceMatrix.upload([random_matrix(TYPES["Q4_0"], 32, 32, seed)[0] for seed in (0, 1)], "cuda", True)
    x = np.random.default_rng(6).standard_normal((1, 32)).astype(np.float32)
    records, made = Records(32, 1, "cuda").quantize(x, 1), Records(32, 1, "cuda")
    plain, y, counters = (np.zeros(shape, kind) for shape, kind in (((1, 32), "f4"), ((1, 32), "f4"), (1, "i4")))
    shape = MatvecShape(2, 1, 1, 4)
    matvec.launch_silu(pair, records, plain, 1, 0, shape)
    sums = np.array([24, 0, 0, 0], np.float32)
    recorded = matvec.Recorded(made, counters)
    matvec.launch_silu(pair, records, y, 1, 0, shape, matvec.Normed(sums, 0.25), recorded)
    np.testing.assert_allclose(y, plain, rtol=1e-6)  # divided by the root of 24 / 32 + 1 / 4
    np.testing.assert_array_equal(on_host(made.buffer), on_host(Records(32, 1, "cuda").quantize(y, 1).buffer))
    matvec.launch_silu(pair, records, y, 1, 0, shape, matvec.Normed(4 * sums, 1.0), recorded)
    assert np.abs(y - plain).max() > 0.1 * np.abs(plain).max()


def test_each_tensor_of_a_matrix_keeps_its_own_factor():
    factors = [np.array([f], np.float32) for f in (0.5, -3)]
    gate, up = tensors = [random_matrix(TYPES["NVFP4"], 3, 64, i, f) for i, f in enumerate(factors)]
    x = np.random.default_rng(4).standard_normal((1, 64)).astype(np.float32) / 64
    records = Records(64, 1, "cuda", "f32").quantize(x, 1)
    one, other = (x.astype(np.float64) @ weights.T for _, weights in tensors)
    y = np.zeros((1, 6), np.float32)
    matvec.launch(DeviceMatrix.upload([gate[0], up[0]], "cuda"), records, y, 1, 0, shape=SMALL)
    np.testing.assert_allclose(y, np.concatenate([one, other], 1), rtol=1e-5, atol=1e-5)
    pair = DeviceMatrix.upload([gate[0], up[0]], "cuda", interleave=True)
    y = np.zeros((1, 3), np.float32)
    matvec.launch_silu(pair, records, y, 1, 0, SMALL)
    np.testing.assert_allclose(y, one / (1 + np.exp(-one)) * other, rtol=1e-4, atol=1e-5)
    rows = torch.zeros(2, 64)
    dequantize.rows(pair, torch.tensor([1, 4], dtype=torch.int32), rows, 2, 0)
    expected = np.stack([up[0].rows([0])[0], gate[0].rows([2])[0]])
    torch.testing.assert_close(rows, torch.from_numpy(expected), rtol=0, atol=0)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            *p.values, id=p.id, marks=[*p.marks, *([] if p.id in ("Q4_K", "Q8_0", "NVFP4", "IQ2_XS") else on_request)]
        )
        for p in ALL.args[1]
    ],
)
def test_dequantized_tiles_and_rows_are_gguf_s(block):
    tensor, _ = random_matrix(block, 4, 256, factors=FACTOR)
    matrix = DeviceMatrix.upload(tensor, "cuda")
    expected = torch.from_numpy(tensor.dequantize())
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        out = torch.zeros(2, 256, dtype=kind)
        dequantize.tile(matrix, 1, 2, out, 0)
        torch.testing.assert_close(out, expected[1:3].to(kind), rtol=0, atol=0)
    out = torch.zeros(3, 256)
    dequantize.rows(matrix, torch.tensor([3, 0, 3], dtype=torch.int32), out, 3, 0)
    torch.testing.assert_close(out, expected[[3, 0, 3]], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_records_of_x_are_the_cpu_runtime_s(kind):
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(5)) * 1e-3
    x[0, 32:64] = 0
    x[1, 5] = 30
    x = x.to(kind)
    if kind == torch.float32:
        x[1, 40], x[1, 70], x[0, 64:] = float("nan"), float("inf"), 1e-38
    buffer = on_host(Records(96, 2, "cuda").quantize(x, 2).buffer)
    for token in range(2):
        record = buffer[token * activations.RECORD :]
        for group in range(3):
            low, high = (record[at + 16 * group :][:16].view(np.int8) for at in (0, 512))
            step = record[1024 + 8 * group :][:4].view(np.float32)[0]
            sums = record[1028 + 8 * group :][:4].view(np.int16)
            q, d, wanted = round32(x[token].float().numpy()[32 * group : 32 * group + 32], 16)
            np.testing.assert_array_equal(step, d)
            np.testing.assert_array_equal(np.concatenate([low, high]), q)
            np.testing.assert_array_equal(sums, wanted)


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_tensor_on_the_device_multiplies_as_its_twin_does(tokens):
    tensor, weights = random_matrix(TYPES["Q6_K"], 4, 256)
    moved = tensor.to("cuda")
    assert (moved.shape, moved.type, moved.device, moved.name) == ((4, 256), "Q6_K", "cuda:0", tensor.name)
    assert moved.bpw == tensor.bpw
    assert moved.kernel.startswith("cuda/q6_k")
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(6))
    y = moved.matmul(x)
    error = np.abs(y.numpy() - x.numpy() @ weights.T).max()
    assert error < (0.05 if tokens == 1 else 0.02) * np.abs(weights).max() * np.sqrt(256)
    out = torch.empty(4)
    assert moved.matvec(x[0].half(), out=out).data_ptr() == out.data_ptr()
    assert_product(moved.matvec(x[0], precision="f32").numpy()[None], x[:1].numpy(), weights)
    torch.testing.assert_close(moved.dequantize(), torch.from_numpy(tensor.dequantize()), rtol=0, atol=0)
    torch.testing.assert_close(moved.rows([2, 0]), torch.from_numpy(tensor.rows([2, 0])), rtol=0, atol=0)
    assert moved.to("cpu") is tensor
    assert moved.to("cuda") is moved


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("precision", ["int8", "f32"])
@pytest.mark.parametrize("tokens", [9, 65])
def test_many_tokens_of_any_size_stay_within_the_range_of_halves(kind, precision, tokens):
    """On tensor cores, if not in float32: 9 as halves, 65 as bytes."""
    tensor, weights = random_matrix(TYPES["Q6_K"], 4, 256)
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(7))
    x[:9] *= torch.tensor([1e5, 1e-7, 0, 1, 6e4, 1e30, 100, 3, 1e-30])[:, None]
    x[3] = 6e4  # the sums leave it as well
    x = (x.clamp(-65504, 65504) if kind == torch.float16 else x).to(kind)
    y = tensor.to("cuda").matmul(x, precision=precision).double().numpy()
    wanted = x.double().numpy() @ weights.T
    scale = np.linalg.norm(x.double().numpy(), axis=1, keepdims=True) * np.linalg.norm(weights, axis=1)
    rounded = kind == torch.bfloat16 or tokens == 65  # x or y has 8 bits
    limit = 1e-6 if precision == "f32" else 1e-2 if rounded else 1e-3
    assert (np.abs(y - wanted) <= limit * scale).all()


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def float_tensor(type: str, rows: int, columns: int) -> QuantTensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(9)).to(FLOATS[type])
    return QuantTensor("f", type, (rows, columns), values.view(torch.uint8).numpy().reshape(-1))


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_tensor_of_floats_multiplies_on_the_device_as_its_twin_does(type, tokens, monkeypatch):
    monkeypatch.setattr("bridge.cuda.product.matmul._TILE", 96)
    tensor = float_tensor(type, 5, 36)  # neither whole blocks nor whole tiles
    moved = tensor.to("cuda")
    assert (moved.shape, moved.type, moved.device, moved.bpw) == (tensor.shape, type, "cuda:0", tensor.bpw)
    assert moved.nbytes == tensor.nbytes
    assert moved.kernel == f"{FLOATS[type]} product"
    x = 1e5 * torch.randn(tokens, 36, generator=torch.Generator().manual_seed(6))
    wanted = tensor.matmul(x)
    torch.testing.assert_close(moved.matmul(x, precision="f32"), wanted, rtol=1e-5, atol=1)
    out = torch.empty_like(wanted)
    assert moved.matmul(x, out=out) is not None
    torch.testing.assert_close(out, wanted, rtol=0.02, atol=6e3 if type == "BF16" else 1e3)
    torch.testing.assert_close(moved.matvec(x[0], precision="f32"), wanted[0], rtol=1e-5, atol=1)
    assert moved.matmul(x[:0]).shape == (0, 5)
    for kind in FLOATS.values():
        expected = torch.from_numpy(tensor.dequantize()).to(kind)
        torch.testing.assert_close(moved.dequantize(kind), expected, rtol=0, atol=0)
    moved.dequantize(FLOATS[type]).zero_()  # a copy
    torch.testing.assert_close(moved.rows([2, 0]), torch.from_numpy(tensor.rows([2, 0])), rtol=0, atol=0)
    assert moved.to("cpu") is tensor


def test_two_models_may_multiply_on_two_streams(monkeypatch):
    """Each has its own records: here one model's product comes between the other's records and its kernel."""
    (one, weights), (other, _) = (random_matrix(TYPES["Q4_0"], 1, 32, seed) for seed in (0, 1))
    device = devices.require("cuda")
    mine, yours = (products.Stack([t], matmul.Multiplier(device, "f32")) for t in (one, other))
    x, launch = torch.randn(1, 32, generator=torch.Generator().manual_seed(0)), matvec.launch

    def late(*arguments, **options) -> None:
        monkeypatch.setattr(matvec, "launch", launch)
        yours.multiply(7 * x)
        launch(*arguments, **options)

    monkeypatch.setattr(matvec, "launch", late)
    assert_product(mine.multiply(x).numpy(), x.numpy(), weights)


def test_what_a_tensor_on_the_device_refuses():
    moved = random_matrix(TYPES["Q4_0"], 4, 96)[0].to("cuda")
    x = torch.zeros(96)
    for wrong, message in (
        (x.numpy(), "w0: x is a ndarray; must be a torch tensor"),
        (x.to("meta"), "w0: x is on meta, the tensor on cpu"),
        (x.double(), "w0: x has dtype torch.float64; must be float32, float16 or bfloat16"),
        (x[:64], r"w0: x has shape \[64\]; must be \[96\]"),
    ):
        with pytest.raises(BridgeError, match=message):
            moved.matvec(wrong)
    with pytest.raises(BridgeError, match=r"out is torch.float16 \[4\]; must be contiguous float32 \[4\]"):
        moved.matvec(x, out=torch.empty(4, dtype=torch.float16))
    with pytest.raises(BridgeError, match="w0: row 4 is not one of 4"):
        moved.rows([4])
    with pytest.raises(BridgeError, match="precision 'f64'"):
        moved.matvec(x, precision="f64")
    with pytest.raises(BridgeError, match="the simulator has one device"):
        moved.to("cuda:1")
    with pytest.raises(BridgeError, match=r"n: is not a matrix, its shape is \[4\]"):
        QuantTensor("n", "F32", (4,), np.zeros(16, np.uint8)).to("cuda")
    with pytest.raises(BridgeError, match=r"q: no CUDA kernel for Q1_0; there is one for Q2_K"):
        QuantTensor("q", "Q1_0", (1, 128), np.zeros(18, np.uint8)).to("cuda")


def test_matrices_that_cannot_be_uploaded_are_refused():
    tensor = random_matrix(TYPES["Q4_K"], 4, 256)[0]
    raw = tensor.raw.copy()
    raw[144 * 2 : 144 * 2 + 2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(BridgeError, match="bad: the scales of row 2 are not finite"):
        DeviceMatrix.upload(QuantTensor("bad", "Q4_K", (4, 256), raw), "cuda")
    for name, scale in (("MXFP4", 255), ("NVFP4", 127), ("NVFP4", 255)):
        coded = random_matrix(TYPES[name], 4, 256, factors=FACTOR)[0]
        raw = coded.raw.copy()
        raw[3 * raw.size // 4 + TYPES[name].nbytes] = scale  # a block's first byte
        with pytest.raises(BridgeError, match="bad: the scales of row 3 are not finite"):
            DeviceMatrix.upload(QuantTensor("bad", name, (4, 256), raw), "cuda")
    coded.factors = np.array([np.inf], np.float32)
    with pytest.raises(BridgeError, match="w0: its scale is inf; the file is damaged"):
        DeviceMatrix.upload(coded, "cuda")
    with pytest.raises(BridgeError, match="float: no CUDA kernel for F32"):
        DeviceMatrix.upload(QuantTensor("float", "F32", (1, 4), np.zeros(16, np.uint8)), "cuda")
    with pytest.raises(BridgeError, match="cannot be combined with"):
        DeviceMatrix.upload([tensor, random_matrix(TYPES["Q5_K"], 4, 256)[0]], "cuda")
    with pytest.raises(BridgeError, match="5 rows cannot alternate with 4"):
        DeviceMatrix.upload([tensor, random_matrix(TYPES["Q4_K"], 5, 256)[0]], "cuda", interleave=True)


def test_what_measures_bandwidth_reads_every_byte_once(gpu):
    block, grid = 32, 3
    count = 2 * bench.LOADS * grid * block
    source = np.full(16 * count, -1, np.int32).view(np.uint8)[: 16 * count]
    out = np.zeros(grid * block, np.int32)
    bench._reader().launch(grid, block, 0, source, count, out)
    assert not out.any()  # an even number of -1 cancels
    if gpu is not None:
        assert gpu.memory.regions[0].frozen.all()
        assert gpu.memory.regions[0].fetched == 16 * count


def _fragments(a, b, out):
    """a [4, 32], b [2, 32]: words of lanes; out [4 * 32, 4]: products of f16, of bf16, what is copied, and the copy."""
    i = thread_x()
    tile = cuda.shared.array(32, np.complex128)
    copy_16(tile, i ^ 3, out, 2 * 32 + i)
    copies_end()
    copies_end()
    copies_wait()
    cuda.syncthreads()
    quad = shared_16(tile, i)
    zero = np.float32(i)
    start = (zero, zero, zero, zero)
    f16 = mma_f16(start, a[0, i], a[1, i], a[2, i], a[3, i], b[0, i], b[1, i])
    bf16 = mma_bf16(start, a[0, i], a[1, i], a[2, i], a[3, i], b[0, i], b[1, i])
    for k in range(4):
        out[i, k] = f16[k]
        out[32 + i, k] = bf16[k]
        out[96 + i, k] = bits_float(quad[k])


def test_tensor_cores_multiply_what_lanes_hold_and_copies_arrive():
    rng = np.random.default_rng(9)
    g, t = np.arange(32) // 4, np.arange(32) % 4
    start = np.arange(32, dtype=np.float32)
    for kind, place in ((torch.float16, 0), (torch.bfloat16, 1)):
        left, right = (torch.from_numpy(rng.standard_normal(shape)).to(kind) for shape in ((16, 16), (8, 16)))
        # pairs of columns as words
        rows, columns = (m.view(torch.int32).numpy() for m in (left, right))
        a = np.stack([rows[g, t], rows[g + 8, t], rows[g, t + 4], rows[g + 8, t + 4]])
        b = np.stack([columns[g, t], columns[g, t + 4]])
        out = np.zeros((4, 32, 4), np.float32)
        out[2] = rng.standard_normal((32, 4))
        Kernel(_fragments, "void(int32[:,::1], int32[:,::1], float32[:,::1])", oldest=(8, 0)).launch(
            1, 32, 0, a, b, out.reshape(128, 4)
        )
        product = left.double().numpy() @ right.double().numpy().T
        wanted = [product[g, 2 * t], product[g, 2 * t + 1], product[g + 8, 2 * t], product[g + 8, 2 * t + 1]]
        np.testing.assert_allclose(out[place], np.stack(wanted, 1) + start[:, None], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(out[3], out[2][np.arange(32) ^ 3])


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_request) for name in ("Q4_K", "Q6_K", "Q8_0")])
def test_products_of_tensor_cores_equal_float64(name):
    """5 of 16 rows, 10 tokens, of 16, and two steps, of which Q8_0 has one unit in the last."""
    columns = 160 if name == "Q8_0" else 256
    tensor, _ = random_matrix(TYPES[name], 5, columns)
    matrix = DeviceMatrix.upload(tensor, "cuda")
    weights = tensor.dequantize().astype(np.float16).astype(np.float64)
    x = torch.randn(10, columns, generator=torch.Generator().manual_seed(3)).half()
    y = torch.full((10, 5), float("nan"))
    mma.launch(matrix, x, y, 0, shape=mma.MMAShape(1, 1))
    scale = np.sqrt((x.double().numpy() ** 2) @ (weights.T**2))
    assert np.abs((y.numpy() - x.double().numpy() @ weights.T) / scale).max() < 2e-6


def _byte_fragments(a, b, c, out):
    """a [4, 32], b [2, 32], c [32, 4]: words of lanes; out [64, 4]: products of 32 and of 16 columns."""
    i = thread_x()
    start = (c[i, 0], c[i, 1], c[i, 2], c[i, 3])
    long = mma_s8(start, a[0, i], a[1, i], a[2, i], a[3, i], b[0, i], b[1, i])
    short = mma_s8_short(start, a[0, i], a[1, i], b[0, i])
    for k in range(4):
        out[i, k] = long[k]
        out[32 + i, k] = short[k]


def test_tensor_cores_multiply_bytes():
    rng = np.random.default_rng(9)
    g, t = np.arange(32) // 4, np.arange(32) % 4
    left, right = (rng.integers(-128, 128, (n, 32), np.int8) for n in (16, 8))
    rows, columns = left.view(np.int32), right.view(np.int32)
    a = np.stack([rows[g, t], rows[g + 8, t], rows[g, t + 4], rows[g + 8, t + 4]])
    b = np.stack([columns[g, t], columns[g, t + 4]])
    start = rng.integers(-(2**20), 2**20, (32, 4), np.int32)
    out = np.zeros((64, 4), np.int32)
    arrays = "int32[:,::1], int32[:,::1], int32[:,::1], int32[:,::1]"
    Kernel(_byte_fragments, f"void({arrays})", oldest=(8, 0)).launch(1, 32, 0, a, b, start, out)
    for place, k in ((0, 32), (32, 16)):
        product = left[:, :k].astype(np.int32) @ right[:, :k].astype(np.int32).T
        wanted = [product[g, 2 * t], product[g, 2 * t + 1], product[g + 8, 2 * t], product[g + 8, 2 * t + 1]]
        np.testing.assert_array_equal(out[place : place + 32], np.stack(wanted, 1) + start)


@pytest.mark.parametrize("name", ["Q4_K", "Q2_K", *(pytest.param(name, marks=on_request) for name in ("Q6_K", "Q8_0"))])
def test_products_of_bytes_on_tensor_cores_equal_float64(name):
    """5 of 16 rows, 9 tokens, of 16, and two steps, of which Q8_0 has one unit in the last."""
    columns = 160 if name == "Q8_0" else 256
    tensor, weights = random_matrix(TYPES[name], 5, columns)
    matrix = DeviceMatrix.upload(tensor, "cuda")
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(3))
    y = torch.full((9, 5), float("nan"))
    mma_int8.launch(matrix, recorded(x, 2, matrix.device), y, 0, shape=mma.MMAShape(1, 1))
    assert_product(y.numpy(), rounded(x.numpy()), weights.astype(np.float64))


def _integers(a, b, c, out):
    i = thread_x()
    out[0, i] = dp4a(a[i], b[i], c[i])
    out[1, i] = dp2a(a[i], b[i], c[i])
    out[2, i] = bits(a[i], b[i] & 31, c[i])
    out[3, i] = shl(a[i], b[i] & 31)
    out[4, i] = ror(a[i], b[i])
    out[5, i] = or_(a[i], b[i])
    out[6, i] = xor(a[i], b[i])
    out[7, i] = sub(a[i], b[i])
    out[8, i] = mad(a[i], b[i], c[i])
    out[9, i] = signed_byte(a[i], b[i] & 24)
    out[10, i] = float_bits(low_half(a[i]))
    out[11, i] = float_bits(high_half(a[i]))
    out[12, i] = to_half(bits_float(c[i]))
    out[13, i] = round_even(bits_float(c[i]))
    out[14, i] = prmt(a[i], b[i], 0x7C43)
    out[15, i] = float_bits(fma(np.float32(a[i] >> 8), np.float32(b[i] >> 8), bits_float(c[i])))
    out[16, i] = pack_f16(np.float32(1), bits_float(c[i]))
    out[17, i] = pack_bf16(np.float32(1), bits_float(c[i]))


def test_integers_and_halves_wrap_and_round_as_the_hardware_does():
    rng = np.random.default_rng(8)
    a, b = rng.integers(-(1 << 31), 1 << 31, (2, 64)).astype(np.int32)
    c = (rng.standard_normal(64) * 10.0 ** rng.integers(-8, 6, 64)).astype(np.float32).view(np.int32)
    a[:2] = -1, 0x7FFF7FFF
    a[2:6] = 0x00013C00, 0x7C00FC00, 0x03FF0001, -0x7FFF8000  # halves: tiny, infinite, subnormal, both zeros
    c[:6] = np.array([2.5, -3.5, np.nan, 65519.9, 65520, 3e9], np.float32).view(np.int32)
    out = np.zeros((18, 64), np.int32)
    Kernel(_integers, "void(int32[::1], int32[::1], int32[::1], int32[:,::1])", oldest=(8, 0)).launch(
        1, 64, 0, a, b, c, out
    )
    bytes_a, bytes_b = (v.view(np.int8).reshape(64, 4).astype(np.int64) for v in (a, b))
    halves = a.view(np.int16).reshape(64, 2).astype(np.int64)
    unsigned, long = a.view(np.uint32).astype(np.uint64), [v.astype(np.int64) for v in (a, b, c)]
    by = b & 31
    floats = c.view(np.float32).astype(np.float64)
    rounded = np.clip(np.nan_to_num(np.rint(floats)), -(1 << 31), (1 << 31) - 1)
    half = np.where(np.abs(floats) >= 65520, np.copysign(np.inf, floats), floats).astype(np.float16).view(np.uint16)
    short = torch.from_numpy(c.view(np.float32)).bfloat16().view(torch.int16).numpy().astype(np.int64)
    expected = [
        (bytes_a * bytes_b).sum(1) + long[2],
        (halves * bytes_b[:, :2]).sum(1) + long[2],
        (unsigned >> by.astype(np.uint64)).astype(np.int64) & long[2],
        (unsigned << by.astype(np.uint64)).astype(np.int64),
        (unsigned * 0x100000001 >> by.astype(np.uint64)).astype(np.int64),
        a | b,
        a ^ b,
        long[0] - long[1],
        long[0] * long[1] + long[2],
        bytes_a[np.arange(64), (b & 24) // 8],
        a.view(np.float16)[::2].astype(np.float32).view(np.int32),
        a.view(np.float16)[1::2].astype(np.float32).view(np.int32),
        half,
        rounded,
        np.stack([bytes_a[:, 3], bytes_b[:, 0], bytes_b[:, 0] >> 7, bytes_b[:, 3]], 1)
        .astype(np.int8)
        .view(np.int32)[:, 0],
        (floats + (long[0] >> 8) * (long[1] >> 8)).astype(np.float32).view(np.int32),  # the product needs 48 bits
        half.astype(np.int64) << 16 | 0x3C00,
        short << 16 | 0x3F80,
    ]
    for row, (found, wanted) in enumerate(zip(out, expected, strict=True)):
        same = found == np.asarray(wanted).astype(np.int64).astype(np.int32)
        assert (same | (np.isnan(floats) & (row in (12, 15, 16, 17)))).all(), row


@pytest.mark.parametrize("way", ["plain", "norm", "gate", "gate_in_turn"])
def test_tokens_become_halves_as_by_torch(way, monkeypatch):
    """Of rows that fill no round of a block; in the simulator a block of one warp."""
    monkeypatch.setattr(halves, "SIMULATED", False)
    if SIMULATED:
        monkeypatch.setattr(halves, "_THREADS", 32)
        monkeypatch.setattr(halves, "kernel", halves.kernel.__wrapped__)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 1216 if way.startswith("gate") else 608, generator=generator)
    x *= torch.tensor([1, 1e6, 0])[:, None]
    weight = torch.rand(608, generator=generator) + 0.5
    given = (weight, 0.25) if way == "norm" else ()
    found = halves._launch(way, x, 608, devices.require("cuda"), *given)
    wanted = halves.by_torch(way, x, *given)
    torch.testing.assert_close(found.scale, wanted.scale, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.values.float(), wanted.values.float(), rtol=2e-3, atol=1e-6)
