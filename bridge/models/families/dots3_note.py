"""dots3-note: attention on latent vectors of two sizes, one for layers with a window; each head has a gate.

Layers without a window attend to the tokens that an indexer chooses, as in DeepSeek V3.2. The rotated part of a key is
normalized first. Normalized latent vectors are multiplied by the root of their share of the hidden size, which
llama.cpp's converter makes part of the norms' weights, and so does this.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_number, rope_rules
from bridge.models.families.deepseek import head_keys, head_values
from bridge.models.families.mixtures import LAYER_KINDS, has_experts, router_bias
from bridge.models.family import (
    EXPERTS,
    NO_BIASES,
    SILU,
    Expected,
    Family,
    LayerRule,
    Row,
    decoder,
    gated_mlp,
    in_layers,
    other_layers,
    require_layer,
    required,
)
from bridge.models.outline import Part
from bridge.models.prediction import prediction, predicts

_LOCAL = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
_WINDOW = "sliding_attention"


def _local(config: Config, args: Arguments, key: str) -> int:
    """A size of layers with a window: swa_KEY, as it is published, or of per_layer_config, as transformers has it."""
    layers = config.get("per_layer_config") or {}
    first = next((layer for layer, kind in enumerate(args.kinds) if kind == _WINDOW), None)
    each = layers.get(str(first), {}) if isinstance(layers, dict) else {}
    return config.integer(f"swa_{key}", each.get(key, config.integer(key)))


def _sizes(config: Config, args: Arguments) -> Mapping[str, int]:
    sizes: dict[str, int] = {}
    for before, size in (("", config.integer), ("local_", lambda key: _local(config, args, key))):
        heads, nope, rope, value, lora = (
            size(key)
            for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        )
        for name, count in (
            ("heads", heads), ("nope", nope), ("rope", rope), ("v_head", value), ("lora", lora),
            ("q", heads * (nope + rope)), ("attended", heads * value),
        ):  # fmt: skip
            sizes[before + name] = config.within_sides(f"{before}{name}", count)
    for key, name in (("qk_rope_head_dim", "rope"), ("q_lora_rank", "q_lora")):
        if _local(config, args, key) != config.integer(key):
            raise BridgeError(f"{config.path}: {key} differs in layers with a window; llama.cpp has one for all layers")
        sizes[name] = config.side(key)
    sizes["shared"] = args.expert_inner * config.integer("n_shared_experts", 1)
    sizes["index_q"] = config.integer("index_n_heads") * config.integer("index_head_dim")
    sizes["rescaled"] = int(bool(config.get("apply_mla_qkv_lora_rescale", True)))
    return sizes


def _windowed(args: Arguments, layer: int) -> bool:
    return predicts(args, layer) or args.kinds[layer] == _WINDOW


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    m, windows = args.sizes, [_windowed(args, layer) for layer in range(args.layers)]
    if not {*args.kinds} <= {_WINDOW, "full_attention", "indexed_attention"} or config.get("use_dsa") is False:
        raise BridgeError(f"{config.path}: layers without a window must have an indexer (use_dsa) for llama.cpp")
    require_layer(config, windows, "has a window")
    require_layer(config, (not window for window in windows), "attends to everything")
    local = rope_rules(config).get(_WINDOW) or {}
    return {
        "attention.head_count": [m["local_heads" if w else "heads"] for w in windows + args.predicting * [True]],
        "attention.head_count_kv": 1, "attention.key_length": m["lora"] + m["rope"],
        "attention.value_length": m["lora"], "attention.key_length_mla": m["nope"] + m["rope"],
        "attention.sliding_window": config.integer("sliding_window", config.get("sliding_window_size", 512)),
        "attention.sliding_window_pattern": windows, "attention.kv_lora_rank_swa": m["local_lora"],
        "attention.key_length_swa": m["local_lora"] + m["rope"], "attention.value_length_swa": m["local_lora"],
        "attention.key_length_mla_swa": m["local_nope"] + m["rope"],
        "attention.value_length_mla_swa": m["local_v_head"],
        "rope.freq_base_swa": rope_number(config, local, "rope_theta", config.get("swa_rope_theta", 50000.0)),
        "attention.indexer.types": [not window for window in windows],
        "leading_dense_block_count": args.leading,
    }  # fmt: skip


def _config(stored: StoredKeys) -> dict[str, Any]:
    windows, heads = stored.get("attention.sliding_window_pattern"), stored.get("attention.head_count")
    rope = stored.get("rope.dimension_count")
    full = next((count for count, window in zip(heads, windows, strict=False) if not window), heads[0])
    local = next((count for count, window in zip(heads, windows, strict=False) if window), heads[-1])
    nope = stored.get("attention.key_length_mla_swa") - rope
    each = {
        "head_dim": nope + rope, "kv_lora_rank": stored.get("attention.kv_lora_rank_swa"),
        "num_attention_heads": local, "num_key_value_heads": local, "qk_nope_head_dim": nope,
        "v_head_dim": stored.get("attention.value_length_mla_swa"),
    }  # fmt: skip
    plain = stored.get("attention.key_length_mla") - rope
    bases = {"indexed_attention": stored.get("rope.freq_base"), _WINDOW: stored.get("rope.freq_base_swa")}
    return {
        "num_attention_heads": full, "num_key_value_heads": full, "qk_nope_head_dim": plain,
        "head_dim": plain + rope, "sliding_window": stored.get("attention.sliding_window"),
        "layer_types": [_WINDOW if window else "full_attention" for window in windows], "use_dsa": True,
        "per_layer_config": {str(layer): each for layer, window in enumerate(windows) if window},
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        "shared_experts_intermediate_size": stored.get("expert_feed_forward_length"),
    }  # fmt: skip


def _latent_norm(source: str, size: str) -> Row:
    """The norm of a latent vector, times the root of hidden / size where the model multiplies what is normalized."""

    def parts(args: Arguments, name: str) -> tuple[Part, ...]:
        count = args.sizes[size]
        factor = np.full(count, (args.hidden / count) ** 0.5, np.float32) if args.more["rescaled"] else None
        return (Part(name, (count,), factor=factor),)

    return Row(source, size, parts=parts)


def _attention(before: str, rule: LayerRule) -> tuple[Row, ...]:
    """The rows of layers with a window ("local_"), or without ("")."""
    kv_b = "self_attn.kv_b_proj"
    return in_layers(
        rule,
        Row("self_attn.q_b_proj", f"{before}q q_lora"),
        Row("self_attn.kv_a_proj_with_mqa", f"{before}lora+rope hidden"),
        _latent_norm("self_attn.kv_a_layernorm", f"{before}lora"),
        Row(
            kv_b,
            f"{before}heads {before}lora {before}nope",
            parts=head_keys(before),
            name="attn_k_b.weight",
            floats="F16",
        ),
        Row(kv_b, f"{before}heads {before}v_head {before}lora", parts=head_values(before), name="attn_v_b.weight"),
        Row("self_attn.g_proj", f"{before}heads hidden", name="attn_gate.weight"),
        Row("self_attn.o_proj", f"hidden {before}attended"),
    )


_FULL = other_layers(_windowed)

DOTS3_NOTE = Family(
    titles=("dots3-note",), arch="dots3note", named_as="glm-dsa",
    architectures=("Dots3NoteForConditionalGeneration", "Dots3NoteForCausalLM", "Dots3NoteTextForCausalLM"),
    model_type="dots3_note_text",
    keys={
        "num_experts": None, "moe_intermediate_size": None, "first_k_dense_replace": 1, "layer_types": None,
        "rms_norm_eps": 1e-5, "rope_theta": 8e7,
    },
    names={"num_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
    expects=(
        SILU, NO_BIASES, Expected("n_group", (1,)), Expected("topk_group", (1,)),
        Expected("scoring_func", ("sigmoid",)), Expected("topk_method", ("noaux_tc",)),
        Expected("attention_gate_type", ("headwise",)), Expected("swa_attention_gate_type", ("headwise",)),
        Expected("k_rope_only_layernorm", (True,)), Expected("normalization", ("RMSNorm",)),
        Expected("use_dynamic_rsf", (False,)),
    ),
    sizes=_sizes,
    metadata=(
        Computed(_metadata, _config), Key("attention.value_length_mla", "v_head_dim", size="v_head"),
        Key("attention.kv_lora_rank", "kv_lora_rank", size="lora"),
        Key("attention.q_lora_rank", "q_lora_rank", size="q_lora"),
        Key("rope.dimension_count", "qk_rope_head_dim", size="rope"),
        Key("expert_shared_count", "n_shared_experts", 1),
        Key("expert_weights_scale", "routed_scaling_factor", 1.0), Key("expert_weights_norm", "norm_topk_prob", True),
        Constant("expert_gating_func", 2),  # sigmoid
        Constant("expert_group_count", 1), Constant("expert_group_used_count", 1),
        Key("attention.indexer.head_count", "index_n_heads", defines="index_heads"),
        Key("attention.indexer.key_length", "index_head_dim", defines="index_head"),
        Key("attention.indexer.top_k", "index_topk", 2048), LAYER_KINDS,
    ),
    language_model=("dots3_note_text", "Dots3NoteForCausalLM"),
    wrapped=True, predicts="carried", mtp={"embed_tokens": "embed_tokens"},
    table=decoder(
        Row("input_layernorm", "hidden"),
        Row("self_attn.q_a_proj", "q_lora hidden"),
        _latent_norm("self_attn.q_a_layernorm", "q_lora"),
        Row("self_attn.k_rope_only_layernorm", "rope", name="attn_k_norm.weight"),
        *_attention("", _FULL),
        *_attention("local_", _windowed),
        *in_layers(
            _FULL,
            Row("self_attn.indexer.k_norm", "index_head", bias=required),
            Row("self_attn.indexer.weights_proj", "index_heads hidden"),
            Row("self_attn.indexer.wk", "index_head hidden"),
            Row("self_attn.indexer.wq_b", "index_q q_lora"),
        ),
        Row("post_attention_layernorm", "hidden"),
        *in_layers(other_layers(has_experts), *gated_mlp("mlp", "inner")),
        *in_layers(
            has_experts, *EXPERTS, router_bias("mlp.gate.e_score_correction_bias"),
            *gated_mlp("mlp.shared_experts", "shared"),
        ),
        *prediction(),
    ),
)  # fmt: skip
