"""How much of the mismatch between the float model's inputs and the quantized one's is made good."""

from __future__ import annotations

import pytest
import torch

from bridge.errors import BridgeError
from bridge.quantize.method import Method, groups, round_alone, superblocks
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.solve import hessian as hessian_module
from bridge.quantize.solve.gptq_solver import dequantize
from bridge.quantize.solve.hessian import Hessian, held_back
from bridge.quantize.solve.target import alpha_of, retarget, target_of

COLUMNS = 24


def gathered(tokens: int, kind: str) -> tuple[Hessian, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A Hessian of some batches, a weight matrix, and the batches: inputs and the float model's."""
    torch.manual_seed(0)
    shift = 0.2 * torch.randn(COLUMNS, COLUMNS)
    hessian, batches = Hessian("layer", COLUMNS), []
    for _ in range(4):
        x = torch.randn(tokens // 4, COLUMNS)
        batches.append((x, x + (x @ shift if kind == "lasting" else 0.5 * torch.randn_like(x))))
        hessian.add(*batches[-1])
    return hessian, torch.randn(16, COLUMNS), batches


def best_alpha(weight: torch.Tensor, hessian: Hessian) -> float:
    return alpha_of(LayerInput("layer", weight, hessian), 0.01)


@pytest.mark.parametrize(("kind", "tokens"), [("lasting", 512), ("chance", 512), ("chance", 2048)])
def test_what_is_kept_of_the_correction_is_what_serves_the_held_back_tokens_best(kind: str, tokens: int) -> None:
    hessian, weight, batches = gathered(tokens, kind)
    x, x_float = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
    held = held_back(0, tokens)
    held_x, held_float = x[held], x_float[held]
    rest = Hessian("rest", COLUMNS)
    rest.add(x[~held], x_float[~held])
    assert hessian.held is not None
    assert rest.cross is not None
    assert (hessian.tokens, hessian.held.tokens) == (tokens, int(held.sum()))
    found = rest.factor(0.01)
    assert found is not None
    moves = retarget(weight, found[0], weight @ rest.cross, 1.0) - weight

    def left(alpha: float) -> float:
        return float((held_float @ weight.T - held_x @ (weight + alpha * moves).T).square().sum())

    best = min((i / 100 for i in range(101)), key=left)
    assert best_alpha(weight, hessian) == pytest.approx(best, abs=0.011)


def test_a_mismatch_that_lasts_is_made_good_and_one_of_chance_is_not() -> None:
    hessian, weight, _ = gathered(512, "lasting")
    assert best_alpha(weight, hessian) > 0.9
    hessian, weight, _ = gathered(512, "chance")
    assert best_alpha(weight, hessian) < 0.2


def test_without_tokens_held_back_nothing_is_made_good() -> None:
    hessian, weight, _ = gathered(512, "lasting")
    hessian.held = None
    expected, _ = Method(groups(4, 8, False), sweeps=0, alpha=0).layer(LayerInput("layer", weight, hessian))
    found, _ = Method(groups(4, 8, False), sweeps=0).layer(LayerInput("layer", weight, hessian))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_activations_that_are_no_numbers_name_the_layer() -> None:
    hessian = Hessian("model.layers.3.mlp.down_proj", 4)
    with pytest.raises(BridgeError, match=r"model\.layers\.3\.mlp\.down_proj: its inputs hold NaN or infinity"):
        hessian.add(torch.full((8, 4), float("inf")))


def test_a_hessian_that_is_not_positive_definite_makes_nothing_good() -> None:
    for useless in (-torch.eye(COLUMNS), torch.full((COLUMNS, COLUMNS), float("nan"))):
        hessian, weight, _ = gathered(512, "lasting")
        hessian.matrix = useless
        torch.testing.assert_close(
            target_of(LayerInput("layer", weight, hessian, last=True), 0.01, 1.0), weight, rtol=0, atol=0
        )


def test_layers_that_share_inputs_share_the_factors_and_get_the_targets_that_each_gets_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
    weights = [gathered(512, "lasting")[1] * scale for scale in (1, 2, 3)]
    alone = [target_of(LayerInput("layer", w, gathered(512, "lasting")[0], last=True), 0.01, 1.0) for w in weights]
    calls: list[int] = []
    damped_factor = hessian_module.damped_factor
    monkeypatch.setattr(hessian_module, "damped_factor", lambda *args: calls.append(1) or damped_factor(*args))
    shared = gathered(512, "lasting")[0]
    for i, (weight, expected) in enumerate(zip(weights, alone, strict=True)):
        found = target_of(LayerInput("layer", weight, shared, last=i == 2), 0.01, 1.0, order)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert (found - weight).abs().max() > 0.01
    assert shared.factor(0.01, order) is not None
    assert len(calls) == 1
    assert shared.cross is None


@pytest.mark.parametrize("shrinkage", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("ordered", [False, True])
def test_the_target_from_a_layers_float_outputs_is_that_of_the_cross_term(shrinkage: float, ordered: bool) -> None:
    batches = gathered(512, "lasting")[2]
    weight = torch.randn(300, COLUMNS)  # every other row is kept of the held-back tokens
    expected, found = Hessian("layer", COLUMNS), Hessian("layer", COLUMNS)
    for x, x_float in batches:
        for inputs in (x, x_float):
            inputs[:, 3] *= 100  # most of W H cancels
        expected.add(x, x_float)
        found.add(x, outputs={"layer": x_float @ weight.T})
    assert found.cross is None
    expected.shrinkage = found.shrinkage = shrinkage
    alphas = [alpha_of(LayerInput("layer", weight, hessian), 0.01) for hessian in (expected, found)]
    assert alphas[0] > 0.1
    assert alphas[1] == pytest.approx(alphas[0], rel=1e-3)
    order = torch.randperm(COLUMNS) if ordered else None
    targets = [target_of(LayerInput("layer", weight, h, last=True), 0.01, 1.0, order) for h in (expected, found)]
    assert (targets[0] - weight).abs().max() > 0.1
    torch.testing.assert_close(targets[1], targets[0], rtol=1e-3, atol=1e-3)
    assert not found.products
    assert found.held is None


def test_tokens_that_are_added_after_h_was_asked_for_count_as_if_it_had_not_been() -> None:
    expected, _, batches = gathered(512, "lasting")
    found = Hessian("layer", COLUMNS)
    for batch in batches:
        found.add(*batch)
        assert found.cross is not None
        assert torch.equal(found.matrix, found.matrix.T)
    torch.testing.assert_close(found.matrix, expected.matrix, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.cross, expected.cross, rtol=1e-4, atol=1e-5)
    x = torch.cat([batch[0] for batch in batches])
    torch.testing.assert_close(expected.matrix, 2 / 512 * x.T @ x, rtol=1e-4, atol=1e-5)


def test_a_layer_that_serves_held_back_tokens_worse_than_rounded_alone_is_rounded_alone() -> None:
    """Tokens held back whose inputs do not depend on each other: making up for errors in other columns adds to them."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 1, generator=random) + 0.05 * torch.randn(4096, 64, generator=random)
    weight = torch.randn(12, 64, generator=random)
    method = Method(superblocks("Q4_0"), shrinkage=0.0, alpha=0)
    layers = []
    for others in (torch.randn(1024, 64, generator=random), x[:1024]):
        hessian = Hessian("layer", 64)
        hessian.add(x, held=False)
        hessian.add(others, held=True)
        layers.append(method.layer(LayerInput("layer", weight, hessian))[1])
        if len(layers) == 1:
            codes = round_alone(weight, grid := superblocks("Q4_0")(12, 64), hessian.mean_squares())
    assert [layer.alone for layer in layers] == [True, False]
    assert (dequantize(layers[0].codes, layers[0].grid) == dequantize(codes, grid)).all()
