"""Hunyuan, dense and MoE: Llama's decoder rotated by halves, with heads of q and k normalized after that.

Layers of the MoE also have an expert that all tokens share, as wide as the others.

Of Hy3 all layers but the first have experts; a bias is added to the router's sigmoid to choose them. Its heads are
normalized before the rotation, as usual.

The rope type is called dynamic, but its alpha is fixed: it makes theta larger, for contexts of 256 Ki tokens.
"""

from dataclasses import replace
from typing import Any

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_number, rope_rules
from bridge.models.families.mixtures import LAYER_KINDS, LEADING, router_bias, shared_width
from bridge.models.family import (
    EXPERTS,
    NO_BIASES,
    SILU,
    Family,
    Row,
    decoder,
    gated_mlp,
    networks,
    pre_norm_attention,
)
from bridge.models.prediction import prediction

_CONTEXT = 256 * 1024  # max_position_embeddings is 32 Ki in some published configs


def _stretched(config: Config, args: Arguments) -> dict[str, Any]:
    rules = rope_rules(config)
    if not rules.get("alpha"):
        return {}
    alpha = rope_number(config, rules, "alpha")
    return {
        "rope.freq_base": args.rope.base * alpha ** (args.head_dim / (args.head_dim - 2)),
        "rope.scaling.type": "none", "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": _CONTEXT, "context_length": _CONTEXT,
    }  # fmt: skip


def _config(stored: StoredKeys) -> dict[str, Any]:
    """rope_parameters from a GGUF, in whose theta alpha is contained."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": stored.get("rope.freq_base", 10000.0)}}


_ATTENTION = pre_norm_attention(Row("self_attn.query_layernorm", "head"), Row("self_attn.key_layernorm", "head"))

HUNYUAN = Family(
    titles=("Hunyuan (dense)",), arch="hunyuan-dense", architectures=("HunYuanDenseV1ForCausalLM",),
    model_type="hunyuan_v1_dense",
    keys={"rms_norm_eps": 1e-5},
    expects=(SILU, NO_BIASES),
    metadata=(Computed(_stretched, _config),),
    table=decoder(*_ATTENTION, *gated_mlp("mlp", "inner")),
)  # fmt: skip

HUNYUAN_MOE = replace(
    HUNYUAN,
    titles=("Hunyuan MoE",), arch="hunyuan-moe", architectures=("HunYuanMoEV1ForCausalLM",),
    model_type="hunyuan_v1_moe",
    keys={**HUNYUAN.keys, "num_experts": None, "moe_intermediate_size": None},
    names={"num_experts_per_tok": "moe_topk", "moe_intermediate_size": "intermediate_size"},
    metadata=(
        *HUNYUAN.metadata, Key("expert_shared_feed_forward_length", size="inner"),
        Constant("expert_weights_norm", True), Key("expert_shared_count", "num_shared_expert", 1),
    ),
    table=decoder(
        *_ATTENTION,
        replace(EXPERTS[0], source="mlp.gate.wg", also=()),
        *EXPERTS[1:],
        *gated_mlp("mlp.shared_mlp", "inner"),
    ),
)  # fmt: skip


def _shared_count(stored: StoredKeys) -> dict[str, Any]:
    width = stored.get("expert_feed_forward_length")
    return {"num_shared_experts": stored.get("expert_shared_feed_forward_length", width) // width}


# as it is published, and as transformers has it in memory; the bias without ".bias", as llama.cpp wants it here
_CHOICE = replace(router_bias("mlp.expert_bias", "mlp.e_score_correction_bias"), name="exp_probs_b", optional=True)
_SHARED = (
    replace(row, also=(row.source.replace("shared_mlp", "shared_experts"),))
    for row in gated_mlp("mlp.shared_mlp", "shared")
)

HY3 = Family(
    titles=("Hy3",), arch="hy_v3", named_as="exaone-moe", architectures=("HYV3ForCausalLM",), model_type="hy_v3",
    keys={
        "rms_norm_eps": 1e-5, "rope_theta": 11158840.0, "num_experts": None, "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
    },
    expects=(SILU, NO_BIASES),
    sizes=shared_width("num_shared_experts"),
    metadata=(
        LEADING,
        Key("expert_shared_feed_forward_length", size="shared"), Key("expert_weights_norm", "route_norm", True),
        Key("expert_weights_scale", "router_scaling_factor", 2.826, missing=1.0), Constant("expert_gating_func", 2),
        Computed(config=_shared_count), LAYER_KINDS,
    ),
    predicts="carried",
    table=decoder(
        *pre_norm_attention(Row("self_attn.q_norm", "head"), Row("self_attn.k_norm", "head")),
        *networks(
            gated_mlp("mlp", "inner"),
            Row("mlp.router.gate", "experts hidden", ("mlp.gate",), floats="F32", name="ffn_gate_inp.weight"),
            *EXPERTS[1:],
            _CHOICE,
            *_SHARED,
        ),
        *(replace(row, source="final_layernorm") if row.source == "shared_head.norm" else row for row in prediction()),
    ),
)  # fmt: skip
