"""Multi-head latent attention: the codes of its values are kept, and its keys are the checkpoint's, transposed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.conversion.planning.checkpoint_outline import outline_of
from bridge.conversion.planning.importance import Importance
from bridge.conversion.writing.verify import failures, verify
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import mean_kl
from tests.support.encode import write_awq, write_gptq
from tests.support.template import (
    FLOAT32,
    TOKENS,
    rewritten,
    values_of,
    write_template,
)

pytest.importorskip("transformers")
from tests.support.tiny_models import dequantized, predict

HEADS, KEY, ROPE, VALUE, RANK = 4, 32, 16, 64, 256


LATENT: dict[str, Any] = {
    "num_key_value_heads": HEADS, "qk_nope_head_dim": KEY, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE,
    "kv_lora_rank": RANK, "q_lora_rank": 256, "head_dim": ROPE, "first_k_dense_replace": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip


def deepseek(floats: Path, path: Path, order: np.ndarray | slice = slice(None)) -> Path:
    """As the converter splits kv_b_proj: of each head k's rows, transposed, in an order, and v's."""

    def change(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        if "attn_kv_b" not in name:
            return {name: values}
        k, v = np.split(values.reshape(HEADS, KEY + VALUE, RANK), [KEY], axis=1)
        return {name.replace("kv_b", "k_b"): k[:, order].swapaxes(1, 2), name.replace("kv_b", "v_b"): v}

    keys = {
        "attention__head_count_kv": 1, "attention__q_lora_rank": 256, "attention__kv_lora_rank": RANK,
        "attention__key_length": RANK + ROPE, "attention__value_length": RANK, "attention__key_length_mla": KEY + ROPE,
        "attention__value_length_mla": VALUE, "attention__layer_norm_rms_epsilon": 1e-6, "rope__dimension_count": ROPE,
        "rope__freq_base": 10000.0, "leading_dense_block_count": 2, "expert_count": 0, "expert_used_count": 0,
        "expert_feed_forward_length": 256, "expert_shared_count": 1, "expert_weights_scale": 1.0,
        "expert_gating_func": 2, "vocab_size": 320,
    }  # fmt: skip
    return write_template(path, floats, "deepseek2", change, **keys)


@pytest.mark.parametrize("act_order", [False, True])
def test_latent_attention_keeps_the_codes_of_its_values_and_transposes_its_keys(act_order, model, tmp_path):
    floats = model("DeepseekV3Config", **LATENT)
    stored = write_gptq(tmp_path / "gptq", floats, desc_act=act_order)
    template = deepseek(floats, tmp_path / "template.gguf")
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    kinds = {t.kind: t for t in report.tensors}
    assert (kinds["attn_v_b"].shape, kinds["attn_k_b"].shape) == ((HEADS, VALUE, RANK), (HEADS, RANK, KEY))
    assert kinds["attn_v_b"].outcome == ("requantized" if act_order else "codes carried")
    assert kinds["attn_k_b"].type == "F16"
    assert not [note for note in report.notes if "the template as" in note]
    for layer in range(2):
        weights = stored[f"model.layers.{layer}.self_attn.kv_b_proj"].dequantize()
        keys, values = np.split(weights.reshape(HEADS, KEY + VALUE, RANK), [KEY], axis=1)
        made = values_of(tmp_path / "m.gguf", f"blk.{layer}.attn_k_b.weight")
        np.testing.assert_array_equal(made, keys.swapaxes(1, 2).astype(np.float16))
        made = values_of(tmp_path / "m.gguf", f"blk.{layer}.attn_v_b.weight")
        assert np.abs(made - values).max() < (2e-2 if act_order else 1e-3)
    assert failures(verify(tmp_path / "m.gguf", tmp_path / "gptq", template=template)) == []

    bridge.convert(tmp_path / "gptq", tmp_path / "f32.gguf", template=template, tensor_types=FLOAT32)
    expected = predict(dequantized(tmp_path / "reference", floats, stored), TOKENS)
    with LlamaCpp(tmp_path / "f32.gguf") as loaded:
        assert mean_kl(expected, loaded.logits(TOKENS)) < 1e-5
    with LlamaCpp(tmp_path / "m.gguf") as loaded:
        assert loaded.generate_greedy(TOKENS[:8], 4)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_template_may_have_the_columns_of_latent_keys_in_any_order(quantized, model, tmp_path):
    floats = model("DeepseekV3Config", **LATENT)
    order = np.random.default_rng(11).permutation(KEY)
    ckpt = floats
    if quantized:
        write_awq(ckpt := tmp_path / "awq", floats)
    template = deepseek(floats, tmp_path / "template.gguf", order)
    bridge.convert(ckpt, tmp_path / "m.gguf", template=template)
    bridge.convert(ckpt, tmp_path / "usual.gguf", template=deepseek(floats, tmp_path / "usual-template.gguf"))
    made, usual = (values_of(tmp_path / name, "blk.0.attn_k_b.weight") for name in ("m.gguf", "usual.gguf"))
    np.testing.assert_array_equal(made, usual[:, :, order])


def test_the_importance_of_all_heads_counts_for_values_that_are_one_tensor(model, tmp_path):
    floats = model("DeepseekV3Config", **LATENT)
    write_gptq(tmp_path / "gptq", floats)
    importance = {"blk.1.attn_v_b.weight": np.random.default_rng(3).random((HEADS, RANK), np.float32)}
    with bridge.open_checkpoint(tmp_path / "gptq") as opened:
        outline = outline_of(opened, template=deepseek(floats, tmp_path / "template.gguf"))
        (tensor,) = [t for t in outline.tensors if t.name in importance]
        np.testing.assert_array_equal(Importance(importance).of(tensor), importance[tensor.name].mean(0))


def test_latent_keys_have_the_factors_by_which_awq_divided_the_norm(model, tmp_path):
    floats = model("DeepseekV3Config", **LATENT)
    factors = np.exp(0.4 * np.random.default_rng(5).standard_normal(RANK)).astype(np.float32)

    def scale(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made = dict(weights)
        for name, v in weights.items():
            if "kv_b_proj" in name:
                made[name] = v * factors
            elif "kv_a_layernorm" in name:
                made[name] = v / factors
        return made

    scaled = rewritten(floats, tmp_path / "scaled", scale)
    stored = write_awq(tmp_path / "awq", scaled)
    template = deepseek(floats, tmp_path / "template.gguf")
    bridge.convert(tmp_path / "awq", tmp_path / "m.gguf", template=template, tensor_types=FLOAT32)
    expected = predict(dequantized(tmp_path / "reference", scaled, stored), TOKENS)
    with LlamaCpp(tmp_path / "m.gguf") as loaded:
        assert mean_kl(expected, loaded.logits(TOKENS)) < 1e-5
