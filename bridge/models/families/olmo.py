"""OLMo 2: norms after attention and network, not before them; q and k are normalized over all heads at once.

OLMo 3 is the same decoder, in which three of four layers attend only to a window.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.windows import local_base, rules_of_both, window_config, window_keys
from bridge.models.family import NO_BIASES, SILU, Family, Row, attention, decoder, gated_mlp

OLMO2 = Family(
    titles=("OLMo 2",), arch="olmo2", architectures=("Olmo2ForCausalLM",), model_type="olmo2",
    keys={"rms_norm_eps": 1e-5},
    expects=(SILU, NO_BIASES),
    in_gguf=lambda get: not get("attention.sliding_window"),
    table=decoder(
        *attention(Row("self_attn.q_norm", "q"), Row("self_attn.k_norm", "kv")),
        Row("post_attention_layernorm", "hidden"),
        *gated_mlp("mlp", "inner"),
        Row("post_feedforward_layernorm", "hidden"),
    ),
)  # fmt: skip


def _windows(config: Config, args: Arguments) -> dict[str, Any]:
    base = local_base(config, args.rope.base)
    if base != args.rope.base:
        raise BridgeError(
            f"{config.path}: layers with a window rotate by rope_theta {base:g}, the others by {args.rope.base:g}; "
            "llama.cpp has one for both in OLMo 3"
        )
    return {**window_keys(config, args, "olmo2", named=True), "rope.freq_base_swa": base}


def _config(stored: StoredKeys) -> dict[str, Any]:
    base = stored.values["rope_parameters"]["rope_theta"]
    return {**window_config(stored), **rules_of_both(stored, base)}


OLMO3 = replace(
    OLMO2,
    titles=("OLMo 3",), architectures=("Olmo3ForCausalLM",), model_type="olmo3",
    keys={**OLMO2.keys, "rope_theta": 500000.0},
    metadata=(Computed(_windows, _config),),
    in_gguf=lambda get: bool(get("attention.sliding_window")),
)  # fmt: skip
