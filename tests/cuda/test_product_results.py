"""Products on CUDA against float64: kernels run as compiled PTX on the machine of tests/support/gpu."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bridge.blocks import TYPES
from bridge.errors import BridgeError
from bridge.runtime import QuantTensor
from tests.support import ptx
from tests.support.random_blocks import ALL, FACTOR, assert_product, random_matrix, round32, rounded

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from bridge.cuda import bench
from bridge.cuda.forms import dequantize
from bridge.cuda.forms.matrix import DeviceMatrix
from bridge.cuda.product import activations, matmul, matvec, matvec_kernel, products
from bridge.cuda.product.activations import Records
from bridge.cuda.product.matvec_shape import MatvecShape
from bridge.cuda.toolchain import device as devices

pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.usefixtures("gpu"),
    pytest.mark.proof,
]
SMALL = MatvecShape(2, 1, 1, 4)


def product(matrix: DeviceMatrix, x: np.ndarray, **options) -> np.ndarray:
    y = np.full((len(x), matrix.rows), np.nan, np.float32)
    records = Records(matrix.columns, len(x), "cuda").quantize(x, len(x))
    matvec.launch(matrix, records, y, len(x), 0, **{"shape": SMALL} | options)
    return y


@ALL
def test_products_of_every_type_equal_float64(block):
    """3 rows and pairs of them, 2 superblocks: 16 of 32 lanes."""  # floats: see dequantization
    tensor, weights = random_matrix(block, 3, 512, factors=FACTOR)
    x = np.random.default_rng(1).standard_normal((1, 512)).astype(np.float32)
    assert_product(product(DeviceMatrix.upload(tensor, "cuda"), x), rounded(x), weights)


@pytest.mark.parametrize(
    ("rows", "columns", "shape"),
    [
        (1, 256, MatvecShape(2, 1, 1, 1)),  # one row, one superblock
        (5, 256, MatvecShape(4, 1, 1, 2)),  # rows that do not fill the last warps
        # columns that do not fill the last units, shared by two warps
        (1, 2304, MatvecShape(1, 2, 2, 2)),
        (2, 512, MatvecShape(2, 4, 1, 1)),  # more units at a time than there are
    ],
)
def test_odd_shapes(rows, columns, shape):
    for name in ("Q4_K", "Q8_0") if columns < 512 else ("Q4_K",):
        tensor, weights = random_matrix(TYPES[name], rows, columns)
        x = np.random.default_rng(2).standard_normal((1, columns)).astype(np.float32)
        assert_product(product(DeviceMatrix.upload(tensor, "cuda"), x, shape=shape), rounded(x), weights)


@pytest.mark.parametrize(
    ("name", "rows", "columns", "n", "units", "split"),
    [
        pytest.param("Q5_K", 1, 256, 8, 1, 1, marks=pytest.mark.exhaustive),  # half a warp has nothing to do
        # rows in two pairs, columns that do not fill the last 16 units, a half with 2 of 3
        pytest.param("Q4_0", 3, 768, 5, 1, 2, marks=pytest.mark.exhaustive),
        pytest.param("Q8_0", 2, 512, 3, 1, 1, marks=pytest.mark.exhaustive),  # by a kernel for four
        ("Q4_1", 2, 1536, 6, 2, 1),
    ],
)
def test_several_columns(name, rows, columns, n, units, split):
    tensor, weights = random_matrix(TYPES[name], rows, columns)
    x = np.random.default_rng(3).standard_normal((n, columns)).astype(np.float32)
    y = product(DeviceMatrix.upload(tensor, "cuda"), x, shape=MatvecShape(2, units, split, split))
    assert_product(y, rounded(x), weights)


def test_bias_accumulation_and_silu_of_alternating_rows():
    gate, gate_weights = random_matrix(TYPES["Q4_0"], 3, 96, seed=0)
    up, up_weights = random_matrix(TYPES["Q4_0"], 3, 96, seed=1)
    x = np.random.default_rng(4).standard_normal((1, 96)).astype(np.float32)
    records = Records(96, 1, "cuda").quantize(x, 1)
    one, other = (rounded(x) @ weights.T for weights in (gate_weights, up_weights))
    y = np.zeros((1, 3), np.float32)
    pair = DeviceMatrix.upload([gate, up], "cuda", interleave=True)
    matvec.launch_activated(pair, records, y, 1, 0, SMALL)
    np.testing.assert_allclose(y, one / (1 + np.exp(-one)) * other, rtol=1e-4, atol=1e-6)
    with pytest.raises(BridgeError, match=r"Q4_0: MatvecShape\(rows=1.* separates gate from up"):
        matvec.launch_activated(pair, records, y, 1, 0, SMALL._replace(rows=1))
    both = DeviceMatrix.upload([gate, up], "cuda")
    y = np.ones((1, 6), np.float32)
    bias = np.arange(6, dtype=np.float32)
    matvec.launch(both, records, y, 1, 0, accumulate=True, bias=bias, shape=SMALL)
    np.testing.assert_allclose(y, np.concatenate([one, other], 1) + 1 + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["int8", pytest.param("f32", marks=pytest.mark.exhaustive)])
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
    for _ in range(2):
        x = rng.standard_normal((1, 32)).astype(np.float32)
        y, z = before.copy(), np.zeros((1, 4), np.float32)
        records = Records(32, 1, "cuda", precision).quantize(x, 1)
        recorded = matvec.Recorded(made, counters, gain, squares)
        matvec.launch(one, records, y, 1, 0, accumulate=True, shape=shape, recorded=recorded)
        assert_product(y - before, x if precision == "f32" else rounded(x), first_weights, 1e-5)
        again = Records(64, 1, "cuda", precision).quantize(y * gain, 1)
        np.testing.assert_array_equal(made.buffer, again.buffer)
        np.testing.assert_allclose(squares[:2], (y.astype(np.float64) ** 2).reshape(2, 32).sum(1), rtol=1e-6)
        assert not counters.any()
        matvec.launch(other, made, z, 1, 0, shape=SMALL, normed=matvec.Normed(squares, 0.25))
        scaled = y * gain if precision == "f32" else rounded(y * gain)
        assert_product(z * np.sqrt((y.astype(np.float64) ** 2).mean() + 0.25), scaled, then_weights)
    with pytest.raises(BridgeError, match=r"Q4_0: 8 columns, .* and records of 32 rows do not go"):
        matvec_kernel.kernel("Q4_0", 8, shape, False, "recorded")


@pytest.mark.parametrize(("name", "precision", "n", "shape"), [
    ("Q4_K", "int8", 4, MatvecShape(2, 2, 2, 4)), ("Q6_K", "int8", 3, MatvecShape(2, 1, 4, 4)),
    ("Q8_0", "f32", 4, MatvecShape(2, 1, 2, 4)), ("Q4_0", "int8", 2, MatvecShape(2, 2, 1, 4)),
    pytest.param("Q2_K", "int8", 4, MatvecShape(2, 2, 4, 4), marks=pytest.mark.exhaustive),
    pytest.param("Q5_K", "f32", 3, MatvecShape(2, 1, 4, 4), marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_up_to_four_columns_have_the_sums_of_one_in_a_decoder_s_step(name, precision, n, shape):
    """To the last bit, of the same shape: what is added, records, squares, and what is normalized by these."""
    first, then = (
        DeviceMatrix.upload(random_matrix(TYPES[name], *size, seed=seed)[0], "cuda")
        for seed, size in enumerate(((64, 4608), (64, 256)))
    )
    rng = np.random.default_rng(5)
    gain, bias = rng.uniform(0.5, 1.5, (2, 64)).astype(np.float32)
    x, before = rng.standard_normal((n, 4608)).astype(np.float32), rng.standard_normal((n, 64)).astype(np.float32)
    sums = rng.uniform(1, 9, (4, 8)).astype(np.float32)
    other = rng.standard_normal((n, 256)).astype(np.float32)

    def run(rows: slice) -> list[np.ndarray]:
        y, count = before[rows].copy(), len(x[rows])
        squares, counters = np.zeros((4, 4), np.float32), np.zeros(2, np.int32)
        made, given = Records(64, count, "cuda", precision), Records(4608, count, "cuda", precision)
        given.quantize(x[rows], count)
        recorded = matvec.Recorded(made, counters, gain, squares.reshape(-1))
        matvec.launch(first, given, y, count, 0, True, bias, shape, None, recorded)
        given = Records(256, count, "cuda", precision).quantize(other[rows], count)
        normed = matvec.Normed(np.roll(sums, -rows.start, 0).reshape(-1), 0.5)
        z, of_z = np.full((count, 64), np.nan, np.float32), Records(64, count, "cuda", precision)
        how = normed, matvec.Recorded(of_z, counters), False, bias, "silu", False
        matvec.launch_activated(then, given, z, count, 0, shape, *how)
        assert not counters.any()
        columns = [records.buffer.reshape(4, 8, -1)[:, :count] for records in (made, of_z)]
        return [y, squares[:count], z, *(np.swapaxes(each, 0, 1) for each in columns)]

    alone = [run(slice(i, i + 1)) for i in range(n)]
    for together, each in zip(run(slice(0, n)), zip(*alone, strict=True), strict=True):
        np.testing.assert_array_equal(together, np.concatenate(each))


@pytest.mark.parametrize("precision", ["int8", pytest.param("f32", marks=pytest.mark.exhaustive)])
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
    matvec.launch_activated(pair, records, plain, 1, 0, shape)
    sums = np.array([24, 0, 0, 0], np.float32)
    recorded = matvec.Recorded(made, counters)
    matvec.launch_activated(pair, records, y, 1, 0, shape, matvec.Normed(sums, 0.25), recorded)
    np.testing.assert_allclose(y, plain, rtol=1e-6)  # divided by the root of 24 / 32 + 1 / 4
    np.testing.assert_array_equal(made.buffer, Records(32, 1, "cuda").quantize(y, 1).buffer)
    matvec.launch_activated(pair, records, y, 1, 0, shape, matvec.Normed(4 * sums, 1.0), recorded)
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
    matvec.launch_activated(pair, records, y, 1, 0, SMALL)
    np.testing.assert_allclose(y, one / (1 + np.exp(-one)) * other, rtol=1e-4, atol=1e-5)
    rows = torch.zeros(2, 64)
    dequantize.rows(pair, torch.tensor([1, 4], dtype=torch.int32), rows, 2, 0)
    expected = np.stack([up[0].rows([0])[0], gate[0].rows([2])[0]])
    torch.testing.assert_close(rows, torch.from_numpy(expected), rtol=0, atol=0)


@ALL
def test_dequantized_tiles_and_rows_are_gguf_s(block):
    tensor, _ = random_matrix(block, 4, 256, factors=FACTOR)
    matrix = DeviceMatrix.upload(tensor, "cuda")
    expected = torch.from_numpy(tensor.dequantize())
    for kind in (torch.float16, *((torch.float32, torch.bfloat16) if block.name in ("Q4_K", "IQ2_XS") else ())):
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
    buffer = Records(96, 2, "cuda").quantize(x, 2).buffer
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
    with pytest.raises(BridgeError, match="there is 1, from cuda:0 on"):
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


def test_what_measures_bandwidth_reads_every_byte_once(gpu: Any):
    block, grid = 32, 3
    count = 2 * bench.LOADS * grid * block
    source = np.full(16 * count, -1, np.int32).view(np.uint8)[: 16 * count]
    out = np.zeros(grid * block, np.int32)
    bench._reader().launch(grid, block, 0, source, count, out)
    assert not out.any()  # an even number of -1 cancels
    assert gpu.memory.regions[0].frozen.all()
    assert gpu.memory.regions[0].fetched == 16 * count
