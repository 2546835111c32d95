"""Models of many families: those whose blocks return tuples, and the language models inside models of several parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from bridge.checkpoint import open_checkpoint
from bridge.conversion.checkpoints.to_checkpoint import quantize_checkpoint
from bridge.conversion.converter import convert
from bridge.conversion.writing.report import CALIBRATED
from bridge.quantize import FloatModel, quantize_model
from bridge.quantize.model.experts import split_experts
from bridge.quantize.model.forward_passes import Passes
from bridge.quantize.model.streamed_model import decoder_blocks
from bridge.quantize.settings import Calibration
from tests.support.tiny_models import SHAPE, save_model

TOKENS = torch.randint(0, 320, (3, 24), generator=torch.Generator().manual_seed(3))
GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8}
TUPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("FalconConfig", {"hidden_size": 64, "alibi": False}),
    "falcon-alibi": ("FalconConfig", {"hidden_size": 64, "alibi": True, "multi_query": False}),
    "falcon-new": ("FalconConfig", {"hidden_size": 64, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": ("BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "gptj": ("GPTJConfig", GPT),
    "codegen": ("CodeGenConfig", GPT),
    "gpt-neo": ("GPTNeoConfig", {"hidden_size": 64, "num_layers": 2, "num_heads": 4,
        "attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "mpt": ("MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
}  # fmt: skip
VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# name -> config class, the language model's fields, and those of what sees: with as many layers
PARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3Config", {"model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 16},
        TOWER | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}),
    "mistral3": ("Mistral3Config", {"model_type": "mistral"}, TOWER | {"model_type": "pixtral"}),
    "llama4": ("Llama4Config", {"model_type": "llama4_text", "intermediate_size_mlp": 64, "num_local_experts": 3,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 16},
        TOWER | {"image_size": 28, "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16,
            "projector_output_dim": 16}),
    "qwen3.5": ("Qwen3_5Config", {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        VISION),
    "qwen3-vl": ("Qwen3VLConfig", {"model_type": "qwen3_vl_text", "rope_parameters": MROPE},
        VISION | {"deepstack_visual_indexes": [0]}),
    "qwen3-vl-moe": ("Qwen3VLMoeConfig", {"model_type": "qwen3_vl_moe_text", "rope_parameters": MROPE, **EXPERTS},
        VISION | {"deepstack_visual_indexes": []}),
}  # fmt: skip
UNUSED = {
    "GPTJConfig": ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    "CodeGenConfig": ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    "GPTNeoConfig": ("num_hidden_layers", "num_attention_heads"),
    "MptConfig": ("hidden_size", "num_hidden_layers", "num_attention_heads"),
    "BloomConfig": ("num_hidden_layers", "num_attention_heads"),
}


def rounded(layer: Any) -> tuple[torch.Tensor, Any]:
    return (layer.weight * 16).round() / 16, layer.hessian


def small(folder: Path, kind: str, tied: bool) -> Path:
    config, fields = TUPLES[kind]
    return save_model(folder, config, without=UNUSED.get(config, ()), tie_word_embeddings=tied, **fields)


def in_memory(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", TUPLES)
def test_models_whose_blocks_return_tuples_are_walked_with_their_head(tmp_path: Path, kind: str, tied: bool) -> None:
    folder = small(tmp_path / "model", kind, tied)
    inputs: list[torch.Tensor] = []
    model = in_memory(folder)
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _m, args: inputs.append(args[0].detach()))
    expected = dict(quantize_model(model, TOKENS, rounded, batch=2, cross=True, head=True))
    with torch.no_grad():
        inputs.clear()
        model(TOKENS)
    with open_checkpoint(folder) as checkpoint:
        found = dict(quantize_model(FloatModel(checkpoint), TOKENS, rounded, batch=2, cross=True, head=True))
    assert len(found) == len(expected) >= 8
    for own, twin in zip(expected.values(), found.values(), strict=True):
        torch.testing.assert_close(own.matrix, twin.matrix, rtol=1e-3, atol=1e-4)
    if tied:
        assert head.weight is model.get_input_embeddings().weight
    else:
        x = inputs[0].flatten(0, 1)
        torch.testing.assert_close(list(found.values())[-1].matrix, 2 / len(x) * x.T @ x, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", TUPLES)
def test_passes_through_single_blocks_give_the_models_logits(tmp_path: Path, kind: str) -> None:
    folder = small(tmp_path / "model", kind, True)
    with open_checkpoint(folder) as checkpoint, torch.no_grad():
        passes = Passes(FloatModel(checkpoint), TOKENS, 2)
        logits = torch.cat([passes.logits(i, x) for i, x in enumerate(passes.inputs[-1])])
        torch.testing.assert_close(logits, in_memory(folder)(TOKENS).logits, rtol=1e-4, atol=1e-4)
        assert all(torch.isfinite(g.blocks).all() for _, g in passes.output_products(2048))


def several_parts(folder: Path, kind: str, tied: bool) -> Path:
    config, text, vision = PARTS[kind]
    size = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "tie_word_embeddings": tied}
    fields = {"text_config": SHAPE | size | text, "vision_config": vision, "tie_word_embeddings": tied}
    return save_model(folder, config, without=SHAPE, auto="AutoModelForImageTextToText", **fields)


def of_text(whole: Any) -> Any:
    """What computes logits of tokens: of Llama 4 the language model, for transformers 5.24 fails without images."""
    return whole.language_model if type(whole).__name__ == "Llama4ForConditionalGeneration" else whole


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", PARTS)
def test_of_a_model_of_several_parts_the_language_model_is_walked(tmp_path: Path, kind: str, tied: bool) -> None:
    folder = several_parts(tmp_path / "model", kind, tied)
    whole = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with open_checkpoint(folder) as checkpoint, torch.no_grad():
        model = FloatModel(checkpoint)
        for block in (None, 0, 1):
            model.load(block)
        model.load_head()
        torch.testing.assert_close(model.model(TOKENS).logits, of_text(whole)(TOKENS).logits, rtol=1e-4, atol=1e-4)
        embeddings, head = model.embedding_and_head()
        assert (embeddings == head) == tied
        assert f"{embeddings}.weight" in checkpoint.tensors
        found = dict(quantize_model(FloatModel(checkpoint), TOKENS, rounded, batch=2, cross=True, head=True))
        assert (head in found) == (not tied)
        assert not any("vis" in name or "projector" in name for name in found)
        assert all(".experts." in name or f"{name}.weight" in checkpoint.tensors for name in found)
    assert all(hessian.tokens for hessian in found.values())


def test_buffers_that_a_part_of_the_model_computes_from_its_own_attributes(tmp_path: Path) -> None:
    """transformers 5.23 reads Gemma 3n's scales of per-layer inputs from the text model, not from the whole."""
    kinds = ["sliding_attention", "full_attention"] * 2
    folder = save_model(tmp_path / "model", "Gemma3nTextConfig", hidden_size=64, num_hidden_layers=4, head_dim=16,
        num_kv_shared_layers=2, layer_types=kinds, hidden_size_per_layer_input=32, vocab_size_per_layer_input=320,
        laurel_rank=8, activation_sparsity_pattern=[0.0] * 4)  # fmt: skip
    with open_checkpoint(folder) as checkpoint, torch.no_grad():
        model = FloatModel(checkpoint)
        for block in (None, *range(4)):
            model.load(block)
        model.load_head()
        torch.testing.assert_close(model.model(TOKENS).logits, in_memory(folder)(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_a_model_of_several_parts_in_memory_is_walked_through_its_language_model(tmp_path: Path) -> None:
    folder = several_parts(tmp_path / "model", "qwen3-vl", tied=False)
    whole = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    names = [name for name, _ in quantize_model(whole, TOKENS, rounded)]
    assert len(names) == 14
    assert all(name.startswith("model.language_model.layers.") for name in names)


def test_a_checkpoint_of_several_parts_keeps_the_others_as_they_are_and_lists_them(tmp_path: Path) -> None:
    folder = several_parts(tmp_path / "model", "qwen3-vl", tied=False)
    np.save(tmp_path / "tokens.npy", TOKENS.numpy())
    settings = Calibration(tmp_path / "tokens.npy", length=24, sweeps=0)
    done = quantize_checkpoint(folder, tmp_path / "out", "gptq_v2", group_size=32, calibrate=settings)
    assert done.modules == 14
    with open_checkpoint(folder) as floats, open_checkpoint(tmp_path / "out") as checkpoint:
        assert all(name.startswith("model.language_model.layers.") for name in checkpoint.modules)
        seen = [name for name in floats.tensors if ".visual." in name]
        assert seen
        assert all(np.array_equal(floats.read_float(name), checkpoint.read_float(name)) for name in seen)
    labels = json.dumps(json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"])
    assert "visual" in labels


@pytest.mark.parametrize("kind", ["gpt-oss", "llama4", "qwen3-vl-moe"])
def test_experts_of_any_orientation_are_split_as_they_compute_together(tmp_path: Path, kind: str) -> None:
    """hidden = inner or twice inner: one of the tensors is square, and only the other tells its orientation."""
    for inner in (24, 32, 64):
        folder = tmp_path / f"{kind}-{inner}"
        if kind == "gpt-oss":
            save_model(folder, "GptOssConfig", hidden_size=64, intermediate_size=inner, head_dim=16,
                num_local_experts=3, num_experts_per_tok=2, sliding_window=8)  # fmt: skip
            auto: Any = transformers.AutoModelForCausalLM
        else:
            config, text, vision = PARTS[kind]
            text = SHAPE | {"hidden_size": 64, "intermediate_size": inner, "head_dim": 16} | text
            text |= {"moe_intermediate_size": inner} if kind == "qwen3-vl-moe" else {}
            fields = {"text_config": text, "vision_config": vision, "tie_word_embeddings": False}
            save_model(folder, config, without=SHAPE, auto="AutoModelForImageTextToText", **fields)
            auto = transformers.AutoModelForImageTextToText
        whole = auto.from_pretrained(folder, dtype=torch.float32).eval()
        expected = of_text(whole)(TOKENS).logits.detach()
        for turned in (False, True):
            if turned:
                turn_experts(folder)
            with open_checkpoint(folder) as checkpoint, torch.no_grad():
                model = FloatModel(checkpoint)
                experts = [name for name in model.linears() if ".experts." in name]
                assert len(experts) == 2 * 3 * 3
                for block in (None, 0, 1):
                    model.load(block)
                model.load_head()
                torch.testing.assert_close(model.model(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
        _, blocks = decoder_blocks(whole)
        split = [split_experts(block) for block in blocks]
        assert all(split)
        torch.testing.assert_close(of_text(whole)(TOKENS).logits.detach(), expected, rtol=1e-4, atol=1e-4)
        found = dict(quantize_model(whole, TOKENS, rounded, cross=True))
        assert sum(".experts." in name for name in found) == 2 * 3 * 3
        assert (of_text(whole)(TOKENS).logits - expected).abs().max() > 1e-3


def turn_experts(folder: Path) -> None:
    """Store the experts' 3-D tensors in the other orientation; both are published."""
    weights = load_file(folder / "model.safetensors")
    for name, values in weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            weights[name] = np.ascontiguousarray(values.swapaxes(1, 2))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_llama_4s_experts_see_the_tokens_that_were_routed_to_them(tmp_path: Path) -> None:
    folder = several_parts(tmp_path / "model", "llama4", tied=False)
    with open_checkpoint(folder) as checkpoint:
        found = dict(quantize_model(FloatModel(checkpoint), TOKENS, rounded))
    own = [h.tokens - h.borrowed_tokens for n, h in found.items() if ".0.feed_forward.experts." in n and "gate" in n]
    assert sum(own) == TOKENS.numel()


def test_gpt_oss_experts_are_calibrated_for_a_gguf_and_stay_floats_in_a_checkpoint(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "GptOssConfig", vocab_size=2048, hidden_size=64, intermediate_size=32,
        head_dim=16, num_local_experts=3, num_experts_per_tok=2, sliding_window=128)  # fmt: skip
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    settings = Calibration(text, samples=8, length=32, sweeps=0)
    report = convert(folder, tmp_path / "out.gguf", type="Q8_0", calibrate=settings)
    outcomes = {t.name: t.outcome for t in report.tensors if "_exps.weight" in t.name}
    assert len(outcomes) == 2 * 3
    assert set(outcomes.values()) == {CALIBRATED}
    assert not any("not seen" in note for note in report.notes)
    done = quantize_checkpoint(folder, tmp_path / "out", "gptq_v2", group_size=32, calibrate=settings)
    assert done.modules == 2 * 4
    assert sum("stays float: it is part of a tensor of all experts" in note for note in done.notes) == 2 * 3 * 3
