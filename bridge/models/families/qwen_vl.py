"""The language models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2's and Qwen3's, rotated by three positions.

A token of text has three equal positions, so for text they are Qwen2 and Qwen3. The sections tell how many pairs of a
head each position rotates.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import ATTENTION_BIAS, Computed
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_rules
from bridge.models.families.qwen2 import QWEN2
from bridge.models.families.qwen3 import QWEN3, QWEN3_MOE


def rope_sections(config: Config, _args: Arguments, default: list[int] | None = None) -> dict[str, Any]:
    sections = rope_rules(config).get("mrope_section", default)
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(n) is int for n in sections):
        raise BridgeError(f"{config.path}: the rope parameters' mrope_section is {sections!r}, must be three counts")
    return {"rope.dimension_sections": [*sections, 0]}


def _deepstack(config: Config, args: Arguments) -> dict[str, Any]:
    """The sections, and the number of first layers to which image features are added."""
    layers = (config.get("vision_config") or {}).get("deepstack_visual_indexes") or []
    return {**rope_sections(config, args), "n_deepstack_layers": len(layers)}


QWEN2_VL = replace(
    QWEN2,
    titles=("Qwen2-VL and 2.5-VL",),
    arch="qwen2vl",
    architectures=("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
    model_type="qwen2_5_vl",
    metadata=(Computed(rope_sections),),
    language_model=("qwen2", "Qwen2ForCausalLM"),
    wrapped=True,
)

QWEN3_VL = replace(
    QWEN3,
    titles=("Qwen3-VL",),
    arch="qwen3vl",
    architectures=("Qwen3VLForConditionalGeneration",),
    model_type="qwen3_vl",
    metadata=(Computed(_deepstack), ATTENTION_BIAS),
    language_model=("qwen3", "Qwen3ForCausalLM"),
    wrapped=True,
)

QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    titles=("Qwen3-VL-MoE",),
    arch="qwen3vlmoe",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    model_type="qwen3_vl_moe",
    keys={**QWEN3_MOE.keys, "norm_topk_prob": True},
    metadata=QWEN3_VL.metadata,
    language_model=("qwen3_moe", "Qwen3MoeForCausalLM"),
    wrapped=True,
    # the published files have each expert's matrices transposed
    whole_own="^",
    table=tuple(replace(row, also=(f"{row.also[-1]}^",)) if "*" in row.source else row for row in QWEN3_MOE.table),
)
