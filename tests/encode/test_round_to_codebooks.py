"""Floats rounded to the IQ and TQ types: valid blocks, honest sums, and a smaller error than ggml's own quantizer."""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import numpy as np
import pytest

from bridge.blocks import ROUNDED
from bridge.blocks.read import WRITTEN
from bridge.encode.rounding.round_rows import quantize_rows
from bridge.errors import BridgeError
from scripts.peers.llama import ggml
from tests.encode.test_float_quantizer import dequantize, importances, row_errors, weights

SOME = ("IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ2_S", "TQ2_0")  # each type compiles for seconds


def types(cheap: Sequence[str]) -> pytest.MarkDecorator:
    """All types, those that are not cheap for exhaustive runs only; tests of one type run in one process."""
    spared = {name: [] if name in cheap else [pytest.mark.exhaustive] for name in ROUNDED}
    params = [pytest.param(name, marks=[pytest.mark.xdist_group(name), *spared[name]]) for name in ROUNDED]
    return pytest.mark.parametrize("name", params)


EVERY = types(SOME)
KINDS = ["gaussian", "heavy-tailed", "uniform", "sparse", "outlier", "tiny", "small", "huge", "constant"]


def over_ggml(name: str, kind: str, importance: np.ndarray | None) -> float:
    """The weighted error over that of ggml, or over what no float32 shows where that is more."""
    x = weights(kind, 8)
    ours = row_errors(x, quantize_rows(x, WRITTEN[name], importance).data, name, importance).sum()
    ones = np.ones(1024, np.float32)  # some types demand an importance
    peer = ggml.quantize(x, name, ones if importance is None else importance)
    theirs = row_errors(x, peer, name, importance).sum()
    # scales of TQ1_0 and TQ2_0 that no half holds are infinite there
    return 0.0 if np.isnan(theirs) else float(ours / (theirs + 2.0**-20 * np.square(x).sum()))


@types([name for name in SOME if name != "IQ2_S"])  # ggml makes its tables for seconds
def test_error_is_below_that_of_ggml(name: str) -> None:
    for label, importance in importances().items():
        ratios = {kind: over_ggml(name, kind, importance) for kind in KINDS}
        if name in ("IQ2_XXS", "IQ2_S"):  # whose scales are lifted, which costs error: that of uniform or equal weights
            assert np.mean(list(ratios.values())) <= 1, (label, ratios)
            assert max(ratios[kind] for kind in KINDS if kind not in ("uniform", "constant")) <= 1, (label, ratios)
        else:
            assert max(ratios.values()) <= 1, (label, ratios)


@pytest.mark.parametrize("name", [pytest.param("IQ3_XXS", marks=pytest.mark.xdist_group("IQ3_XXS"))])
def test_scales_shrink_the_weights_by_less_than_the_error(name: str) -> None:
    x, importance = weights("gaussian", 8), importances()["lognormal"]
    assert importance is not None
    cost = np.sqrt(importance)  # what the search weighs errors with
    stored = dequantize(quantize_rows(x, WRITTEN[name], importance).data, name)
    signal = (cost * x * x).sum()
    lost = (cost * (x - stored) ** 2).sum() / signal  # by least squares, the weights shrink by as much
    assert 0 < 1 - (cost * x * stored).sum() / signal < lost / 2


@EVERY
@pytest.mark.parametrize("label", ["none", "lognormal"])
def test_sums_reported_are_those_of_the_dequantized_blocks(name: str, label: str) -> None:
    importance = importances()[label]
    for kind in ("gaussian", "constant", "tiny", "huge", "zero"):
        x = weights(kind, 8)
        got = quantize_rows(x, WRITTEN[name], importance)
        small = 1e-12 * float(np.square(x).sum())
        assert np.allclose(got.errors, row_errors(x, got.data, name, None), rtol=1e-5, atol=small)
        weighted = row_errors(x, got.data, name, importance).sum()
        assert got.weighted_error == pytest.approx(weighted, rel=1e-4, abs=small)


@EVERY
def test_blocks_hold_what_ggml_reads(name: str) -> None:
    data = quantize_rows(weights("gaussian", 4), WRITTEN[name], importances()["lognormal"]).data
    assert np.array_equal(ggml.dequantize(data, gguf.GGMLQuantizationType[name]), dequantize(data, name))


@EVERY
def test_zero_rows_become_exact_zeros(name: str) -> None:
    assert not dequantize(quantize_rows(weights("zero", 2), WRITTEN[name]).data, name).any()


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_ternary_weights_are_exact_at_any_density(name: str) -> None:
    rng = np.random.default_rng(0)
    scale = rng.random((8, 1)).astype(np.float16).astype(np.float32)
    for density in (0.01, 0.3, 1.0):
        x = scale * rng.integers(-1, 2, (8, 256)) * (rng.random((8, 256)) <= density)
        assert quantize_rows(x.astype(np.float32), WRITTEN[name]).error == 0


@EVERY
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_with_their_row(name: str, bad: float) -> None:
    x = weights("gaussian", 3)
    x[1, 300] = bad
    with pytest.raises(BridgeError, match="row 1"):
        quantize_rows(x, WRITTEN[name])
