"""Plain types rounded with a Hessian, scales chosen with the codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridge.blocks.read import CALIBRATED
from bridge.encode.rounding.round_rows import quantize_rows
from bridge.quantize.grids.plain import PlainGrid
from bridge.quantize.method import Method, superblocks
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.solve.gptq_solver import Solution, dequantize, error, grouped_act_order, row_errors, solve
from bridge.quantize.solve.hessian import Hessian, damp, inverse_factor
from bridge.quantize.solve.refine import refine
from bridge.runtime.cpu.engines.dequantize import rows as dequantize_blocks

SOME = ("Q5_0", "Q4_1")  # scales alone, and with minimums; each compiles for seconds
TYPES = [
    name if name in SOME else pytest.param(name, marks=pytest.mark.exhaustive)
    for name, block in CALIBRATED.items()
    if not (block.values or block.numbered)
]
COLUMNS = 320  # runs of 128, 128 and 64


def layer(seed: int, rows: int = 16, columns: int = COLUMNS) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and the damped Hessian of correlated inputs of uneven size."""
    random = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + torch.randn(columns, columns, generator=random) / columns**0.5
    inputs = torch.randn(4 * columns, columns, generator=random) @ mix
    inputs *= torch.exp(0.5 * torch.randn(columns, generator=random))
    hessian = Hessian("layer", columns)
    hessian.add(inputs)
    damp(hessian.matrix, 0.01)
    return torch.randn(rows, columns, generator=random), hessian.matrix


def solved(weight: torch.Tensor, hessian: torch.Tensor, type: str, fit: str = "reached") -> tuple[PlainGrid, Solution]:
    grid = PlainGrid(CALIBRATED[type], *weight.shape)
    order = grouped_act_order(hessian, grid.fit_columns, grid.sub, grid.unit)
    return grid, solve(weight.clone(), hessian, grid, order=order, fit=fit, damping=0)


@pytest.mark.parametrize("type", TYPES)
def test_the_error_falls_with_each_sweep_below_that_of_the_nearest_codes_and_blocks_hold_it(type: str) -> None:
    weight, hessian = layer(1)
    rounded = quantize_rows(weight.numpy(), CALIBRATED[type], hessian.diagonal().numpy()).data
    least = error(weight, dequantize_blocks(type, rounded), hessian)
    grid, solution = solved(weight, hessian, type)
    last = row_errors(weight, solution.codes, grid, hessian)
    assert last.sum() < 0.75 * least
    for _ in range(3):
        refine(weight, hessian, grid, solution.codes, sweeps=1)
        now = row_errors(weight, solution.codes, grid, hessian)
        assert (now <= last * (1 + 1e-4)).all()  # weights are float32
        last = now
    assert last.sum() < 0.65 * least
    np.testing.assert_array_equal(dequantize_blocks(type, grid.pack(solution.codes)), dequantize(solution.codes, grid))


@pytest.mark.parametrize("type", TYPES)
def test_scales_chosen_with_the_codes_cost_less_than_scales_fitted_beforehand(type: str) -> None:
    weight, hessian = layer(2, 64)
    costs = []
    for fit in ("reached", "first"):
        grid, solution = solved(weight, hessian, type, fit)
        costs.append(error(weight, dequantize(solution.codes, grid), hessian))
    assert costs[0] < 0.97 * costs[1]


@pytest.mark.parametrize("type", TYPES)
def test_the_errors_of_a_run_are_those_of_the_whole_metric(type: str) -> None:
    weight, hessian = layer(3, 16, 128)
    grid = PlainGrid(CALIBRATED[type], 16, 128)
    order = grouped_act_order(hessian, grid.fit_columns, grid.sub, grid.unit)
    factor = inverse_factor(hessian[order[:, None], order].clone())
    assert factor is not None
    own = weight[:, order]
    codes, errors = grid.round_run(0, own, order, factor)
    values = codes * grid.a[:, order // grid.sub] + grid.c[:, order // grid.sub]
    lost = (own - torch.from_numpy(values)).double()
    expected = (lost @ hessian[order[:, None], order].double() * lost).sum(1)
    np.testing.assert_allclose(np.square(errors).sum(1), expected, rtol=1e-3)


@pytest.mark.parametrize("type", TYPES)
def test_weights_that_lie_on_the_types_grid_stay_as_they_are(type: str) -> None:
    weight, hessian = layer(4)
    rounded = quantize_rows(weight.numpy(), CALIBRATED[type], None).data
    weight = torch.from_numpy(dequantize_blocks(type, rounded))
    grid, solution = solved(weight, hessian, type)
    refine(weight, hessian, grid, solution.codes)
    share = error(weight, dequantize(solution.codes, grid), hessian) / error(weight, torch.zeros_like(weight), hessian)
    assert share < (1e-3 if type == "Q2_0" else 1e-6)


@pytest.mark.parametrize("type", SOME)
def test_rows_are_independent(type: str) -> None:
    weight, hessian = layer(5, 8)
    grid, solution = solved(weight, hessian, type)
    alone, own = solved(weight[5:6], hessian, type)
    np.testing.assert_array_equal(own.codes, solution.codes[5:6])
    other = PlainGrid(grid.block, 1, COLUMNS)
    other.copy_rows(np.array([0]), grid, np.array([5]))
    np.testing.assert_array_equal(other.a, alone.a)
    np.testing.assert_array_equal(other.c, alone.c)


@pytest.mark.parametrize("type", SOME)
@pytest.mark.parametrize("act_order", ["none", "static", "fixed"])
def test_dead_columns_and_rows_of_zeros_are_rounded_in_any_order(type: str, act_order: str) -> None:
    random = torch.Generator().manual_seed(6)
    inputs = torch.randn(2048, COLUMNS, generator=random)
    inputs[:, torch.rand(COLUMNS, generator=random) < 0.25] = 0
    inputs[:, 64:128] = 0
    hessian = Hessian("layer", COLUMNS)
    hessian.add(inputs)
    weight = torch.randn(8, COLUMNS, generator=random)
    weight[3] = 0
    lost = []
    for sweeps in (0, 2):
        method = Method(superblocks(type), act_order, sweeps=sweeps)
        values, done = method.layer(LayerInput("layer", weight, hessian))
        assert torch.isfinite(values).all()
        assert not values[3].any()
        np.testing.assert_array_equal(dequantize_blocks(type, done.blocks()), values)
        lost.append(error(weight, values, hessian.matrix))
    assert lost[1] < lost[0]
