"""Granite 3: Llama's decoder with four factors: of embeddings, attention scores, each layer's output, and logits.

Of the mixtures of experts every layer has experts in two stacks, and some models one that all tokens share.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import ATTENTION_BIAS, Computed, Key, StoredKeys
from bridge.models.families.llama import LLAMA
from bridge.models.family import Row, configured, decoder, pre_norm_attention
from bridge.models.outline import Part

FACTORS = (
    Key("attention.scale", "attention_multiplier", 1.0, missing=None),
    Key("embedding_scale", "embedding_multiplier", 1.0),
    Key("residual_scale", "residual_multiplier", 1.0),
    Key("logit_scale", "logits_scaling", 1.0),
)
SHARED = Key("expert_shared_feed_forward_length", "shared_intermediate_size", defines="shared", optional=True)

GRANITE = replace(
    LLAMA,
    titles=("Granite 3",),
    arch="granite",
    architectures=("GraniteForCausalLM",),
    model_type="granite",
    metadata=(*FACTORS, ATTENTION_BIAS),
)


def _kind(stored: StoredKeys) -> dict[str, Any]:
    shared = {"model_type": "granitemoeshared", "class": "GraniteMoeSharedForCausalLM"}
    return shared if stored.get(SHARED.key) else {}


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
    alternative="_linear.weight",
    metadata=(*FACTORS, SHARED, ATTENTION_BIAS, Computed(config=_kind)),
    written_as={"num_experts": "num_local_experts"},
    table=decoder(
        *pre_norm_attention(bias=configured, o_bias=configured, interleaved=True),
        *STACKED,
    ),
)
