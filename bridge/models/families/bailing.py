"""Ling and Ring: mixtures of experts whose q, k and v are one matrix; names of modules as in their repositories.

Ling 1 has experts in every layer, chosen by softmax; GGUF separates q, k and v and rotates neighbouring rows. In
Ling 2 heads are normalized and a part of each is rotated; a bias is added to the router's sigmoid to choose experts, of
groups.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Constant, Key
from bridge.models.config.model_config import Config
from bridge.models.config.rope import interleaved_rows
from bridge.models.families.mixtures import LEADING, router_bias
from bridge.models.family import EXPERTS, SILU, Expected, Family, Row, decoder, gated_mlp, networks
from bridge.models.outline import Part
from bridge.models.prediction import prediction, predicts

_OWN_HEAD = Expected("tie_word_embeddings", (False,), "llama.cpp's graph for this architecture has a head of its own")
_NO_BIASES = tuple(
    Expected(key, (False,), "llama.cpp's graph for this architecture has no biases")
    for key in ("use_bias", "use_qkv_bias")
)
_EMBEDDINGS = Row("model.word_embeddings", "vocab hidden")


def _fused(which: int) -> Callable[[Arguments, str], tuple[Part, ...]]:
    """q, k or v of query_key_value; rows of the first two so that neighbours are rotated."""

    def parts(args: Arguments, source: str) -> tuple[Part, ...]:
        sizes = args.sizes["q"], args.sizes["kv"], args.sizes["kv"]
        heads = args.heads if which == 0 else args.kv_heads
        rows = interleaved_rows(heads, args.head_dim) if which < 2 else np.arange(sizes[which])
        stored = (sum(sizes), args.hidden)
        return (Part(source, (sizes[which], args.hidden), sum(sizes[:which]) + rows, stored=stored),)

    return parts


def _head(args: Arguments, source: str) -> tuple[Part, ...]:
    """The head, whose columns are scaled to a length of one where the model does so."""
    return (Part(source, (args.vocab, args.hidden), change="unit columns" if args.more["norm_head"] else None),)


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    return {
        "shared": args.expert_inner * config.count("num_shared_experts", 1),
        "norm_head": bool(config.get("norm_head", False)),
    }


def _sizes2(config: Config, args: Arguments) -> dict[str, int]:
    if args.heads * args.head_dim != args.hidden:
        raise BridgeError(
            f"{config.path}: {args.heads} heads of {args.head_dim} elements in a hidden_size of {args.hidden}; "
            "llama.cpp has as many of q here"
        )
    return {"shared": config.side("moe_shared_expert_intermediate_size", args.expert_inner)}


BAILING_MOE = Family(
    titles=("Ling and Ring 1",), arch="bailingmoe", architectures=("BailingMoeForCausalLM",),
    model_type="bailing_moe",
    keys={"num_experts": None, "moe_intermediate_size": None, "rms_norm_eps": 1e-6},
    expects=(
        SILU, *_NO_BIASES, _OWN_HEAD,
        Expected("first_k_dense_replace", (0,), "llama.cpp has experts in all layers of this architecture"),
    ),
    sizes=_sizes,
    metadata=(
        Constant("leading_dense_block_count", 0), Constant("expert_weights_scale", 1.0),
        Key("expert_shared_count", "num_shared_experts", 1), Key("expert_weights_norm", "norm_topk_prob", True),
    ),
    table=decoder(
        Row("input_layernorm", "hidden"),
        Row("attention.query_key_value", "q hidden", parts=_fused(0), name="attn_q.weight"),
        Row("attention.query_key_value", "kv hidden", parts=_fused(1), name="attn_k.weight"),
        Row("attention.query_key_value", "kv hidden", parts=_fused(2), name="attn_v.weight"),
        Row("attention.dense", "hidden q", name="attn_output.weight"),
        Row("post_attention_layernorm", "hidden"),
        *EXPERTS,
        *gated_mlp("mlp.shared_experts", "shared"),
        first=(_EMBEDDINGS,),
        head=Row("lm_head", "vocab hidden", parts=_head),
    ),
)  # fmt: skip

BAILING_MOE2 = Family(
    titles=("Ling and Ring 2",), arch="bailingmoe2", architectures=("BailingMoeV2ForCausalLM",),
    model_type="bailing_moe_v2",
    keys={
        "num_experts": None, "moe_intermediate_size": None, "first_k_dense_replace": 0, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6,
    },
    expects=(
        SILU, *_NO_BIASES, _OWN_HEAD, Expected("score_function", ("sigmoid",), written=True),
        Expected("use_qk_norm", (True,)), Expected("num_shared_experts", (1,), written=True),
    ),
    sizes=_sizes2,
    metadata=(
        LEADING,
        Key("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size", size="shared"),
        Constant("expert_shared_count", 1), Constant("expert_gating_func", 2),  # sigmoid
        Key("expert_weights_scale", "routed_scaling_factor", 1.0), Key("expert_weights_norm", "norm_topk_prob", True),
        Key("expert_group_count", "n_group", optional=True),
        Key("expert_group_used_count", "topk_group", optional=True),
    ),
    predicts="carried",
    table=decoder(
        Row("input_layernorm", "hidden"),
        Row("attention.query_key_value", "q+kv+kv hidden"),
        Row("attention.query_layernorm", "head"),
        Row("attention.key_layernorm", "head"),
        Row("attention.dense", "hidden q"),
        Row("post_attention_layernorm", "hidden"),
        *networks(
            gated_mlp("mlp", "inner"),
            *EXPERTS,
            replace(router_bias("mlp.gate.expert_bias"), optional=True),
            *gated_mlp("mlp.shared_experts", "shared"),
        ),
        *prediction(),
        Row("final_layernorm", "hidden", optional=True, layers=predicts),
        first=(_EMBEDDINGS,),
        head=Row("lm_head", "vocab hidden"),
    ),
)  # fmt: skip
