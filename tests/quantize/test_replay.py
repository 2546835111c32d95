"""Passes through a block that start at what was quantized last, against those that start at its beginning."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers

from bridge.quantize import activations, quantize_model, walk
from bridge.quantize.hessian import Hessian

TOKENS = torch.randint(0, 64, (6, 12), generator=torch.Generator().manual_seed(3))
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64, "initializer_range": 0.3,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "experts": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "side by side": ("GPTNeoX", {"use_parallel_residual": True}),
}


def model_of(kind: str) -> Any:
    name, fields = KINDS[kind]
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**SHAPE, **fields)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def rounded(layer: Any) -> tuple[torch.Tensor, Any]:
    return (layer.weight * 8).round() / 8, (layer.weight, layer.hessian)


def mismatch(name: str, weight: torch.Tensor, hessian: Hessian) -> torch.Tensor | None:
    """W C of a layer, however it was gathered."""
    if name in hessian.products:
        assert hessian.cross is None
        return hessian.products[name].whole - weight @ hessian.matrix
    return None if hessian.cross is None else weight @ hessian.cross


@pytest.mark.parametrize("feed", ["quantized", "float"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_hessians_are_those_of_passes_from_the_beginning(
    kind: str, feed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = dict(quantize_model(model_of(kind), TOKENS, rounded, batch=4, cross=True, feed=feed))
    find_stages = walk.find_stages
    monkeypatch.setattr(walk, "find_stages", lambda *args: (find_stages(*args)[0], {}))
    expected = dict(quantize_model(model_of(kind), TOKENS, rounded, batch=4, cross=True, feed=feed))
    assert list(found) == list(expected)
    products = set()
    for name, (weight, hessian) in expected.items():
        torch.testing.assert_close(found[name][1].matrix, hessian.matrix, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(mismatch(name, *found[name]), mismatch(name, weight, hessian), rtol=1e-4, atol=1e-5)
        products |= {name.rpartition(".")[2]} if name in found[name][1].products else set()
    assert products == {
        "llama": {"o_proj", "down_proj"}, "experts": {"o_proj"}, "side by side": {"dense", "dense_4h_to_h"},
    }[kind]  # fmt: skip


def test_without_free_memory_modules_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(quantize_model(model_of("llama"), TOKENS, rounded, batch=4, cross=True))
    monkeypatch.setattr(activations, "free_memory", lambda: 1)
    expected = dict(quantize_model(model_of("llama"), TOKENS, rounded, batch=4, cross=True))
    for name, (_, hessian) in expected.items():
        torch.testing.assert_close(found[name][1].matrix, hessian.matrix, rtol=1e-6, atol=1e-6)


def test_each_layer_multiplies_each_token_once_in_the_quantized_and_the_float_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")
    calls: Counter[int] = Counter()
    linear = torch.nn.functional.linear

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        calls[tuple(weight.shape)] += x.numel() // x.shape[-1]  # type: ignore[index]
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    for _ in quantize_model(model, TOKENS, rounded, batch=2, cross=True):
        pass
    found = {48 * 32: 0, 32 * 48: 0} | {shape[0] * shape[1]: 0 for shape in calls}  # type: ignore[index]
    for shape, tokens in calls.items():
        found[shape[0] * shape[1]] += tokens  # type: ignore[index]
    layers = {48 * 32: 3, 32 * 32: 2, 16 * 32: 2}
    extra = 1 / 3  # the first batch of each block, which shows its stages
    first = 1 / 6  # and of the first block, which shows what blocks return
    for size, count in layers.items():
        assert found[size] <= 2 * count * TOKENS.numel() * (2 + extra + first)
