"""OLMo 3: OLMo 2's decoder, in which three of four layers attend only to a window."""

from dataclasses import replace
from typing import Any

from bridge.models.arguments import Arguments
from bridge.models.families.olmo2 import OLMO2
from bridge.models.families.windows import window_layers
from bridge.models.model_config import Config


def _windows(config: Config, args: Arguments) -> dict[str, Any]:
    return {**window_layers(config, args), "rope.freq_base_swa": args.rope.base}


OLMO3 = replace(
    OLMO2,
    titles=("OLMo 3",),
    architectures=("Olmo3ForCausalLM",),
    model_type="olmo3",
    keys={**OLMO2.keys, "rope_theta": 500000.0},
    metadata=_windows,
)
