"""The template's row order, found through the noise of quantization."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.blocks.read import READ
from bridge.models.template.match import LazyMatrix, find_in_several, find_rows, rounding_of
from scripts.peers.llama import ggml


def matrix(values: np.ndarray, noise: float = 0.0) -> LazyMatrix:
    return LazyMatrix((len(values), values.shape[1]), lambda a, b: values[a:b], noise=noise)


def test_any_permutation_of_rows_is_found_through_quantization_noise():
    rng = np.random.default_rng(2)
    weights = rng.standard_normal((300, 64)).astype(np.float32)
    order = rng.permutation(300)
    noisy = weights + 0.3 * rng.standard_normal(weights.shape).astype(np.float32)  # about 2 bits' worth
    found = find_rows(matrix(weights[order]), matrix(noisy, 0.09))
    assert found is not None
    assert np.array_equal(found.order, order)
    assert not found.scaled
    assert find_rows(matrix(rng.standard_normal((300, 64)).astype(np.float32)), matrix(noisy, 0.09)) is None
    assert find_rows(matrix(weights), matrix(noisy)) is None  # no quantization that could explain the noise


@pytest.mark.parametrize(
    "type",  # ggml takes seconds to get its largest codebooks ready
    [pytest.param(t, marks=[pytest.mark.exhaustive] * (t in ("IQ1_S", "IQ1_M", "IQ2_S"))) for t in READ],
)
def test_a_template_in_any_type_is_told_from_another_model(type):
    pytest.importorskip("xllamacpp")
    rng = np.random.default_rng(3)
    weights = rng.standard_t(4, (2, 64, 1024)).astype(np.float32)
    if type in ("Q1_0", "Q2_0", "TQ1_0", "TQ2_0"):  # for weights that are such
        weights = np.sign(weights) * (np.float32(0.5) if type == "Q1_0" else rng.integers(0, 2, weights.shape))
        weights = weights.astype(np.float32)
    own, another = weights
    raw = ggml.quantize(own, type, np.ones(1024, np.float32))
    rounded = ggml.dequantize(raw, int(READ[type].ggml))
    order = rng.permutation(64)
    template = LazyMatrix((64, 1024), lambda a, b: rounded[order][a:b], rounding=rounding_of(type))
    found = find_rows(template, matrix(own))
    assert found is not None
    assert np.array_equal(found.order, order)
    assert find_rows(template, matrix(another)) is None


def test_one_wrong_row_in_many_is_noticed():
    weights = np.random.default_rng(2).standard_normal((256, 64)).astype(np.float32)
    wrong = weights.copy()
    wrong[17] *= -1
    assert find_rows(matrix(wrong), matrix(weights)) is None


def test_a_row_that_would_serve_twice_is_no_permutation():
    weights = np.random.default_rng(2).standard_normal((64, 64)).astype(np.float32)
    assert find_rows(matrix(weights[[0, 0, *range(2, 64)]]), matrix(weights)) is None


def test_rows_dealt_from_several_matrices_are_found_in_runs():
    """GPT-NeoX-like: the heads of q, k and v by turns."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((64, 96)).astype(np.float32) for _ in range(3))
    fused = np.concatenate([part[head * 16 : head * 16 + 16] for head in range(4) for part in (q, k, v)])
    runs = find_in_several(matrix(fused), [matrix(k), matrix(v), matrix(q)])
    assert runs is not None
    assert [which for which, _ in runs] == [2, 0, 1] * 4
    assert [rows[0] for _, rows in runs] == [0, 0, 0, 16, 16, 16, 32, 32, 32, 48, 48, 48]
    assert find_in_several(matrix(fused), [matrix(k), matrix(v)]) is None
