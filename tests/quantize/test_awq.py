"""AWQ: scales and clips that lessen the output error, folded so that the model stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.formats.written import Groups
from bridge.checkpoint.write.writer import write_checkpoint
from bridge.quantize import Method, groups, quantize_model
from bridge.quantize.awq import Awq, clipped, fold_scales, smoothing
from bridge.quantize.model.float_model import FloatModel
from tests.support.tiny_models import save_model

RTN = Method(groups(4, 32, False), "none", damping=float("inf"), sweeps=0)


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
    s, alpha, errors = smoothing(weights, x.abs().mean(0), x.T @ x, nearest)
    expected = [sum(lost(w, nearest(w * s) / s, x) for w in weights), sum(lost(w, nearest(w), x) for w in weights)]
    torch.testing.assert_close(torch.tensor([min(errors), errors[0]]), torch.tensor(expected), rtol=1e-3, atol=0)
    assert len(errors) == 20
    assert alpha == errors.index(min(errors)) / 20 > 0
    assert min(errors) < 0.7 * errors[0]
    torch.testing.assert_close(s.max() * s.min(), torch.tensor(1.0))


def test_inputs_of_one_size_leave_the_weights_as_they_are() -> None:
    weights, _ = linears_and_inputs()
    x = torch.sign(torch.randn(200, 128))
    s, _, _ = smoothing(weights, x.abs().mean(0), x.T @ x, nearest)
    torch.testing.assert_close(s, torch.ones(128))


def test_clipping_a_groups_outliers_lessens_the_output_error_and_touches_nothing_within_the_range() -> None:
    weights, x = linears_and_inputs()
    weight = weights[0]
    weight[::3, 5] = 6.0
    narrow = clipped(weight, x.T @ x, 32, nearest)
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
            fold_scales(before, linears, torch.rand(24) + 0.5)
            for linear, y in zip(linears, expected, strict=True):
                torch.testing.assert_close(linear(before(x)), y)


# as a method


def decoder(config_class: str = "LlamaConfig", heads: int = 4, **fields: Any) -> tuple[nn.Module, torch.Tensor]:
    """A random decoder some of whose channels see large inputs, and tokens."""
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=heads, head_dim=16, **fields,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "layernorm" in name:
                parameter[::8] += 12
    return model, torch.randint(0, 128, (8, 32), generator=torch.Generator().manual_seed(1))


def folded(awq: Awq) -> dict[str, str]:
    """Layers of the first block -> what feeds them, last names."""
    return {
        ", ".join(name.rpartition(".")[2] for name in f.layers): f.before.rpartition(".")[2]
        for f in awq.folds
        if ".0." in f.before
    }


def smooth(model: nn.Module, tokens: torch.Tensor, **more: Any) -> Awq:
    """Search and fold, and leave the weights as they then are."""
    awq = Awq(RTN, stored=torch.float32)
    for _ in quantize_model(model, tokens, lambda layer: (layer.weight, None), prepare=awq.prepare, **more):
        pass
    return awq


ALL = {
    "q_proj, k_proj, v_proj": "input_layernorm",
    "o_proj": "v_proj",
    "gate_proj, up_proj": "post_attention_layernorm",
    "down_proj": "up_proj",
}


@pytest.mark.parametrize(
    ("family", "fields", "missing"),
    [
        ("LlamaConfig", {}, ()),
        ("Qwen2Config", {}, ()),  # biases
        ("Qwen3Config", {"heads": 2}, ("o_proj",)),  # values that two heads share
        ("GemmaConfig", {}, ("q_proj, k_proj, v_proj", "gate_proj, up_proj")),  # its norms multiply by 1 + w
        (
            "Qwen3MoeConfig",  # whose router reads what the experts read
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            ("gate_proj, up_proj", "down_proj"),
        ),
    ],
)
def test_what_feeds_a_layer_is_found_and_folding_leaves_the_model_as_it_was(
    family: str, fields: dict[str, Any], missing: tuple[str, ...]
) -> None:
    model, tokens = decoder(family, **fields)
    with torch.no_grad():
        expected = model(tokens).logits
        awq = smooth(model, tokens)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-3, atol=1e-3)
    assert folded(awq) == {layers: before for layers, before in ALL.items() if layers not in missing}
    assert bool(awq.floats) == (family != "GemmaConfig")
    assert all(f.gain <= 1 for f in awq.folds)


def test_awq_is_nearer_to_the_float_model_than_rtn_and_clips_help() -> None:
    lost = {}
    for name in ("rtn", "scales", "scales and clips"):
        model, tokens = decoder()
        with torch.no_grad():
            expected = model(tokens).logits
            awq = Awq(RTN, clip="clips" in name)
            prepare = None if name == "rtn" else awq.prepare
            layers = dict(quantize_model(model, tokens, awq.layer, prepare=prepare))
            lost[name] = float((model(tokens).logits - expected).square().mean())
        assert len(layers) == 14
        assert all(0 < layer.error < 1 for layer in layers.values())
    assert lost["scales"] < 0.9 * lost["rtn"]
    assert lost["scales and clips"] < lost["rtn"]


@pytest.mark.parametrize(
    "rounds", [RTN, pytest.param(Method(groups(4, 32, False), sweeps=0), marks=pytest.mark.exhaustive)]
)
def test_the_checkpoint_holds_the_changed_floats_beside_the_codes(tmp_path: Path, rounds: Method) -> None:
    source = save_model(tmp_path / "model", "Qwen2Config", hidden_size=64, intermediate_size=96, num_key_value_heads=4)
    tokens = torch.randint(0, 320, (4, 32), generator=torch.Generator().manual_seed(1))
    models = [transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval() for _ in range(2)]
    awq = Awq(rounds, stored=torch.float32)
    layers = dict(quantize_model(models[0], tokens, awq.layer, prepare=awq.prepare))
    tensors = {name: layer.tensor() for name, layer in layers.items()}
    with open_checkpoint(source) as ckpt:
        again = Awq(rounds, stored=torch.float32)
        read = dict(quantize_model(FloatModel(ckpt), tokens, again.layer, prepare=again.prepare))
        assert all(np.array_equal(read[name].codes, layers[name].codes) for name in layers)
        assert again.floats.keys() == awq.floats.keys()
        write_checkpoint(
            ckpt, tmp_path / "out", "awq", dict.fromkeys(tensors, Groups(4, 32)), tensors.values(), floats=awq.floats
        )
    assert {name.rpartition(".")[2] for name in awq.floats} == {"weight", "bias"}  # of norms, and of the values
    with open_checkpoint(tmp_path / "out") as ckpt, torch.no_grad():
        for name in ckpt.modules:
            models[1].get_submodule(name).weight.copy_(torch.from_numpy(ckpt.read_module(name).dequantize()))
        for name in ckpt.tensors:
            models[1].get_parameter(name).copy_(torch.from_numpy(ckpt.read_float(name)))
        torch.testing.assert_close(models[1](tokens).logits, models[0](tokens).logits)
