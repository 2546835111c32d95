"""A checkpoint's model in `transformers`, one block of it in memory at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bridge.checkpoint import open_checkpoint
from bridge.errors import BridgeError
from bridge.quantize import FloatModel, quantize_model
from tests.conftest import CHECKPOINT
from tests.support.tiny_models import save_model

TOKENS = torch.randint(0, 320, (6, 24), generator=torch.Generator().manual_seed(3))
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "scaled": ("Gemma2Config", {"head_dim": 64, "sliding_window": 8}),
    "gpt2": ("GPT2Config", {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 256, "hidden_size": None}),
}


def save(folder: Path, kind: str, **fields: Any) -> Path:
    config, own = KINDS[kind]
    fields = (
        {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1} | own | fields
    )
    if config == "GPT2Config":
        fields = {key: fields[key] for key in ("n_embd", "n_layer", "n_head", "n_positions")} | {
            "n_embd": 64,
            "n_head": 2,
        }
    return save_model(folder, config, **fields)


def in_memory(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def rounded(layer: Any) -> tuple[torch.Tensor, Any]:
    return (layer.weight * 16).round() / 16, layer.hessian


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_comes_block_by_block_is_quantized_as_one_in_memory(tmp_path: Path, kind: str) -> None:
    folder = save(tmp_path / "model", kind)
    expected = dict(quantize_model(in_memory(folder), TOKENS, rounded, batch=4, cross=True))
    with open_checkpoint(folder) as checkpoint:
        model = FloatModel(checkpoint)
        found = {}
        for name, hessian in quantize_model(model, TOKENS, rounded, batch=4, cross=True):
            found[name] = hessian
            assert {p.device.type for p in model.model.get_input_embeddings().parameters()} == {"meta"}
            real = [i for i, b in enumerate(model.blocks) if any(p.device.type != "meta" for p in b.parameters())]
            assert len(real) == 1
            assert f".{real[0]}." in name
        assert all(p.device.type == "meta" for p in model.model.parameters())
    assert list(found) == list(expected)
    for name, hessian in expected.items():
        torch.testing.assert_close(found[name].matrix, hessian.matrix)
        torch.testing.assert_close(found[name].cross, hessian.cross)


@pytest.mark.parametrize("kind", KINDS)
def test_all_blocks_and_the_head_loaded_make_the_whole_model(tmp_path: Path, kind: str) -> None:
    folder = save(tmp_path / "model", kind)
    with open_checkpoint(folder) as checkpoint, torch.no_grad():
        model = FloatModel(checkpoint)
        assert model.vocabulary == (320 if kind != "gpt2" else in_memory(folder).config.vocab_size)
        for block in (None, 0, 1):
            model.load(block)
        model.load_head()
        torch.testing.assert_close(model.model(TOKENS).logits, in_memory(folder)(TOKENS).logits)


def test_quantized_modules_of_a_checkpoint_come_as_what_they_stand_for() -> None:
    with open_checkpoint(CHECKPOINT) as checkpoint:
        model = FloatModel(checkpoint)
        model.load(0)
        name = "model.layers.0.mlp.down_proj"
        assert name in checkpoint.modules
        weight = model.model.get_submodule(name).weight
        torch.testing.assert_close(weight.detach(), torch.from_numpy(checkpoint.read_module(name).dequantize()))
        assert model.name(name) == name


def test_what_cannot_be_run_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())

    def refused(match: str, **fields: Any) -> None:
        (folder / "config.json").write_text(json.dumps(config | fields))
        with open_checkpoint(folder) as checkpoint, pytest.raises(BridgeError, match=match) as caught:
            FloatModel(checkpoint).load(1)
        assert "\n" not in str(caught.value)

    refused("cannot build a text model of nonesuch", model_type="nonesuch")
    refused("cannot build a text model of llama", text_config={"hidden_size": 64})
    refused(r"gate_proj.weight is \[96, 64\], but \[128, 64\] by config.json", intermediate_size=128)
    refused("has no model.layers.1.self_attn.q_proj.bias, a part of", attention_bias=True)
