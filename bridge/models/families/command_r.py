"""Command-R and Aya: attention and network in parallel after one layer norm without bias; scaled logits, tied.

In Command R7B and A three of four layers have a window, and these alone are rotated. Cohere's mixture of experts has
dense layers first, which are rotated, too; what its experts and the shared ones make is averaged.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, Present, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.mixtures import LAYER_KINDS, UNSCALED, shared_width
from bridge.models.families.windows import rotated_window_keys, window_config, window_layers
from bridge.models.family import (
    EXPERTS,
    NO_BIASES,
    SILU,
    Expected,
    Family,
    Row,
    attention,
    decoder,
    gated_mlp,
    networks,
)
from bridge.models.prediction import prediction


def _context(config: Config, _args: Arguments) -> dict[str, Any]:
    """The trained context; max_position_embeddings says 8192."""
    return {"context_length": config.integer("model_max_length")} if config.get("model_max_length") else {}


COMMAND_R = Family(
    titles=("Command-R",), arch="command-r", architectures=("CohereForCausalLM",), model_type="cohere",
    keys={"tie_word_embeddings": True, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "use_qk_norm": False},
    expects=(
        SILU, NO_BIASES,
        Expected("tie_word_embeddings", (True,), "llama.cpp's graph for this architecture has no head of its own"),
    ),
    names={"rms_norm_eps": "layer_norm_eps"},
    metadata=(
        Key("logit_scale", "logit_scale", 0.0625), Constant("rope.scaling.type", "none"), Computed(_context),
        Present("use_qk_norm", "attn_q_norm.weight"),
    ),
    layer_norm=True,
    table=decoder(
        Row("input_layernorm", "hidden"),
        *attention(
            Row("self_attn.q_norm", "heads head", floats="F32", when=lambda args: args.qk_norm),
            Row("self_attn.k_norm", "kv_heads head", floats="F32", when=lambda args: args.qk_norm),
        ),
        *gated_mlp("mlp", "inner"),
    ),
)  # fmt: skip


COHERE2 = replace(
    COMMAND_R,
    titles=("Command R7B and A",), arch="cohere2", architectures=("Cohere2ForCausalLM",), model_type="cohere2",
    keys={"tie_word_embeddings": True, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
    expects=(SILU, COMMAND_R.expects[-1], Expected("rotary_pct", (1.0,))),
    metadata=(
        COMMAND_R.metadata[0], UNSCALED,
        Computed(lambda config, args: rotated_window_keys(config, args, "cohere2", False), window_config),
    ),
    table=decoder(Row("input_layernorm", "hidden"), *attention(), *gated_mlp("mlp", "inner")),
)  # fmt: skip


def _windows(config: Config, args: Arguments) -> dict[str, Any]:
    keys, rms = rotated_window_keys(config, args, "cohere2moe"), config.values.get("rms_norm_eps")
    unrotated = not all(window_layers(config, args.layers, 4)[: args.leading])
    if unrotated and config.get("prefix_dense_sliding_window_pattern", 1) != 1:
        raise BridgeError(
            f"{config.path}: prefix_dense_sliding_window_pattern is "
            f"{config.get('prefix_dense_sliding_window_pattern')}, so that a dense layer without a window is not "
            "rotated; llama.cpp rotates all dense layers here"
        )
    return {
        **keys, "leading_dense_block_count": args.leading,
        "attention.layer_norm_rms_epsilon": None if rms is None else float(rms),
    }  # fmt: skip


def _windows_config(stored: StoredKeys) -> dict[str, Any]:
    return {**window_config(stored), "rms_norm_eps": stored.get("attention.layer_norm_rms_epsilon")}


def _router(config: Config, args: Arguments) -> dict[str, Any]:
    """softmax is over the experts chosen: the same as over all of them where their weights are to sum to one."""
    softmax = config.get("expert_selection_fn", "softmax") == "softmax"
    count = config.count("num_shared_experts", 0)
    shared = {"expert_shared_count": count, "expert_shared_feed_forward_length": args.sizes["shared"]} if count else {}
    return {
        "expert_gating_func": 1 if softmax else 2,
        "expert_weights_norm": softmax or bool(config.get("norm_topk_prob", True)), **shared,
    }  # fmt: skip


def _router_config(stored: StoredKeys) -> dict[str, Any]:
    return {
        "expert_selection_fn": "softmax" if stored.get("expert_gating_func", 2) == 1 else "sigmoid",
        "norm_topk_prob": bool(stored.get("expert_weights_norm", False)),
        "num_shared_experts": stored.get("expert_shared_count", 0),
    }


def _has_shared(args: Arguments) -> bool:
    return args.more["shared"] > 0


COHERE2_MOE = replace(
    COHERE2,
    titles=("Command MoE",), arch="cohere2moe", named_as="exaone-moe", architectures=("Cohere2MoeForCausalLM",),
    model_type="cohere2_moe",
    keys={
        **COHERE2.keys, "num_experts": None, "moe_intermediate_size": 22528, "first_k_dense_replace": 0,
        "head_dim": 128,
    },
    expects=(
        SILU, Expected("expert_selection_fn", ("softmax", "sigmoid")),
        Expected("shared_expert_combination_strategy", ("average",), written=True),
    ),
    names={
        "rms_norm_eps": "layer_norm_eps", "intermediate_size": "prefix_dense_intermediate_size",
        "moe_intermediate_size": "intermediate_size",
    },
    sizes=shared_width("num_shared_experts", 0),
    metadata=(
        COMMAND_R.metadata[0], UNSCALED, Computed(_windows, _windows_config), Computed(_router, _router_config),
        LAYER_KINDS,
    ),
    predicts="carried",
    table=decoder(
        Row("input_layernorm", "hidden"),
        *attention(),
        *networks(
            gated_mlp("mlp", "inner"),
            *EXPERTS,
            *(replace(row, when=_has_shared) for row in gated_mlp("mlp.shared_experts", "shared")),
        ),
        *prediction(),
    ),
)  # fmt: skip
