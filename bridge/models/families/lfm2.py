"""LFM2: layers of a short convolution between two gates, and layers of attention with normalized heads.

Of the mixtures of experts all layers but the first two have experts; a bias is added to the router's sigmoid to choose
experts, but not to weight them.
"""

from dataclasses import replace
from typing import Any

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.mixtures import router_bias
from bridge.models.family import Expected, Family, Row, decoder, in_layers, networks, stacked


def _adjusted(config: Config, args: Arguments) -> dict[str, int]:
    """The network is two thirds as wide as configured, rounded up, unless the config forbids it."""
    inner = config.integer("block_ff_dim", args.inner)
    if config.get("block_auto_adjust_ff_dim", True):
        multiple = config.integer("block_multiple_of", 256)
        inner = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    return {"inner": inner}


def _heads(_config: Config, args: Arguments) -> dict[str, Any]:
    return {"attention.head_count_kv": [args.kv_heads if kind == _ATTENTION else 0 for kind in args.kinds]}


def _kinds(stored: StoredKeys) -> dict[str, Any]:
    return {"layer_types": [_ATTENTION if count else "conv" for count in stored.get("attention.head_count_kv")]}


def _of(kind: str, *rows: Row) -> tuple[Row, ...]:
    return in_layers(lambda args, layer: args.kinds[layer] == kind, *rows)


def _network(module: str, inner: str) -> tuple[Row, ...]:
    gate, up = f"{module}.w1", f"{module}.w3"
    return (
        Row(gate, f"{inner} hidden"),
        Row(up, f"{inner} hidden"),
        Row(f"{module}.w2", f"hidden {inner}", columns_of=(gate, up)),
    )


_ATTENTION = "full_attention"
_KEYS = (
    Computed(_heads, _kinds),
    Key("shortconv.l_cache", "conv_L_cache", 3, defines="kernel"),
    Key("feed_forward_length", size="inner"),
)
_LAYERS = (
    Row("operator_norm", "hidden"),
    *_of(
        "conv",
        Row("conv.in_proj", "hidden+hidden+hidden hidden"),
        Row("conv.conv", "hidden kernel", floats="F32", change="squeezed"),
        Row("conv.out_proj", "hidden hidden"),
    ),
    *_of(
        _ATTENTION,
        Row("self_attn.q_proj", "q hidden"),
        Row("self_attn.k_proj", "kv hidden"),
        Row("self_attn.v_proj", "kv hidden"),
        Row("self_attn.q_layernorm", "head"),
        Row("self_attn.k_layernorm", "head"),
        Row("self_attn.out_proj", "hidden q"),
    ),
    Row("ffn_norm", "hidden"),
)
_NORM = Row("model.embedding_norm", "hidden")

LFM2 = Family(
    titles=("LFM2",), arch="lfm2", architectures=("Lfm2ForCausalLM", "LFM2ForCausalLM"), model_type="lfm2",
    keys={"tie_word_embeddings": True, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "layer_types": None},
    names={"rms_norm_eps": "norm_eps"},
    expects=(Expected("conv_bias", (False,)),),
    sizes=_adjusted,
    metadata=(*_KEYS, Computed(config=lambda _stored: {"block_auto_adjust_ff_dim": False})),
    table=decoder(*_LAYERS, *_network("feed_forward", "inner"), norm=_NORM),
)  # fmt: skip

LFM2_MOE = replace(
    LFM2,
    titles=("LFM2 MoE",), arch="lfm2moe", architectures=("Lfm2MoeForCausalLM",), model_type="lfm2_moe",
    keys={**LFM2.keys, "num_experts": None, "moe_intermediate_size": None, "first_k_dense_replace": 2},
    names={**LFM2.names, "first_k_dense_replace": "num_dense_layers"},
    expects=(
        *LFM2.expects, Expected("use_expert_bias", (True,), written=True),
        Expected("norm_topk_prob", (True,), written=True), Expected("routed_scaling_factor", (1.0,), written=True),
    ),
    sizes=None,
    metadata=(*_KEYS, Constant("expert_gating_func", 2)),  # sigmoid
    table=decoder(
        *_LAYERS,
        *networks(
            _network("feed_forward", "inner"),
            Row("feed_forward.gate", "experts hidden", floats="F32"),
            *stacked("feed_forward.experts", *(
                replace(row, name=f"ffn_{part}_exps.weight")
                for row, part in zip(_network("feed_forward.experts.*", "expert"), ("gate", "up", "down"), strict=True)
            )),
            router_bias("feed_forward.expert_bias"),
        ),
        norm=_NORM,
    ),
)  # fmt: skip
