"""Passes through a block that start at what was quantized last, against those that start at its beginning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

from bridge.quantize import quantize_model
from bridge.quantize.model import activations
from bridge.quantize.model.activations import ActivationStore
from bridge.quantize.model.block_inputs import first_inputs, is_layer
from bridge.quantize.model.experts import split_experts
from bridge.quantize.model.replay import Replay
from bridge.quantize.model.stages import find_stages
from bridge.quantize.quantizer import LayerHooks
from bridge.quantize.solve.hessian import Hessian

TOKENS = torch.randint(0, 64, (6, 12), generator=torch.Generator().manual_seed(3))
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64, "initializer_range": 0.3,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "experts": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "side by side": ("GPTNeoX", {"use_parallel_residual": True}),
    "norms after": ("Gemma2", {"head_dim": 16}),
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
        return hessian.products[name].total - weight @ hessian.matrix
    return None if hessian.cross is None else weight @ hessian.cross


@pytest.mark.parametrize("feed", ["quantized", "float"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_hessians_are_those_of_passes_from_the_beginning(
    kind: str, feed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = dict(quantize_model(model_of(kind), TOKENS, rounded, batch=4, cross=True, feed=feed))
    monkeypatch.setattr(Replay, "keep", lambda *args: None)
    expected = dict(quantize_model(model_of(kind), TOKENS, rounded, batch=4, cross=True, feed=feed))
    assert list(found) == list(expected)
    products = set()
    for name, (weight, hessian) in expected.items():
        torch.testing.assert_close(found[name][1].matrix, hessian.matrix, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(mismatch(name, *found[name]), mismatch(name, weight, hessian), rtol=1e-4, atol=1e-5)
        products |= {name.rpartition(".")[2]} if name in found[name][1].products else set()
    assert products == {
        "llama": {"o_proj", "down_proj"}, "experts": {"o_proj"}, "side by side": {"dense", "dense_4h_to_h"},
        "norms after": {"down_proj"},
    }[kind]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_output_is_added_to_is_found_where_it_is_added_to_nothing_else(kind: str) -> None:
    model = model_of(kind)
    blocks = list(model.base_model.layers)
    batches = first_inputs(model, blocks, [TOKENS], ActivationStore(None))
    batches[0].select_block(0)
    split_experts(blocks[0])
    _, ends = find_stages(blocks[0], {n: m for n, m in blocks[0].named_modules() if is_layer(m)}, batches)
    attention = {"self_attn": "input_layernorm"}
    assert {name: end.added for name, end in ends.items() if end.added} == {
        "llama": attention | {"mlp": "post_attention_layernorm"}, "experts": attention,
    }.get(kind, {})  # fmt: skip


def test_o_and_down_are_to_make_good_what_was_lost_of_what_they_are_added_to() -> None:
    """R = 2/n sum (W x_float + h_float - h) x^T, h what the output is added to."""
    model, original = model_of("llama"), model_of("llama")
    found = dict(quantize_model(model, TOKENS, rounded, batch=4, cross=True))
    seen: dict[tuple[str, bool], torch.Tensor] = {}
    for quantized, own in ((True, model), (False, original)):
        for n, m in own.named_modules():
            if n.endswith(("o_proj", "down_proj", "layernorm")):
                m.register_forward_pre_hook(lambda _, a, key=(n, quantized): seen.update({key: a[0].flatten(0, 1)}))
        with torch.no_grad():
            own(TOKENS)
    for n, norm in (("self_attn.o_proj", "input_layernorm"), ("mlp.down_proj", "post_attention_layernorm")):
        name, norm = f"model.layers.1.{n}", f"model.layers.1.{norm}"
        weight, hessian = found[name]
        x, h = seen[name, True], seen[norm, True]
        wanted = seen[name, False] @ weight.T + seen[norm, False] - h
        torch.testing.assert_close(hessian.products[name].total, 2 / len(x) * wanted.T @ x, rtol=1e-3, atol=1e-4)


def test_layers_for_which_tokens_count_otherwise_have_hessians_of_their_own() -> None:
    """H = 2/n sum w x x^T and W C = 2/n sum w W (x_float - x) x^T of v with its own w; q and k share theirs."""
    model, original = model_of("llama"), model_of("llama")
    generator = torch.Generator().manual_seed(4)
    counts = {name: torch.rand(TOKENS.numel(), generator=generator).square() for name in ("v_proj", "others")}
    counts = {name: own / own.mean() for name, own in counts.items()}

    def weights(names: Sequence[str]) -> torch.Tensor:
        return counts["v_proj" if names[0].endswith("v_proj") else "others"]

    found = dict(quantize_model(model, TOKENS, rounded, batch=4, cross=True, layers=LayerHooks(weights=weights)))
    seen: dict[bool, torch.Tensor] = {}
    for quantized, own in ((True, model), (False, original)):
        layer = own.get_submodule("model.layers.1.self_attn.q_proj")
        layer.register_forward_pre_hook(lambda _, a, key=quantized: seen.update({key: a[0].flatten(0, 1)}))
        with torch.no_grad():
            own(TOKENS)
    x, x_float = seen[True], seen[False]
    for name in ("q_proj", "k_proj", "v_proj"):
        weight, hessian = found[f"model.layers.1.self_attn.{name}"]
        w = weights([name])[:, None]
        torch.testing.assert_close(hessian.matrix, 2 / len(x) * (w * x).T @ x, rtol=1e-4, atol=1e-5)
        expected = 2 / len(x) * (w * (x_float - x) @ weight.T).T @ x
        lost = mismatch(f"model.layers.1.self_attn.{name}", weight, hessian)
        torch.testing.assert_close(lost, expected, rtol=1e-3, atol=1e-4)
    of = {name: found[f"model.layers.1.{name}"][1] for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")}
    assert of["self_attn.q_proj"] is of["self_attn.k_proj"]
    assert of["mlp.up_proj"] is found["model.layers.1.mlp.gate_proj"][1]


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
