"""Kimi Linear and Kimi K3: layers of delta attention (KDA), each fourth of latent attention, without any positions.

KDA is a gated delta net whose state decays by channel: q, k and v have a short convolution each, the decay and the gate
of the output are made by two matrices of low rank. A bias is added to the router's sigmoid to choose experts, but not
to weight them.

K3 is several times as deep. Every few layers the state is put aside and begins anew; what attention and networks read
is a mixture of those states, weighted by scores (*_res_*), whose norm and vector GGUF has multiplied. Experts read a
shorter vector, gates are bent by tanh (situ), and the output's gate is one matrix, which latent attention has too.

Names are those of the published checkpoints; those that transformers has in memory follow.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.deepseek import LATENT_ATTENTION
from bridge.models.families.mixtures import router_bias
from bridge.models.family import (
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
from bridge.models.outline import Part
from bridge.system.fields import table

_GATINGS = {"softmax": 1, "sigmoid": 2}


def _kda(args: Arguments, layer: int) -> bool:
    return bool(args.more[f"kda.{layer}"])


def _dense(args: Arguments, layer: int) -> bool:
    return layer < args.more["dense"]


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    """The sizes of config.json as it is published, or as transformers saves it."""
    published = table(config.get("linear_attn_config"))
    heads = config.get("linear_num_heads", published.get("num_heads", args.heads))
    if heads != args.heads:
        raise BridgeError(
            f"{config.path}: {heads} heads of linear attention; llama.cpp has as many as num_attention_heads, "
            f"{args.heads}"
        )
    head = config.side("linear_head_dim", published.get("head_dim", 128))
    kinds = _kinds(config, args, published)
    dense = _dense_layers(config, args)
    nope = config.side("qk_nope_head_dim", 128)
    return {
        **{f"kda.{layer}": int(kind) for layer, kind in enumerate(kinds)}, "dense": dense, "one": 1,
        "kda_head": head, "kda": args.heads * head,
        "kernel": config.integer("linear_conv_kernel_dim", published.get("short_conv_kernel_size", 4)),
        "nope": nope, "q": args.heads * (nope + args.more["rope"]), "attended": args.heads * args.more["v_head"],
        "shared": args.expert_inner * config.integer("num_shared_experts", 1),
    }  # fmt: skip


def _kinds(config: Config, args: Arguments, published: dict[str, Any]) -> list[bool]:
    """Whether each layer has linear attention."""
    kinds, full = config.get("layer_types"), published.get("full_attn_layers")
    if kinds is None and full is None:
        return [layer == 0 or layer % 4 != 0 for layer in range(args.layers)]  # transformers' default
    if kinds is None and isinstance(full, list) and {*full} <= {*range(1, args.layers + 1)}:
        return [layer + 1 not in full for layer in range(args.layers)]
    if kinds is None or len(kinds) != args.layers or not {*kinds} <= {"linear_attention", "full_attention"}:
        raise BridgeError(
            f"{config.path}: the layers with full attention, {(full if kinds is None else kinds)!r:.80}, must be some "
            f"of {args.layers}"
        )
    return [kind == "linear_attention" for kind in kinds]


def _dense_layers(config: Config, args: Arguments) -> int:
    """The layers before the first with experts."""
    kinds = config.get("mlp_layer_types")
    dense = config.count("first_k_dense_replace", 1) if kinds is None else list(kinds).count("dense")
    if kinds is not None and list(kinds) != dense * ["dense"] + (args.layers - dense) * ["sparse"]:
        raise BridgeError(
            f"{config.path}: mlp_layer_types is {kinds!r:.80}; llama.cpp has networks without experts in first layers "
            "only"
        )
    return dense


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    m, groups = args.more, config.integer("num_expert_group", 1)
    require_layer(config, (_kda(args, layer) for layer in range(args.layers)), "has linear attention")
    return {
        "attention.head_count_kv": [0 if _kda(args, layer) else 1 for layer in range(args.layers)],
        "attention.key_length": m["lora"] + m["rope"], "attention.value_length": config.values.get("head_dim"),
        "attention.key_length_mla": m["nope"] + m["rope"],
        "expert_gating_func": _GATINGS[config.get("moe_router_activation_func", "sigmoid")],
        "expert_group_count": groups if groups > 1 else None,
        "expert_group_used_count": config.integer("topk_group", 1),
    }  # fmt: skip


def _config(stored: StoredKeys) -> dict[str, Any]:
    counts, heads = stored.get("attention.head_count_kv"), stored.values["num_attention_heads"]
    gating = {number: name for name, number in _GATINGS.items()}[stored.get("expert_gating_func", 2)]
    return {
        "linear_attn_config": {
            "full_attn_layers": [layer for layer, count in enumerate(counts, 1) if count],
            "kda_layers": [layer for layer, count in enumerate(counts, 1) if not count],
            "head_dim": stored.get("kda.head_dim"), "num_heads": heads,
            "short_conv_kernel_size": stored.get("ssm.conv_kernel"),
        },
        "num_key_value_heads": heads, "rope_theta": stored.get("rope.freq_base", 10000.0),
        "head_dim": stored.get("attention.value_length"), "moe_router_activation_func": gating,
        "qk_nope_head_dim": stored.get("attention.key_length_mla") - stored.get("rope.dimension_count"),
        "num_expert_group": stored.get("expert_group_count", 1), "topk_group": stored.get("expert_group_used_count", 1),
    }  # fmt: skip


def _convolution(which: int) -> Callable[[Arguments, str], tuple[Part, ...]]:
    """Of q, k or v; transformers has one of all three in memory."""

    def parts(args: Arguments, source: str) -> tuple[Part, ...]:
        rows, kernel = args.more["kda"], args.more["kernel"]
        if not source.endswith(".self_attn.conv1d.weight"):
            return (Part(source, (rows, kernel), change="squeezed"),)
        return (
            Part(source, (rows, kernel), which * rows + np.arange(rows), stored=(3 * rows, kernel), change="squeezed"),
        )

    return parts


def _decay(args: Arguments, source: str) -> tuple[Part, ...]:
    return (Part(source, (1, 1, args.heads, 1), change="-exp"),)


def _forget(part: str, shape: str, **more: Any) -> Row:
    """A row of what makes the decay, a module of its own in transformers."""
    return Row(f"self_attn.{part}", shape, (f"self_attn.forget_gate.{part}",), **more)


DELTA_ROWS = (
    *(Row(f"self_attn.{part}_proj", "kda hidden") for part in "qkv"),
    *(
        Row(
            f"self_attn.{part}_conv1d", "kda one kernel", ("self_attn.conv1d",), floats="F32",
            name=f"ssm_conv1d_{part}.weight", parts=_convolution(which),
        )
        for which, part in enumerate("qkv")
    ),
    _forget("f_a_proj", "kda_head hidden", name="ssm_f_a.weight"),
    _forget("f_b_proj", "kda kda_head", name="ssm_f_b.weight"),
    Row("self_attn.b_proj", "heads hidden", name="ssm_beta.weight"),
    _forget("A_log", "heads one", exact=True, name="ssm_a", floats="F32", parts=_decay),
    _forget("dt_bias", "kda", exact=True, name="ssm_dt.bias"),
    Row("self_attn.o_norm", "kda_head", name="ssm_norm.weight"),
    Row("self_attn.o_proj", "hidden kda"),
)  # fmt: skip
_LOW_GATE = (
    Row("self_attn.g_a_proj", "kda_head hidden", name="ssm_g_a.weight"),
    Row("self_attn.g_b_proj", "kda kda_head", name="ssm_g_b.weight"),
)


_MOE = "block_sparse_moe"
_STACKS = {"gate": "gate_up_proj[0/2]", "up": "gate_up_proj[1/2]", "down": "down_proj"}


def experts(expert: str = "expert hidden") -> tuple[Row, ...]:
    """The router and the experts, of matrices of that shape, and those that all tokens share."""
    back = " ".join(reversed(expert.split()))
    shapes = {"gate": ("w1", expert), "up": ("w3", expert), "down": ("w2", back)}
    routed = (
        Row(
            f"{_MOE}.experts.*.{part}", shape, (f"mlp.experts.*.{name}_proj", f"mlp.experts.{_STACKS[name]}"),
            name=f"ffn_{name}_exps.weight",
            columns_of=(f"{_MOE}.experts.*.w1", f"{_MOE}.experts.*.w3") if name == "down" else (),
        )
        for name, (part, shape) in shapes.items()
    )  # fmt: skip
    module = f"{_MOE}.shared_experts"
    shared = (
        replace(row, also=(row.source.replace(_MOE, "mlp"),), name=f"ffn_{name}_shexp.weight")
        for name, row in zip(shapes, gated_mlp(module, "shared"), strict=True)
    )
    bias = "gate.e_score_correction_bias"
    return (
        Row(f"{_MOE}.gate", "experts hidden", ("mlp.gate",), floats="F32", name="ffn_gate_inp.weight"),
        *routed,
        router_bias(f"{_MOE}.{bias}", f"mlp.{bias}"),
        *shared,
    )


# transformers saves them with the experts' names
DENSE_ROWS = tuple(replace(row, also=(row.source.replace("mlp", _MOE),)) for row in gated_mlp("mlp", "inner"))

KIMI_LINEAR = Family(
    titles=("Kimi Linear",), arch="kimi-linear", named_as="deepseek2", architectures=("KimiLinearForCausalLM",),
    model_type="kimi_linear",
    keys={
        "num_experts": None, "moe_intermediate_size": None, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576,
    },
    expects=(
        SILU, Expected("q_lora_rank", (None,)), Expected("mla_use_nope", (True,), written=True),
        Expected("moe_renormalize", (True,), "llama.cpp normalizes this architecture's expert weights", written=True),
        Expected("moe_router_activation_func", tuple(_GATINGS)[::-1]), Expected("moe_layer_freq", (1,)),
    ),
    names={
        "max_position_embeddings": "model_max_length", "num_experts_per_tok": "num_experts_per_token",
        "head_dim": "qk_rope_head_dim",
    },
    sizes=_sizes,
    metadata=(
        Key("attention.value_length_mla", "v_head_dim", 128, defines="v_head"),
        Key("attention.kv_lora_rank", "kv_lora_rank", 512, defines="lora"),
        Key("attention.q_lora_rank", "q_lora_rank", defines="q_lora", optional=True),
        Key("rope.dimension_count", "qk_rope_head_dim", 64, defines="rope"),
        Key("leading_dense_block_count", "first_k_dense_replace", size="dense"), Key("ssm.conv_kernel", size="kernel"),
        Key("kda.head_dim", size="kda_head"), Key("expert_shared_count", "num_shared_experts", 1),
        Key("expert_weights_scale", "routed_scaling_factor", 2.446), Computed(_metadata, _config),
    ),
    lacks=("rope_parameters",), predicts="dropped",
    table=decoder(
        Row("input_layernorm", "hidden"),
        *in_layers(_kda, *DELTA_ROWS, *_LOW_GATE),
        *in_layers(other_layers(_kda), *LATENT_ATTENTION),
        Row("post_attention_layernorm", "hidden"),
        *in_layers(_dense, *DENSE_ROWS),
        *in_layers(other_layers(_dense), *experts()),
        head=Row("lm_head", "vocab hidden"),  # llama.cpp's graph needs one even if the embeddings are tied
    ),
)  # fmt: skip


def _k3_sizes(config: Config, args: Arguments) -> dict[str, int]:
    latent = config.get("routed_expert_hidden_size")
    return {
        **_sizes(config, args), "latent": config.side("routed_expert_hidden_size", args.hidden),
        "has_latent": int(latent is not None), "mixed": config.count("attn_res_block_size", 0),
    }  # fmt: skip


def _k3_metadata(config: Config, args: Arguments) -> dict[str, Any]:
    m, bound = args.more, table(config.get("linear_attn_config")).get("gate_lower_bound")
    return {
        **_metadata(config, args), "attention.value_length": m["lora"],
        "kda.gate_lower_bound": None if bound is None else float(bound),
        "expert_latent_length": m["latent"] if m["has_latent"] else None,
        "activation.situ_linear_beta": float(config.get("activation_situ_linear_beta", 0.0)),
        "attn_res.block_size": m["mixed"],
    }  # fmt: skip


def _k3_config(stored: StoredKeys) -> dict[str, Any]:
    config = _config(stored)
    bound = stored.get("kda.gate_lower_bound")
    more = {} if bound is None else {"gate_lower_bound": bound}
    return {
        **config, "linear_attn_config": {**config["linear_attn_config"], **more}, "head_dim": None,
        "routed_expert_hidden_size": stored.get("expert_latent_length"),
        "activation_situ_linear_beta": stored.get("activation.situ_linear_beta"),
        "attn_res_block_size": stored.get("attn_res.block_size", 0),
    }  # fmt: skip


def _mixed(args: Arguments) -> bool:
    return args.more["mixed"] > 0


def _score(module: str, name: str) -> Row:
    """A vector that scores states, times the norm before it."""

    def parts(args: Arguments, source: str) -> tuple[Part, ...]:
        norm = source.replace("_proj.weight", "_norm.weight")
        return (Part(source, (args.hidden,), change="squeezed", times=norm),)

    return Row(f"{module}_proj", "hidden", name=f"{name}_res_score.weight", parts=parts, when=_mixed)


def _latent(part: str, shape: str, name: str, **more: Any) -> Row:
    return Row(f"{_MOE}.routed_expert_{part}", shape, name=f"ffn_routed_{name}.weight", when=_has_latent, **more)


def _has_latent(args: Arguments) -> bool:
    return bool(args.more["has_latent"])


KIMI_K3 = replace(
    KIMI_LINEAR,
    titles=("Kimi K3",), arch="kimi-k3", architectures=("KimiK3ForConditionalGeneration",), model_type="kimi_k3",
    expects=(
        Expected("hidden_act", ("situ",), written=True), Expected("mla_use_nope", (True,), written=True),
        Expected("moe_router_activation_func", ("sigmoid",)), Expected("moe_layer_freq", (1,)),
    ),
    sizes=_k3_sizes,
    metadata=(
        *(key for key in KIMI_LINEAR.metadata if isinstance(key, Key)),
        Key("expert_weights_norm", "moe_renormalize", True),
        Key("activation.situ_beta", "activation_situ_beta", 1.0), Computed(_k3_metadata, _k3_config),
    ),
    wrapped=True,
    table=(
        *decoder(
            _score("self_attention_res", "attn"),
            Row("input_layernorm", "hidden"),
            *in_layers(
                _kda,
                *(replace(row, shape="heads", parts=None, change="-exp") if row.name == "ssm_a" else row
                  for row in DELTA_ROWS),
                Row("self_attn.g_proj", "kda hidden", name="ssm_g.weight"),
            ),
            *in_layers(
                other_layers(_kda), *LATENT_ATTENTION,
                Row("self_attn.g_proj", "attended hidden", name="attn_gate.weight", optional=True),
            ),
            _score("mlp_res", "ffn"),
            Row("post_attention_layernorm", "hidden"),
            *in_layers(_dense, *DENSE_ROWS),
            *in_layers(
                other_layers(_dense), *experts("expert latent"),
                _latent("down_proj", "latent hidden", "down"), _latent("up_proj", "hidden latent", "up"),
                _latent("norm", "latent", "norm", optional=True),
            ),
            head=Row("lm_head", "vocab hidden"),
        ),
        _score("model.output_attn_res", "output"),
    ),
)  # fmt: skip
