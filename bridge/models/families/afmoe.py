"""Arcee Trinity (AFMoE): gated heads, norms before and after, and many experts beside a shared one.

Three of four layers attend to a window, and these alone rotate; in llama.cpp every fourth layer does neither.
"""

from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.mixtures import LEADING, router_bias
from bridge.models.families.windows import window_config, window_layers, window_rule
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

_PERIOD = window_rule("afmoe").period or 1


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    count = config.count("num_shared_experts", 2)
    return {"shared_experts": count, "shared": count * args.expert_inner}


def _has_shared(args: Arguments) -> bool:
    return args.more["shared_experts"] > 0


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    period = config.integer("global_attn_every_n_layers", _PERIOD)
    if window_layers(config, args.layers, period) != window_rule("afmoe").by_default(args.layers):
        raise BridgeError(
            f"{config.path}: layers other than every fourth attend to everything; llama.cpp rotates all but every "
            "fourth in AFMoE"
        )
    return {"attention.sliding_window": config.integer("sliding_window", 1024)}


def _config(stored: StoredKeys) -> dict[str, Any]:
    return {**window_config(stored), "global_attn_every_n_layers": _PERIOD, "score_func": "sigmoid"}


AFMOE = Family(
    titles=("Arcee Trinity",), arch="afmoe", architectures=("AfmoeForCausalLM",), model_type="afmoe",
    keys={
        "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "head_dim": 128, "num_experts": None,
        "moe_intermediate_size": None, "first_k_dense_replace": 1, "mup_enabled": False,
    },
    names={"first_k_dense_replace": "num_dense_layers"},
    expects=(
        SILU, NO_BIASES,
        Expected("mup_enabled", (True,), "llama.cpp multiplies the embeddings of this architecture", written=True),
        Expected("route_norm", (True,), "the model normalizes the weights of experts", written=True),
        Expected("score_func", ("sigmoid",)), Expected("n_group", (1, 0)),
    ),
    sizes=_sizes,
    metadata=(
        Computed(_metadata, _config), Constant("expert_gating_func", 2),
        Constant("expert_weights_norm", True), Key("expert_weights_scale", "route_scale", 1.0),
        Key("expert_shared_count", "num_shared_experts", size="shared_experts", missing=0),
        LEADING,
    ),
    table=decoder(
        Row("input_layernorm", "hidden"),
        *attention(Row("self_attn.q_norm", "head"), Row("self_attn.k_norm", "head")),
        Row("self_attn.gate_proj", "q hidden"),
        Row("post_attention_layernorm", "hidden"),
        Row("pre_mlp_layernorm", "hidden"),
        *networks(
            gated_mlp("mlp", "inner"),
            Row("mlp.router.gate", "experts hidden", floats="F32"),
            *EXPERTS[1:],
            router_bias("mlp.expert_bias"),
            *(Row(row.source, row.shape, columns_of=row.columns_of, when=_has_shared)
              for row in gated_mlp("mlp.shared_experts", "shared")),
        ),
        Row("post_mlp_layernorm", "hidden"),
    ),
)  # fmt: skip
