"""Phi-3.5-MoE: Phi-3's rules of rotation, layer norms and biases everywhere, experts with Mixtral's names."""

from dataclasses import replace
from typing import Any

from bridge.models.config.gguf_keys import Computed, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.phi3 import PHI3, phi3_config
from bridge.models.family import EMBEDDINGS, EXPERTS, Row, attention, decoder, required


def _config(stored: StoredKeys) -> dict[str, Any]:
    rules = phi3_config(stored)["rope_parameters"]
    if "rope_factors_long.weight" in stored.names:  # what others call attention_factor
        rules |= dict.fromkeys(("short_mscale", "long_mscale"), rules.get("attention_factor", 1.0))
    return {"rope_parameters": rules, "attention_bias": True, "lm_head_bias": True}


def _notes(_config: Config) -> list[str]:
    return [
        "llama.cpp (tried: build 11549) computes RMS norms and a softmax over all experts for this family, where the "
        "model has layer norms and weights of its own: its predictions differ"
    ]


PHIMOE = replace(
    PHI3,
    titles=("Phi-3.5-MoE¹⁵",),
    arch="phimoe",
    architectures=("PhiMoEForCausalLM", "PhimoeForCausalLM"),
    model_type="phimoe",
    keys={**PHI3.keys, "num_experts": None, "rope_theta": 1000000.0},
    metadata=(*PHI3.metadata, Computed(config=_config)),
    language_model=("phimoe", "PhimoeForCausalLM"),
    written_as={"num_experts": "num_local_experts"},
    notes=_notes,
    own="block_sparse_moe",
    table=decoder(
        Row("input_layernorm", "hidden", bias=required),
        *attention(bias=required, o_bias=required),
        Row("post_attention_layernorm", "hidden", bias=required),
        *EXPERTS,
        first=(EMBEDDINGS,),
        norm=Row("model.norm", "hidden", bias=required),
        head=Row("lm_head", "vocab hidden", bias=required),
    ),
)
