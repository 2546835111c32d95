"""MiMo V2: windows in most layers, which have twice the key-value heads and sinks; values narrower than keys.

All layers but the first have experts; a bias is added to the router's sigmoid to choose them. What attention makes is
multiplied by attention_value_scale. The three layers that predict further tokens have a window and no experts.
MiMo V2.5 has q, k and v as rows of one matrix.
"""

from collections.abc import Mapping
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_rules
from bridge.models.families.mixtures import has_experts, router_bias
from bridge.models.families.windows import local_base, rules_of_both, window_config
from bridge.models.family import (
    EXPERTS,
    NO_BIASES,
    SILU,
    Expected,
    Family,
    Row,
    decoder,
    gated_mlp,
    in_layers,
    other_layers,
    require_layer,
)
from bridge.models.prediction import prediction, predicts


def _sizes(config: Config, args: Arguments) -> Mapping[str, int]:
    values = config.side("v_head_dim", 128)
    local = config.side("swa_num_key_value_heads", 2 * args.kv_heads)
    for key, usual in (
        ("swa_head_dim", args.head_dim),
        ("swa_num_attention_heads", args.heads),
        ("swa_v_head_dim", values),
    ):
        config.expect(key, (usual,), usual, "llama.cpp has one size of heads for all layers here")
    if args.heads % local:
        raise BridgeError(f"{config.path}: {args.heads} heads cannot share {local} key-value heads")
    return {
        "values": values, "kv_values": args.kv_heads * values, "heads_values": args.heads * values,
        "local_kv_heads": local, "local_kv": local * args.head_dim, "local_values": local * values,
    }  # fmt: skip


def _windowed(args: Arguments, layer: int) -> bool:
    return predicts(args, layer) or args.kinds[layer] == "sliding_attention"


def _check_rotation(config: Config, args: Arguments) -> None:
    """BridgeError where layers with a window rotate otherwise than llama.cpp has it."""
    local = rope_rules(config).get("sliding_attention") or {}
    share = local.get("partial_rotary_factor")
    if share is not None and int(args.head_dim * share) != args.rotated:
        raise BridgeError(
            f"{config.path}: layers with a window rotate {int(args.head_dim * share)} elements of a head, the others "
            f"{args.rotated}; llama.cpp has one number for all here"
        )
    if args.rope.attention_factor is not None:
        raise BridgeError(
            f"{config.path}: rope with an attention factor of its own; llama.cpp would scale layers with a window as "
            "well"
        )


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    windows = [_windowed(args, layer) for layer in range(args.layers + args.predicting)]
    require_layer(config, windows, "has a window")
    _check_rotation(config, args)
    scale = config.get("attention_value_scale")
    return {
        "attention.head_count_kv": [args.more["local_kv_heads"] if window else args.kv_heads for window in windows],
        "attention.value_length": args.more["values"],
        "attention.layer_norm_rms_epsilon": config.number("layernorm_epsilon", args.norm_eps),
        "attention.sliding_window": config.integer("sliding_window", config.get("sliding_window_size")),
        "attention.sliding_window_pattern": windows,
        "rope.freq_base_swa": local_base(config, config.get("swa_rope_theta", 10000.0)),
        "attention.value_scale": None if scale is None else config.number("attention_value_scale"),
    }  # fmt: skip


def _config(stored: StoredKeys) -> dict[str, Any]:
    config = window_config(stored)
    kinds, counts = config["layer_types"], stored.get("attention.head_count_kv")
    of_kind = {kind: count for kind, count in zip(kinds, counts, strict=False)}
    rules = rules_of_both(stored, stored.get("rope.freq_base_swa", 10000.0))
    for rule in rules["rope_parameters"].values():
        rule["partial_rotary_factor"] = stored.get("rope.dimension_count") / stored.values["head_dim"]
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in stored.names for layer in range(len(kinds))]
    return {
        **config, **rules, "num_key_value_heads": of_kind.get("full_attention") or of_kind["sliding_attention"] // 2,
        "v_head_dim": stored.get("attention.value_length"),
        "attention_value_scale": stored.get("attention.value_scale", 1.0),
        "mlp_layer_types": ["sparse" if one else "dense" for one in sparse],
    }  # fmt: skip


def _attention(kv: str, values: str) -> tuple[Row, ...]:
    """The matrices for queries, keys and values, together in one or apart."""
    together, apart = ("self_attn.qkv_proj.weight",), ("self_attn.q_proj.weight",)
    return (
        Row(
            "self_attn.qkv_proj",
            f"q+{kv}+{values} hidden",
            unless=apart,
            optional=True,
            name="attn_qkv.weight",
        ),
        Row("self_attn.q_proj", "q hidden", unless=together),
        Row("self_attn.k_proj", f"{kv} hidden", unless=together),
        Row("self_attn.v_proj", f"{values} hidden", unless=together),
    )


MIMO2 = Family(
    titles=("MiMo V2",), arch="mimo2", architectures=("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    model_type="mimo_v2_flash",
    keys={
        "head_dim": 192, "rms_norm_eps": 1e-5, "rope_theta": 5e6, "num_experts": None, "moe_intermediate_size": 2048,
        "partial_rotary_factor": 0.334, "first_k_dense_replace": 0, "layer_types": None,
    },
    names={"num_experts": "n_routed_experts"},
    expects=(
        SILU, NO_BIASES, Expected("scoring_func", ("sigmoid",)), Expected("topk_method", ("noaux_tc",)),
        Expected("n_group", (1,)), Expected("topk_group", (1,)), Expected("norm_topk_prob", (True,)),
        Expected("routed_scaling_factor", (1.0,)), Expected("tie_word_embeddings", (False,)),
        Expected("n_shared_experts", (None, 0)),
    ),
    sizes=_sizes,
    metadata=(
        Computed(_metadata, _config), Constant("expert_gating_func", 2), Constant("expert_group_count", 1),
        Constant("expert_group_used_count", 1),
    ),
    predicts="carried",
    table=decoder(
        Row("input_layernorm", "hidden"),
        *in_layers(_windowed, *_attention("local_kv", "local_values")),
        *in_layers(other_layers(_windowed), *_attention("kv", "kv_values")),
        Row(
            "self_attn.attention_sink_bias", "heads", ("self_attn.sinks",), exact=True, optional=True,
            name="attn_sinks.weight",
        ),
        Row("self_attn.o_proj", "hidden heads_values"),
        Row("post_attention_layernorm", "hidden", ("pre_mlp_layernorm",)),
        *in_layers(other_layers(has_experts), *gated_mlp("mlp", "inner")),
        *in_layers(has_experts, *EXPERTS, router_bias("mlp.gate.e_score_correction_bias")),
        *prediction(),
        *in_layers(predicts, Row("final_layernorm", "hidden", name="layer_output_norm.weight")),
    ),
)  # fmt: skip
