"""Granite 4 hybrid: most layers are Mamba-2's, a few have Granite 3's attention without rotation; all have experts.

llama.cpp has one more dimension in A and D, and the norm's groups are rows of a matrix.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.arguments import Arguments
from bridge.models.families.granite import GRANITE_MOE, STACKED, with_shared
from bridge.models.family import NO_BIASES, NO_OTHER, SILU, Expected, Row, attention, decoder, required
from bridge.models.model_config import Config
from bridge.models.outline import Part

_CONTEXT = 2**20  # nothing depends on positions, so there is no length of training to keep to


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    heads, groups = config.side("mamba_n_heads"), config.side("mamba_n_groups", 1)
    inner, state = config.integer("mamba_expand", 2) * args.hidden, config.side("mamba_d_state")
    if inner % heads or inner % groups:
        raise BridgeError(f"{config.path}: {inner} elements of a Mamba layer in {heads} heads and {groups} groups")
    return {
        "shared": config.side("shared_intermediate_size"), "ssm_heads": heads, "ssm_inner": inner, "state": state,
        "groups": groups, "group": inner // groups, "kernel": config.side("mamba_d_conv", 4), "one": 1,
        "convolved": inner + 2 * groups * state,
    }  # fmt: skip


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    m = args.more
    return {
        **with_shared(config, args),
        "attention.head_count_kv": [args.kv_heads if _attends(args, i) else 0 for i in range(args.layers)],
        "ssm.conv_kernel": m["kernel"], "ssm.state_size": m["state"], "ssm.group_count": m["groups"],
        "ssm.inner_size": m["ssm_inner"], "ssm.time_step_rank": m["ssm_heads"],
        "rope.scaling.finetuned": False, "context_length": _CONTEXT,
    }  # fmt: skip


def _attends(args: Arguments, layer: int) -> bool:
    return args.kinds[layer] in ("attention", "full_attention")


def _mixes(args: Arguments, layer: int) -> bool:
    return args.kinds[layer] in ("mamba", "linear_attention")


def _vector(size: str, change: str | None = None) -> Callable[[Arguments, str], tuple[Part, ...]]:
    """A vector that is a matrix in the GGUF."""
    return lambda args, source: (Part(source, (args.more[size],), change=change),)


def _mamba(module: str, shape: str, **more: Any) -> Row:
    return Row(f"mamba.{module}", shape, layers=_mixes, **more)


GRANITE_HYBRID = replace(
    GRANITE_MOE,
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
        _mamba("in_proj", "ssm_inner+convolved+ssm_heads hidden"),
        _mamba("conv1d", "convolved kernel", bias=required, floats="F32", change="squeezed"),
        _mamba("dt_bias", "ssm_heads", exact=True, name="ssm_dt.bias"),
        _mamba("A_log", "ssm_heads one", exact=True, name="ssm_a", floats="F32", parts=_vector("ssm_heads", "-exp")),
        _mamba("D", "ssm_heads one", exact=True, name="ssm_d", floats="F32", parts=_vector("ssm_heads")),
        _mamba("norm", "groups group", floats="F32", parts=_vector("ssm_inner")),
        _mamba("out_proj", "hidden ssm_inner"),
        *(replace(row, layers=_attends) for row in attention(interleaved=True)),
        Row("post_attention_layernorm", "hidden"),
        *STACKED,
    ),
)  # fmt: skip
