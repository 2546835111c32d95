"""Products of 9 to 64 tokens on tensor cores: what they compute, the bytes they load, machine code, who takes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bridge.blocks import BLOCKS, BlockType
from bridge.blocks.read import WRITTEN
from bridge.errors import BridgeError
from tests.support import ptx
from tests.support.gpu.device import pretended_gpu
from tests.support.gpu.disguise import disguised_gpu
from tests.support.random_blocks import random_matrix

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from bridge.cuda.forms import dequantize
from bridge.cuda.forms.matrix import DeviceMatrix
from bridge.cuda.product import halves, matmul, mma
from bridge.cuda.product.mma import MMAShape
from bridge.cuda.toolchain import device as devices
from bridge.cuda.toolchain import launch

pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.proof,
]

PROVED = "Q4_K"  # in every run; others in odd shapes
BY_TYPE = pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            WRITTEN[name],
            id=name,
            marks=[pytest.mark.xdist_group(name), *([] if name == PROVED else [pytest.mark.exhaustive])],
        )
        for name in mma.TYPES
    ],
)


def values(n: int, columns: int, kind: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(n, columns, generator=torch.Generator().manual_seed(n)).to(kind)


def made(block: BlockType, rows: int, columns: int, kind: torch.dtype = torch.float16) -> tuple[DeviceMatrix, Any]:
    """A matrix on the device, and its weights as dequantize.py rounds them."""
    matrix = DeviceMatrix.upload(random_matrix(block, rows, columns)[0], "cuda")
    weights = torch.empty((rows, columns), dtype=kind)
    dequantize.tile(matrix, 0, rows, weights, 0)
    return matrix, weights


def assert_sums(y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> None:
    """y is x times weights within the rounding of as many float32 sums as there are steps."""
    scale = (x.double() ** 2 @ weights.double().T ** 2).sqrt()
    assert ((y - x.double() @ weights.double().T) / scale).abs().max() < 2e-6


@BY_TYPE
def test_weights_are_those_of_dequantization_to_the_bit(block):
    """64 tokens of which each chooses one column: all places in a unit, twice, and all units of four superblocks."""
    i = np.arange(64)
    chosen = 16 * i + i // 2 * 5 % 16
    assert set(np.bincount(chosen % 32)) == {2}
    with pretended_gpu():
        matrix, weights = made(block, 128, 1024)
        y = torch.full((64, 128), float("nan"))
        mma.launch(matrix, torch.eye(1024)[chosen].half(), y, 0, shape=MMAShape(8, 1))
        torch.testing.assert_close(y.T, weights[:, chosen].float(), rtol=0, atol=0)


@BY_TYPE
def test_each_byte_of_the_weights_is_loaded_once_for_64_tokens(block):
    with pretended_gpu() as gpu:
        matrix, weights = made(block, 128, 1024)
        x, y = values(64, 1024), torch.empty(64, 128)
        mma.launch(matrix, x, y, 0, shape=MMAShape(8, 1))
        assert_sums(y, x, weights)
        assert gpu.memory is not None
        loaded = gpu.memory.regions[0]
        book = matrix.layout.book
        table = 0 if book is None else book.table.nbytes
        assert 0 <= loaded.fetched_from_l2 - 128 * 1024 * matrix.layout.bpw / 8 <= table
        if not block.numbered:  # the rest is in L1: scales, and bits of 4 bytes a unit
            assert loaded.fetched <= 2 * loaded.fetched_from_l2
        assert gpu.memory.regions[1].fetched == x.nbytes  # for the block's 128 rows


@pytest.mark.parametrize(
    ("name", "rows", "columns", "n", "shape", "kind", "ends"),
    [
        # rows and tokens that fill no tile, summed in parts
        ("Q4_K", 40, 768, 15, MMAShape(2, 3), torch.float16, "scale accumulate bias"),
        ("IQ2_XS", 20, 512, 10, MMAShape(2, 1), torch.float16, ""),  # its codebook is looked up
        ("Q8_0", 17, 416, 12, MMAShape(1, 2), torch.float16, ""),  # 13 units: the last step has one, its part two
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("Q4_K", 33, 1280, 9, MMAShape(1, 1), torch.float16, ""),
                ("Q4_K", 20, 768, 16, MMAShape(2, 1), torch.float16, "scale accumulate bias"),
                ("Q6_K", 20, 512, 10, MMAShape(2, 1), torch.bfloat16, ""),
                ("Q8_0", 1, 32, 1, MMAShape(1, 1), torch.float16, ""),
            )
        ),
    ],
)
def test_odd_shapes_parts_and_what_ends_a_product(name, rows, columns, n, shape, kind, ends):
    with pretended_gpu():
        matrix, weights = made(WRITTEN[name], rows, columns, kind)
        x = values(n, columns, kind)
        scale = torch.linspace(0.5, 2, n) if "scale" in ends else None
        bias = torch.arange(rows, dtype=torch.float32) if "bias" in ends else None
        y = torch.full((n, rows), 3.0 if "accumulate" in ends else float("nan"))
        mma.launch(matrix, x, y, 0, scale, "accumulate" in ends, bias, shape)
        if "accumulate" in ends:
            y -= 3
        if bias is not None:
            y -= bias
        assert_sums(y if scale is None else y / scale[:, None], x, weights)


def test_what_is_not_finite_stays_with_its_row_or_token():
    """Q8_0 of 32 columns a row: three quarters of what a step loads belong to the next rows."""
    with pretended_gpu():
        tensor, _ = random_matrix(BLOCKS["Q8_0"], 3, 32)
        tensor.raw[34:36] = np.array([6e4], np.float16).view(np.uint8)  # times 127 is beyond halves
        matrix = DeviceMatrix.upload(tensor, "cuda")
        x, y = values(3, 32), torch.empty(3, 3)
        x[1, 5] = float("nan")
        mma.launch(matrix, x, y, 0, shape=MMAShape(1, 1))
        assert y[[0, 2]][:, [0, 2]].isfinite().all()
        assert not y[:, 1].isfinite().any()
        assert y[1].isnan().all()


LARGEST = [
    pytest.param((8, 0), id="8.0"),
    pytest.param((9, 0), id="9.0"),
    *(pytest.param(c, id=f"{c[0]}.{c[1]}", marks=pytest.mark.exhaustive) for c in ((8, 6), (8, 9), (10, 0), (12, 0))),
]


@BY_TYPE
@pytest.mark.parametrize("capability", LARGEST)
def test_no_kernel_of_64_tokens_spills_or_needs_more_than_128_registers(block, capability):
    found = ptx.assembled(
        ptx.ptx_of(mma.kernel(block.name, "f16", 8, 8, False, ""), mma.OLDEST), capability, mma.MAX_REGISTERS
    )
    assert (found.stack, found.spills) == (0, 0)
    assert found.registers <= 128


@pytest.mark.exhaustive
@BY_TYPE
@pytest.mark.parametrize(("kind", "epilogue"), [("f16", "scaled_bias_accumulate"), ("bf16", "partial")])
def test_no_other_kernel_spills(block, kind, epilogue):
    for tiles, warps in ((2, 8), (6, 8), (8, 8), (8, 1)):
        kernel = mma.kernel(block.name, kind, tiles, warps, not block.is_k, epilogue)
        for capability in ((8, 0), (8, 9), (9, 0), (12, 0)):
            found = ptx.assembled(ptx.ptx_of(kernel, mma.OLDEST), capability, kernel.registers)
            assert (found.stack, found.spills) == (0, 0), (tiles, warps, capability)


def test_the_loop_has_products_wide_loads_and_no_conversions_of_codes():
    code = ptx.ptx_of(mma.kernel("Q4_K", "f16", 8, 8, False, ""), mma.OLDEST)
    assert code.count("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32") == 64
    assert code.count("ld.shared.v4.u32") == 32
    assert code.count("cvt.rn.f16x2.f32") == 32
    assert code.count("ld.global.nc.L1::no_allocate.L2::128B.v4.u32") == 4  # two of them before the loop
    assert "local" not in code
    made = ptx.compiled(mma.combiner("scaled_bias_accumulate"), mma.OLDEST)
    assert (made.stack, made.spills) == (0, 0)
    assert made.registers <= launch.MAX_REGISTERS


@pytest.mark.parametrize(
    ("n", "precision", "kind", "capability", "wanted"),
    [
        (8, "int8", torch.float32, (8, 0), ["_quantize_f32", "_product_Q4_K_8"]),
        (9, "int8", torch.float32, (8, 0), ["_halve_plain", "_product_mma_Q4_K_f16_2_1_scaled"]),
        (64, "int8", torch.float16, (9, 0), ["_product_mma_Q4_K_f16_8_8"]),
        (9, "int8", torch.float16, (8, 6), ["_product_mma_Q4_K_f16_2_1"]),
        (9, "int8", torch.bfloat16, (9, 0), ["_product_mma_Q4_K_bf16_2_1"]),
        (150, "int8", torch.float32, (9, 0), ["_halve_plain", "_dequantize_Q4_K_f16"]),
        (9, "int8", torch.float32, (7, 5), ["_halve_plain", "_dequantize_Q4_K_f16"]),
        (9, "f32", torch.float32, (9, 0), ["_dequantize_Q4_K_f32"]),
    ],
)
def test_the_number_of_tokens_the_precision_and_the_gpu_choose_the_way(n, precision, kind, capability, wanted):
    with pretended_gpu(capability=capability) as gpu:
        tensor, weights = random_matrix(BLOCKS["Q4_K"], 128 if n == 64 else 16, 256)
        x = values(n, 256, kind)
        y = tensor.to("cuda").matmul(x, precision=precision)
        assert len(gpu.names) == len(wanted)
        assert all(name.startswith(start) for name, start in zip(gpu.names, wanted, strict=True)), gpu.names
        wrong = (y.double() - x.double() @ torch.from_numpy(weights).T).norm()
        assert wrong < 0.02 * (x.double() @ torch.from_numpy(weights).T).norm()


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
@pytest.mark.parametrize("n", [9, 70])
def test_a_view_that_begins_between_16_bytes_is_multiplied_too(n, kind):
    with pretended_gpu():
        tensor, weights = random_matrix(BLOCKS["Q4_1"], 16, 256)  # which has no way of bytes
        x = values(n + 1, 256, kind).reshape(-1)[3 : 3 + n * 256].view(n, 256)
        y = tensor.to("cuda").matmul(x).double()
        wanted = x.double() @ torch.from_numpy(weights).T
        assert (y - wanted).norm() < 2e-3 * wanted.norm()


@pytest.mark.parametrize("n", [3, pytest.param(12, marks=pytest.mark.exhaustive), 70])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_product_adds_a_bias_to_columns_of_a_wider_result_and_leaves_the_others(n: int, accumulate: bool) -> None:
    """On all three ways: up to 8 tokens, up to 64, and by torch."""
    from bridge.cuda.product.matmul import Multiplier

    with pretended_gpu():
        tensor, weights = random_matrix(BLOCKS["Q4_0"], 6, 64)
        matrix, x, bias = DeviceMatrix.upload(tensor, "cuda"), values(n, 64, torch.float32), torch.arange(6.0)
        wide = torch.full((n, 11), 5.0)
        Multiplier(devices.require("cuda"), "int8").multiply(matrix, x, wide[:, 3:9], bias, accumulate)
    wanted = x.double() @ torch.from_numpy(weights).T + bias + 5 * accumulate
    assert (wide[:, 3:9] - wanted).norm() < 0.02 * wanted.norm()
    assert (wide[:, [0, 1, 2, 9, 10]] == 5).all()


@pytest.mark.parametrize("way", ["plain", "norm", "gate", "gate_in_turn", "gate_in_turn_scaled"])
@pytest.mark.parametrize("columns", [32, 2336])  # less than a turn of a block, and more than one
def test_halves_are_those_that_torch_makes(way, columns):
    given = torch.tensor([2.0, 1e-3, 0.5]) if way.endswith("_scaled") else None
    way = way.removesuffix("_scaled")
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((3, columns * (1 + way.startswith("gate")))))
    x = (x * torch.tensor([[1e-3], [1.0], [3e4]])).float()
    weight = torch.linspace(0.5, 2, columns) if way == "norm" else None
    with pretended_gpu():
        device = devices.require("cuda")
        if way == "plain":
            made = halves.halved(x, device)
        elif way == "norm":
            made = halves.normed(x, weight, 1e-5, device)
        else:
            made = halves.gated(x, way, device, given)
    exact = halves.floats_by_torch(way, (x if given is None else x * given[:, None]).double(), weight, 1e-5)
    found = made.values.double() * made.scale[:, None].double()
    assert made.values.abs().amax(1).allclose(torch.tensor(halves.LARGEST).half(), rtol=1e-3)
    assert (found - exact).abs().amax(1).div(exact.abs().amax(1)).max() < 6e-4


def test_sums_that_are_not_scaled_are_with_their_scale_the_products():
    with pretended_gpu():
        device = devices.require("cuda")
        tensor, _ = random_matrix(BLOCKS["Q4_K"], 32, 256)
        matrix = DeviceMatrix.upload(tensor, "cuda")
        multiplier = matmul.Multiplier(device, "int8")
        for n, scaled in ((20, True), (200, False)):
            x = halves.halved(torch.randn(n, 256), device)
            y, sums = torch.full((2, n, 32), float("nan"))
            multiplier.multiply(matrix, x, y)
            scale = multiplier.sums(matrix, x, sums)
            assert (scale is None) == scaled
            assert (sums if scale is None else sums * scale[:, None]).allclose(y, rtol=1e-6)


def test_torch_s_sums_of_halves_are_float32_and_scaled_once():
    from bridge.cuda.product.matmul import product

    with disguised_gpu():
        weight = torch.full((4, 1024), 100.0, dtype=torch.float16, device="cuda")
        x = torch.full((2, 1024), 3e4, device="cuda")  # as halves 8, times which the sums are 819,200
        y = product(weight, halves.halved(x, devices.require("cuda")))
    assert (y.held / 1024 - 3e6).abs().max() < 1


def test_blocks_fill_the_device_and_warps_have_rows():
    def shape(rows: int, columns: int, n: int = 64) -> MMAShape:
        gpu = devices.Device(0, "NVIDIA H200", (9, 0), 132)
        nbytes = rows * columns * 9 // 16
        matrix: Any = SimpleNamespace(rows=rows, units=columns // 32, nbytes=nbytes, device=gpu)
        return mma.choose_shape(matrix, n)

    assert shape(8192, 28672) == MMAShape(8, 4)  # 256 of 264 blocks that find room
    assert shape(4096, 14336) == MMAShape(8, 8)
    assert shape(28672, 4096) == MMAShape(8, 1)  # 224 blocks; sums of parts are as many bytes as the weights
    assert shape(128256, 4096) == MMAShape(8, 1)
    assert shape(8192, 2048, 16).parts > shape(8192, 2048, 64).parts
    assert shape(16, 4096) == MMAShape(1, 8)
    assert shape(17, 4096).warps == 2
    assert shape(16, 256) == MMAShape(1, 1)
    for columns in range(32, 8192, 96):  # every part has steps
        steps, parts = -(-columns // 128), shape(256, columns).parts
        assert (parts - 1) * -(-steps // parts) < steps


def test_what_does_not_fit_is_refused():
    with pretended_gpu():
        matrix, _ = made(BLOCKS["Q4_K"], 16, 256)
        y = torch.empty(9, 16)
        for x, message in (
            (values(9, 256, torch.float32), r"float32 \[9, 256\]; must be float16 or bfloat16 of 1 to 64 times"),
            (values(9, 512), r"w0: x is torch.float16 \[9, 512\]; must be float16 or bfloat16 of 1 to 64 times 256"),
            (values(65, 256), r"w0: x is torch.float16 \[65, 256\]"),
        ):  # fmt: skip
            with pytest.raises(BridgeError, match=message):
                mma.launch(matrix, x, y, 0)
