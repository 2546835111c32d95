"""Small checkpoints of Kimi K3 with random weights, which transformers does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.family_models import copy_tokenizer
from tests.support.make_families import GOLDENS

PREFIX = "language_model."
CONFIG: dict[str, Any] = json.loads((GOLDENS / "kimi-k3.json").read_text())["config"]


def shapes(c: dict[str, Any], gated: bool = True) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint whose text_config is c; `gated`: latent attention's results are."""
    hidden, experts = c["hidden_size"], c["num_experts"]
    latent, expert = c.get("routed_expert_hidden_size"), c["moe_intermediate_size"]
    found: dict[str, tuple[int, ...]] = {"lm_head.weight": (c["vocab_size"], hidden)}
    model = {"embed_tokens.weight": (c["vocab_size"], hidden), "norm.weight": (hidden,)}
    if c["attn_res_block_size"]:
        model |= _score("output_attn_res", hidden)
    for layer in range(c["num_hidden_layers"]):
        full = layer + 1 in c["linear_attn_config"]["full_attn_layers"]
        parts = {f"self_attn.{name}": shape for name, shape in (_latent(c, gated) if full else _delta(c)).items()}
        parts |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        if c["attn_res_block_size"]:
            parts |= _score("self_attention_res", hidden) | _score("mlp_res", hidden)
        if layer < c["first_k_dense_replace"]:
            parts |= _network("mlp", hidden, c["intermediate_size"])
        else:
            moe = "block_sparse_moe"
            parts |= {f"{moe}.gate.weight": (experts, hidden), f"{moe}.gate.e_score_correction_bias": (experts,)}
            for number in range(experts):
                parts |= _network(f"{moe}.experts.{number}", latent or hidden, expert, ("w1", "w3", "w2"))
            parts |= _network(f"{moe}.shared_experts", hidden, expert * c["num_shared_experts"])
            if latent:
                routed = f"{moe}.routed_expert_"
                parts |= {f"{routed}down_proj.weight": (latent, hidden), f"{routed}up_proj.weight": (hidden, latent)}
                parts[f"{routed}norm.weight"] = (latent,)
        model |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    return {f"{PREFIX}{name}": s for name, s in (found | {f"model.{name}": s for name, s in model.items()}).items()}


def _score(module: str, hidden: int) -> dict[str, tuple[int, ...]]:
    return {f"{module}_norm.weight": (hidden,), f"{module}_proj.weight": (1, hidden)}


def _network(
    module: str, read: int, inner: int, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, tuple[int, ...]]:
    sizes = (inner, read), (inner, read), (read, inner)
    return {f"{module}.{name}.weight": size for name, size in zip(names, sizes, strict=True)}


def _delta(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, head = c["hidden_size"], c["num_attention_heads"], c["linear_attn_config"]["head_dim"]
    values, kernel = heads * head, c["linear_attn_config"]["short_conv_kernel_size"]
    return {
        **{f"{part}_proj.weight": (values, hidden) for part in "qkvg"},
        **{f"{part}_conv1d.weight": (values, 1, kernel) for part in "qkv"},
        "f_a_proj.weight": (head, hidden), "f_b_proj.weight": (values, head), "b_proj.weight": (heads, hidden),
        "A_log": (heads,), "dt_bias": (values,), "o_norm.weight": (head,), "o_proj.weight": (hidden, values),
    }  # fmt: skip


def _latent(c: dict[str, Any], gated: bool) -> dict[str, tuple[int, ...]]:
    hidden, heads, value, rank = c["hidden_size"], c["num_attention_heads"], c["v_head_dim"], c["kv_lora_rank"]
    plain, rotated, queries = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["q_lora_rank"]
    made = {
        "kv_a_proj_with_mqa.weight": (rank + rotated, hidden), "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (plain + value), rank), "o_proj.weight": (hidden, heads * value),
    }  # fmt: skip
    if gated:
        made["g_proj.weight"] = (heads * value, hidden)
    if not queries:
        return {**made, "q_proj.weight": (heads * (plain + rotated), hidden)}
    made |= {"q_a_proj.weight": (queries, hidden), "q_a_layernorm.weight": (queries,)}
    return {**made, "q_b_proj.weight": (heads * (plain + rotated), queries)}


def write_kimi_k3(folder: Path, gated: bool = True, **text: Any) -> dict[str, np.ndarray]:
    """Write a checkpoint of CONFIG with random weights, and return these; `text`: keys of its text_config."""
    c = CONFIG["text_config"] | text
    rng, weights = np.random.default_rng(8), {}
    for name, shape in sorted(shapes(c, gated).items()):
        values = rng.standard_normal(shape)
        if values.ndim == 1:
            values = 0.3 * values + name.endswith("norm.weight")
        else:  # a router without near-ties
            values *= (4 if name.endswith("gate.weight") else 1) / values.shape[-1] ** 0.5
        weights[name] = values.astype(np.float32)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"text_config": c}))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    copy_tokenizer(folder)
    return weights
