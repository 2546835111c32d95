"""Mistral: Llama's graph, plus a sliding window in the paper. Mixtral: the same with experts.

llama.cpp's llama graph attends to the whole context. A window is written to the metadata and
reported; up to its length the two agree. Both transformers and llama.cpp normalize the weights of a
token's experts to a sum of one.

Mistral Small 3.1 is Mistral inside a vision model. Ministral 3 is that, stretched by yarn; it multiplies q by a
temperature that grows with the position beyond the original context.
"""

from dataclasses import replace
from typing import Any

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_number, rope_rules, yarn_betas
from bridge.models.family import EXPERTS, SILU, Expected, Family, decoder, gated_mlp, optional, pre_norm_attention

_ATTENTION = pre_norm_attention(bias=optional, o_bias=optional, interleaved=True)

MISTRAL = Family(
    titles=("Mistral",), arch="llama", architectures=("MistralForCausalLM",), model_type="mistral",
    keys={"sliding_window": None},
    in_gguf=lambda get: not get("expert_count") and bool(get("attention.sliding_window")),
    divided=True,
    table=decoder(*_ATTENTION, *gated_mlp("mlp", "inner", bias=optional)),
)  # fmt: skip

MIXTRAL = Family(
    titles=("Mixtral",), arch="llama", architectures=("MixtralForCausalLM",), model_type="mixtral",
    keys={"sliding_window": None, "num_experts": None},
    in_gguf=lambda get: bool(get("expert_count")),
    written_as={"num_experts": "num_local_experts"},
    divided=True,
    table=decoder(*_ATTENTION, *EXPERTS),
    alternative="block_sparse_moe",
)  # fmt: skip


def _temperature(config: Config, args: Arguments) -> dict[str, Any]:
    if config.get("model_type") != "ministral3":
        return {}
    config.expect("rope_parameters.rope_type", ("yarn",), args.rope.type, "llama.cpp reads Ministral 3 with yarn")
    rules = rope_rules(config)
    return {
        "rope.scaling.attn_factor": None,
        "rope.scaling.yarn_log_multiplier": rope_number(config, rules, "mscale_all_dim"),
        "attention.temperature_scale": rope_number(config, rules, "llama_4_scaling_beta"),
        **yarn_betas(config, args.rope),
    }


def _config(stored: StoredKeys) -> dict[str, Any]:
    beta = stored.get("attention.temperature_scale")
    if beta is None:
        return {}
    scale = stored.get("rope.scaling.yarn_log_multiplier")
    more = {"mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": beta}
    rules = {**stored.values["rope_parameters"], **more}
    return {"rope_parameters": rules, "model_type": "ministral3", "class": "Ministral3ForCausalLM"}


MISTRAL3 = replace(
    MISTRAL,
    titles=("Mistral Small 3.1", "Ministral 3"), arch="mistral3",
    architectures=("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"), model_type="mistral3",
    expects=(
        SILU,
        Expected(
            "model_type", ("mistral", "mistral3", "ministral3"), "this language model is not in the table",
            by_template=True,
        ),
    ),
    metadata=(Computed(_temperature, _config),),
    language_model=("mistral", "MistralForCausalLM"), wrapped=True,
)  # fmt: skip
