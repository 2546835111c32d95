"""Rounding with A of the outputs as well as H of the inputs, against the formulas and the exact cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bridge.blocks import BLOCKS
from bridge.quantize import Method, superblocks
from bridge.quantize.budget.sensitivity import OutputMetric, layer_costs
from bridge.quantize.grids.superblock import SuperblockGrid
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.solve import two_sided
from bridge.quantize.solve.gptq_solver import dequantize
from bridge.quantize.solve.hessian import Hessian, damp, token_weights
from bridge.quantize.solve.two_sided import OutputHessian


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
    return LayerInput("layer", weight, hessian, outputs=OutputHessian((gradients.T @ gradients / 4000)[None]))


def cost(layer: LayerInput, values: torch.Tensor) -> float:
    """tr(A E H E^T), in float64, of the damped A."""
    assert layer.outputs is not None
    outputs = layer.outputs.blocks[0].clone()
    damp(outputs, 0.05)
    lost = (layer.weight - values).double()
    return float(torch.trace(outputs.double() @ lost @ layer.hessian.matrix.double() @ lost.T))


@pytest.mark.parametrize("type", ["Q4_K", pytest.param("Q2_K", marks=pytest.mark.exhaustive)])
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
    both = method.layer(replace(layer, outputs=OutputHessian(diagonal[None])))[1]
    np.testing.assert_array_equal(both.blocks(), one.blocks())


def test_the_target_of_each_part_makes_up_for_the_rows_before_it(layer) -> None:
    """W_r + (A_rest,rest^-1 A_rest,done E_done)_r, rows by falling diagonal of A."""
    assert layer.outputs is not None
    outputs = layer.outputs.blocks[0].clone()
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
    two_sided.round_two_sided(layer.weight, layer.outputs.blocks, grid, solver)
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
        assert any("gradients" in text for text in said)
    assert made[0] != made[1] == made[2]
    assert not list((tmp_path / "disk").iterdir())


def test_what_rows_cost_is_their_variance_given_those_that_are_rounded_after_them(layer) -> None:
    """So their product is the determinant, of each block by itself; on a diagonal there is nothing to make up for."""
    assert layer.outputs is not None
    blocks = torch.zeros(2, 40, 40)
    blocks[0], blocks[1, :32, :32] = layer.outputs.blocks[0, :40, :40], layer.outputs.blocks[0, 40:, 40:]
    costs = two_sided.row_costs(blocks, 72)
    for own, n in ((costs[:40], 40), (costs[40:], 32)):
        outputs = blocks[0 if n == 40 else 1, :n, :n].clone()
        damp(outputs, 0.05)
        assert float(own.log().sum()) == pytest.approx(float(torch.logdet(outputs.double())), rel=1e-4)
        assert (own <= outputs.diagonal() * 1.0001).all()
    diagonal = torch.arange(1.0, 73).diag()
    expected = diagonal.diagonal().double() + 0.05 * 36.5
    torch.testing.assert_close(two_sided.row_costs(diagonal[None], 72), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("type", ["Q3_K", "IQ3_XXS"])
def test_a_few_rows_tell_what_rounding_two_sided_will_cost(layer, type) -> None:
    assert layer.outputs is not None
    method = Method(superblocks(type), alpha=0)
    squares, left = layer.outputs.blocks[0].diagonal().double(), two_sided.row_costs(layer.outputs.blocks, 72)

    def rounded(rows: torch.Tensor, type: str) -> torch.Tensor:
        return method.layer(LayerInput("layer", rows, layer.hessian))[0]

    exact = [cost(layer, method.layer(own)[0]) / 4 for own in (replace(layer, outputs=None), layer)]
    found = [
        layer_costs(layer.weight, [OutputMetric(layer.hessian.matrix, squares, own)], {type: rounded})[type].loss
        for own in (squares, left)
    ]
    np.testing.assert_allclose(found, exact, rtol=0.3)
    assert found[1] < 0.85 * found[0]


def planted(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [tokens, 256], gradients [tokens, 72]: one token in 512 has 100 times the gradient, and always one x."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 256, generator=random) @ torch.randn(256, 256, generator=torch.Generator().manual_seed(7))
    g = torch.randn(tokens, 72, generator=random) @ torch.randn(72, 72, generator=torch.Generator().manual_seed(6)) / 9
    heavy = torch.arange(tokens) % 512 == 0
    x[heavy] = torch.randn(256, generator=torch.Generator().manual_seed(8)) * 16
    some = torch.randn(3, 72, generator=torch.Generator().manual_seed(9))  # the directions of the heavy ones
    g[heavy] = 100 * torch.randn(int(heavy.sum()), 3, generator=random) @ some / 3**0.5
    return x / 16, g


@pytest.mark.parametrize("type", ["Q4_K", pytest.param("Q2_K", marks=pytest.mark.exhaustive)])
def test_a_few_heavy_tokens_do_not_make_two_sided_rounding_worse(type: str) -> None:
    """Judged by (g E x)^2 of other tokens. With all of |g|^2 in A and none in H, it is."""
    x, g = planted(1, 8192)
    others = planted(2, 16384)
    weight = torch.randn(72, 256, generator=torch.Generator().manual_seed(3))
    norms = torch.linalg.vector_norm(g, dim=1)
    half, whole = (
        OutputHessian(((g / norms[:, None] ** p).T @ (g / norms[:, None] ** p) / 8192)[None]) for p in (0.5, 0)
    )

    def lost(outputs: OutputHessian | None, weights: torch.Tensor | None) -> float:
        hessian = Hessian("layer", 256)
        hessian.add(x, weights=weights)
        values = Method(superblocks(type), alpha=0).layer(LayerInput("layer", weight, hessian, outputs))[0]
        return float((((others[0] @ (weight - values).T) * others[1]).sum(1).double() ** 2).mean())

    weights = token_weights([norms])
    assert weights is not None
    assert float(weights.mean()) == pytest.approx(1, rel=1e-4)
    plain, one_sided = lost(None, None), lost(None, weights)
    assert one_sided < plain
    assert lost(half, weights) <= one_sided
    assert lost(whole, None) > 1.5 * lost(half, weights)


def test_outputs_that_held_back_tokens_do_not_know_are_not_used(layer: LayerInput) -> None:
    """A of noise says nothing of other tokens: rows are rounded by themselves. A that they share is used."""
    random = torch.Generator().manual_seed(4)
    found = []
    for tokens in (40, 4000):
        gradients = torch.randn(tokens, 72, generator=random)
        held = torch.randn(4000, 72, generator=random)
        a, b = (g.T @ g / len(g) for g in (gradients, held))
        found.append(two_sided.output_shrinkage(OutputHessian((0.75 * a + 0.25 * b)[None], b, 0.25)))
    assert found == [1.0, 1.0]
    assert layer.outputs is not None
    a = layer.outputs.blocks[0]
    assert two_sided.output_shrinkage(OutputHessian(a[None], a, 0.25)) == 0.0
    assert two_sided.output_shrinkage(OutputHessian(a[None])) == 0.0
    noise = OutputHessian((0.75 * a + 0.25 * torch.eye(72))[None], torch.eye(72), 0.25)
    method = Method(superblocks("Q4_K"), alpha=0)
    alone, other = (method.layer(replace(layer, outputs=own))[1] for own in (None, noise))
    assert (alone.codes == other.codes).all()
