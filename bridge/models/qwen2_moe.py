"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, many small experts, and one shared by all tokens.

llama.cpp takes the router's probabilities as they are: norm_topk_prob must be false.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.models import qwen2
from bridge.models.decoder import QKV, Family
from bridge.models.model_config import Config
from bridge.models.moe import Experts, add_expert_metadata, add_experts, expect_sparse_layers, read_experts
from bridge.models.qwen2 import Qwen2Args


@dataclass(frozen=True)
class Qwen2MoeArgs(Qwen2Args):
    experts: Experts


def read(config: Config) -> Qwen2MoeArgs:
    expect_sparse_layers(config)
    config.expect("norm_topk_prob", False, "llama.cpp does not normalize this architecture's expert weights")
    config.expect("qkv_bias", True, "llama.cpp's graph for this architecture has no other")
    experts = read_experts(config, "moe_intermediate_size", "shared_expert_intermediate_size")
    # the dense width is of no use where every layer has experts, and some configs leave it out
    config = config.with_values(intermediate_size=config.get("intermediate_size", experts.shared_inner))
    return Qwen2MoeArgs(**vars(qwen2.read(config)), experts=experts)


QWEN2_MOE = Family(
    "qwen2moe", read, lambda _args: QKV, biases=QKV, head_of_own=True,
    feed_forward=add_experts, add_metadata=add_expert_metadata, notes=qwen2.notes,
)  # fmt: skip
