"""Granite 3: Llama's decoder with four factors: of embeddings, attention scores, each layer's output, and logits.

Of the mixtures of experts every layer has experts in two stacks, and some models one that all tokens share. In Granite
4 hybrid, most layers are Mamba-2's, a few have Granite 3's attention without rotation; all have experts.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import ATTENTION_BIAS, Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.llama import LLAMA
from bridge.models.families.mamba2 import mamba2, mamba2_keys, mamba2_sizes
from bridge.models.family import (
    NO_BIASES,
    SILU,
    Expected,
    Row,
    attention,
    configured,
    decoder,
    in_layers,
    pre_norm_attention,
    stacked,
)
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
    titles=("Granite 3",), arch="granite", architectures=("GraniteForCausalLM",), model_type="granite",
    metadata=(*FACTORS, ATTENTION_BIAS),
)  # fmt: skip


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


def has_shared(args: Arguments) -> bool:
    return args.more["shared"] > 0


_MOE = "block_sparse_moe"
_STACKED = (
    Row(f"{_MOE}.router.layer", "experts hidden", floats="F32"),
    *stacked(
        f"{_MOE}.experts",
        Row(f"{_MOE}.experts.*.w1", "expert hidden", (f"{_MOE}.input_linear.weight[0/2]",)),
        Row(f"{_MOE}.experts.*.w3", "expert hidden", (f"{_MOE}.input_linear.weight[1/2]",)),
        Row(f"{_MOE}.experts.*.w2", "hidden expert", (f"{_MOE}.output_linear.weight",)),
    ),
    Row("shared_mlp.input_linear", "shared hidden", parts=_half(0), when=has_shared, name="ffn_gate_shexp.weight"),
    Row("shared_mlp.input_linear", "shared hidden", parts=_half(1), when=has_shared, name="ffn_up_shexp.weight"),
    Row("shared_mlp.output_linear", "hidden shared", when=has_shared),
)

GRANITE_MOE = replace(
    GRANITE,
    titles=("Granite 3 MoE",), arch="granitemoe",
    architectures=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), model_type="granitemoe",
    keys={**LLAMA.keys, "num_experts": None},
    alternative="_linear.weight",
    metadata=(*FACTORS, SHARED, ATTENTION_BIAS, Computed(config=_kind)),
    written_as={"num_experts": "num_local_experts"},
    table=decoder(*pre_norm_attention(bias=configured, o_bias=configured, interleaved=True), *_STACKED),
)  # fmt: skip


def _metadata(_config: Config, args: Arguments) -> dict[str, Any]:
    heads = [args.kv_heads if _attends(args, layer) else 0 for layer in range(args.layers)]
    return {"attention.head_count_kv": heads}


def _config(stored: StoredKeys) -> dict[str, Any]:
    inner = stored.get("ssm.inner_size")
    return {
        "layer_types": ["attention" if count else "mamba" for count in stored.get("attention.head_count_kv")],
        "mamba_d_head": inner // stored.get("ssm.time_step_rank"),
        "mamba_expand": inner // stored.values["hidden_size"],
    }


def _attends(args: Arguments, layer: int) -> bool:
    return args.kinds[layer] in ("attention", "full_attention")


GRANITE_HYBRID = replace(
    GRANITE_MOE,
    titles=("Granite 4 hybrid",), arch="granitehybrid", architectures=("GraniteMoeHybridForCausalLM",),
    model_type="granitemoehybrid",
    keys={**GRANITE_MOE.keys, "layer_types": None},
    expects=(
        SILU, NO_BIASES, Expected("position_embedding_type", (None, "nope"), written=True),
        Expected("mamba_proj_bias", (False,)), Expected("mamba_conv_bias", (True,)),
    ),
    sizes=lambda config, args: mamba2_sizes(config, args, config.integer("mamba_expand", 2) * args.hidden),
    metadata=(
        *FACTORS, replace(SHARED, optional=False), Computed(_metadata, _config),
        *mamba2_keys(("mamba_d_conv", 4), ("mamba_d_state", None), ("mamba_n_groups", 1), ("mamba_n_heads", None)),
        Constant("rope.scaling.finetuned", False), ATTENTION_BIAS,
    ),
    table=decoder(
        Row("input_layernorm", "hidden"),
        *mamba2("mamba", lambda args, layer: args.kinds[layer] in ("mamba", "linear_attention")),
        *in_layers(_attends, *attention(interleaved=True)),
        Row("post_attention_layernorm", "hidden"),
        *_STACKED,
    ),
)  # fmt: skip
