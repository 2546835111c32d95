"""Rounding with A of the outputs as well as H of the inputs, against the formulas and the exact cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bridge.blocks import BLOCKS
from bridge.quantize import Method, superblocks, two_sided
from bridge.quantize.budget.sensitivity import Felt, layer_costs
from bridge.quantize.gptq_solver import dequantize
from bridge.quantize.grids.superblock import SuperblockGrid
from bridge.quantize.hessian import Hessian, damp
from bridge.quantize.quantizer import LayerInput


def correlated(seed: int, size: int, tokens: int) -> torch.Tensor:
    """float32 [tokens, size] whose columns depend on each other and differ in power."""
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, size, generator=random) @ torch.randn(size, size, generator=random)
    return mixed * torch.exp(torch.randn(size, generator=random)) / size**0.5


@pytest.fixture(scope="module")
def layer() -> LayerInput:
    hessian = Hessian("layer", 256)
    hessian.add(correlated(1, 256, 2000))
    gradients = correlated(2, 72, 4000)
    weight = torch.randn(72, 256, generator=torch.Generator().manual_seed(3))
    return LayerInput("layer", weight, hessian, outputs=(gradients.T @ gradients / 4000)[None])


def cost(layer: LayerInput, values: torch.Tensor) -> float:
    """tr(A E H E^T), in float64, of the damped A."""
    assert layer.outputs is not None
    outputs = layer.outputs[0].clone()
    damp(outputs, 0.05)
    lost = (layer.weight - values).double()
    return float(torch.trace(outputs.double() @ lost @ layer.hessian.matrix.double() @ lost.T))


@pytest.mark.parametrize("type", ["Q4_K", "Q2_K"])
def test_the_cost_of_both_sides_is_far_below_that_of_one_and_falls_with_each_sweep(layer, type, monkeypatch) -> None:
    monkeypatch.setattr(two_sided, "_PART", 4)
    method = Method(superblocks(type), alpha=0)
    costs = [cost(layer, method.layer(replace(layer, outputs=None))[0])]
    for sweeps in (0, 1, 2):
        monkeypatch.setattr(two_sided, "_SWEEPS", sweeps)
        costs.append(cost(layer, method.layer(layer)[0]))
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < 0.75 * costs[0]


def test_where_outputs_do_not_depend_on_each_other_the_codes_are_those_of_one_side(layer, monkeypatch) -> None:
    monkeypatch.setattr(two_sided, "_SWEEPS", 0)
    method = Method(superblocks("Q4_K"), alpha=0)
    one = method.layer(replace(layer, outputs=None))[1]
    diagonal = torch.diag(torch.rand(72, generator=torch.Generator().manual_seed(4)) + 0.1)
    both = method.layer(replace(layer, outputs=diagonal[None]))[1]
    np.testing.assert_array_equal(both.blocks(), one.blocks())


def test_the_target_of_each_part_makes_up_for_the_rows_before_it(layer) -> None:
    """W_r + (A_rest,rest^-1 A_rest,done E_done)_r, rows by falling diagonal of A."""
    assert layer.outputs is not None
    outputs = layer.outputs[0].clone()
    damp(outputs, 0.05)
    order = outputs.diagonal().argsort(descending=True)
    outputs = outputs.double()[order[:, None], order]
    weight = layer.weight.double()[order]
    lost = torch.zeros_like(weight)
    at = 0

    def whole_numbers(target: torch.Tensor, own: SuperblockGrid) -> np.ndarray:
        nonlocal at
        rest, end = slice(at, None), at + len(target)
        shift = torch.linalg.solve(outputs[rest, rest], outputs[rest, :at] @ lost[:at])
        torch.testing.assert_close(target.double(), weight[at:end] + shift[: end - at], rtol=1e-3, atol=1e-3)
        own.a[:] = 1
        codes = target.round().clamp(own.low, own.high).numpy().astype(np.int16)
        lost[at:end] = weight[at:end] - torch.from_numpy(dequantize(codes, own))
        at = end
        return codes

    grid = SuperblockGrid(BLOCKS["Q6_K"], 72, 256)
    solver = two_sided.RowSolver(layer.hessian.matrix, whole_numbers, lambda g, own, codes: g)
    two_sided.round_two_sided(layer.weight, layer.outputs, grid, solver)
    assert at == 72


def test_the_default_is_two_sided_and_the_same_with_any_folder_for_activations(tmp_path) -> None:
    from bridge.conversion.converter import convert
    from bridge.quantize.settings import Calibration
    from tests.support.tiny_models import save_model

    model = save_model(tmp_path / "model", "LlamaConfig", num_hidden_layers=1)
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 300, (4, 32)))
    (tmp_path / "disk").mkdir()
    made = []
    for name, options in (("one", {"method": "gptaq"}), ("two", {}), ("again", {"offload": tmp_path / "disk"})):
        said: list[str] = []
        settings = Calibration(
            tokens,
            **{"length": 32, "progress": lambda d, n, text, s=said: s.append(text)} | options,
        )
        convert(model, tmp_path / f"{name}.gguf", type="Q4_K", calibrate=settings)
        made.append((tmp_path / f"{name}.gguf").read_bytes())
        assert any("gradients" in text for text in said) == (name != "one")
    assert made[0] != made[1] == made[2]
    assert not list((tmp_path / "disk").iterdir())


def test_what_rows_cost_is_their_variance_given_those_that_are_rounded_after_them(layer) -> None:
    """So their product is the determinant, of each block by itself; on a diagonal there is nothing to make up for."""
    assert layer.outputs is not None
    blocks = torch.zeros(2, 40, 40)
    blocks[0], blocks[1, :32, :32] = layer.outputs[0, :40, :40], layer.outputs[0, 40:, 40:]
    costs = two_sided.row_costs(blocks, 72)
    for own, n in ((costs[:40], 40), (costs[40:], 32)):
        outputs = blocks[0 if n == 40 else 1, :n, :n].clone()
        damp(outputs, 0.05)
        assert float(own.log().sum()) == pytest.approx(float(torch.logdet(outputs.double())), rel=1e-4)
        assert (own <= outputs.diagonal() * 1.0001).all()
    diagonal = torch.arange(1.0, 73).diag()
    expected = diagonal.diagonal().double() + 0.05 * 36.5
    torch.testing.assert_close(two_sided.row_costs(diagonal[None], 72), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("type", ["Q3_K", "IQ3_S"])
def test_a_few_rows_tell_what_rounding_two_sided_will_cost(layer, type) -> None:
    assert layer.outputs is not None
    method = Method(superblocks(type), alpha=0)
    squares, left = layer.outputs[0].diagonal().double(), two_sided.row_costs(layer.outputs, 72)

    def rounded(rows: torch.Tensor, type: str) -> torch.Tensor:
        return method.layer(LayerInput("layer", rows, layer.hessian))[0]

    exact = [cost(layer, method.layer(own)[0]) / 4 for own in (replace(layer, outputs=None), layer)]
    found = [
        layer_costs(layer.weight, [Felt(layer.hessian.matrix, squares, own)], {type: rounded})[type].loss
        for own in (squares, left)
    ]
    np.testing.assert_allclose(found, exact, rtol=0.3)
    assert found[1] < 0.85 * found[0]
