"""The solver against textbooks, and what must hold for any weights and Hessian."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.blocks import BLOCKS
from bridge.errors import BridgeError
from bridge.quantize import textbook
from bridge.quantize.grids.group import GroupGrid
from bridge.quantize.grids.superblock import SuperblockGrid
from bridge.quantize.grids.try_lines import line_search
from bridge.quantize.method import Method, groups, superblocks
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.solve.gptq_solver import dequantize, error, grouped_act_order, round_to_nearest, solve
from bridge.quantize.solve.hessian import Hessian, damp, held_back, inverse_factor
from bridge.quantize.solve.refine import refine
from bridge.quantize.solve.target import retarget
from bridge.runtime.cpu.engines.dequantize import rows as dequantize_blocks
from bridge.system.kernels.jit import kernel

# with minimums, and without; others differ from these in numbers alone, and each compiles for 20 seconds
TYPES = ["Q4_K", "Q6_K", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("Q2_K", "Q3_K", "Q5_K"))]


def layer(seed: int, rows: int, columns: int, spread: float = 1.0, dtype: Any = torch.float32) -> tuple[Any, Any]:
    """Weights, and a Hessian of correlated inputs of uneven size."""
    random = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + torch.randn(columns, columns, generator=random) / columns**0.5
    inputs = torch.randn(4 * columns, columns, generator=random) @ mix
    inputs *= torch.exp(spread * torch.randn(columns, generator=random))
    hessian = Hessian("layer", columns)
    hessian.add(inputs)
    return torch.randn(rows, columns, generator=random).to(dtype), hessian.matrix.to(dtype)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 128), (3, 32), (2, 64), (8, -1)])
def test_the_solver_equals_the_textbook(bits: int, group_size: int, symmetric: bool) -> None:
    weight, hessian = layer(bits, 24, 320, dtype=torch.float64)
    weight[:, 7] = hessian[:, 7] = hessian[7] = 0
    grid = GroupGrid(24, 320, bits, group_size, symmetric, half=False, dtype=np.float64)
    solution = solve(weight, hessian, grid, nearest=False)
    expected = textbook.gptq(weight.numpy(), hessian.numpy(), bits, group_size, symmetric, ties=solution.codes)
    np.testing.assert_allclose(dequantize(solution.codes, grid), expected, atol=1e-5)


def test_act_order_is_the_textbook_on_permuted_columns_and_g_idx_undoes_it() -> None:
    weight, hessian = layer(1, 16, 256, dtype=torch.float64)
    layout = np.argsort(-hessian.diagonal().numpy(), kind="stable")
    permuted = hessian[layout][:, layout]
    grid = GroupGrid(16, 256, 4, 64, half=False, dtype=np.float64)
    solution = solve(weight[:, layout], permuted, grid, nearest=False)
    expected = textbook.gptq(weight.numpy()[:, layout], permuted.numpy(), 4, 64, True, ties=solution.codes)
    tensor = grid.tensor("layer", solution.codes, layout)
    assert not tensor.sequential
    np.testing.assert_allclose(tensor.dequantize()[:, layout], expected, atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_static_groups_in_any_order_are_the_textbooks(symmetric: bool) -> None:
    weight, hessian = layer(12, 12, 160, dtype=torch.float64)
    falls = np.argsort(-hessian.diagonal().numpy(), kind="stable")
    grid = GroupGrid(12, 160, 4, 32, symmetric, half=False, dtype=np.float64)
    codes = solve(weight, hessian, grid, order=falls, fit="first", nearest=False).codes
    args = weight.numpy(), hessian.numpy(), 4, 32, symmetric
    np.testing.assert_allclose(dequantize(codes, grid), textbook.gptq(*args, order=falls, ties=codes), atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_ternary_weights_are_those_of_the_reference_quantizer(symmetric: bool) -> None:
    weight, _ = layer(13, 40, 16, dtype=torch.float64)
    weight[0], weight[1], weight[2] = weight[0].abs(), -weight[1].abs(), 0
    weight[3, :2] = weight[3].max() * torch.tensor([1.0, 0.5])  # half of it is not beyond half of it
    values = weight.numpy()
    low, high = np.minimum(values.min(1), 0), np.maximum(values.max(1), 0)
    if symmetric:
        high = np.maximum(-low, high)
        low = np.where(low < 0, -high, low)
    low, high = low[:, None], high[:, None]
    grid = GroupGrid(40, 16, bits=0, group_size=-1, symmetric=symmetric, half=False, dtype=np.float64)
    codes = round_to_nearest(weight, grid, np.ones(16))
    np.testing.assert_array_equal(dequantize(codes, grid), (values > high / 2) * high + (values < low / 2) * low)
    if symmetric:
        np.testing.assert_allclose(grid.tensor("layer", codes).dequantize(), dequantize(codes, grid), rtol=1e-6)
    else:
        with pytest.raises(BridgeError, match="cannot hold ternary weights from -a to b; use symmetric groups"):
            grid.tensor("layer", codes)


@pytest.mark.parametrize("rows", [64, 384])  # all are looked at, or first a sample
def test_rows_that_rounding_to_nearest_serves_better_are_rounded_so(rows) -> None:
    weight, hessian = layer(0, rows, 128)  # with few codes, what is made good drives later columns off their grid
    grid = GroupGrid(rows, 128, 2, 16)
    nearest = GroupGrid(rows, 128, 2, 16)
    expected = round_to_nearest(weight, nearest, np.ones(128))
    codes = solve(weight, hessian, grid).codes
    kept = (codes == expected).all(1) & (grid.scales == nearest.scales).all(1)
    assert 0 < kept.sum() < rows

    def errors(codes: np.ndarray, grid: GroupGrid) -> np.ndarray:
        lost = weight.double() - torch.from_numpy(dequantize(codes, grid)).double()
        return ((lost @ hessian.double()) * lost).sum(1).numpy()

    assert (errors(codes, grid) <= errors(expected, nearest) * (1 + 1e-5)).all()


def test_lines_tried_side_by_side_are_each_what_gptq_makes_of_it_alone() -> None:
    random = np.random.default_rng(14)
    hessian = layer(14, 1, 12, dtype=torch.float64)[1]
    factor = inverse_factor(hessian.clone())
    assert factor is not None
    inverted = factor.T - torch.diag(factor.diagonal()) + torch.diag(1 / factor.diagonal())
    target = random.standard_normal(12).astype(np.float32)
    a, c = (random.uniform(least, 0.4, 8).astype(np.float32) for least in (0.1, -1.0))
    a[5] = 0
    codes, errors = (np.empty((12, 8), np.float32) for _ in range(2))
    lost = np.empty(8, np.float32)
    try_lines = line_search(8)

    @kernel
    def run(target, push, a, c, codes, errors, lost):  # type: ignore[no-untyped-def]
        try_lines(target, push, a, c, np.float32(0), np.float32(15), codes, errors, lost)

    run(target, inverted.float().contiguous().numpy(), a, c, codes, errors, lost)
    for lane in range(8):
        grid = GroupGrid(1, 12, 4, 12, half=False, dtype=np.float64)
        grid.a[:], grid.c[:] = a[lane], c[lane]
        weight = torch.from_numpy(target)[None].double()
        found = solve(weight, hessian, grid, fit="none", damping=0, nearest=False).codes
        np.testing.assert_array_equal(codes[:, lane], found[0])
        left = torch.from_numpy(target - (a[lane] * codes[:, lane] + c[lane]))[None].double()
        assert lost[lane] == pytest.approx(error(left, torch.zeros_like(left), hessian), rel=1e-4)


@pytest.mark.parametrize(("columns", "dtype", "close"), [(96, torch.float64, 1e-8), (600, torch.float32, 1e-4)])
def test_the_factor_is_that_of_the_inverse_and_takes_the_place_of_h(columns: int, dtype: Any, close: float) -> None:
    _, hessian = layer(2, 1, columns, dtype=dtype)
    damp(hessian, 0.01)
    place = hessian.clone()
    factor = inverse_factor(place)
    assert factor is not None
    assert factor.data_ptr() == place.data_ptr()
    assert torch.equal(factor, factor.triu())
    exact = factor.double()
    found = exact.T @ exact @ hessian.double()
    torch.testing.assert_close(found, torch.eye(columns, dtype=torch.float64), atol=close, rtol=0)


def test_the_running_mean_is_that_of_all_tokens_at_once() -> None:
    random = torch.Generator().manual_seed(3)
    x, x_float = (torch.randn(700, 24, generator=random) for _ in range(2))
    hessian = Hessian("layer", 24)
    for a, b in ((0, 13), (13, 13), (13, 500), (500, 700)):
        hessian.add(x[a:b], x_float[a:b])
    torch.testing.assert_close(hessian.matrix, 2 / 700 * x.T @ x)
    torch.testing.assert_close(hessian.cross, 2 / 700 * (x_float - x).T @ x)


def test_a_hessian_is_symmetric_whatever_the_blas_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    addmm_ = torch.Tensor.addmm_

    def uneven(self: torch.Tensor, *factors: torch.Tensor, **scales: float) -> torch.Tensor:
        return addmm_(self, *factors, **scales).mul_(1 + 1e-6 * torch.rand(self.shape))

    monkeypatch.setattr(torch.Tensor, "addmm_", uneven)
    hessian = Hessian("layer", 1100)
    for _ in range(2):
        hessian.add(torch.randn(40, 1100))
    assert torch.equal(hessian.matrix, hessian.matrix.T)


def test_activations_that_overflow_name_the_layer() -> None:
    x = torch.ones(4, 8)
    x[2, 3] = torch.inf
    with pytest.raises(BridgeError, match=r"model\.layers\.2\.mlp: its inputs hold NaN or infinity"):
        Hessian("model.layers.2.mlp", 8).add(x)


def test_damping_rises_until_it_is_enough_and_past_the_limit_weights_are_rounded_to_nearest() -> None:
    weight, hessian = layer(4, 8, 64)
    indefinite = hessian - 0.05 * hessian.diagonal().mean() * torch.eye(64)
    grid = GroupGrid(8, 64, group_size=32)
    assert solve(weight, indefinite, grid, damping=0.001).damping > 0.001
    hopeless = hessian - 9 * hessian.diagonal().max() * torch.eye(64)
    solution = solve(weight, hopeless, grid)
    assert solution.damping == float("inf")
    nearest = GroupGrid(8, 64, group_size=32)
    assert np.array_equal(solution.codes, round_to_nearest(weight, nearest, np.ones(64, np.float32)))


def test_an_order_that_tears_groups_apart_wants_them_fitted_first() -> None:
    weight, hessian = layer(5, 4, 64)
    order = np.arange(64).reshape(2, 32).T.reshape(-1)
    with pytest.raises(BridgeError, match="separates columns of one group"):
        solve(weight, hessian, GroupGrid(4, 64, group_size=32), order=order)
    grid = GroupGrid(4, 64, group_size=32)
    solution = solve(weight, hessian, grid, order=order, fit="first")
    nearest = GroupGrid(4, 64, group_size=32)
    codes = round_to_nearest(weight, nearest, hessian.diagonal().numpy())
    assert np.array_equal(grid.scales, nearest.scales)
    assert error(weight, dequantize(solution.codes, grid), hessian) < error(weight, dequantize(codes, nearest), hessian)


def test_runs_fall_by_their_sum_and_columns_inside_them_by_their_own_diagonal() -> None:
    hessian = torch.diag(torch.tensor([1.0, 5, 2, 9, 0, 3, 4, 7]))
    assert grouped_act_order(hessian, 4).tolist() == [3, 1, 2, 0, 7, 6, 5, 4]
    assert grouped_act_order(hessian, 2).tolist() == [3, 2, 7, 6, 1, 0, 5, 4]


def test_without_a_mismatch_of_inputs_gptaq_is_gptq() -> None:
    weight, _ = layer(6, 8, 128)
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(6))
    codes = []
    for alpha in (0.0, 1.0):
        hessian = Hessian("layer", 128)
        hessian.add(x, x)
        codes.append(Method(groups(4, 32, True), alpha=alpha).layer(LayerInput("layer", weight, hessian))[1].codes)
    assert np.array_equal(*codes)


def test_gptaq_brings_the_outputs_nearer_to_those_of_the_float_inputs() -> None:
    weight, _ = layer(7, 32, 256)
    random = torch.Generator().manual_seed(8)
    x_float = torch.randn(4000, 256, generator=random) @ (torch.eye(256) + torch.randn(256, 256, generator=random) / 16)
    x = x_float - 0.2 * x_float.roll(1, 1) + 0.02 * torch.randn(4000, 256, generator=random)
    lost = []
    for alpha in (0.0, 1.0):
        hessian = Hessian("layer", 256)
        hessian.add(x, x_float)
        values = Method(groups(6, 64, True), alpha=alpha, sweeps=0).layer(LayerInput("layer", weight, hessian))[0]
        lost.append(float((x_float @ weight.T - x @ values.T).square().sum()))
    assert lost[1] < 0.9 * lost[0]


@pytest.mark.parametrize("type", TYPES)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.0, 1.0, 2.0]), ordered=st.booleans())
def test_on_superblocks_the_error_is_below_rtns_and_refining_never_raises_it(
    type: str, seed: int, spread: float, ordered: bool
) -> None:
    weight, hessian = layer(seed, 8, 512, spread)
    damp(hessian, 0.01)
    block = BLOCKS[type]
    grid = SuperblockGrid(block, 8, 512)
    codes = round_to_nearest(weight, grid, hessian.diagonal().numpy())
    nearest = error(weight, dequantize(codes, grid), hessian)
    grid = SuperblockGrid(block, 8, 512)
    solution = solve(
        weight, hessian, grid, order=grouped_act_order(hessian, grid.fit_columns) if ordered else None, damping=0
    )
    last = error(weight, dequantize(solution.codes, grid), hessian)
    assert last <= nearest * (1 + 1e-5)  # weights are float32
    for _ in range(2):
        refine(weight, hessian, grid, solution.codes, sweeps=1)
        values = dequantize(solution.codes, grid)
        now = error(weight, values, hessian)
        assert now <= last * (1 + 1e-5)
        last = now
    assert solution.codes.min() >= grid.low
    assert solution.codes.max() <= grid.high
    np.testing.assert_array_equal(dequantize_blocks(type, grid.pack(solution.codes)), values)


@pytest.mark.parametrize("share", [0.05, 0.25])
@pytest.mark.parametrize("type", TYPES)
def test_refining_never_raises_the_error_where_columns_between_small_inputs_are_dead(type: str, share: float) -> None:
    random = torch.Generator().manual_seed(15)
    inputs = 0.02 * torch.exp(torch.randn(512, generator=random)) * torch.randn(2048, 512, generator=random)
    inputs[:, torch.rand(512, generator=random) < share] = 0
    hessian = Hessian("layer", 512)
    hessian.add(inputs)
    weight = torch.randn(16, 512, generator=random)
    original = weight.clone()
    methods = [Method(superblocks(type), sweeps=sweeps) for sweeps in (0, 2)]
    done = [method.layer(LayerInput("layer", weight, hessian))[0] for method in methods]
    plain, refined = (error(weight, values, hessian.matrix) for values in done)
    assert refined < plain  # of live columns alone: the others' inputs are 0
    assert torch.equal(weight, original)


@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_damping_weighs_dead_columns_by_the_size_of_the_others_inputs(damping: float) -> None:
    hessian = torch.diag(torch.tensor([4e-6, 0, 2e-6, 0]))
    damp(hessian, damping)
    assert inverse_factor(hessian.clone()) is not None
    assert (hessian.diagonal()[[1, 3]] <= 0.01 * 1.5e-6 * 1.001).all()


def test_held_back_tokens_are_spread_over_the_positions_of_all_sequences_whatever_the_batches() -> None:
    held = held_back(0, 64 * 512)
    assert held.float().mean() == pytest.approx(1 / 8, rel=0.01)
    of_sequence = held.reshape(64, 512).float()
    assert ((of_sequence.mean(1) > 0.05) & (of_sequence.mean(1) < 0.2)).all()
    assert ((of_sequence.mean(0) > 0.05) & (of_sequence.mean(0) < 0.25)).all()
    x, x_float = (torch.randn(2048, 4) for _ in range(2))
    whole, parts = Hessian("layer", 4), Hessian("layer", 4)
    whole.add(x, x_float)
    for at in (slice(0, 700), slice(700, 2048)):
        parts.add(x[at], x_float[at])
    assert whole.held is not None
    assert parts.held is not None
    expected = x[held_back(0, 2048)]
    assert parts.held.tokens == whole.held.tokens == len(expected)
    torch.testing.assert_close(whole.held.matrix, 2 / len(expected) * expected.T @ expected)
    torch.testing.assert_close(parts.held.matrix, whole.held.matrix)
    torch.testing.assert_close(parts.held.cross, whole.held.cross)


def test_the_target_of_mismatched_inputs_is_the_least_squares_solution() -> None:
    weight, _ = layer(9, 6, 40)
    random = torch.Generator().manual_seed(10)
    x_float = torch.randn(500, 40, generator=random)
    x = x_float + 0.3 * torch.randn(500, 40, generator=random)
    hessian = Hessian("layer", 40)
    hessian.add(x, x_float)
    assert hessian.cross is not None
    best = torch.linalg.lstsq(x, x_float @ weight.T).solution.T
    for alpha, expected in ((1.0, best), (0.5, (weight + best) / 2)):
        factor = hessian.factor(0.0)
        assert factor is not None
        found = retarget(weight, factor[0], weight @ hessian.cross, alpha)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.sampled_from([16, 40, -1]), st.booleans(),
       st.sampled_from(["reached", "first"]))  # fmt: skip
def test_on_groups_the_error_is_below_rtns_and_refining_never_raises_it(
    seed: int, bits: int, group_size: int, symmetric: bool, fit: str
) -> None:
    weight, hessian = layer(seed, 8, 128)
    damp(hessian, 0.01)
    grid = GroupGrid(8, 128, bits, group_size, symmetric)
    nearest = error(weight, dequantize(round_to_nearest(weight, grid, hessian.diagonal().numpy()), grid), hessian)
    grid = GroupGrid(8, 128, bits, group_size, symmetric)
    codes = solve(weight, hessian, grid, order=grouped_act_order(hessian, grid.fit_columns), fit=fit, damping=0).codes
    last = error(weight, dequantize(codes, grid), hessian)
    assert last <= nearest * (1 + 1e-5)  # weights are float32
    for _ in range(2):
        refine(weight, hessian, grid, codes, sweeps=1)
        now = error(weight, dequantize(codes, grid), hessian)
        assert now <= last * (1 + 1e-5)
        last = now
    values = grid.tensor("layer", codes).dequantize()
    np.testing.assert_allclose(values, dequantize(codes, grid), atol=1e-5)
    assert np.array_equal(grid.scales, grid.scales.astype(np.float16))
