"""Granite 3: Llama's decoder with four factors: of embeddings, attention scores, each layer's output, and logits.

Of the mixtures of experts every layer has experts in two stacks, and some models one that all tokens share.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bridge.models.arguments import Arguments
from bridge.models.families.llama import LLAMA
from bridge.models.family import Row, attention, configured, decoder
from bridge.models.model_config import Config
from bridge.models.outline import Part


def _factors(config: Config, _args: Arguments) -> dict[str, Any]:
    return {
        "attention.scale": config.number("attention_multiplier", 1.0),
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "logit_scale": config.number("logits_scaling", 1.0),
    }


GRANITE = replace(
    LLAMA,
    titles=("Granite 3",),
    arch="granite",
    architectures=("GraniteForCausalLM",),
    model_type="granite",
    metadata=_factors,
)


def _shared(config: Config, _args: Arguments) -> dict[str, int]:
    return {"shared": config.side("shared_intermediate_size") if config.get("shared_intermediate_size") else 0}


def with_shared(config: Config, args: Arguments) -> dict[str, Any]:
    shared = args.more["shared"]
    return {**_factors(config, args), "expert_shared_feed_forward_length": shared or None}


def _half(which: int) -> Callable[[Arguments, str], tuple[Part, ...]]:
    """The rows of gate, 0, or of up, 1, in the shared expert's matrix of both."""

    def parts(args: Arguments, source: str) -> tuple[Part, ...]:
        shared = args.more["shared"]
        rows = which * shared + np.arange(shared)
        return (Part(source, (shared, args.hidden), rows, stored=(2 * shared, args.hidden)),)

    return parts


def _has_shared(args: Arguments) -> bool:
    return args.more["shared"] > 0


_MOE = "block_sparse_moe"
STACKED = (
    Row(f"{_MOE}.router.layer", "experts hidden", floats="F32"),
    Row(f"{_MOE}.experts.*.w1", "expert hidden", (f"{_MOE}.input_linear.weight[0/2]",)),
    Row(f"{_MOE}.experts.*.w3", "expert hidden", (f"{_MOE}.input_linear.weight[1/2]",)),
    Row(f"{_MOE}.experts.*.w2", "hidden expert", (f"{_MOE}.output_linear.weight",)),
    Row("shared_mlp.input_linear", "shared hidden", parts=_half(0), when=_has_shared, name="ffn_gate_shexp.weight"),
    Row("shared_mlp.input_linear", "shared hidden", parts=_half(1), when=_has_shared, name="ffn_up_shexp.weight"),
    Row("shared_mlp.output_linear", "hidden shared", when=_has_shared),
)

GRANITE_MOE = replace(
    GRANITE,
    titles=("Granite 3 MoE",),
    arch="granitemoe",
    architectures=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    model_type="granitemoe",
    keys={**LLAMA.keys, "num_experts": None},
    own="_linear.weight",
    sizes=_shared,
    metadata=with_shared,
    table=decoder(
        Row("input_layernorm", "hidden"),
        *attention(bias=configured, o_bias=configured, interleaved=True),
        Row("post_attention_layernorm", "hidden"),
        *STACKED,
    ),
)
