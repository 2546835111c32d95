"""A Llama of random floats, written without torch: to be damaged, or for options that depend on shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.family_models import copy_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def llama_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """float16 by transformers' names."""
    rng = np.random.default_rng(0)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        own = {
            "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float16) for name, shape in shapes.items()}


def write_llama(folder: Path, weights: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    """A checkpoint's folder: `CONFIG` with changes, these weights or `llama_weights` of it, and the tokenizer."""
    folder.mkdir()
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps({key: v for key, v in config.items() if v is not None}))
    save_file(llama_weights(config) if weights is None else weights, folder / "model.safetensors", {"format": "pt"})
    return copy_tokenizer(folder)
