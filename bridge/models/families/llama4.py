"""Llama 4: every second layer or every one has experts and a shared one; every fourth attends to all, unrotated.

The others attend to chunks of 8192 tokens. llama.cpp normalizes q and k but in the model of 128 experts.
"""

from typing import Any

from bridge.errors import BridgeError
from bridge.gguf_file.architectures import ARCHITECTURES
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import ATTENTION_BIAS, Computed, Key
from bridge.models.config.model_config import Config
from bridge.models.family import (
    SILU,
    Expected,
    Family,
    Row,
    configured,
    decoder,
    gated_mlp,
    in_layers,
    other_layers,
    pre_norm_attention,
)

_BUILT_IN = "llama.cpp's graph has it built in"
_MAVERICK = ARCHITECTURES["llama4"].no_unit_norms  # experts


def _checked(config: Config, args: Arguments) -> dict[str, Any]:
    """No keys; BridgeError for what llama.cpp's graph does otherwise."""
    rotated = [int((layer + 1) % 4 != 0) for layer in range(args.layers)]
    config.expect("no_rope_layers", (rotated, []), rotated, _BUILT_IN)
    normed = args.experts != _MAVERICK
    if args.qk_norm != normed:
        by_count = f"{normed} for {args.experts} experts"
        raise BridgeError(f"{config.path}: use_qk_norm is {args.qk_norm}; llama.cpp has {by_count}")
    return {}


def _sparse(args: Arguments, layer: int) -> bool:
    return (layer + 1) % args.more["step"] == 0


_EXPERTS = "feed_forward.experts"

LLAMA4 = Family(
    titles=("Llama 4",), arch="llama4", architectures=("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
    model_type="llama4_text",
    keys={
        "rope_theta": 500000.0, "attention_bias": False, "num_experts": None, "moe_intermediate_size": None,
        "use_qk_norm": True, "rms_norm_eps": 1e-5,
    },
    expects=(
        SILU, Expected("attention_chunk_size", (8192,), _BUILT_IN), Expected("floor_scale", (8192,), _BUILT_IN),
        Expected("attn_scale", (0.1,), _BUILT_IN), Expected("attn_temperature_tuning", (True, 4), _BUILT_IN),
    ),
    names={"intermediate_size": "intermediate_size_mlp", "moe_intermediate_size": "intermediate_size"},
    sizes=lambda config, args: {"step": config.integer("interleave_moe_layer_step", 1), "shared": args.expert_inner},
    metadata=(
        Computed(_checked, lambda stored: {"use_qk_norm": stored.get("expert_count") != _MAVERICK}),
        Key("interleave_moe_layer_step", "interleave_moe_layer_step", 1), ATTENTION_BIAS,
    ),
    language_model=("llama4_text", "Llama4ForCausalLM"), written_as={"num_experts": "num_local_experts"}, wrapped=True,
    alternative=_EXPERTS, unstacked=True,
    divided=True,
    table=decoder(
        *pre_norm_attention(bias=configured, o_bias=configured),
        *in_layers(other_layers(_sparse), *gated_mlp("feed_forward", "inner")),
        *in_layers(
            _sparse,
            Row("feed_forward.router", "experts hidden", floats="F32"),
            Row(f"{_EXPERTS}.*.gate_proj", "expert hidden", (f"{_EXPERTS}.gate_up_proj[0/2]^",)),
            Row(f"{_EXPERTS}.*.up_proj", "expert hidden", (f"{_EXPERTS}.gate_up_proj[1/2]^",)),
            Row(f"{_EXPERTS}.*.down_proj", "hidden expert", (f"{_EXPERTS}.down_proj^",)),
            *gated_mlp("feed_forward.shared_expert", "shared"),
        ),
    ),
)  # fmt: skip
