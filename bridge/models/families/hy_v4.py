"""Hunyuan 4: DeepSeek's attention and indexer, with a gate and sinks; several residual streams, mixed by gates.

Names are those of the repository; transformers saves some otherwise (`Row.also`).
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.deepseek import INDEXER, LATENT, LATENT_ATTENTION, ROUTER_BIAS, full_config, latent_sizes
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
)  # fmt: skip

_SPARSE = ("sparse_attention", "deepseek_sparse_attention")


def _full(config: Config, args: Arguments) -> list[bool]:
    """Whether each layer chooses the tokens that are attended to; none does: []."""
    kinds = config.get("indexer_types")
    if kinds is None:
        sparse = [kind in _SPARSE for kind in config.get("layer_types", ())]
        kinds = ["full" if one else "shared" for one in sparse] if any(sparse) else []
    if kinds and (len(kinds) != args.layers or not {*kinds} <= {"full", "shared"} or kinds[0] != "full"):
        raise BridgeError(
            f"{config.path}: indexer_types is {kinds!r:.80}; must be full or shared for each of {args.layers} layers, "
            "and full for the first"
        )
    return [kind == "full" for kind in kinds]


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    streams, full = config.integer("hc_mult", 4), _full(config, args)
    heads, head = (config.side(key) if full else 0 for key in ("index_n_heads", "index_head_dim"))
    return {
        **latent_sizes(config, args), "streams": streams, "mixes": 2 * streams, "all": streams * args.hidden, "one": 1,
        "two": 2, "index_heads": heads, "index_head": head, "index_q": heads * head,
        **{f"full.{layer}": 1 for layer, one in enumerate(full) if one},
    }  # fmt: skip


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    full, limit, m = _full(config, args), config.get("swiglu_limit", 10.0), args.sizes
    keys: dict[str, Any] = {"swiglu_clamp_exp": args.layers * [float(limit)] if limit and limit > 0 else None}
    if config.get("n_group", 1) == config.get("topk_group", 1) == 1:
        keys |= {"expert_group_count": None, "expert_group_used_count": None}
    if full:
        keys |= {
            "attention.indexer.head_count": m["index_heads"], "attention.indexer.key_length": m["index_head"],
            "attention.indexer.top_k": config.integer("index_topk"), "attention.indexer.types": full,
        }  # fmt: skip
    return keys


def _config(stored: StoredKeys) -> dict[str, Any]:
    config = {
        **layer_kinds(stored),
        "swiglu_limit": (stored.get("swiglu_clamp_exp") or [0.0])[0],
        "n_group": stored.get("expert_group_count", 1), "topk_group": stored.get("expert_group_used_count", 1),
    }  # fmt: skip
    if not stored.get("attention.indexer.types"):
        return config
    names = {"index_n_heads": "head_count", "index_head_dim": "key_length", "index_topk": "top_k"}
    return {**config, **full_config(stored), **{n: stored.get(f"attention.indexer.{k}") for n, k in names.items()}}


def _streams(part: str, module: str) -> tuple[Row, ...]:
    """What mixes the streams before and after a layer's attention, or its network."""
    return tuple(
        Row(
            f"{module}.hc_pre.hc_{key}", shape, (f"hc_pre.{module}.hc_{key}",), name=f"hc_{part}_{key}.weight",
            exact=True, floats="F32",
        )
        for key, shape in (("fn", "mixes all"), ("base", "mixes"), ("scale", "two"))
    )  # fmt: skip


def _saved(*rows: Row) -> tuple[Row, ...]:
    """Rows with transformers' names of gates, too."""
    names = {row: (*row.also, row.source.replace("gate_proj", "linear_gate")) for row in rows}
    return tuple(replace(row, also=names[row]) if "gate_proj" in row.source else row for row in rows)


HY_V4 = Family(
    titles=("Hunyuan 4",), arch="hy_v4", named_as="glm-dsa", architectures=("HYV4ForCausalLM",), model_type="hy_v4",
    keys={
        "num_experts": None, "moe_intermediate_size": None, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
    },
    expects=(
        SILU, NO_BIASES, Expected("scoring_func", ("sigmoid",)),
        Expected("tie_word_embeddings", (False,), "llama.cpp's graph needs a head"),
    ),
    names={"num_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
    sizes=_sizes,
    metadata=(
        *LATENT, Computed(_metadata, _config), Key("hyper_connection.count", "hc_mult", size="streams"),
        Key("hyper_connection.epsilon", "hc_eps", 1e-6), Key("hyper_connection.magnitude", "hc_magnitude", 2.0),
    ),
    predicts="dropped", alternative="mlp.experts.",  # stacks
    table=(
        *decoder(
            Row("input_layernorm", "hidden"),
            *LATENT_ATTENTION,
            Row("self_attn.learnable_sink_param", "heads", ("self_attn.sinks",), exact=True, name="attn_sinks.weight"),
            Row("self_attn.linear_gate", "attended hidden", ("self_attn.gate_proj",), name="attn_gate.weight"),
            *in_layers(lambda args, layer: f"full.{layer}" in args.more, *INDEXER),
            *_streams("attn", "hc_attn_layer"),
            *_streams("ffn", "hc_mlp_layer"),
            Row("post_attention_layernorm", "hidden"),
            *networks(
                _saved(*gated_mlp("mlp", "inner")),
                *_saved(*EXPERTS),
                ROUTER_BIAS,
                *_saved(*gated_mlp("mlp.shared_experts", "shared")),
            ),
        ),
        *(
            Row(
                f"model.hc_head.hc_head_{key}", shape, (f"model.hc_pre.hc_head.hc_head_{key}",),
                name=f"output_hc_{key}.weight", exact=True, floats="F32",
            )
            for key, shape in (("fn", "streams all"), ("base", "streams"), ("scale", "one"))
        ),
    ),
)  # fmt: skip
