"""Small drafters: models that guess tokens for another one. A config.json, and the names and shapes of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

Shapes = dict[str, tuple[int, ...]]


class DrafterModel(NamedTuple):
    """config.json and tensors of a drafter, and config.json of the model that it guesses for (None: it needs none)."""

    config: dict[str, Any]
    shapes: Shapes
    target: dict[str, Any] | None = None


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_LLAMA = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu",
}  # fmt: skip
TARGET = {"architectures": ["LlamaForCausalLM"], **_LLAMA, "num_hidden_layers": 8, "tie_word_embeddings": False}


def layer_shapes(layer: str, hidden: int = 32, read: int = 64, q: int = 32, kv: int = 16, inner: int = 64) -> Shapes:
    """A layer whose attention reads `read` values, under the name of the layer."""
    matrices = {
        "self_attn.q_proj": (q, read), "self_attn.k_proj": (kv, read), "self_attn.v_proj": (kv, read),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
    return {f"{layer}.{name}.weight": shape for name, shape in (matrices | norms).items()}


def _eagle(layer: str, target_hidden: int = 32, draft: int = 512, vocab: int = 2048) -> Shapes:
    return {
        "fc.weight": (32, 3 * target_hidden), "norm.weight": (32,), f"{layer}.hidden_norm.weight": (32,),
        **layer_shapes(layer), "lm_head.weight": (draft, 32), "d2t": (draft,), "t2d": (vocab,),
    }  # fmt: skip


def _gemma4(name: str, backbone: int, local: int) -> tuple[dict[str, Any], Shapes]:
    """An assistant of so many local layers and a global one; the second kind as files before transformers 5 name it."""
    kind = "gemma4" if name == "Gemma4" else "gemma4_unified"
    layers = local + 1
    text = {
        "model_type": f"{kind}_text", "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "global_head_dim": 32, "layer_types": [*local * ["sliding_attention"], "full_attention"], "sliding_window": 32,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": layers,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "final_logit_softcapping": None, "tie_word_embeddings": True, "use_bidirectional_attention": None,
        "attention_bias": False,
    }  # fmt: skip
    if kind == "gemma4_unified":
        text |= {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "moe_intermediate_size": None}
    config = {
        "architectures": [f"{name}AssistantForCausalLM"], "model_type": f"{kind}_assistant", "text_config": text,
        "backbone_hidden_size": backbone, "use_ordered_embeddings": True, "num_centroids": 64,
        "centroid_intermediate_top_k": 4, "tie_word_embeddings": True,
    }  # fmt: skip
    shapes: Shapes = {"model.embed_tokens.weight": (2048, 32), "model.norm.weight": (32,)}
    for number in range(layers):
        layer, size = f"model.layers.{number}", 16 if number < local else 32
        own = layer_shapes(layer, read=32, q=4 * size)
        own |= {f"{layer}.{place}_feedforward_layernorm.weight": (32,) for place in ("pre", "post")}
        own |= {f"{layer}.self_attn.q_norm.weight": (size,), f"{layer}.layer_scalar": (1,)}
        shapes |= {name: shape for name, shape in own.items() if not name.endswith(("k_proj.weight", "v_proj.weight"))}
    shapes |= {"pre_projection.weight": (32, 2 * backbone), "post_projection.weight": (backbone, 32)}
    return config, shapes | {"masked_embedding.centroids.weight": (64, 32), "masked_embedding.token_ordering": (2048,)}


def _dflash(states: int, layers: int) -> Shapes:
    shapes: Shapes = {"fc.weight": (32, 32 * states), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    for i in range(layers):
        shapes |= layer_shapes(f"layers.{i}", read=32)
        shapes |= {f"layers.{i}.self_attn.{name}_norm.weight": (8,) for name in "qk"}
    return shapes


_DFLASH = {
    "architectures": ["DFlashDraftModel"], **_LLAMA, "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 8,
    "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
_SPECULATOR = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 512,
    "norm_before_residual": True, "target_hidden_size": None,
    "transformer_layer_config": {
        **_LLAMA, "num_hidden_layers": 1, "head_dim": 8, "attention_bias": False, "rope_scaling": LLAMA3,
    },
}  # fmt: skip

DRAFTERS = {
    "eagle3": DrafterModel(
        {"architectures": ["LlamaForCausalLMEagle3"], **_LLAMA, "num_hidden_layers": 1, "draft_vocab_size": 512},
        _eagle("midlayer"), TARGET,
    ),
    "eagle3-speculator": DrafterModel(
        _SPECULATOR, _eagle("layers.0", 64) | {"embed_tokens.weight": (2048, 32)},
        {**TARGET, "hidden_size": 64, "num_attention_heads": 8},
    ),
    # of all tokens, without a table, with a norm of the states, and other layers
    "eagle3-whole": DrafterModel(
        {
            "architectures": ["LlamaForCausalLM"], **_LLAMA, "num_hidden_layers": 1, "draft_vocab_size": 2048,
            "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 8],
        },
        {
            name: shape for name, shape in _eagle("midlayer", draft=2048).items() if name not in ("d2t", "t2d")
        } | {"input_norm.weight": (96,)},
        {"architectures": ["LlavaForConditionalGeneration"], "text_config": TARGET},
    ),
    "dflash": DrafterModel(
        {**_DFLASH, "block_size": 4, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 4, 6]}},
        _dflash(3, 2), TARGET,
    ),
    # with windows, embeddings and a head of its own, for a model whose tokens have several positions
    "dflash-windows": DrafterModel(
        {
            **_DFLASH, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            "dflash_config": {
                "mask_token_id": 5, "target_layer_ids": [0, 3], "block_size": 8, "causal": True,
                "final_logit_softcapping": 20.0, "input_embedding_scale": 2.0,
            },
        },
        _dflash(2, 3) | {"embed_tokens.weight": (2048, 32), "lm_head.weight": (2048, 32)},
        {**TARGET, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    ),
    "gemma4-assistant": DrafterModel(*_gemma4("Gemma4", 64, 3)),
    "gemma4-unified-assistant": DrafterModel(*_gemma4("Gemma4Unified", 64, 1)),
}  # fmt: skip


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with this config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
