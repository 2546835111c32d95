"""MiMo V2 Flash: a mixture of experts; most layers have a window, with sinks and other key-value heads than the rest.

Values have another size than keys, and are multiplied by a number. A bias is added to the router's sigmoid to choose
experts, but not to weight them. Layers that predict further tokens have a window and no experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_number, rope_rules
from bridge.models.families.mixtures import LAYER_KINDS, has_experts, router_bias
from bridge.models.families.windows import local_base, rules_of_both, window_layers
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
)
from bridge.models.prediction import prediction, predicts


def _windows(config: Config, args: Arguments) -> list[bool]:
    """Whether each layer has a window: by layer_types, or as it is published; those that predict always have."""
    pattern = config.get("hybrid_layer_pattern")
    if config.get("layer_types") is None and isinstance(pattern, list):
        if len(pattern) != args.layers or {*pattern} - {0, 1}:
            raise BridgeError(
                f"{config.path}: hybrid_layer_pattern is {pattern!r:.80}; must be 0 or 1, for each of {args.layers} "
                "layers"
            )
        return [*map(bool, pattern), *args.predicting * [True]]
    return [*window_layers(config, args.layers, 1), *args.predicting * [True]]


def _kv_heads(config: Config, args: Arguments) -> list[int]:
    local = config.integer("swa_num_key_value_heads", 2 * args.kv_heads)
    if args.heads % local:
        raise BridgeError(f"{config.path}: {args.heads} heads cannot share {local} key-value heads")
    return [local if window else args.kv_heads for window in _windows(config, args)]


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    for key, usual in (("head_dim", args.head_dim), ("num_attention_heads", args.heads)):
        if config.get(f"swa_{key}", usual) != usual:
            raise BridgeError(
                f"{config.path}: swa_{key} is {config.get(f'swa_{key}')!r}; llama.cpp has {usual}, as in other layers"
            )
    value = config.side("v_head_dim", args.head_dim)
    if config.get("swa_v_head_dim", value) != value:
        raise BridgeError(f"{config.path}: swa_v_head_dim is not {value}; llama.cpp has values of one size")
    return {"v_head": value, "attended": args.heads * value}


def _layer_sizes(config: Config, args: Arguments) -> Mapping[str, Sequence[int]]:
    heads = _kv_heads(config, args)
    return {"k": [count * args.head_dim for count in heads], "v": [count * args.more["v_head"] for count in heads]}


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    rules, eps = rope_rules(config), config.get("layernorm_epsilon")
    shares = {
        (rules.get(kind) or rules).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        for kind in ("full_attention", "sliding_attention")
    }
    if len(shares) > 1:
        raise BridgeError(f"{config.path}: partial_rotary_factor is one of {sorted(shares)}; llama.cpp has one for all")
    scale = config.get("attention_value_scale")
    local = rope_number(config, config.values, "swa_rope_theta", local_base(config))
    return {
        "attention.head_count_kv": _kv_heads(config, args), "attention.value_length": args.more["v_head"],
        "attention.sliding_window": config.integer("sliding_window"), "rope.freq_base_swa": local,
        "attention.sliding_window_pattern": list(map(int, _windows(config, args))),
        "attention.value_scale": None if scale is None else float(scale),
        "rope.dimension_count": int(args.head_dim * float(shares.pop())),
        "attention.layer_norm_rms_epsilon": args.norm_eps if eps is None else float(eps),
    }  # fmt: skip


def _config(stored: StoredKeys) -> dict[str, Any]:
    layers = stored.values["num_hidden_layers"]
    windows = stored.get("attention.sliding_window_pattern")[:layers]
    heads = stored.get("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads] * layers
    local = next((count for count, window in zip(heads, windows, strict=False) if window), heads[0])
    rules = rules_of_both(stored, stored.get("rope.freq_base_swa", 10000.0))
    both = rules["rope_parameters"]
    both["sliding_attention"]["partial_rotary_factor"] = both["full_attention"].get("partial_rotary_factor", 1.0)
    return {
        "num_key_value_heads": next((n for n, window in zip(heads, windows, strict=False) if not window), local),
        "swa_num_key_value_heads": local, "v_head_dim": stored.get("attention.value_length"),
        "sliding_window": stored.get("attention.sliding_window"),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "attention_value_scale": stored.get("attention.value_scale"), **rules,
    }  # fmt: skip


def _leading(_config: Config, args: Arguments) -> dict[str, Any]:
    """llama.cpp's converter leaves it out, as the tensors tell; a config.json that is made of the file needs it."""
    return {"leading_dense_block_count": args.leading}


_ONE = "llama.cpp's graph for this architecture has one group of experts, whose weights sum to one"

MIMO2 = Family(
    titles=("MiMo V2 Flash",), arch="mimo2", architectures=("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    model_type="mimo_v2_flash",
    keys={
        "head_dim": 192, "num_experts": None, "moe_intermediate_size": 2048, "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5, "rope_theta": 5000000.0, "partial_rotary_factor": 1.0,
    },
    expects=(
        SILU, NO_BIASES, Expected("scoring_func", ("sigmoid",)), Expected("n_group", (1,), _ONE),
        Expected("norm_topk_prob", (True,), _ONE), Expected("routed_scaling_factor", (1.0,), _ONE),
        Expected("tie_word_embeddings", (False,), "llama.cpp's graph for this architecture has a head of its own"),
    ),
    names={"num_experts": "n_routed_experts"},
    sizes=_sizes, layer_sizes=_layer_sizes,
    metadata=(Computed(_metadata, _config), Constant("expert_gating_func", 2), Computed(_leading), LAYER_KINDS,
        Key("expert_group_count", "n_group", optional=True),
        Key("expert_group_used_count", "topk_group", optional=True),
    ),
    predicts="carried", lacks=("first_k_dense_replace",),
    table=decoder(
        Row("input_layernorm", "hidden"),
        Row("self_attn.q_proj", "q hidden"),
        Row("self_attn.k_proj", "k hidden"),
        Row("self_attn.v_proj", "v hidden"),
        Row("self_attn.o_proj", "hidden attended"),
        Row(
            "self_attn.attention_sink_bias", "heads", ("self_attn.sinks",), exact=True, name="attn_sinks.weight",
            optional=True,
        ),
        Row("post_attention_layernorm", "hidden", ("pre_mlp_layernorm",)),
        *in_layers(other_layers(has_experts), *gated_mlp("mlp", "inner")),
        *in_layers(has_experts, *EXPERTS, router_bias("mlp.gate.e_score_correction_bias")),
        *prediction(),
        Row("final_layernorm", "hidden", optional=True, layers=predicts, name="layer_output_norm.weight"),
    ),
)  # fmt: skip
