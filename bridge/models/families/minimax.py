"""MiniMax M2 and M3: mixtures of experts; a bias is added to the router's sigmoid to choose, but not to weight them.

M2 has experts in every layer; q and k are normalized over all heads, a part of each is rotated. M3 has dense layers,
then layers with experts and a shared one that attend to blocks chosen by an indexer. Its gates and values are clamped
as in gpt-oss, and all norms are stored minus one.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.mixtures import layer_kinds, router_bias
from bridge.models.family import (
    EXPERTS,
    NORM,
    SILU,
    Expected,
    Family,
    Row,
    attention,
    decoder,
    gated_mlp,
    in_layers,
    other_layers,
    pre_norm_attention,
)

_ROUTER_BIAS = router_bias("block_sparse_moe.e_score_correction_bias", "mlp.gate.e_score_correction_bias")


def _m2_config(stored: StoredKeys) -> dict[str, Any]:
    return {
        "rotary_dim": stored.get("rope.dimension_count", stored.values["head_dim"]),
        "intermediate_size": stored.get("expert_feed_forward_length", stored.values["intermediate_size"]),
    }


MINIMAX_M2 = Family(
    titles=("MiniMax M2",), arch="minimax-m2", architectures=("MiniMaxM2ForCausalLM",), model_type="minimax_m2",
    keys={
        "head_dim": 128, "rope_theta": 5000000.0, "partial_rotary_factor": 1.0, "rotary_dim": None, "num_experts": None,
    },
    expects=(SILU, Expected("scoring_func", ("sigmoid",), written=True)),
    metadata=(
        Constant("expert_gating_func", 2),  # sigmoid
        Key("expert_feed_forward_length", size="inner"), Computed(config=_m2_config)),
    written_as={"num_experts": "num_local_experts"}, alternative="block_sparse_moe",
    table=decoder(
        *pre_norm_attention(Row("self_attn.q_norm", "q"), Row("self_attn.k_norm", "kv")),
        *EXPERTS,
        _ROUTER_BIAS,
    ),
)  # fmt: skip


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    """The sizes of M3, from config.json as it is published or as transformers saves it."""
    published = config.get("sparse_attention_config", {})
    heads = config.side("index_n_heads", published.get("sparse_num_index_heads"))
    size = config.side("index_head_dim", published.get("sparse_index_dim"))
    kinds = config.get("moe_layer_freq", [kind == "sparse" for kind in config.get("mlp_layer_types", ())])
    dense = next((layer for layer, kind in enumerate(kinds) if kind), len(kinds))
    if kinds and [bool(kind) for kind in kinds] != [layer >= dense for layer in range(args.layers)]:
        raise BridgeError(f"{config.path}: llama.cpp has experts in all layers after the first that has some, not here")
    return {
        "dense": dense, "shared": config.side("shared_intermediate_size", args.expert_inner),
        "index_heads": heads, "index_head": size, "index_q": heads * size,
        "block": config.integer("index_block_size", published.get("sparse_block_size")),
        "blocks": config.integer("index_topk_blocks", published.get("sparse_topk_blocks")),
        "local": config.count("index_local_blocks", published.get("sparse_local_block", 1)),
    }  # fmt: skip


def _m3_config(stored: StoredKeys) -> dict[str, Any]:
    layers, dense = stored.values["num_hidden_layers"], stored.get("leading_dense_block_count", 0)
    return {
        "rotary_dim": stored.get("rope.dimension_count", stored.values["head_dim"]),
        "shared_intermediate_size": stored.get("expert_shared_count") * stored.get("expert_feed_forward_length"),
        **layer_kinds(stored),
        "layer_types": dense * ["full_attention"] + (layers - dense) * ["minimax_m3_sparse"],
    }


def _dense(args: Arguments, layer: int) -> bool:
    return layer < args.more["dense"]


_SPARSE = other_layers(_dense)
_SHARED = (
    replace(row, also=(row.source.replace("mlp", "block_sparse_moe"),))
    for row in gated_mlp("mlp.shared_experts", "shared")
)


def _index(part: str, shape: str, **more: Any) -> Row:
    source, name = f"self_attn.index_{part}", f"indexer.{part}.weight"
    return Row(source, shape, (f"self_attn.indexer.{part}",), name=name, floats="F32", layers=_SPARSE, **more)


MINIMAX_M3 = Family(
    titles=("MiniMax M3",), arch="minimax-m3", named_as="glm4moe",
    architectures=("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM", "MiniMaxM3VLForCausalLM"),
    model_type="minimax_m3_vl_text",
    keys={
        "head_dim": 128, "rope_theta": 5000000.0, "partial_rotary_factor": 1.0, "rotary_dim": None, "num_experts": None,
        "moe_intermediate_size": None,
    },
    expects=(
        Expected("hidden_act", ("swigluoai", "silu")), Expected("scoring_func", ("sigmoid",), written=True),
        Expected("swiglu_alpha", (1.702,)), Expected("swiglu_limit", (7.0,)), Expected("use_gemma_norm", (True,)),
        Expected("qk_norm_type", ("per_head",)),
    ),
    names={"intermediate_size": "dense_intermediate_size", "moe_intermediate_size": "intermediate_size"},
    sizes=_sizes,
    metadata=(
        Key("leading_dense_block_count", size="dense"), Constant("expert_gating_func", 2),  # sigmoid
        Key("expert_shared_count", "n_shared_experts", 1, missing=None), Constant("expert_weights_norm", True),
        Key("expert_weights_scale", "routed_scaling_factor", 2.0, missing=1.0),
        Key("attention.indexer.head_count", "index_n_heads", size="index_heads"),
        Key("attention.indexer.key_length", "index_head_dim", size="index_head"),
        Key("attention.indexer.block_size", "index_block_size", size="block"),
        Key("attention.indexer.top_k", "index_topk_blocks", size="blocks"),
        Key("attention.indexer.local_blocks", "index_local_blocks", size="local"), Computed(config=_m3_config),
    ),
    language_model=("minimax_m3_vl_text", "MiniMaxM3SparseForCausalLM"),
    written_as={"num_experts": "num_local_experts"}, wrapped=True, predicts="dropped", alternative="block_sparse_moe",
    table=decoder(
        Row("input_layernorm", "hidden", change="+1"),
        *attention(Row("self_attn.q_norm", "head", change="+1"), Row("self_attn.k_norm", "head", change="+1")),
        _index("q_proj", "index_q hidden"),
        _index("k_proj", "index_head hidden"),
        _index("q_norm", "index_head", change="+1"),
        _index("k_norm", "index_head", change="+1"),
        Row("post_attention_layernorm", "hidden", name="ffn_norm.weight", change="+1"),
        *in_layers(_dense, *gated_mlp("mlp", "inner")),
        *in_layers(_SPARSE, *EXPERTS, _ROUTER_BIAS, *_SHARED),
        norm=Row(NORM.source, "hidden", change="+1"),
    ),
)  # fmt: skip
