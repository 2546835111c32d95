"""Granite with windows: Granite 3's decoder, in which most layers attend only to a window and heads have sinks.

Some layers may rotate nothing: in transformers their layer_rope_theta is 0, in older configs their number of
no_rope_layers. Experts, and the expert that all tokens share, keep gate and up in one matrix in GGUF too.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import ATTENTION_BIAS, Computed, Present, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.granite import FACTORS, GRANITE, SHARED, has_shared
from bridge.models.families.windows import window_config, window_layers
from bridge.models.family import Row, attention, configured, decoder, experts_with_gate_up, gated_mlp, require_layer

_TOKENS = 128  # of the window, in a config without it


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    if config.get("layer_types") is None:
        windows = [layer % 4 != 0 for layer in range(args.layers)]
    else:
        windows = list(window_layers(config, args.layers, 1))
    keys = {
        "attention.sliding_window": config.integer("sliding_window", _TOKENS),
        "attention.sliding_window_pattern": windows,
    }
    require_layer(config, windows, "has a window")
    rotated = _rotated(config, args)
    return keys if rotated is None else {**keys, "attention.rope_pattern": rotated}


def _rotated(config: Config, args: Arguments) -> list[bool] | None:
    """Whether each layer rotates; None where all do."""
    bases, numbers = config.get("layer_rope_theta"), config.get("no_rope_layers")
    listed = bases or numbers
    if not listed:
        return None
    if not isinstance(listed, list) or len(listed) != args.layers:
        raise BridgeError(f"{config.path}: {listed!r:.80} must have a number for each of {args.layers} layers")
    if bases and {base for base in bases if base} - {args.rope.base}:
        raise BridgeError(
            f"{config.path}: layer_rope_theta is {bases!r:.80}, rope_theta {args.rope.base:g}; llama.cpp has one for "
            "all layers that rotate"
        )
    require_layer(config, map(bool, listed), "rotates")
    return list(map(bool, listed)) if numbers or not all(listed) else None


def _config(stored: StoredKeys) -> dict[str, Any]:
    base, layers = stored.values["rope_parameters"]["rope_theta"], stored.values["num_hidden_layers"]
    rotated = stored.get("attention.rope_pattern") or layers * [True]
    return {**window_config(stored), "layer_rope_theta": [base if rotates else 0 for rotates in rotated]}


_ATTENTION = (
    Row("input_layernorm", "hidden"),
    *attention(bias=configured, o_bias=configured, interleaved=True),
    Row("self_attn.sinks", "heads", exact=True, name="attn_sinks.weight"),
    Row("post_attention_layernorm", "hidden"),
)
_KEYS = {"max_position_embeddings": 8192, "attention_bias": False, "rms_norm_eps": 1e-5}

GRANITE_SWA = replace(
    GRANITE,
    titles=("Granite with windows",), arch="granite_swa", named_as="granite", architectures=("GraniteSWAForCausalLM",),
    model_type="granite_swa",
    keys={**_KEYS, "tie_word_embeddings": True, "mlp_bias": False, "num_key_value_heads": 4},
    metadata=(*FACTORS, Computed(_metadata, _config), ATTENTION_BIAS, Present("mlp_bias", "ffn_gate.bias")),
    in_gguf=lambda get: not get("expert_count"),
    table=decoder(*_ATTENTION, *gated_mlp("mlp", "inner", bias=lambda args: args.mlp_bias)),
)  # fmt: skip

_MOE = "block_sparse_moe"
_GATE_UP, _GATE, _UP, _DOWN = experts_with_gate_up(f"{_MOE}.experts")
_STACK = f"{_MOE}.input_linear.weight"  # as repositories of older models have it
_UNLESS = (*_GATE.unless, _STACK)

GRANITE_MOE_SWA = replace(
    GRANITE_SWA,
    titles=("Granite MoE with windows",), named_as="granitemoe", architectures=("GraniteMoeSWAForCausalLM",),
    model_type="granitemoe_swa",
    keys={**_KEYS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "num_experts": None},
    metadata=(*FACTORS, Computed(_metadata, _config), SHARED, ATTENTION_BIAS),
    written_as={"num_experts": "num_local_experts"},
    in_gguf=lambda get: bool(get("expert_count")), alternative=".experts.",
    table=decoder(
        *_ATTENTION,
        Row(f"{_MOE}.router", "experts hidden", (f"{_MOE}.router.layer",), floats="F32", name="ffn_gate_inp.weight"),
        replace(_GATE_UP, also=(*_GATE_UP.also, _STACK), name="ffn_gate_up_exps.weight"),
        replace(_GATE, unless=_UNLESS),
        replace(_UP, unless=_UNLESS),
        replace(_DOWN, also=(*_DOWN.also, f"{_MOE}.output_linear.weight"), name="ffn_down_exps.weight"),
        Row("shared_mlp.input_linear", "shared+shared hidden", when=has_shared, name="ffn_up_shexp.weight"),
        Row("shared_mlp.output_linear", "hidden shared", when=has_shared, name="ffn_down_shexp.weight"),
    ),
)  # fmt: skip
