"""Products with the experts that tokens chose, against float64: kernels run as compiled PTX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bridge.blocks.read import WRITTEN
from bridge.errors import BridgeError
from tests.support import ptx
from tests.support.random_blocks import ALL, FACTOR, assert_product, random_matrix, rounded

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from bridge.cuda.forms import dequantize
from bridge.cuda.product import experts
from bridge.cuda.product.activations import Records
from bridge.cuda.product.experts import ExpertMatrices
from bridge.cuda.product.matvec_shape import MatvecShape
from bridge.cuda.toolchain import device as devices

pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.usefixtures("gpu"),
    pytest.mark.proof,
]
SMALL = MatvecShape(2, 1, 1, 4)
TYPES = ("NVFP4", "IQ2_XS")  # in every run: with factors of rows, and a codebook


def stack(type: str, count: int, rows: int, columns: int, seed: int = 0) -> tuple[list[Any], np.ndarray]:
    """Tensors of so many experts, each with a factor of its own if the type has one, and weights [count, rows, in]."""
    found = [random_matrix(WRITTEN[type], rows, columns, seed + i, FACTOR * np.float32(i + 1)) for i in range(count)]
    return [tensor for tensor, _ in found], np.stack([weights for _, weights in found])


def multiplied(matrices: ExpertMatrices, x: np.ndarray, chosen: list[int], precision: str, **options: Any) -> Any:
    y = np.full((len(chosen), matrices.rows // (2 if options.get("activation") else 1)), np.nan, np.float32)
    records = Records(matrices.columns, len(x), "cuda", precision).quantize(x, len(x))
    experts.launch(matrices, records, y, np.array(chosen), 0, **{"shape": SMALL} | options)
    return y


@pytest.mark.parametrize("precision", ["int8", pytest.param("f32", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(*p.values, id=p.id, marks=[*p.marks, *[pytest.mark.exhaustive] * (p.id not in TYPES)])
        for p in ALL.args[1]
    ],
)
def test_each_pair_is_multiplied_by_its_expert_and_by_none_where_that_is_not_here(block, precision):
    """Three rows and pairs of them; an expert of two tokens, twice in one of them; numbers beyond both ends."""
    tensors, weights = stack(block.name, 3, 3, 256)
    x = np.random.default_rng(1).standard_normal((2, 256)).astype(np.float32)
    chosen = [2, 0, 3, 2, 2, -1]
    y = multiplied(ExpertMatrices([[t] for t in tensors], devices.require("cuda")), x, chosen, precision)
    given = x if precision == "f32" else rounded(x)
    for pair in (0, 1, 3, 4):
        assert_product(y[pair : pair + 1], given[pair // 3 : pair // 3 + 1], weights[chosen[pair]])
    assert not y[[2, 5]].any()


@pytest.mark.parametrize("precision", ["int8", pytest.param("f32", marks=pytest.mark.exhaustive)])
def test_more_than_eight_columns_of_x_are_each_multiplied_by_their_own_expert(precision):
    """Of which one has a NaN, that reaches no other column."""
    n = 9
    tensors, weights = stack("Q4_0", 4, 2, 32)
    x = np.random.default_rng(2).standard_normal((n, 32)).astype(np.float32)
    x[7, 3] = np.nan
    chosen = [i % 4 for i in range(n)]
    y = multiplied(ExpertMatrices([[t] for t in tensors], devices.require("cuda")), x, chosen, precision)
    given = x if precision == "f32" else rounded(x)
    for pair in range(n):
        if pair == 7:
            assert np.isnan(y[pair]).all()
        else:
            assert_product(y[pair : pair + 1], given[pair : pair + 1], weights[chosen[pair]])


@pytest.mark.parametrize("precision", ["int8", pytest.param("f32", marks=pytest.mark.exhaustive)])
def test_biases_are_the_expert_s_own_and_rows_that_alternate_end_in_swiglu(precision):
    """Rows shared by two warps; a pair without an expert gets no bias either."""
    (gates, gate_weights), (ups, up_weights) = (stack("Q4_0", 2, 3, 64, seed) for seed in (0, 2))
    matrices = ExpertMatrices(list(zip(gates, ups, strict=True)), devices.require("cuda"))
    x = np.random.default_rng(3).standard_normal((1, 64)).astype(np.float32)
    shape, chosen = MatvecShape(2, 1, 2, 2), [1, 0, 2]
    given = x if precision == "f32" else rounded(x)
    gate, up = (np.concatenate([given @ w[e].T for e in (1, 0)]) for w in (gate_weights, up_weights))
    y = multiplied(matrices, x, chosen, precision, activation="silu", shape=shape)
    np.testing.assert_allclose(y[:2], gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-6)
    assert not y[2].any()
    bias = np.arange(12, dtype=np.float32)
    y = multiplied(matrices, x, chosen, precision, bias=bias, shape=shape)
    both = np.stack([gate, up], -1).reshape(2, 6) + bias.reshape(2, 6)[[1, 0]]
    np.testing.assert_allclose(y[:2], both, rtol=1e-5, atol=1e-5)
    assert not y[2].any()


@pytest.mark.parametrize("type", ["NVFP4", pytest.param("IQ2_XS", marks=pytest.mark.exhaustive)])
def test_an_expert_is_a_matrix_of_its_own_in_the_same_memory(type):
    tensors, _ = stack(type, 3, 2, 256)
    matrices = ExpertMatrices([[t] for t in tensors], devices.require("cuda"))
    for expert, tensor in enumerate(tensors):
        out = torch.zeros(2, 256)
        dequantize.tile(matrices[expert], 0, 2, out, 0)
        torch.testing.assert_close(out, torch.from_numpy(tensor.dequantize()), rtol=0, atol=0)


def test_records_of_another_length_are_refused():
    tensors, _ = stack("Q4_0", 2, 2, 64)
    matrices = ExpertMatrices([[t] for t in tensors], devices.require("cuda"))
    for columns, pairs in ((32, 2), (64, 3)):
        with pytest.raises(BridgeError, match=rf"w0: {pairs} products of 2 columns of {columns} values; must be a mul"):
            experts.launch(matrices, Records(columns, 2, "cuda"), np.zeros((pairs, 2), "f4"), np.zeros(pairs, int), 0)
