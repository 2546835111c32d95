"""Qwen2 and Qwen3, their mixtures of experts, and the language models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Qwen2 is Llama's decoder with biases on q, k and v; heads are rotated by halves. Qwen3 has no biases, normalizes heads
of q and k, and its head_dim is independent of the hidden size.

Qwen1.5-MoE and Qwen2-MoE have many small experts, and one shared by all tokens; Qwen3-MoE shares none. llama.cpp does
not normalize the first ones' weights of a token's experts, norm_topk_prob must be false; it normalizes Qwen3's to a sum
of one, and norm_topk_prob must be true, while transformers' default is false.

The vision models' decoders are rotated by three positions, which are equal for text. The sections tell how many pairs
of a head each position rotates.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import ATTENTION_BIAS, Computed
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_rules
from bridge.models.family import (
    ALL_SPARSE,
    EXPERTS,
    SILU,
    Expected,
    Family,
    Row,
    configured,
    decoder,
    gated_mlp,
    pre_norm_attention,
    required,
)

_KEYS2 = {"max_position_embeddings": 32768, "use_sliding_window": False}
_UNNORMALIZED = "llama.cpp does not normalize this architecture's expert weights"
_ATTENTION2 = pre_norm_attention(bias=required)

QWEN2 = Family(
    titles=("Qwen2 and 2.5",), arch="qwen2", architectures=("Qwen2ForCausalLM",), model_type="qwen2",
    keys=_KEYS2,
    table=decoder(*_ATTENTION2, *gated_mlp("mlp", "inner")),
)  # fmt: skip

QWEN2_MOE = Family(
    titles=("Qwen2-MoE",), arch="qwen2moe", architectures=("Qwen2MoeForCausalLM",), model_type="qwen2_moe",
    keys={**_KEYS2, "num_experts": None, "moe_intermediate_size": None, "shared_expert_intermediate_size": None},
    expects=(
        SILU, *ALL_SPARSE, Expected("norm_topk_prob", (False,), _UNNORMALIZED, written=True),
        Expected("qkv_bias", (True,)),
    ),
    table=decoder(
        *_ATTENTION2,
        *EXPERTS,
        Row("mlp.shared_expert_gate", "hidden", change="squeezed"),  # a matrix of one row
        *gated_mlp("mlp.shared_expert", "shared"),
        head=Row("lm_head", "vocab hidden"),  # llama.cpp's graph needs one even if the embeddings are tied
    ),
)  # fmt: skip


# 128 is transformers' default, whatever hidden_size / num_attention_heads is
_KEYS3 = {"max_position_embeddings": 32768, "head_dim": 128, "use_sliding_window": False, "attention_bias": False}
_ATTENTION3 = pre_norm_attention(Row("self_attn.q_norm", "head"), Row("self_attn.k_norm", "head"), bias=configured)

QWEN3 = Family(
    titles=("Qwen3",), arch="qwen3", architectures=("Qwen3ForCausalLM",), model_type="qwen3",
    keys=_KEYS3,
    metadata=(ATTENTION_BIAS,),
    table=decoder(*_ATTENTION3, *gated_mlp("mlp", "inner")),
)  # fmt: skip

QWEN3_MOE = Family(
    titles=("Qwen3-MoE",), arch="qwen3moe", architectures=("Qwen3MoeForCausalLM",), model_type="qwen3_moe",
    keys={**_KEYS3, "num_experts": None, "moe_intermediate_size": None, "norm_topk_prob": False},
    expects=(
        SILU, *ALL_SPARSE,
        Expected("norm_topk_prob", (True,), "llama.cpp normalizes this architecture's expert weights", written=True),
    ),
    metadata=(ATTENTION_BIAS,),
    table=decoder(*_ATTENTION3, *EXPERTS),
)  # fmt: skip


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
    titles=("Qwen2-VL and 2.5-VL",), arch="qwen2vl",
    architectures=("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"), model_type="qwen2_5_vl",
    metadata=(Computed(rope_sections),),
    language_model=("qwen2", "Qwen2ForCausalLM"), wrapped=True,
)  # fmt: skip

QWEN3_VL = replace(
    QWEN3,
    titles=("Qwen3-VL",), arch="qwen3vl", architectures=("Qwen3VLForConditionalGeneration",), model_type="qwen3_vl",
    metadata=(Computed(_deepstack), ATTENTION_BIAS),
    language_model=("qwen3", "Qwen3ForCausalLM"), wrapped=True,
)  # fmt: skip

QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    titles=("Qwen3-VL-MoE",), arch="qwen3vlmoe", architectures=("Qwen3VLMoeForConditionalGeneration",),
    model_type="qwen3_vl_moe",
    keys={**QWEN3_MOE.keys, "norm_topk_prob": True},
    metadata=QWEN3_VL.metadata,
    language_model=("qwen3_moe", "Qwen3MoeForCausalLM"), wrapped=True,
    # the published files have each expert's matrices transposed
    of_parts="^",
    table=tuple(replace(row, also=(f"{row.also[-1]}^",)) if "*" in row.source else row for row in QWEN3_MOE.table),
)  # fmt: skip
