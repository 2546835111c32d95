"""Models that transformers lacks, saved with their repositories' names: another family of the same arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Weights = dict[str, np.ndarray]
_QKV = [f"self_attn.{part}_proj.weight" for part in "qkv"]


def _fused(weights: Weights, layers: int) -> Weights:
    """Ling's attention and embeddings."""
    renamed = {
        name.replace("embed_tokens", "word_embeddings")
        .replace("self_attn.o_proj", "attention.dense")
        .replace("self_attn.q_norm", "attention.query_layernorm")
        .replace("self_attn.k_norm", "attention.key_layernorm"): values
        for name, values in weights.items()
        if not name.endswith(tuple(_QKV))
    }
    for layer in range(layers):
        before = f"model.layers.{layer}"
        joined = np.concatenate([weights[f"{before}.{part}"] for part in _QKV])
        renamed[f"{before}.attention.query_key_value.weight"] = joined
    return renamed


def _ling2(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
    """Of GLM-4.5 with normalized heads."""
    rules = config.pop("rope_parameters")
    del config["num_nextn_predict_layers"]
    config |= {
        "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2", "score_function": "sigmoid",
        "num_experts": config.pop("n_routed_experts"), "num_shared_experts": config.pop("n_shared_experts"),
        "rope_theta": rules["rope_theta"], "partial_rotary_factor": rules["partial_rotary_factor"],
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"], "rope_scaling": None,
    }  # fmt: skip
    named = {name.replace("e_score_correction_bias", "expert_bias"): values for name, values in weights.items()}
    return config, _fused(named, config["num_hidden_layers"])


def _ling(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
    """Of Granite's mixture of experts without its factors."""
    inner, rules = config["intermediate_size"], config.pop("rope_parameters")
    config |= {
        "architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "norm_head": True,
        "num_experts": config.pop("num_local_experts"),
        "num_shared_experts": config["shared_intermediate_size"] // inner,
        "moe_intermediate_size": inner, "norm_topk_prob": True, "rope_theta": rules["rope_theta"],
        "first_k_dense_replace": 0,
    }  # fmt: skip
    named: Weights = {}
    for name, values in _fused(weights, config["num_hidden_layers"]).items():
        layer = name.partition(".block_sparse_moe.")[0].partition(".shared_mlp.")[0]
        if name.endswith("moe.input_linear.weight"):
            for expert, both in enumerate(values):
                gate, up = np.split(both, 2)
                named |= {
                    f"{layer}.mlp.experts.{expert}.{part}_proj.weight": v for part, v in (("gate", gate), ("up", up))
                }
        elif name.endswith("moe.output_linear.weight"):
            named |= {f"{layer}.mlp.experts.{expert}.down_proj.weight": v for expert, v in enumerate(values)}
        elif name.endswith("shared_mlp.input_linear.weight"):
            gate, up = np.split(values, 2)
            named |= {f"{layer}.mlp.shared_experts.{part}_proj.weight": v for part, v in (("gate", gate), ("up", up))}
        else:
            named[
                name.replace("shared_mlp.output_linear", "mlp.shared_experts.down_proj").replace(
                    "block_sparse_moe.router.layer", "mlp.gate"
                )
            ] = values
    return config, named


def _minicpm(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
    """Of Granite, whose scores are scaled by heads."""
    layers, rules = config["num_hidden_layers"], config.pop("rope_parameters")
    del config["attention_multiplier"]
    config |= {
        "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm",
        "scale_emb": config.pop("embedding_multiplier"),
        "scale_depth": config.pop("residual_multiplier") * layers**0.5,
        "dim_model_base": int(config["hidden_size"] / config.pop("logits_scaling")),
        "rope_theta": rules.pop("rope_theta"), "rope_scaling": None if rules["rope_type"] == "default" else rules,
    }  # fmt: skip
    return config, weights


def _plamo3(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
    """Of Gemma 3, whose embeddings are scaled, with a head of its own."""
    rules, kinds = config.pop("rope_parameters"), config.pop("layer_types")
    config |= {
        "architectures": ["Plamo3ForCausalLM"], "model_type": "plamo3", "window_size": config.pop("sliding_window"),
        "sliding_window_pattern": 1 + kinds.index("full_attention"), "hidden_act": config.pop("hidden_activation"),
        "rope_theta": rules["full_attention"]["rope_theta"],
        "rope_local_theta": rules["sliding_attention"]["rope_theta"],
    }  # fmt: skip
    names = {
        "input_layernorm": "pre_mixer_norm", "post_attention_layernorm": "post_mixer_norm",
        "pre_feedforward_layernorm": "pre_mlp_norm", "post_feedforward_layernorm": "post_mlp_norm",
        "model.layers": "model.layers.layers", "self_attn": "mixer",
    }  # fmt: skip
    renamed: Weights = {}
    for name, values in weights.items():
        for there, here in names.items():
            name = name.replace(there, here)
        renamed[name] = values
        if name.endswith("post_mixer_norm.weight"):
            renamed[name] = values + np.float32(1 - 1 / 5)
        elif name.endswith("post_mlp_norm.weight"):
            renamed[name] = values + np.float32(1 - 1 / 5**1.5)
    renamed["model.embed_tokens.weight"] = renamed["model.embed_tokens.weight"] * config["hidden_size"] ** 0.5
    for layer in range(config["num_hidden_layers"]):
        before = f"model.layers.layers.{layer}"
        qkv = [renamed.pop(f"{before}.mixer.{part}_proj.weight") for part in "qkv"]
        gate_up = [renamed.pop(f"{before}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        renamed[f"{before}.mixer.qkv_proj.weight"] = np.concatenate(qkv)
        renamed[f"{before}.mlp.gate_up_proj.weight"] = np.concatenate(gate_up)
    return config, renamed


REMOTE: dict[str, Callable[[dict[str, Any], Weights], tuple[dict[str, Any], Weights]]] = {
    "ling": _ling,
    "ling2": _ling2,
    "minicpm": _minicpm,
    "minicpm4": _minicpm,
    "plamo3": _plamo3,
}


def save_remote(name: str, model: Any, folder: Path) -> None:
    """The checkpoint of a model in its repository's form."""
    import torch

    if name == "ling":  # whose head is scaled when it is used
        with torch.no_grad():
            model.lm_head.weight /= model.lm_head.weight.norm(dim=0)
    type(model).save_pretrained(model, folder, save_original_format=True)
    config = json.loads((folder / "config.json").read_text())
    config, weights = REMOTE[name](config, load_file(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {key: np.ascontiguousarray(values) for key, values in weights.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
