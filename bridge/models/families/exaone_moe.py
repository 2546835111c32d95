"""K-EXAONE: norms before attention and network, heads of q and k normalized, a window in three of four layers.

Only layers with a window are rotated. All layers but the first have experts and shared ones; a bias is added to the
router's sigmoid to choose experts, but not to weight them. The layer that predicts a further token has no experts.
"""

from typing import Any

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key
from bridge.models.config.model_config import Config
from bridge.models.families.mixtures import LAYER_KINDS, UNSCALED, has_experts, router_bias, shared_width
from bridge.models.families.windows import rotated_window_keys, window_config
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
    other_layers,
    pre_norm_attention,
)
from bridge.models.prediction import QWENS, prediction


def _counted(config: Config, args: Arguments) -> dict[str, Any]:
    return {
        **rotated_window_keys(config, args, "exaone-moe"),
        "leading_dense_block_count": args.leading, "nextn_predict_layers": args.predicting,
    }  # fmt: skip


EXAONE_MOE = Family(
    titles=("K-EXAONE",), arch="exaone-moe", architectures=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
    model_type="exaone_moe",
    keys={
        "rms_norm_eps": 1e-5, "num_experts": None, "moe_intermediate_size": 1024, "first_k_dense_replace": 0,
        "rope_theta": 10000.0,
    },
    expects=(
        SILU, NO_BIASES, Expected("scoring_func", ("sigmoid",), written=True),
        Expected("tie_word_embeddings", (False,), "llama.cpp's graph needs a head"),
    ),
    sizes=shared_width("num_shared_experts"),
    metadata=(
        Computed(_counted, window_config),
        Key("expert_shared_count", "num_shared_experts", 1), Constant("expert_gating_func", 2),  # sigmoid
        Key("expert_shared_feed_forward_length", size="shared"), Key("expert_weights_norm", "norm_topk_prob", True),
        Key("expert_weights_scale", "routed_scaling_factor", 2.5, missing=1.0),
        Key("expert_group_count", "n_group", 1), Key("expert_group_used_count", "topk_group", 1),
        UNSCALED, LAYER_KINDS,
    ),
    predicts="carried", mtp=QWENS,
    divided=True,
    table=decoder(
        *pre_norm_attention(Row("self_attn.q_norm", "head"), Row("self_attn.k_norm", "head")),
        *in_layers(other_layers(has_experts), *gated_mlp("mlp", "inner")),
        *in_layers(
            has_experts, *EXPERTS, router_bias("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
            *gated_mlp("mlp.shared_experts", "shared"),
        ),
        *prediction(),
    ),
)  # fmt: skip
