"""SmolLM3: Llama's decoder without rotation in every fourth layer, an interval that is compiled into llama.cpp."""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed
from bridge.models.config.model_config import Config
from bridge.models.families.llama import LLAMA
from bridge.models.family import SILU, Expected


def _every_fourth(config: Config, args: Arguments) -> dict[str, Any]:
    rotated = config.get("no_rope_layers")
    if rotated and list(map(bool, rotated)) != [(layer + 1) % 4 != 0 for layer in range(args.layers)]:
        raise BridgeError(f"{config.path}: no_rope_layers is {rotated}; llama.cpp omits rotation in every fourth layer")
    return {}


SMOLLM3 = replace(
    LLAMA,
    titles=("SmolLM3",),
    arch="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    model_type="smollm3",
    keys={**LLAMA.keys, "tie_word_embeddings": True, "rope_theta": 2000000.0},
    expects=(SILU, Expected("no_rope_layer_interval", (4,), "llama.cpp omits rotation in every fourth layer")),
    metadata=(Computed(_every_fourth),),
)
