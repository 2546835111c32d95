"""Products of int8 on tensor cores: what they and their records hold, machine code, and who takes them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bridge.blocks import TYPES
from bridge.errors import BridgeError
from tests.support import ptx
from tests.support.gpu.device import pretended_gpu
from tests.support.places import ROOT
from tests.support.random_blocks import assert_product, random_matrix, rounded

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from bridge.cuda.forms.layout import DeviceLayout
from bridge.cuda.forms.matrix import DeviceMatrix
from bridge.cuda.product import halves, mma_int8, token_records
from bridge.cuda.product.matmul import Multiplier
from bridge.cuda.product.mma import MMAShape
from bridge.cuda.product.token_records import TokenRecords, recorded
from bridge.cuda.toolchain import device as devices

pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.proof,
]

BY_TYPE = pytest.mark.parametrize(
    "name",
    [pytest.param(t, marks=() if t in ("Q4_K", "Q2_K") else pytest.mark.exhaustive) for t in mma_int8.TYPES],
)


def values(n: int, columns: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, columns, generator=torch.Generator().manual_seed(n)).to(kind)


def stored(records: TokenRecords) -> tuple[np.ndarray, np.ndarray]:
    """(values, sums): codes times steps [tokens, columns], and their sums over 32 columns, of all that there is room
    for."""
    size, steps = records.tiles, records.steps
    chunks = records.buffer.numpy().reshape(-1, steps, size, 1280)
    codes = chunks[..., :1024].view(np.int8).reshape(-1, steps, size, 4, 8, 4, 2, 4).astype(np.float64)
    codes = codes.transpose(0, 2, 4, 1, 3, 6, 5, 7).reshape(-1, steps * 4, 32)
    floats = chunks[..., 1024:].copy().view(np.float32).reshape(-1, steps, size, 4, 8, 2).astype(np.float64)
    floats = floats.transpose(0, 2, 4, 1, 3, 5).reshape(-1, steps * 4, 2)
    return (codes * floats[..., :1]).reshape(len(codes), -1), floats[..., 1]


@pytest.mark.parametrize(
    ("way", "kind"),
    [("plain", torch.float16), ("norm", torch.float32), ("gate", torch.float32)]
    + [
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (("plain", torch.bfloat16), ("plain", torch.float32), ("gate_in_turn", torch.float32))
    ],
)
def test_records_hold_what_is_multiplied_rounded_as_on_the_cpu(way, kind):
    """17 tokens in groups of 16; 288 columns, a step and one block."""
    columns = 288
    x = values(17, columns * (2 if way.startswith("gate") else 1), kind)
    weight = torch.linspace(0.5, 2, columns) if way == "norm" else None
    with pretended_gpu():
        records = recorded(x, 2, devices.require("cuda"), way, weight, 1e-5)
    found, sums = stored(records)
    assert found.shape == (32, 384)
    exact = halves.floats_by_torch(way, x, weight, 1e-5).float().numpy()
    if way == "plain":
        np.testing.assert_array_equal(found[:17, :columns], rounded(exact))
    else:  # the last bit of a value may round another way
        assert np.abs(found[:17, :columns] - exact).max() < 1.01 * np.abs(found - np.roll(found, 1, 0)).max() / 128
    assert not found[17:].any()
    assert not found[:, columns:].any()
    np.testing.assert_allclose(sums, found.reshape(32, -1, 32).sum(2), rtol=1e-6, atol=1e-6)


@BY_TYPE
@pytest.mark.parametrize(
    ("rows", "steps", "n", "tiles", "shape", "ends"),
    [
        (40, 6, 15, 2, MMAShape(2, 3), "bias accumulate"),  # rows and tokens that fill no tile, summed in parts
        (20, 4, 37, 3, MMAShape(1, 1), "bias"),  # two groups of tokens
    ],
)
def test_products_are_those_of_rounded_tokens(name, rows, steps, n, tiles, shape, ends):
    columns = 128 * steps - (96 if TYPES[name].size == 32 else 0)  # a last step of one unit, where a type has that
    with pretended_gpu():
        tensor, weights = random_matrix(TYPES[name], rows, columns)
        matrix = DeviceMatrix.upload(tensor, "cuda")
        x = values(n, columns)
        bias = torch.arange(rows) / 64
        y = torch.full((n, rows), 0.5 if "accumulate" in ends else float("nan"))
        mma_int8.launch(matrix, recorded(x, tiles, matrix.device), y, 0, "accumulate" in ends, bias, shape)
    y -= bias + 0.5 * ("accumulate" in ends)
    assert_product(y.numpy(), rounded(x.numpy()), weights.astype(np.float64))


def test_all_values_of_a_unit_at_their_largest_are_summed_exactly():
    """Q8_0: 32 times -128 * -128, the most that an int32 of tensor cores has to hold here."""
    with pretended_gpu():
        tensor, _ = random_matrix(TYPES["Q8_0"], 3, 64)
        tensor.raw.reshape(-1, 34)[:, 2:] = 128
        matrix = DeviceMatrix.upload(tensor, "cuda")
        x, y = torch.full((9, 64), -2.0), torch.empty(9, 3)
        mma_int8.launch(matrix, recorded(x, 2, matrix.device), y, 0, shape=MMAShape(1, 1))
    steps = tensor.raw.reshape(3, 2, 34)[:, :, :2].copy().view(np.float16).astype(np.float64)[:, :, 0]
    np.testing.assert_allclose(y.numpy(), np.tile(steps.sum(1) * 32 * 256, (9, 1)), rtol=1e-6)


def test_scales_multiplied_into_codes_are_exact_at_their_largest():
    """Q2_K: codes of 3 with scales and mins of 15, times -128: 45 * 128 in each byte's product, less 15 * 128."""
    with pretended_gpu():
        tensor, _ = random_matrix(TYPES["Q2_K"], 3, 256)
        blocks = tensor.raw.reshape(3, 84)
        blocks[:, :80] = 255
        matrix = DeviceMatrix.upload(tensor, "cuda")
        x, y = torch.full((9, 256), -2.0), torch.empty(9, 3)
        mma_int8.launch(matrix, recorded(x, 2, matrix.device), y, 0, shape=MMAShape(1, 1))
    d, dmin = blocks[:, 80:].copy().view(np.float16).astype(np.float64).T
    np.testing.assert_allclose(y.numpy(), np.tile(-2 * 256 * (45 * d - 15 * dmin), (9, 1)), rtol=1e-5)


def test_what_is_not_finite_stays_with_its_token():
    with pretended_gpu():
        tensor, _ = random_matrix(TYPES["Q8_0"], 3, 32)
        matrix = DeviceMatrix.upload(tensor, "cuda")
        x, y = values(9, 32), torch.empty(9, 3)
        x[1, 5] = float("nan")
        mma_int8.launch(matrix, recorded(x, 2, matrix.device), y, 0, shape=MMAShape(1, 1))
    assert y[1].isnan().all()
    assert y[[0, *range(2, 9)]].isfinite().all()


@BY_TYPE
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("tiles", [3, pytest.param(6, marks=pytest.mark.exhaustive)])
def test_no_kernel_spills_or_needs_more_than_128_registers(name, capability, tiles):
    kernel = mma_int8.kernel(name, tiles, 8, "bias")
    found = ptx.assembled(ptx.ptx_of(kernel, mma_int8.OLDEST), capability, kernel.registers)
    assert (found.stack, found.spills) == (0, 0)
    assert found.registers <= 128


def test_the_loop_has_products_and_wide_loads():
    code = ptx.ptx_of(mma_int8.kernel("Q4_K", 3, 8, "bias"), mma_int8.OLDEST)
    assert code.count("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32") == 4 * 3
    assert code.count("ld.global.nc.L1::no_allocate.L2::128B.v4.u32") == 4  # two of them before the loop
    assert "local" not in code


@pytest.mark.parametrize(
    ("n", "kind", "capability", "wanted"),
    [
        (9, torch.float32, (9, 0), ["_halve_plain", "_product_mma_Q4_K_f16_2_1"]),
        (20, torch.float16, (9, 0), ["_product_mma_Q4_K_f16_4_1"]),  # without a launch for x
        (65, torch.bfloat16, (9, 0), ["_record_plain_bf16", "_product_int8_Q4_K_6_1"]),
    ],
)
def test_the_number_of_tokens_and_the_gpu_choose_the_way(n, kind, capability, wanted):
    with pretended_gpu(capability=capability) as gpu:
        tensor, weights = random_matrix(TYPES["Q4_K"], 16, 256)
        x = values(n, 256, kind)
        y = tensor.to("cuda").matmul(x)
        assert [name[: len(start)] for name, start in zip(gpu.names, wanted, strict=True)] == wanted
    exact = x.double() @ torch.from_numpy(weights).double().T
    assert (y.double() - exact).norm() < 0.02 * exact.norm()


def test_it_is_chosen_where_it_takes_less_time_as_measured_or_by_count():
    def chosen(name: str, capability: tuple[int, int]) -> list[int]:
        layout = DeviceLayout(TYPES[name])
        gpu = SimpleNamespace(capability=capability)
        matrix: Any = SimpleNamespace(type=name, layout=layout, device=gpu)
        return [n for n in (9, 16, 24, 32, 64, 65, 96, 97, 128, 256, 2048) if mma_int8.takes(matrix, n)]

    for name in mma_int8.TYPES:
        assert chosen(name, (9, 0)) == [24, 65, 96]  # as measured
    assert chosen("Q4_K", (8, 0)) == [65, 96, 97, 128]
    assert chosen("Q4_K", (8, 9)) == chosen("Q4_K", (12, 0)) == [65, 96, 97, 128, 256, 2048]
    assert chosen("Q2_K", (8, 0)) == []  # two conversions a product
    assert chosen("Q4_K", (7, 5)) == chosen("Q4_K", (10, 0)) == chosen("Q4_1", (9, 0)) == []


@pytest.mark.proof("docs/measurements/cuda.md")
def test_the_counts_in_the_docs_are_those_that_choose():
    page = (ROOT / "docs" / "measurements" / "cuda.md").read_text()
    text = page.partition("8-bit integers are")[2].partition("\n## ")[0]
    tokens = [int(n) for n in re.findall(r"(\d+) tokens \|", text)]
    for name in mma_int8.TYPES:
        found = [mma_int8.clocks(name, (9, 0), n) for n in tokens]
        cells = [f"{here:,.0f} / {there:,.0f} = {here / there:.2f}" for _, here, there in found]
        assert f"| {name} | {found[0][0]:.0f} | {' | '.join(cells)} |" in text


@pytest.mark.parametrize("parts", [1, 2])
def test_there_may_be_more_tokens_than_a_grid_has_blocks_in_its_second_direction(monkeypatch, parts):
    with pretended_gpu(capability=(8, 9)) as gpu:
        monkeypatch.setattr(gpu, "run", lambda kernel, *given: gpu.names.append(kernel.name))  # computes nothing
        monkeypatch.setattr(mma_int8, "choose_shape", lambda *given: MMAShape(1, parts))
        matrix = DeviceMatrix.upload(random_matrix(TYPES["Q4_K"], 16, 256)[0], "cuda")
        x = torch.zeros((65537, 256), dtype=torch.float16)
        Multiplier(matrix.device, "int8").multiply(matrix, x, torch.empty((65537, 16)))
    assert [name.split("_")[1] for name in gpu.names] == ["record", "product", *["combine"] * (parts > 1)]


def test_tiles_of_a_group_fit_the_tokens():
    assert [mma_int8.tiles_of(n) for n in (9, 16, 17, 24, 25, 2048)] == [2, 2, 3, 3, 6, 6]


def test_what_does_not_fit_is_refused():
    with pretended_gpu():
        matrix = DeviceMatrix.upload(random_matrix(TYPES["Q4_K"], 16, 256)[0], "cuda")
        y = torch.empty(9, 16)
        with pytest.raises(BridgeError, match="w0: records of 512 columns; must be 256"):
            mma_int8.launch(matrix, TokenRecords(torch.empty(0), 9, 512, 2), y, 0)
        with pytest.raises(BridgeError, match=r"x is torch.float64 \[9, 256\]"):
            token_records.recorded(values(9, 256, torch.float64), 2, matrix.device)
