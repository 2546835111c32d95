"""AWQ's searches: scales and clips that lessen the output error, folded so that the model stays the same."""

from __future__ import annotations

import torch

from bridge.quantize.awq_search import clipped, fold, smoothing


def nearest(weight: torch.Tensor, size: int = 32) -> torch.Tensor:
    """4-bit asymmetric groups, from the least to the greatest weight."""
    groups = weight.reshape(len(weight), -1, size)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-8)
    zero = (-low / scale).round()
    return (((groups / scale + zero).round().clamp(0, 15) - zero) * scale).reshape(weight.shape)


def linears_and_inputs() -> tuple[list[torch.Tensor], torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(600, 128, generator=random)
    x[:, ::16] *= 20
    return [torch.randn(48, 128, generator=random) for _ in range(2)], x


def lost(weight: torch.Tensor, rounded: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (weight - rounded).T).square().sum())


def test_inputs_of_uneven_size_call_for_scales_and_the_best_alpha_is_taken() -> None:
    weights, x = linears_and_inputs()
    s, alpha, errors = smoothing(weights, x, nearest)
    expected = [sum(lost(w, nearest(w * s) / s, x) for w in weights), sum(lost(w, nearest(w), x) for w in weights)]
    torch.testing.assert_close(torch.tensor([min(errors), errors[0]]), torch.tensor(expected), rtol=1e-3, atol=0)
    assert len(errors) == 20
    assert alpha == errors.index(min(errors)) / 20 > 0
    assert min(errors) < 0.7 * errors[0]
    torch.testing.assert_close(s.max() * s.min(), torch.tensor(1.0))


def test_inputs_of_one_size_leave_the_weights_as_they_are() -> None:
    weights, _ = linears_and_inputs()
    x = torch.sign(torch.randn(200, 128))
    s, _, _ = smoothing(weights, x, nearest)
    torch.testing.assert_close(s, torch.ones(128))


def test_clipping_a_groups_outliers_lessens_the_output_error_and_touches_nothing_within_the_range() -> None:
    weights, x = linears_and_inputs()
    weight = weights[0]
    weight[::3, 5] = 6.0
    narrow = clipped(weight, x, 32, nearest)
    assert lost(weight, nearest(narrow), x) < lost(weight, nearest(weight), x)
    changed = narrow != weight
    assert changed.any()
    assert (narrow[changed].abs() < weight[changed].abs()).all()


def test_folded_scales_leave_the_outputs_as_they_were() -> None:
    torch.manual_seed(0)
    x = torch.randn(10, 24)
    for before in (torch.nn.LayerNorm(24), torch.nn.Linear(24, 24)):
        torch.nn.init.normal_(before.bias)
        linears = [torch.nn.Linear(24, 8) for _ in range(2)]
        with torch.no_grad():
            expected = [linear(before(x)) for linear in linears]
            fold(before, linears, torch.rand(24) + 0.5)
            for linear, y in zip(linears, expected, strict=True):
                torch.testing.assert_close(linear(before(x)), y)
