"""Granite 4 hybrid: most layers are Mamba-2's, a few have Granite 3's attention without rotation; all have experts."""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import ATTENTION_BIAS, Computed, Constant, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.granite import FACTORS, GRANITE_MOE, SHARED, STACKED
from bridge.models.families.mamba2 import mamba2, mamba2_keys, mamba2_sizes
from bridge.models.family import NO_BIASES, SILU, Expected, Row, attention, decoder, in_layers


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    heads, groups = args.more["ssm_heads"], args.more["groups"]
    inner = config.integer("mamba_expand", 2) * args.hidden
    if inner % heads or inner % groups:
        raise BridgeError(f"{config.path}: {inner} elements of a Mamba layer in {heads} heads and {groups} groups")
    return mamba2_sizes(args, inner)


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
    titles=("Granite 4 hybrid",),
    arch="granitehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    model_type="granitemoehybrid",
    keys={**GRANITE_MOE.keys, "layer_types": None},
    expects=(
        SILU, NO_BIASES, Expected("position_embedding_type", (None, "nope"), written=True),
        Expected("mamba_proj_bias", (False,)), Expected("mamba_conv_bias", (True,)),
    ),
    sizes=_sizes,
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
        *STACKED,
    ),
)  # fmt: skip
