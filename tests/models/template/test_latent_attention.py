"""Multi-head latent attention: the codes of its values are kept, and its keys come from the template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.conversion.checkpoint_outline import outline_of
from bridge.conversion.importance import Importance
from bridge.conversion.verify import failures, verify
from bridge.errors import BridgeError
from scripts.peers.llama_cpp import LlamaCpp
from scripts.peers.reference import mean_kl
from tests.support.encode import load_floats, write_awq, write_gptq
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


def deepseek(floats: Path, path: Path) -> Path:
    """As the converter splits kv_b_proj: of each head k's rows, transposed, and v's."""

    def change(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        if "attn_kv_b" not in name:
            return {name: values}
        k, v = np.split(values.reshape(HEADS, KEY + VALUE, RANK), [KEY], axis=1)
        return {name.replace("kv_b", "k_b"): k.swapaxes(1, 2), name.replace("kv_b", "v_b"): v}

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
def test_latent_attention_keeps_the_codes_of_its_values_and_takes_its_keys_from_the_template(
    act_order, model, tmp_path
):
    floats = model("DeepseekV3Config", **LATENT)
    stored = write_gptq(tmp_path / "gptq", floats, desc_act=act_order)
    template = deepseek(floats, tmp_path / "template.gguf")
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    kinds = {t.kind: t for t in report.tensors}
    assert (kinds["attn_v_b"].shape, kinds["attn_k_b"].shape) == ((HEADS, VALUE, RANK), (HEADS, RANK, KEY))
    assert kinds["attn_v_b"].outcome == ("requantized" if act_order else "codes carried")
    kept = [note for note in report.notes if "the template as" in note]
    assert len(kept) == 2
    for note, layer in zip(kept, range(2), strict=True):
        assert note.startswith(f"blk.{layer}.attn_k_b.weight: ")
        assert note.endswith(f"the checkpoint has it transposed, in model.layers.{layer}.self_attn.kv_b_proj.weight")
        weights = stored[f"model.layers.{layer}.self_attn.kv_b_proj"].dequantize()
        values = weights.reshape(HEADS, KEY + VALUE, RANK)[:, KEY:]
        made = values_of(tmp_path / "m.gguf", f"blk.{layer}.attn_v_b.weight")
        assert np.abs(made - values).max() < (2e-2 if act_order else 1e-3)
    assert failures(verify(tmp_path / "m.gguf", tmp_path / "gptq", template=template)) == []

    bridge.convert(tmp_path / "gptq", tmp_path / "f32.gguf", template=template, tensor_types=FLOAT32)
    reference = dequantized(tmp_path / "reference", floats, stored)

    def with_its_keys(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name, v in load_floats(floats).items():
            if "kv_b_proj" in name:
                weights[name] = weights[name].copy()
                weights[name].reshape(HEADS, KEY + VALUE, RANK)[:, :KEY] = v.reshape(HEADS, -1, RANK)[:, :KEY]
        return weights

    expected = predict(rewritten(reference, tmp_path / "mixed", with_its_keys), TOKENS)
    with LlamaCpp(tmp_path / "f32.gguf") as loaded:
        assert mean_kl(expected, loaded.logits(TOKENS)) < 1e-5
    with LlamaCpp(tmp_path / "m.gguf") as loaded:
        assert loaded.generate_greedy(TOKENS[:8], 4)


def test_the_importance_of_all_heads_counts_for_values_that_are_one_tensor(model, tmp_path):
    floats = model("DeepseekV3Config", **LATENT)
    write_gptq(tmp_path / "gptq", floats)
    importance = {"blk.1.attn_v_b.weight": np.random.default_rng(3).random((HEADS, RANK), np.float32)}
    with bridge.open_checkpoint(tmp_path / "gptq") as opened:
        outline = outline_of(opened, template=deepseek(floats, tmp_path / "template.gguf"))
        (tensor,) = [t for t in outline.tensors if t.name in importance]
        np.testing.assert_array_equal(Importance(importance).of(tensor), importance[tensor.name].mean(0))


def test_latent_attention_whose_norm_awq_has_divided_is_refused(model, tmp_path):
    """The template's keys would lack the factors that AWQ took out of the norm before them."""
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

    write_awq(tmp_path / "awq", rewritten(floats, tmp_path / "scaled", scale))
    template = deepseek(floats, tmp_path / "template.gguf")
    with pytest.raises(BridgeError, match=r"AWQ divided .*norm.weight by .* blk.0.attn_k_b.weight, which is copied"):
        bridge.convert(tmp_path / "awq", tmp_path / "m.gguf", template=template)
