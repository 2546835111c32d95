"""Muse Glimmer: normalized embeddings, heads gated one by one, and windows in three of four layers, which alone rotate.

Norms around attention and network are stored minus one. q and k are normalized by no weights, and q is multiplied by
a number of the config: GGUF has both as the weights of norms, for llama.cpp multiplies by these.
"""

from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_rules
from bridge.models.family import NO_BIASES, Expected, Family, Row, attention, decoder, gated_mlp, require_layer

_WINDOWED, _FULL = "sliding_attention", "full_attention"
_SCALE = 3.87  # of q


def _windows(config: Config, args: Arguments) -> list[bool]:
    """Whether each layer attends to a window; by default the last does not, nor every fourth before it."""
    default = [_FULL if (args.layers - 1 - layer) % 4 == 0 else _WINDOWED for layer in range(args.layers)]
    kinds = config.get("layer_types", default)
    if len(kinds) != args.layers or not {*kinds} <= {_WINDOWED, _FULL}:
        raise BridgeError(f"{config.path}: layer_types is {kinds!r:.80}, must be full or sliding, for every layer")
    return [kind == _WINDOWED for kind in kinds]


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    windows, rules = _windows(config, args), rope_rules(config)
    bases = config.get("layer_rope_theta", windows)
    require_layer(config, windows, "has a window")
    if [bool(base) for base in bases] != windows:
        raise BridgeError(
            f"{config.path}: layer_rope_theta is {bases!r:.80}; llama.cpp rotates in the layers with a window, and in "
            "these alone"
        )
    if args.rope.type != "default":
        raise BridgeError(f"{config.path}: rope of type {rules['rope_type']!r}; llama.cpp has default for this model")
    return {"attention.sliding_window_pattern": windows}


def _config(stored: StoredKeys) -> dict[str, Any]:
    windows = stored.get("attention.sliding_window_pattern")
    return {"layer_types": [_WINDOWED if one else _FULL for one in windows]}


def _norm(name: str) -> Row:
    return Row(name, "hidden", change="+1")


MUSE_GLIMMER = Family(
    titles=("Muse Glimmer",), arch="muse-glimmer", named_as="gemma3",
    architectures=("MuseGlimmerForConditionalGeneration",), model_type="muse_glimmer",
    keys={"head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
    expects=(
        Expected("hidden_act", ("silu", "swish"), written=True), NO_BIASES,
        Expected("post_norm_eps", (1e-8,), written=True),
    ),
    names={"hidden_act": "hidden_activation"},
    factors=lambda config, _args: {
        "self_attn.q_norm": [config.number("qk_scale_factor", _SCALE)], "self_attn.k_norm": [1.0],
    },
    metadata=(
        Key("final_logit_softcapping", "final_logit_softcapping", 20.0),
        Key("logit_scale", "output_multiplier", 0.19611613513818404),
        Key("attention.sliding_window", "sliding_window", 2048), Computed(_metadata, _config),
    ),
    told={"qk_scale_factor": "blk.0.attn_q_norm.weight"},
    language_model=("muse_glimmer_text", "MuseGlimmerForConditionalGeneration"), wrapped=True,
    table=decoder(
        _norm("input_layernorm"),
        *attention(
            Row("self_attn.q_norm", "head", filled=True), Row("self_attn.k_norm", "head", filled=True),
            interleaved=True,
        ),
        Row("self_attn.gate_proj", "q hidden", name="attn_gate.weight"),
        _norm("post_attention_layernorm"),
        _norm("pre_feedforward_layernorm"),
        *gated_mlp("mlp", "inner"),
        _norm("post_feedforward_layernorm"),
        head=Row("lm_head", "vocab hidden"),  # llama.cpp's graph needs one even if the embeddings are tied
    ),
)  # fmt: skip
