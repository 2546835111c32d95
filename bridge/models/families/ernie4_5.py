"""ERNIE 4.5: Llama's decoder without reordered rows: its heads are rotated by neighbours in the checkpoint too.

Of the mixtures of experts all layers but the first have experts and shared ones; a bias is added to the router's
softmax to choose experts, but not to weight them.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key
from bridge.models.config.model_config import Config
from bridge.models.families.mixtures import router_bias
from bridge.models.family import EXPERTS, SILU, Expected, Family, decoder, gated_mlp, networks, pre_norm_attention

_UNKNOWN = "llama.cpp's converter knows no such model"
_ATTENTION = pre_norm_attention()

ERNIE4_5 = Family(
    titles=("ERNIE 4.5",), arch="ernie4_5", architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    model_type="ernie4_5",
    keys={"tie_word_embeddings": True, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "head_dim": 128},
    expects=(SILU, Expected("use_bias", (False,), _UNKNOWN)),
    table=decoder(*_ATTENTION, *gated_mlp("mlp", "inner")),
)  # fmt: skip


def _shared(config: Config, args: Arguments) -> dict[str, int]:
    count = config.get("moe_num_shared_experts", 2)
    return {"shared_count": count, "shared": args.expert_inner * count}


def _has_shared(args: Arguments) -> bool:
    return args.more["shared"] > 0


def _checked(config: Config, args: Arguments) -> dict[str, Any]:
    last = config.get("moe_layer_end_index", -1)
    if last not in (-1, args.layers - 1):
        raise BridgeError(
            f"{config.path}: moe_layer_end_index is {last!r}; llama.cpp has experts in the last layer too"
        )
    return {}


ERNIE4_5_MOE = replace(
    ERNIE4_5,
    titles=("ERNIE 4.5 MoE",), arch="ernie4_5-moe", architectures=("Ernie4_5_MoeForCausalLM",),
    model_type="ernie4_5_moe",
    keys={
        "tie_word_embeddings": True, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "num_experts": None,
        "moe_intermediate_size": None, "first_k_dense_replace": 1,
    },
    names={
        "num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k",
        "first_k_dense_replace": "moe_layer_start_index",
    },
    expects=(*ERNIE4_5.expects, Expected("moe_layer_interval", (1,), _UNKNOWN)),
    sizes=_shared,
    metadata=(
        Computed(_checked), Key("expert_shared_count", "moe_num_shared_experts", size="shared_count", missing=0),
        Constant("interleave_moe_layer_step", 1),
        Key("expert_shared_feed_forward_length", size="shared", optional=True),
    ),
    predicts="dropped",
    table=decoder(
        *_ATTENTION,
        *networks(
            gated_mlp("mlp", "inner"),
            *EXPERTS,
            replace(router_bias("mlp.moe_statics.e_score_correction_bias"), change="squeezed"),
            *(replace(row, when=_has_shared) for row in gated_mlp("mlp.shared_experts", "shared")),
        ),
    ),
)  # fmt: skip
