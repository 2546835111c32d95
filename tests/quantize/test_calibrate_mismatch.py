"""How much of the mismatch between the float model's inputs and the quantized one's is made good."""

from __future__ import annotations

import pytest
import torch

from bridge.errors import BridgeError
from bridge.quantize.hessian import Hessian, alpha_of, held_back, retarget
from bridge.quantize.method import Method, groups
from bridge.quantize.walk import LayerInput

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
    held = hessian.held
    assert held is not None
    assert held.cross is not None
    assert hessian.cross is not None
    return alpha_of(weight @ hessian.cross, weight @ held.cross, hessian, held, 0.01)


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
    moves = retarget(weight, rest.matrix, weight @ rest.cross, 0.01, 1.0) - weight

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
    expected, _ = Method(groups(4, 8, False), sweeps=0, alpha=0).layer(LayerInput("layer", weight, hessian))
    hessian.held = None
    found, _ = Method(groups(4, 8, False), sweeps=0).layer(LayerInput("layer", weight, hessian))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_activations_that_are_no_numbers_name_the_layer() -> None:
    hessian = Hessian("model.layers.3.mlp.down_proj", 4)
    with pytest.raises(BridgeError, match=r"model\.layers\.3\.mlp\.down_proj: its inputs hold NaN or infinity"):
        hessian.add(torch.full((8, 4), float("inf")))


def test_a_hessian_that_is_not_positive_definite_makes_nothing_good() -> None:
    hessian, weight, _ = gathered(512, "lasting")
    assert hessian.cross is not None
    for useless in (-torch.eye(COLUMNS), torch.full((COLUMNS, COLUMNS), float("nan"))):
        torch.testing.assert_close(retarget(weight, useless, weight @ hessian.cross, 0.01, 1.0), weight)
