"""Phi-3.5-MoE: Phi-3's rules of rotation, layer norms and biases everywhere, experts with Mixtral's names."""

from dataclasses import replace

from bridge.models.families.phi3 import PHI3
from bridge.models.family import EMBEDDINGS, EXPERTS, Row, attention, decoder, required
from bridge.models.model_config import Config


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
