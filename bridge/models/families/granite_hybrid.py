"""Granite 4 hybrid: most layers are Mamba-2's, a few have Granite 3's attention without rotation; all have experts."""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.arguments import Arguments
from bridge.models.families.granite import GRANITE_MOE, STACKED, with_shared
from bridge.models.families.mamba2 import mamba2, mamba2_keys, mamba2_sizes
from bridge.models.family import NO_BIASES, NO_OTHER, SILU, Expected, Row, attention, decoder
from bridge.models.model_config import Config


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    heads, groups = config.side("mamba_n_heads"), config.side("mamba_n_groups", 1)
    inner, state = config.integer("mamba_expand", 2) * args.hidden, config.side("mamba_d_state")
    if inner % heads or inner % groups:
        raise BridgeError(f"{config.path}: {inner} elements of a Mamba layer in {heads} heads and {groups} groups")
    kernel = config.side("mamba_d_conv", 4)
    return {"shared": config.side("shared_intermediate_size"), **mamba2_sizes(heads, inner, groups, state, kernel)}


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    return {
        **with_shared(config, args),
        "attention.head_count_kv": [args.kv_heads if _attends(args, i) else 0 for i in range(args.layers)],
        **mamba2_keys(args), "rope.scaling.finetuned": False,
    }  # fmt: skip


def _attends(args: Arguments, layer: int) -> bool:
    return args.kinds[layer] in ("attention", "full_attention")


def _mixes(args: Arguments, layer: int) -> bool:
    return args.kinds[layer] in ("mamba", "linear_attention")


GRANITE_HYBRID = replace(
    GRANITE_MOE,
    titles=("Granite 4 hybrid",),
    arch="granitehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    model_type="granitemoehybrid",
    keys={**GRANITE_MOE.keys, "layer_types": None},
    expects=(
        SILU, NO_BIASES, Expected("position_embedding_type", (None, "nope"), NO_OTHER),
        Expected("mamba_proj_bias", (False,), NO_OTHER), Expected("mamba_conv_bias", (True,), NO_OTHER),
    ),
    sizes=_sizes,
    metadata=_metadata,
    table=decoder(
        Row("input_layernorm", "hidden"),
        *mamba2("mamba", _mixes),
        *(replace(row, layers=_attends) for row in attention(interleaved=True)),
        Row("post_attention_layernorm", "hidden"),
        *STACKED,
    ),
)  # fmt: skip
