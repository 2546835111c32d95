"""Rounding onto tables and codebooks with a Hessian: costs against the formulas, and what must hold for any weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bridge.blocks.read import CALIBRATED
from bridge.encode.rounding.nearest_points import looker
from bridge.encode.rounding.round_points import codebook
from bridge.encode.rounding.round_rows import quantize_rows
from bridge.errors import BridgeError
from bridge.quantize.grids.codebook import CodebookGrid
from bridge.quantize.grids.codebook_rounding import rounding
from bridge.quantize.grids.codebook_units import values_of_codes
from bridge.quantize.method import Method, superblocks
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.solve.gptq_solver import Solution, dequantize, error, grouped_act_order, row_errors, solve
from bridge.quantize.solve.hessian import Hessian, damp, inverse_factor
from bridge.quantize.solve.refine import refine
from bridge.runtime.cpu.engines.dequantize import rows as dequantize_blocks
from bridge.system.kernels.jit import kernel
from scripts.peers import nvfp4
from scripts.peers.llama import ggml

SOME = ("IQ4_XS", "IQ3_XXS", "IQ2_S")  # a table, a parity of signs, and a codebook without; each compiles for seconds
REFINED = SOME[:2]  # what refines them is one source, which calls the rounding of units


def types(*names: str) -> list[Any]:
    """All types that have a table or a codebook; only these are in every run."""
    found = [name for name, block in CALIBRATED.items() if block.values or block.numbered]
    return [name if name in names else pytest.param(name, marks=pytest.mark.exhaustive) for name in found]


def layer(seed: int, rows: int = 32, columns: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and the damped Hessian of correlated inputs of uneven size."""
    random = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + torch.randn(columns, columns, generator=random) / columns**0.5
    inputs = torch.randn(4 * columns, columns, generator=random) @ mix
    inputs *= torch.exp(torch.randn(columns, generator=random))
    hessian = Hessian("layer", columns)
    hessian.add(inputs)
    damp(hessian.matrix, 0.01)
    return torch.randn(rows, columns, generator=random), hessian.matrix


def solved(weight: torch.Tensor, hessian: torch.Tensor, type: str) -> tuple[CodebookGrid, Solution]:
    grid = CodebookGrid(CALIBRATED[type], *weight.shape)
    order = grouped_act_order(hessian, grid.fit_columns, grid.sub, grid.unit)
    return grid, solve(weight, hessian, grid, order=order, damping=0)


def nearest_values(weight: torch.Tensor, hessian: torch.Tensor, type: str) -> np.ndarray:
    """As rounded to nearest, scales in the metric of H's diagonal; 4-bit floats as ggml and ModelOpt round."""
    if type == "NVFP4":
        return nvfp4.quantize(weight.numpy()).values()
    if type == "MXFP4":
        return ggml.dequantize(ggml.quantize(weight.numpy(), type), ggml.GGMLQuantizationType[type])
    return dequantize_blocks(type, quantize_rows(weight.numpy(), CALIBRATED[type], hessian.diagonal().numpy()).data)


@pytest.mark.parametrize("type", types(*REFINED))  # compiled anew in every run
def test_a_unit_costs_its_residual_in_the_metric_and_keeps_the_parity_of_signs(type: str) -> None:
    units = rounding(type).units
    unit, search = units.unit, units.function
    even = type in ("IQ2_XXS", "IQ2_XS", "IQ3_XXS")
    rng = np.random.default_rng(1)

    @kernel
    def run(w, a, m, variant, q, scratch):  # type: ignore[no-untyped-def]
        return search(w, a, m, variant, q, scratch)

    scratch = units.scratch()
    for _ in range(100):
        root = rng.normal(size=(unit, unit)).astype(np.float32)
        m = root @ root.T + np.eye(unit, dtype=np.float32) * np.float32(0.1)
        a = np.float32(0.02)
        w = (rng.normal(size=unit) * 0.5).astype(np.float32)
        q = np.zeros(unit, np.float32)
        lost = run(w, a, m, 0, q, scratch)
        assert set(q.astype(int)) <= set(values_of_codes(CALIBRATED[type]))
        r = w - a * q
        assert lost == pytest.approx(r @ m @ r, rel=1e-4, abs=1e-6)
        if unit == 1:
            continue
        assert not even or (q < 0).sum() % 2 == 0


@pytest.mark.exhaustive  # takes seconds to compile
def test_of_the_points_near_a_target_the_cheapest_in_the_metric_is_found_and_where_its_gradient_leads() -> None:
    book = codebook("IQ1_S")
    look = looker(book.bounds)

    @kernel
    def run(t, w, a, inverse, shift, m, near, numbers, values, point):  # type: ignore[no-untyped-def]
        return look(t, w, a, inverse, shift, m, near, numbers, values, point)

    rng = np.random.default_rng(2)
    for shift in (0, -2) * 25:
        root = rng.normal(size=(16, 8)).astype(np.float32)
        m = root.T @ root
        w, a = rng.normal(size=8).astype(np.float32), np.float32(0.15)
        t, point = w / a - np.float32(shift), np.zeros(8, np.float32)
        cell = sum(3 ** (7 - i) * sum(y > bound for bound in book.bounds) for i, y in enumerate(t))
        cost = run(t, w, a, 1 / a, np.float32(shift), m, book.near, book.numbers, book.values, point)
        listed = book.near[cell].T.astype(np.float32)
        residuals = w - a * (listed + shift)
        costs = ((residuals @ m) * residuals).sum(1)
        np.testing.assert_array_equal(point, listed[costs.argmin()])
        assert (point == book.values).all(1).any()
        assert cost == pytest.approx(costs.min(), rel=1e-4)
        leads = point + residuals[costs.argmin()] @ m / np.diag(m) / a
        np.testing.assert_allclose(t, leads, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("type", types(*SOME))
def test_the_errors_of_a_run_are_those_of_the_whole_metric(type: str) -> None:
    weight, hessian = layer(2, 16, 256)
    grid = CodebookGrid(CALIBRATED[type], 16, 256)
    order = grouped_act_order(hessian, grid.fit_columns, grid.sub, grid.unit)[: grid.fit_columns]
    run, columns = order[0] // grid.fit_columns, order % grid.fit_columns
    span = slice(run * grid.fit_columns, (run + 1) * grid.fit_columns)
    factor = inverse_factor(hessian[order[:, None], order].clone())
    assert factor is not None
    own = weight[:, order]
    grid.fit(run, weight[:, span].numpy(), hessian.diagonal().numpy()[span])
    codes, errors = grid.round_run(run, own, columns, factor)
    values = torch.from_numpy(codes * grid.a[:, order // grid.sub])
    lost = (own - values).double()
    expected = (lost @ hessian[order[:, None], order].double() * lost).sum(1)
    np.testing.assert_allclose(np.square(errors).sum(1), expected, rtol=1e-3)


@pytest.mark.parametrize("type", types(*REFINED))
def test_the_error_falls_with_each_sweep_far_below_that_of_the_nearest_codes_and_blocks_hold_it(type: str) -> None:
    weight, hessian = layer(3)
    least = error(weight, nearest_values(weight, hessian, type), hessian)
    grid, solution = solved(weight.clone(), hessian, type)
    last = row_errors(weight, solution.codes, grid, hessian)
    assert last.sum() < 0.7 * least
    for _ in range(3):
        refine(weight, hessian, grid, solution.codes, sweeps=1)
        now = row_errors(weight, solution.codes, grid, hessian)
        assert (now <= last * (1 + 1e-4)).all()  # weights are float32
        last = now
    assert last.sum() < 0.58 * least
    np.testing.assert_array_equal(dequantize_blocks(type, grid.pack(solution.codes)), dequantize(solution.codes, grid))


@pytest.mark.parametrize("type", REFINED)
def test_rows_are_independent(type: str) -> None:
    weight, hessian = layer(4, 8)
    grid, solution = solved(weight.clone(), hessian, type)
    alone, own = solved(weight[5:6].clone(), hessian, type)
    np.testing.assert_array_equal(own.codes, solution.codes[5:6])
    other = CodebookGrid(grid.block, 1, 512)
    other.copy_rows(np.array([0]), grid, np.array([5]))
    np.testing.assert_array_equal(other.a, alone.a)


@pytest.mark.parametrize("type", REFINED)
@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_dead_columns_and_rows_of_zeros_are_rounded(type: str, damping: float) -> None:
    random = torch.Generator().manual_seed(5)
    inputs = torch.randn(2048, 512, generator=random)
    inputs[:, torch.rand(512, generator=random) < 0.25] = 0
    inputs[:, :256] *= 0.01
    inputs[:, 32:64] = 0
    hessian = Hessian("layer", 512)
    hessian.add(inputs)
    weight = torch.randn(8, 512, generator=random)
    weight[3] = 0
    found, lost = [], []
    for sweeps in (0, 2):
        values, done = Method(superblocks(type), damping=damping, sweeps=sweeps).layer(
            LayerInput("layer", weight, hessian)
        )
        assert torch.isfinite(values).all()
        assert not values[3].any()
        np.testing.assert_array_equal(dequantize_blocks(type, done.blocks()), values)
        found.append(done)
        lost.append(error(weight, values, hessian.matrix))
    assert lost[1] < lost[0]


def test_without_a_usable_hessian_weights_are_rounded_to_the_nearest_codes() -> None:
    weight, hessian = layer(6, 8, 256)
    broken: Any = torch.full_like(hessian, torch.nan)
    grid, solution = solved(weight.clone(), broken, "IQ4_XS")
    assert solution.damping == float("inf")
    assert float((weight - torch.from_numpy(dequantize(solution.codes, grid))).square().mean()) < 0.01


def test_columns_that_fill_no_blocks_are_told() -> None:
    with pytest.raises(BridgeError, match="rows of 288 weights do not fill IQ2_S blocks of 256"):
        superblocks("IQ2_S")(4, 288)


def test_weights_that_are_no_numbers_are_told() -> None:
    weight, _ = layer(7, 4, 256)
    weight[1, 2] = torch.nan
    with pytest.raises(BridgeError, match=r"layer: its weights hold NaN"):
        Method(superblocks("IQ4_XS")).layer(LayerInput("layer", weight, Hessian("layer", 256)))


def test_an_order_that_separates_the_columns_of_a_point_is_refused() -> None:
    weight, _ = layer(8, 4, 256)
    with pytest.raises(BridgeError, match=r"static.*choose fixed or none"):
        Method(superblocks("IQ2_S"), "static").layer(LayerInput("layer", weight, Hessian("layer", 256)))
