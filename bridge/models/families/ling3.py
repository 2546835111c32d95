"""Ling 3: most layers have linear attention (Kimi's delta attention), the others DeepSeek's on a latent vector.

Kimi's delta attention has matrices of full rank here, and its decay is bounded. Each head of the other layers is
multiplied by the sigmoid of a number. Experts are chosen of groups, by a sigmoid and a bias.

Names are those of the repositories; those that transformers has in memory follow.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_rules
from bridge.models.families.deepseek import LATENT_ATTENTION, latent_rules, latent_sizes
from bridge.models.families.mixtures import router_bias
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
    networks,
    other_layers,
    require_layer,
)
from bridge.models.outline import Part
from bridge.models.prediction import predicts

_KINDS = {"linear_attention", "full_attention"}
_LIMITS = {"swiglu_clamp_exp": "expert_swiglu_limit_list", "swiglu_clamp_shexp": "share_expert_swiglu_limit_list"}
_ROPES = ("default", "linear", "yarn", "dynamic")


def _linear(args: Arguments, layer: int) -> bool:
    """Whether a layer has linear attention."""
    return f"linear.{layer}" in args.more


def _kinds(config: Config, args: Arguments) -> list[str]:
    """Each layer's kind; by default the last of each whole group has full attention, and all after the groups."""
    kinds = config.get("layer_types")
    if kinds is None:
        group = config.integer("layer_group_size", 6)
        grouped = args.layers // group * group
        full = [(layer + 1) % group == 0 or layer >= grouped for layer in range(args.layers)]
        return ["full_attention" if one else "linear_attention" for one in full]
    if not isinstance(kinds, list) or len(kinds) != args.layers or not {*kinds} <= _KINDS:
        raise BridgeError(
            f"{config.path}: layer_types is {kinds!r:.80}, must be linear_attention or full_attention, for every layer"
        )
    return kinds


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    # transformers saves the size of linear attention's heads under this name, and another one as head_dim
    key = "linear_head_dim" if config.get("linear_head_dim") is not None else "head_dim"
    head = Config(config.values, config.path, config.longest).side(key, 128)
    shared, count = config.get("moe_shared_expert_intermediate_size"), config.integer("num_shared_experts", 1)
    return {
        **latent_sizes(config, args), "linear_head": head, "linear": args.heads * head, "one": 1,
        "kernel": config.integer("short_conv_kernel_size", 4), "shared_experts": count,
        "shared": config.side("moe_shared_expert_intermediate_size") if shared else args.expert_inner * count,
        **{f"linear.{layer}": 1 for layer, kind in enumerate(_kinds(config, args)) if kind == "linear_attention"},
    }  # fmt: skip


def _limits(config: Config, key: str, count: int) -> list[float] | None:
    """What bounds the experts' activations in each layer; 0: nothing does."""
    limits = config.get(key)
    if limits is None:
        return None
    first = [0.0 if limit is None else float(limit) for limit in limits[:count]]
    return first + (count - len(first)) * [0.0]


def _sections(config: Config, args: Arguments) -> list[int] | None:
    """How many pairs are rotated by each of an image's three positions; None without images."""
    sections = config.get("mrope_section", rope_rules(config).get("mrope_section"))
    if sections is None:
        return None
    if 2 * sum(sections[:3]) != args.more["rope"]:
        raise BridgeError(
            f"{config.path}: mrope_section is {sections!r:.80}, must count the pairs of qk_rope_head_dim "
            f"{args.more['rope']}"
        )
    return [*sections[:3], 0]


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    m, blocks, bound = args.sizes, args.layers + args.predicting, config.get("kda_lower_bound", -5.0)
    rules = rope_rules(config)
    require_layer(config, (_linear(args, layer) for layer in range(args.layers)), "has linear attention")
    if bound >= 0:
        raise BridgeError(f"{config.path}: kda_lower_bound is {bound!r}; must be below 0")
    if (rules.get("rope_type") or rules.get("type") or "default") not in (*_ROPES, "mrope"):
        raise BridgeError(
            f"{config.path}: rope of type {args.rope.type!r}; llama.cpp has {', '.join(_ROPES[:3])} for this model"
        )
    if args.rope.type != "default" and rules.get("mscale_all_dim"):
        raise BridgeError(
            f"{config.path}: rope with mscale_all_dim {rules['mscale_all_dim']}, which scales all scores; llama.cpp "
            "does not for this model"
        )
    return {
        "attention.head_count_kv": [int(not _linear(args, layer)) for layer in range(blocks)],
        "attention.key_length": m["lora"] + m["rope"], "attention.value_length": m["linear_head"],
        "attention.key_length_mla": m["nope"] + m["rope"], "kda.gate_lower_bound": float(bound),
        "leading_dense_block_count": args.leading, "rope.dimension_sections": _sections(config, args),
        **{key: _limits(config, name, blocks) for key, name in _LIMITS.items()},
    }  # fmt: skip


def _config(stored: StoredKeys) -> dict[str, Any]:
    layers, heads = stored.values["num_hidden_layers"], stored.values["num_attention_heads"]
    sections, rope = stored.get("rope.dimension_sections"), stored.get("rope.dimension_count")
    limits = {name: stored.get(key) for key, name in _LIMITS.items()}
    return {
        "layer_types": [
            "full_attention" if kv_heads else "linear_attention"
            for kv_heads in stored.get("attention.head_count_kv")[:layers]
        ],
        "head_dim": stored.get("kda.head_dim"), "num_key_value_heads": heads, "qk_rope_head_dim": rope,
        "qk_nope_head_dim": stored.get("attention.key_length_mla") - rope,
        "kda_lower_bound": stored.get("kda.gate_lower_bound"),
        **{name: [limit or None for limit in values] for name, values in limits.items() if values},
        **({"mrope_section": sections[:3]} if sections else {}),
    }  # fmt: skip


def _convolution(which: int) -> Callable[[Arguments, str], tuple[Part, ...]]:
    """Of q, k or v; transformers has one of all three in memory."""

    def parts(args: Arguments, source: str) -> tuple[Part, ...]:
        rows, kernel = args.more["linear"], args.more["kernel"]
        if not source.endswith(".self_attn.conv1d.weight"):
            return (Part(source, (rows, kernel), change="squeezed"),)
        of_all = which * rows + np.arange(rows)
        return (Part(source, (rows, kernel), of_all, stored=(3 * rows, kernel), change="squeezed"),)

    return parts


def _of(module: str, shape: str, name: str, *also: str, **more: Any) -> Row:
    """A row of attention, whose module transformers calls otherwise."""
    return Row(f"attention.{module}", shape, (f"self_attn.{module}", *also), name=name, **more)


def _latent(row: Row) -> Row:
    """A row of DeepSeek's attention with the names of this family."""
    module = row.source.removeprefix("self_attn.")
    names = ("attention.dense", "attention.o_proj") if module == "o_proj" else (f"attention.{module}",)
    kind = "attn_output.weight" if module == "o_proj" else f"attn_{module.removesuffix('_proj')}.weight"
    renamed = {
        "attn_q_a_layernorm.weight": "attn_q_a_norm.weight", "attn_kv_a_layernorm.weight": "attn_kv_a_norm.weight",
        "attn_kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    }  # fmt: skip
    return replace(row, source=names[0], also=(*names[1:], row.source), name=row.name or renamed.get(kind, kind))


_FORGET = "self_attn.forget_gate"  # a module of its own in transformers
_LINEAR = (
    *(_of(f"{part}_proj", "linear hidden", f"attn_{part}.weight") for part in "qkv"),
    *(
        _of(
            f"{part}_conv1d", "linear one kernel", f"ssm_conv1d_{part}.weight", "self_attn.conv1d", floats="F32",
            parts=_convolution(which),
        )
        for which, part in enumerate("qkv")
    ),
    _of("f_proj", "linear hidden", "ssm_f_a.weight", f"{_FORGET}.f_proj"),
    _of("b_proj", "heads hidden", "ssm_beta.weight"),
    _of(
        "A_log", "heads one", "ssm_a", f"{_FORGET}.A_log", exact=True, floats="F32",
        parts=lambda args, source: (Part(source, (args.heads,), change="exp"),),
    ),
    _of("dt_bias", "linear", "ssm_dt.bias", f"{_FORGET}.dt_bias", exact=True),
    _of("g_proj", "linear hidden", "ssm_g_a.weight"),
    _of("o_norm", "linear_head", "ssm_norm.weight"),
    _of("o_proj", "hidden linear", "attn_output.weight", "attention.dense"),
)  # fmt: skip

LING3 = Family(
    titles=("Ling 3",), arch="bailingmoe3", named_as="deepseek2",
    architectures=(
        "BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration", "BailingHybridForCausalLM",
    ),
    model_type="bailing_hybrid",
    keys={
        "num_experts": None, "moe_intermediate_size": None, "first_k_dense_replace": 2, "rope_theta": 6000000.0,
        "partial_rotary_factor": 1.0, "rotary_dim": None, "max_position_embeddings": 262144,
    },
    expects=(
        SILU, NO_BIASES,
        Expected("no_kda_lora", (True,), written=True), Expected("kda_safe_gate", (True,), written=True),
        Expected("gated_attention_proj_granularity_type", ("head_wise",), written=True),
        Expected("score_function", ("sigmoid",), written=True),
    ),
    names={
        "head_dim": "qk_rope_head_dim", "rotary_dim": "qk_rope_head_dim",
        "max_position_embeddings": ("max_position_embeddings", "model_max_length"),
        "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token"),
        "norm_topk_prob": ("norm_topk_prob", "moe_renormalize"), "n_group": ("n_group", "num_expert_group"),
        "num_shared_experts": ("num_shared_experts", "n_shared_experts"),
    },
    sizes=_sizes,
    metadata=(
        Key("ssm.conv_kernel", "short_conv_kernel_size", size="kernel"), Key("kda.head_dim", size="linear_head"),
        Constant("kda.safe_gate", True), Key("attention.value_length_mla", "v_head_dim", 128, defines="v_head"),
        Key("attention.kv_lora_rank", "kv_lora_rank", 512, defines="lora"),
        Key("attention.q_lora_rank", "q_lora_rank", defines="q_lora", optional=True),
        Key("rope.dimension_count", "qk_rope_head_dim", 64, defines="rope"),
        Key("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size", size="shared"),
        Key("expert_shared_count", "num_shared_experts", size="shared_experts"),
        Constant("expert_gating_func", 2),  # sigmoid
        Key("expert_weights_scale", "routed_scaling_factor", 2.5), Key("expert_weights_norm", "norm_topk_prob", True),
        Key("expert_group_count", "n_group", 8), Key("expert_group_used_count", "topk_group", 4),
        Computed(_metadata, _config), Computed(config=latent_rules),
    ),
    wrapped=True, predicts="carried",
    table=decoder(
        Row("input_layernorm", "hidden"),
        *in_layers(_linear, *_LINEAR),
        *in_layers(
            other_layers(_linear), *map(_latent, LATENT_ATTENTION), _of("g_proj", "heads hidden", "attn_gate.weight")
        ),
        Row("post_attention_layernorm", "hidden"),
        *networks(
            gated_mlp("mlp", "inner"),
            *EXPERTS,
            router_bias("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
            *gated_mlp("mlp.shared_experts", "shared"),
        ),
        *in_layers(
            predicts,
            Row("eh_proj", "hidden hidden+hidden", name="nextn.eh_proj.weight"),
            Row("enorm", "hidden", name="nextn.enorm.weight"),
            Row("hnorm", "hidden", name="nextn.hnorm.weight"),
            Row("final_layernorm", "hidden", name="layer_output_norm.weight"),
        ),
        first=(Row("model.word_embeddings", "vocab hidden", ("model.embed_tokens",), name="token_embd.weight"),),
        head=Row("lm_head", "vocab hidden"),  # transformers has one of its own even if the embeddings are tied
    ),
)  # fmt: skip
