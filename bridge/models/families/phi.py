"""Phi-3 to Phi-4: q, k and v in one matrix, gate and up in another, in GGUF as in the checkpoint; LongRoPE.

llama.cpp runs its sliding window as full attention. Phi-3.5-MoE has Phi-3's rules of rotation, layer norms and biases
everywhere, and experts with Mixtral's names.
"""

from dataclasses import replace
from typing import Any

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.family import EMBEDDINGS, EXPERTS, Family, Row, attention, decoder, required


def _context(config: Config, args: Arguments) -> dict[str, Any]:
    original = args.rope.original_context or config.integer("original_max_position_embeddings", args.context)
    # llama.cpp expects 0 for a model without a window
    return {"rope.scaling.original_context_length": original, "attention.sliding_window": args.window or 0}


def _config(stored: StoredKeys) -> dict[str, Any]:
    original = stored.get("rope.scaling.original_context_length") or stored.values["max_position_embeddings"]
    rules = dict(stored.values["rope_parameters"])
    if stored.get("rope.scaling.attn_factor"):
        rules["attention_factor"] = stored.get("rope.scaling.attn_factor")
    if "rope_factors_long.weight" in stored.names:
        rules["original_max_position_embeddings"] = original
    return {"original_max_position_embeddings": original, "rope_parameters": rules}


PHI3 = Family(
    titles=("Phi-3 to Phi-4",), arch="phi3", architectures=("Phi3ForCausalLM",), model_type="phi3",
    keys={"sliding_window": None, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    metadata=(Computed(_context, _config),),
    divided=True,
    table=decoder(
        Row("input_layernorm", "hidden"),
        Row("self_attn.qkv_proj", "q+kv+kv hidden", separate=tuple(f"self_attn.{part}_proj" for part in "qkv")),
        Row("self_attn.o_proj", "hidden q"),
        Row("post_attention_layernorm", "hidden"),
        Row("mlp.gate_up_proj", "inner+inner hidden", separate=("mlp.gate_proj", "mlp.up_proj")),
        Row("mlp.down_proj", "hidden inner", columns_of=("mlp.gate_up_proj",)),
    ),
)  # fmt: skip


def _moe_config(stored: StoredKeys) -> dict[str, Any]:
    rules = _config(stored)["rope_parameters"]
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
    titles=("Phi-3.5-MoE",), arch="phimoe", architectures=("PhiMoEForCausalLM", "PhimoeForCausalLM"),
    model_type="phimoe",
    keys={**PHI3.keys, "num_experts": None, "rope_theta": 1000000.0},
    metadata=(*PHI3.metadata, Computed(config=_moe_config)),
    language_model=("phimoe", "PhimoeForCausalLM"), written_as={"num_experts": "num_local_experts"}, notes=_notes,
    alternative="block_sparse_moe",
    table=decoder(
        Row("input_layernorm", "hidden", bias=required),
        *attention(bias=required, o_bias=required),
        Row("post_attention_layernorm", "hidden", bias=required),
        *EXPERTS,
        first=(EMBEDDINGS,),
        norm=Row("model.norm", "hidden", bias=required),
        head=Row("lm_head", "vocab hidden", bias=required),
    ),
)  # fmt: skip
