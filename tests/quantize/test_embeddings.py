"""Embeddings rounded with a Hessian of their own: that of the gradients at the first block's inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from bridge.checkpoint import open_checkpoint
from bridge.conversion.converter import convert
from bridge.conversion.writing.report import CALIBRATED, FLOAT
from bridge.quantize import quantize_model
from bridge.quantize.model.activations import ActivationStore
from bridge.quantize.model.embeddings import embeddings_hessian, embeddings_matrix
from bridge.quantize.model.float_model import FloatModel
from bridge.quantize.model.forward_passes import output_hessians
from bridge.quantize.quantizer import LayerHooks
from bridge.quantize.settings import Calibration
from bridge.quantize.solve.hessian import Hessian
from tests.support.tiny_models import save_model


def test_one_matrix_weighs_errors_as_both_uses_of_tied_embeddings_feel_them() -> None:
    """Exactly, where each token is predicted a third as often as it occurs."""
    random = torch.Generator().manual_seed(0)
    x, g, e = (torch.randn(n, 8, generator=random).double() for n in (50, 60, 5))
    inputs = Hessian("head", 8)
    inputs.add(x.float())
    occurs = torch.rand(5, generator=random).double()
    occurs /= occurs.sum()
    products = g.T @ g / 60
    expected = (e @ products * e).sum(1) @ occurs / 2
    expected += ((e @ x.T).square().mean(1) / 2) @ (occurs / 3)
    hessian = embeddings_hessian("embeddings", embeddings_matrix(products.float(), (inputs, occurs / 3)), 100)
    found = (e @ hessian.matrix.double() * e).sum(1) @ occurs / 4
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_the_quantized_model_starts_at_quantized_embeddings_and_the_float_model_at_its_own() -> None:
    torch.manual_seed(0)
    shape: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=64)).eval()
    tokens = torch.randint(0, 64, (6, 12))
    weight, norm = model.model.embed_tokens.weight.data.clone(), model.model.layers[0].input_layernorm
    values = (weight * 32).round() / 32
    for layer in quantize_model(
        model,
        tokens,
        lambda layer: (layer.weight, layer.hessian),
        cross=True,
        layers=LayerHooks(values_by_rows=lambda _: [values[:40], values[40:]]),
    ):
        name, hessian = layer
        if name.endswith("q_proj"):
            x, x_float = (norm(v[tokens.flatten()]) for v in (values, weight))
            torch.testing.assert_close(hessian.matrix, 2 / len(x) * x.T @ x, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(hessian.cross, 2 / len(x) * (x_float - x).T @ x, rtol=1e-3, atol=1e-5)
            return
    raise AssertionError


@pytest.mark.parametrize("tied", [False, True])
def test_two_sided_embeddings_lose_less_where_gradients_are_than_rounded_ones(tmp_path: Path, tied: bool) -> None:
    folder = save_model(tmp_path / "m", "LlamaConfig", num_hidden_layers=1, tie_word_embeddings=tied)
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 300, (24, 32)))
    model = FloatModel(open_checkpoint(folder))
    found = dict(output_hessians(model, torch.from_numpy(np.load(tokens)), ActivationStore(None)))
    half = found["model.embed_tokens"].blocks[0].double()
    weight = model.embedding_rows(slice(0, model.vocabulary)).double()
    assert torch.equal(model.embedding_rows(slice(3, 5)).double(), weight[3:5])
    costs = {}
    for method in ("gptq", "two-sided"):
        settings = Calibration(tokens, 24, 32, method=method, sweeps=0)
        report = convert(folder, tmp_path / f"{method}.gguf", type="Q3_K", calibrate=settings)
        (outcome,) = (t.outcome for t in report.tensors if t.kind == "token_embd")
        assert outcome == (CALIBRATED if method == "two-sided" else FLOAT)
        (tensor,) = (t for t in gguf.GGUFReader(tmp_path / f"{method}.gguf").tensors if t.name == "token_embd.weight")
        lost = weight - torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).double()
        costs[method] = float((lost @ half * lost).sum())
    assert costs["two-sided"] < 0.8 * costs["gptq"]
