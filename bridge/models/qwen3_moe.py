"""Qwen3-MoE: Qwen3's attention with experts, none of them shared.

llama.cpp normalizes the weights of the chosen experts to a sum of one: norm_topk_prob must be true.
transformers takes it as false where config.json does not say.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.errors import BridgeError
from bridge.models import qwen3
from bridge.models.decoder import QKV, Family
from bridge.models.model_config import Config
from bridge.models.moe import Experts, add_expert_metadata, add_experts, expect_sparse_layers, read_experts
from bridge.models.qwen3 import Qwen3Args


@dataclass(frozen=True)
class Qwen3MoeArgs(Qwen3Args):
    experts: Experts


def read(config: Config) -> Qwen3MoeArgs:
    expect_sparse_layers(config)
    if not config.get("norm_topk_prob", False):
        raise BridgeError(
            f"{config.path}: norm_topk_prob is not true; llama.cpp normalizes this architecture's expert weights, and "
            "the model would not be the same"
        )
    experts = read_experts(config, "moe_intermediate_size")
    # the dense width is of no use here
    config = config.with_values(intermediate_size=config.get("intermediate_size", experts.inner))
    return Qwen3MoeArgs(**vars(qwen3.read(config)), experts=experts)


QWEN3_MOE = Family(
    "qwen3moe", read, qwen3.needs_bias, biases=QKV, qk_norm=True,
    feed_forward=add_experts, add_metadata=add_expert_metadata, notes=qwen3.notes,
)  # fmt: skip
