"""Floats rounded to the groups of a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.encode.rounding.round_groups import fit_groups, round_to_groups


def lost(weights: np.ndarray, scales: np.ndarray, zeros: np.ndarray, bits: int) -> float:
    """The squared error of groups [n, size] with the nearest codes of these lines."""
    codes = (np.rint(weights / scales[:, None]) + zeros[:, None]).clip(0, 2**bits - 1)
    return float(np.square((codes - zeros[:, None]) * scales[:, None] - weights).sum())


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "share"), [(2, 0.75), (3, 0.9), (4, 0.95), (8, 1.0)])
def test_less_is_lost_than_by_the_whole_range(bits: int, share: float, symmetric: bool, size: int) -> None:
    """With GPTQ's range and with one whose two ends are as far from 0; both leave codes of outliers to few weights."""
    weights = np.random.default_rng(bits).standard_normal((1024, size)).astype(np.float32)
    high, middle = 2**bits - 1, 2 ** (bits - 1)
    least, most = weights.min(1).clip(None, 0), weights.max(1).clip(0)
    widest = np.abs(weights).max(1)
    scales, zeros = (2 * widest / high, widest / (middle - 1)) if symmetric else ((most - least) / high,), middle
    fitted = fit_groups(weights, np.ones(size, np.float32), bits, symmetric)
    assert (fitted[0] == fitted[0].astype(np.float16)).all()
    assert (fitted[1] == np.rint(fitted[1])).all()
    for scale in scales:
        scale = scale.astype(np.float16).astype(np.float32)
        plain = np.full(1024, zeros) if symmetric else np.rint(-least / scale)
        assert lost(weights, *fitted, bits) < share * lost(weights, scale, plain, bits)
    if symmetric:
        assert (fitted[1] == middle).all()
        return
    raised = fit_groups(weights, np.ones(size, np.float32), bits, False, least=1)  # GPTQ v1 has no zero point of 0
    assert raised[1].min() >= 1
    assert raised[1].max() <= high


def test_the_cost_of_an_error_moves_the_scale() -> None:
    weights = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    weights[:, 0] *= 9
    cost = np.ones(32, np.float32)
    cost[0] = 1000
    first = [round_error(weights, cost, fit_groups(weights, w, 3, True)) for w in (cost, np.ones(32, np.float32))]
    assert first[0] < first[1]


def round_error(weights: np.ndarray, cost: np.ndarray, lines: tuple[np.ndarray, np.ndarray]) -> float:
    scales, zeros = (x[:, None] for x in lines)
    codes = (np.rint(weights / scales) + zeros).clip(0, 7)
    return float((np.square((codes - zeros) * scales - weights) @ cost).sum())


def test_weights_on_a_grid_come_back_and_zeros_and_extremes_have_a_scale() -> None:
    codes = np.random.default_rng(1).integers(0, 16, (4, 64))
    codes[:, [0, 32]], codes[:, [1, 33]] = 0, 15
    exact = ((codes - 5) * 0.25).astype(np.float32)
    assert (round_to_groups("layer", exact, 4, symmetric=False).dequantize() == exact).all()
    rows = np.zeros((4, 32), np.float32)
    rows[1:] = np.array([[1e-30], [1e6], [1e30]]) * np.linspace(-1, 1, 32)
    tensor = round_to_groups("layer", rows, 4, symmetric=True)
    assert (tensor.dequantize(slice(0, 1)) == 0).all()
    assert np.isinf(tensor.scales).ravel().tolist() == [False, False, True, True]
    assert (tensor.scales > 0).all()
