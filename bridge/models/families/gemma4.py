"""Gemma 4: local and global layers with heads of two sizes, networks of two widths, experts in some models.

Global layers rotate the first share of a head's pairs. Their values may be their keys (no v_proj). The last layers may
use the keys and values of earlier ones. Small models add an embedding of every token to every layer.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import global_layers
from bridge.models.families.gemma import GELU
from bridge.models.families.windows import local_base, rules_of_both, window_config
from bridge.models.family import EMBEDDINGS, NO_BIASES, Expected, Family, Row, decoder, experts_with_gate_up, gated_mlp

_GLOBAL = "full_attention"


def gemma4_sizes(config: Config, args: Arguments) -> dict[str, int]:
    head, kv_heads = global_layers(config)
    each = config.side("hidden_size_per_layer_input") if config.get("hidden_size_per_layer_input") else 0
    moe = bool(config.get("enable_moe_block"))
    double = 2 if config.get("use_double_wide_mlp") else 1
    return {
        "one": 1, "global_head": head, "global_q": args.heads * head, "global_kv_heads": kv_heads,
        "global_kv": kv_heads * head, "keys_are_values": int(bool(config.get("attention_k_eq_v"))),
        "own_kv": args.layers - (config.integer("num_kv_shared_layers") if config.get("num_kv_shared_layers") else 0),
        "last_inner": double * args.inner, "each_input": each, "inputs": args.layers * each,
        "input_vocab": config.side("vocab_size_per_layer_input", args.vocab) if each else 0,
        "experts": config.side("num_experts") if moe else 0,
        "expert": config.side("moe_intermediate_size") if moe else 0,
    }  # fmt: skip


def layers_with_window(args: Arguments) -> list[bool]:
    return [kind != _GLOBAL for kind in args.kinds]


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    m, windows = args.more, layers_with_window(args)
    keys: dict[str, Any] = {
        "attention.key_length": m["global_head"], "attention.value_length": m["global_head"],
        "attention.key_length_swa": args.head_dim, "attention.value_length_swa": args.head_dim,
        "rope.dimension_count": m["global_head"], "rope.dimension_count_swa": args.head_dim,
        "rope.freq_base_swa": local_base(config),
        "attention.sliding_window": config.integer("sliding_window", 512),
        "attention.sliding_window_pattern": windows,
        "attention.shared_kv_layers": args.layers - m["own_kv"],
        "embedding_length_per_layer_input": m["each_input"],
    }  # fmt: skip
    if m["last_inner"] != args.inner:
        keys["feed_forward_length"] = [args.inner if i < m["own_kv"] else m["last_inner"] for i in range(args.layers)]
    if m["global_kv_heads"] != args.kv_heads:
        keys["attention.head_count_kv"] = [args.kv_heads if window else m["global_kv_heads"] for window in windows]
    if m["experts"]:
        keys |= {
            "expert_count": m["experts"], "expert_used_count": config.integer("top_k_experts"),
            "expert_feed_forward_length": m["expert"],
        }  # fmt: skip
    if config.get("final_logit_softcapping"):
        keys["final_logit_softcapping"] = config.number("final_logit_softcapping")
    return keys


def inputs_config(stored: StoredKeys) -> dict[str, Any]:
    """What Gemma 3n and 4 have alike."""
    return {
        **window_config(stored), "num_kv_shared_layers": stored.get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": stored.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": stored.values["vocab_size"],
        "final_logit_softcapping": stored.get("final_logit_softcapping"),
        **rules_of_both(stored, stored.get("rope.freq_base_swa", 10000.0)),
    }  # fmt: skip


def _config(stored: StoredKeys) -> dict[str, Any]:
    config = inputs_config(stored)
    full = [kind == _GLOBAL for kind in config["layer_types"]]
    counts, widths = stored.get("attention.head_count_kv"), stored.get("feed_forward_length")
    counts = counts if isinstance(counts, list) else len(full) * [counts]
    local, everywhere = (
        next((n for n, f in zip(counts, full, strict=False) if f == kind), counts[0]) for kind in (False, True)
    )
    last = next((i for i, f in enumerate(full) if f and f"blk.{i}.attn_k.weight" in stored.names), None)
    config |= {
        "head_dim": stored.get("attention.key_length_swa"), "global_head_dim": stored.get("attention.key_length"),
        "num_key_value_heads": local, "num_global_key_value_heads": everywhere,
        "attention_k_eq_v": last is not None and f"blk.{last}.attn_v.weight" not in stored.names,
        "use_double_wide_mlp": isinstance(widths, list),
        "intermediate_size": widths[0] if isinstance(widths, list) else widths,
    }  # fmt: skip
    if stored.get("expert_count"):
        config |= {
            "num_experts": stored.get("expert_count"), "top_k_experts": stored.get("expert_used_count"),
            "moe_intermediate_size": stored.get("expert_feed_forward_length"), "enable_moe_block": True,
        }  # fmt: skip
    return config


def _attention(q: str, kv: str, head: str, chosen: Callable[[str], bool]) -> tuple[Row, ...]:
    """The attention of local or of global layers, which have keys and values if they do not use earlier ones."""

    def of_kind(args: Arguments, layer: int) -> bool:
        return chosen(args.kinds[layer])

    def owns(args: Arguments, layer: int) -> bool:
        return of_kind(args, layer) and layer < args.more["own_kv"]

    def shares(args: Arguments, layer: int) -> bool:
        return of_kind(args, layer) and layer >= args.more["own_kv"]

    def values(args: Arguments, layer: int) -> bool:
        return owns(args, layer) and not (args.kinds[layer] == _GLOBAL and args.more["keys_are_values"])

    kv_rows = (
        Row("self_attn.k_proj", f"{kv} hidden", layers=owns), Row("self_attn.v_proj", f"{kv} hidden", layers=values),
        Row("self_attn.k_norm", head, layers=owns),
    )  # fmt: skip
    return (
        Row("self_attn.q_proj", f"{q} hidden", layers=of_kind),
        Row("self_attn.q_norm", head, layers=of_kind),
        *kv_rows,
        *(replace(row, layers=shares, optional=True) for row in kv_rows),
        Row("self_attn.o_proj", f"hidden {q}", layers=of_kind),
    )


def _inputs(args: Arguments) -> bool:
    return args.more["inputs"] > 0


def _experts(args: Arguments) -> bool:
    return args.more["experts"] > 0


def _with(rule: Callable[[Arguments], bool], *rows: Row) -> tuple[Row, ...]:
    return tuple(replace(row, when=rule) for row in rows)


# the embeddings, and another of each token for every layer; how a layer takes it
INPUTS = EMBEDDINGS, *_with(
    _inputs,
    Row("model.embed_tokens_per_layer", "input_vocab inputs"),
    Row("model.per_layer_model_projection", "inputs hidden", floats="F16"),
    Row("model.per_layer_projection_norm", "each_input"),
)  # fmt: skip
INPUT_OF_LAYER = _with(
    _inputs,
    Row("per_layer_input_gate", "each_input hidden"),
    Row("per_layer_projection", "hidden each_input"),
    Row("post_per_layer_input_norm", "hidden"),
)
NORMS = (
    Row("input_layernorm", "hidden"), Row("post_attention_layernorm", "hidden"),
    Row("pre_feedforward_layernorm", "hidden"), Row("post_feedforward_layernorm", "hidden"),
)  # fmt: skip

GEMMA4 = Family(
    titles=("Gemma 4 (also MoE)",), arch="gemma4",
    architectures=("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"), model_type="gemma4_text",
    keys={"tie_word_embeddings": True, "head_dim": 256, "layer_types": None},
    expects=(GELU, NO_BIASES, Expected("use_bidirectional_attention", (None, "vision"))),
    names={"hidden_act": "hidden_activation"},
    sizes=gemma4_sizes,
    metadata=(Computed(_metadata, _config),),
    language_model=("gemma4_text", "Gemma4ForCausalLM"), tokenizer="gemma4", wrapped=True, alternative=".experts.",
    divided=True,
    table=decoder(
        *NORMS,
        *_attention("q", "kv", "head", lambda kind: kind != _GLOBAL),
        *_attention("global_q", "global_kv", "global_head", lambda kind: kind == _GLOBAL),
        *(replace(r, layers=lambda args, layer: layer < args.more["own_kv"]) for r in gated_mlp("mlp", "inner")),
        *(replace(r, layers=lambda args, layer: layer >= args.more["own_kv"]) for r in gated_mlp("mlp", "last_inner")),
        *_with(
            _experts,
            Row("post_feedforward_layernorm_1", "hidden"),
            Row("pre_feedforward_layernorm_2", "hidden"),
            Row("post_feedforward_layernorm_2", "hidden"),
            Row("router.proj", "experts hidden", floats="F32"),
            Row("router.scale", "hidden", exact=True, name="ffn_gate_inp.scale"),
            Row("router.per_expert_scale", "experts", exact=True, name="ffn_down_exps.scale"),
            *experts_with_gate_up("experts"),
        ),
        *INPUT_OF_LAYER,
        Row("layer_scalar", "one", exact=True),
        first=INPUTS,
    ),
)  # fmt: skip

# its images and sounds are embedded without towers
GEMMA4_UNIFIED = replace(
    GEMMA4,
    titles=("Gemma 4 12B",), architectures=("Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedForCausalLM"),
    model_type="gemma4_unified_text",
)  # fmt: skip
