"""GLM-5.3 Flash: most layers have linear attention (Kimi's delta attention), the others attend to chosen tokens.

The linear layers' state decays by a gate of each element of a key. The others have DeepSeek's attention on a latent
vector, without positions; an indexer pools a number of keys into one and chooses among these pools. Several residual
streams are mixed by matrices that each token makes (hc_*), and averaged at the end.

config.json is read as it is published, with linear_attn_config, or as transformers saves it.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.deepseek import INDEXER, LATENT_ATTENTION, ROUTER_BIAS, full_config, full_keys, latent_sizes
from bridge.models.families.mixtures import layer_kinds
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
from bridge.models.prediction import prediction, predicts

_LOWER_BOUND = -5.0  # of the logarithm of the decay


def linear_layer(args: Arguments, layer: int) -> bool:
    """Whether a layer has linear attention."""
    return not predicts(args, layer) and args.kinds[layer] == "linear_attention"


def _shared(args: Arguments, layer: int) -> bool:
    """Whether a layer attends to the tokens that a layer before it has chosen."""
    return f"shared.{layer}" in args.more


def _indexed(args: Arguments, layer: int) -> bool:
    return not linear_layer(args, layer) and not _shared(args, layer)


def _linear(config: Config) -> dict[str, Any]:
    """What the config says of linear attention, by the keys of linear_attn_config."""
    published = config.get("linear_attn_config")
    if published is None:
        names = {
            "num_heads": "linear_num_heads", "head_dim": "linear_head_dim",
            "short_conv_kernel_size": "linear_conv_kernel_dim",
        }  # fmt: skip
        bound = config.values.get("linear_lower_bound", _LOWER_BOUND)
        return {key: config.get(name) for key, name in names.items()} | {"gate_lower_bound": bound}
    if not isinstance(published, dict):
        raise BridgeError(f"{config.path}: linear_attn_config is {published!r:.80}, must be an object")
    bound = published.get("gate_lower_bound")
    return {
        **published,
        "gate_lower_bound": _LOWER_BOUND if bound is None and published.get("safe_gate", True) else bound,
    }


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    linear = Config(_linear(config), config.path, config.longest)
    heads = linear.integer("num_heads", 64)
    if heads != args.heads:
        raise BridgeError(
            f"{config.path}: linear attention has {heads} heads, other layers {args.heads}; llama.cpp has as "
            "many in all"
        )
    head, pool = linear.side("head_dim", 128), config.integer("index_kpool", 16)
    if pool < 2 or config.integer("index_topk", 2048) % pool:
        raise BridgeError(
            f"{config.path}: index_topk is {config.get('index_topk')} with index_kpool {pool}; llama.cpp chooses pools "
            "of two tokens or more, which must divide it"
        )
    streams = args.more["streams"]
    return {
        **latent_sizes(config, args), "rope": 0, "linear_head": head, "linear": args.heads * head,
        "kernel": linear.integer("short_conv_kernel_size", 4), "one": 1, "three": 3, "pool": pool,
        "index_q": args.more["index_heads"] * args.more["index_head"], "streams": streams,
        "mixes": (2 + streams) * streams, "all": streams * args.hidden,
        **{f"shared.{layer}": 1 for layer, kind in enumerate(config.get("indexer_types", ())) if kind == "shared"},
    }  # fmt: skip


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    kinds, m = args.kinds, args.sizes
    if not {*kinds} <= {"linear_attention", "full_attention", "indexed_attention"}:
        raise BridgeError(f"{config.path}: layer_types is {kinds!r:.80}, must be linear or indexed, for every layer")
    require_layer(config, (linear_layer(args, layer) for layer in range(args.layers)), "has linear attention")
    first = next((layer for layer in range(args.layers) if not linear_layer(args, layer)), None)
    if first is not None and _shared(args, first):
        raise BridgeError(f"{config.path}: indexer_types has shared for layer {first}, before any layer that chooses")
    bound, limit = _linear(config)["gate_lower_bound"], config.get("swiglu_limit", 10.0)
    limits = (args.layers + args.predicting) * [float(limit)] if limit else None
    return {
        "attention.head_count_kv": [int(not linear_layer(args, i)) for i in range(args.layers + args.predicting)],
        "attention.key_length": m["lora"], "attention.value_length": m["lora"],
        "attention.key_length_mla": m["nope"], "rope.dimension_count": 0,
        "attention.layer_norm_epsilon": 1e-6,  # of the indexer's norm
        "kda.gate_lower_bound": None if bound is None else float(bound),
        "leading_dense_block_count": args.leading, "swiglu_clamp_exp": limits, "swiglu_clamp_shexp": limits,
    }  # fmt: skip


def _config(stored: StoredKeys) -> dict[str, Any]:
    layers, heads = stored.values["num_hidden_layers"], stored.values["num_attention_heads"]
    bound = stored.get("kda.gate_lower_bound")
    limits = stored.get("swiglu_clamp_exp") or [0.0]
    return {
        "qk_nope_head_dim": stored.get("attention.key_length_mla"), "qk_rope_head_dim": 0, "mla_use_nope": True,
        "num_key_value_heads": heads, "swiglu_limit": limits[0], "n_group": stored.get("expert_group_count", 1),
        "layer_types": [
            "indexed_attention" if kv_heads else "linear_attention"
            for kv_heads in stored.get("attention.head_count_kv")[:layers]
        ],
        **layer_kinds(stored),
        "linear_attn_config": {
            "num_heads": heads, "head_dim": stored.get("kda.head_dim"), "safe_gate": bound is not None,
            "short_conv_kernel_size": stored.get("ssm.conv_kernel"), "gate_lower_bound": bound,
        },
    }  # fmt: skip


def _of_linear(module: str, shape: str, name: str, **more: Any) -> Row:
    return Row(f"self_attn.{module}", shape, name=name, layers=linear_layer, **more)


def convolutions(prefix: str, size: str) -> tuple[Row, ...]:
    """The convolutions of q, k and v; `prefix`: of their modules."""
    return tuple(
        Row(f"{prefix}.{part}_conv1d", f"{size} one kernel", name=f"ssm_conv1d_{part}.weight", floats="F32")
        for part in "qkv"
    )


def _streams(part: str) -> tuple[Row, ...]:
    """What mixes the streams before and after a layer's attention, or its network."""
    shapes = {"fn": "mixes all", "base": "mixes", "scale": "three"}
    rows = (
        Row(f"hc_{part}_{key}", shape, name=f"hc_{part}_{key}.weight", exact=True, floats="F32")
        for key, shape in shapes.items()
    )
    return in_layers(other_layers(predicts), *rows)


def _pooling(key: str, shape: str) -> Row:
    source = f"self_attn.indexer.index_kpool_compress_{key}"
    return Row(source, shape, name=f"indexer_compressor_{key}.weight", exact=True, floats="F32")


GLM5_NEXT = Family(
    titles=("GLM-5.3 Flash",), arch="glm5-next", named_as="glm-dsa",
    architectures=("Glm5NextForConditionalGeneration",), model_type="glm5_next",
    keys={
        "num_experts": None, "moe_intermediate_size": None, "first_k_dense_replace": 3, "layer_types": None,
        "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
    },
    expects=(
        SILU, NO_BIASES, Expected("qk_rope_head_dim", (0,), "llama.cpp rotates nothing here", written=True),
        Expected("hc_mult", (4,)), Expected("scoring_func", ("sigmoid",)), Expected("mhc", (True,)),
        Expected("mla_use_nope", (True,)),
    ),
    names={"num_experts": "n_routed_experts", "head_dim": "qk_nope_head_dim"},
    sizes=_sizes,
    metadata=(
        Computed(_metadata, _config), Key("ssm.conv_kernel", size="kernel"), Key("kda.head_dim", size="linear_head"),
        Key("attention.value_length_mla", "v_head_dim", defines="v_head"),
        Key("attention.kv_lora_rank", "kv_lora_rank", defines="lora"),
        Key("attention.q_lora_rank", "q_lora_rank", defines="q_lora"),
        Key("attention.indexer.head_count", "index_n_heads", 32, defines="index_heads"),
        Key("attention.indexer.key_length", "index_head_dim", 128, defines="index_head"),
        Key("attention.indexer.top_k", "index_topk", 2048), Key("attention.indexer.kpool", "index_kpool", size="pool"),
        Key("attention.indexer.kpool_select_tail", "index_kpool_always_select_tail", True),
        Computed(full_keys, full_config), Key("hyper_connection.count", "hc_mult", 4, defines="streams"),
        Key("hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters", 20),
        Key("hyper_connection.epsilon", "hc_eps", 1e-6), Key("expert_shared_count", "n_shared_experts", 1),
        Constant("expert_gating_func", 2),  # sigmoid
        Key("expert_weights_scale", "routed_scaling_factor", 2.5), Key("expert_weights_norm", "norm_topk_prob", True),
        Key("expert_group_count", "n_group", 1), Key("expert_group_used_count", "topk_group", 1),
    ),
    language_model=("glm5_next_text", "Glm5NextForConditionalGeneration"), rotary=False, wrapped=True,
    predicts="carried",
    table=decoder(
        Row("input_layernorm", "hidden"),
        *_streams("attn"),
        *_streams("ffn"),
        *(_of_linear(f"{part}_proj", "linear hidden", f"attn_{part}.weight") for part in "qkv"),
        *in_layers(linear_layer, *convolutions("self_attn", "linear")),
        _of_linear("f_a_proj", "linear_head hidden", "ssm_f_a.weight"),
        _of_linear("f_b_proj", "linear linear_head", "ssm_f_b.weight"),
        _of_linear("b_proj", "heads hidden", "ssm_beta.weight"),
        _of_linear("g_a_proj", "linear_head hidden", "ssm_g_a.weight"),
        _of_linear("g_b_proj", "linear linear_head", "ssm_g_b.weight"),
        _of_linear("A_log", "heads", "ssm_a", exact=True, change="-exp"),
        _of_linear("dt_bias", "linear", "ssm_dt.bias", exact=True),
        _of_linear("o_norm", "linear_head", "ssm_norm.weight"),
        _of_linear("o_proj", "hidden linear", "attn_output.weight"),
        *in_layers(other_layers(linear_layer), *LATENT_ATTENTION),
        *in_layers(_indexed, *INDEXER, _pooling("gate", "index_head hidden"), _pooling("ape", "pool index_head")),
        Row("post_attention_layernorm", "hidden"),
        *networks(
            gated_mlp("mlp", "inner"),
            *EXPERTS,
            replace(ROUTER_BIAS, optional=False),
            *gated_mlp("mlp.shared_experts", "shared"),
        ),
        *prediction(),
        head=Row("lm_head", "vocab hidden"),  # llama.cpp's graph needs one even if the embeddings are tied
    ),
)  # fmt: skip
