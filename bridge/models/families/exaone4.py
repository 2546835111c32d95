"""EXAONE 4 and 4.5: OLMo 2's places of norms, heads of q and k normalized.

The models of 64 layers have a window in three of four.

Only layers with a window are rotated where there is one. llama.cpp knows that model by its 64 layers.
EXAONE 4.5 has images and layers that predict further tokens.
"""

from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed
from bridge.models.config.model_config import Config
from bridge.models.families.windows import window_config, window_keys, window_rule
from bridge.models.family import NO_BIASES, SILU, Family, Row, attention, decoder, gated_mlp
from bridge.models.prediction import QWENS, prediction

_LAYERS = window_rule("exaone4").layers


def _windows(config: Config, args: Arguments) -> dict[str, Any]:
    keys, window = window_keys(config, args, "exaone4", named=True), config.get("sliding_window")
    if bool(window) != (args.layers == _LAYERS):
        raise BridgeError(
            f"{config.path}: sliding_window is {window} with {args.layers} layers; llama.cpp has a window in EXAONE "
            f"4's model of {_LAYERS} layers alone, and always there"
        )
    if window and "attention.sliding_window_pattern" not in keys:
        raise BridgeError(f"{config.path}: sliding_window is {window}, and no layer has it; llama.cpp wants some")
    return keys


EXAONE4 = Family(
    titles=("EXAONE 4", "EXAONE 4.5"), arch="exaone4",
    architectures=("Exaone4ForCausalLM", "Exaone4_5_ForConditionalGeneration"), model_type="exaone4",
    keys={"rms_norm_eps": 1e-5},
    expects=(SILU, NO_BIASES),
    metadata=(Computed(_windows, window_config),),
    wrapped=True, predicts="carried", mtp=QWENS,
    divided=True,
    table=decoder(
        *attention(Row("self_attn.q_norm", "head"), Row("self_attn.k_norm", "head")),
        Row("post_attention_layernorm", "hidden"),
        *gated_mlp("mlp", "inner"),
        Row("post_feedforward_layernorm", "hidden"),
        *prediction(),
    ),
)  # fmt: skip
