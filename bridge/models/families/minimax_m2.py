"""MiniMax M2: a mixture of experts in every layer; q and k are normalized over all heads, a part of each is rotated.

A bias is added to the router's sigmoid to choose experts, but not to weight them.
"""

from typing import Any

from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.family import EXPERTS, SILU, Expected, Family, Row, attention, decoder


def _config(stored: StoredKeys) -> dict[str, Any]:
    return {
        "rotary_dim": stored.get("rope.dimension_count", stored.values["head_dim"]),
        "intermediate_size": stored.get("expert_feed_forward_length", stored.values["intermediate_size"]),
    }


MINIMAX_M2 = Family(
    titles=("MiniMax M2",),
    arch="minimax-m2",
    architectures=("MiniMaxM2ForCausalLM",),
    model_type="minimax_m2",
    keys={
        "head_dim": 128, "rope_theta": 5000000.0, "partial_rotary_factor": 1.0, "rotary_dim": None, "num_experts": None,
    },
    expects=(SILU, Expected("scoring_func", ("sigmoid",), written=True)),
    metadata=(
        Constant("expert_gating_func", 2),  # sigmoid
        Key("expert_feed_forward_length", size="inner"), Computed(config=_config)),
    written_as={"num_experts": "num_local_experts"},
    own="block_sparse_moe",
    table=decoder(
        Row("input_layernorm", "hidden"),
        *attention(Row("self_attn.q_norm", "q"), Row("self_attn.k_norm", "kv")),
        Row("post_attention_layernorm", "hidden"),
        *EXPERTS,
        Row(
            "block_sparse_moe.e_score_correction_bias", "experts", ("mlp.gate.e_score_correction_bias",), exact=True,
            name="exp_probs_b.bias",
        ),
    ),
)  # fmt: skip
