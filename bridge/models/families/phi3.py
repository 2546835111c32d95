"""Phi-3, 3.5 and 4: q, k and v in one matrix, gate and up in another, in GGUF as in the checkpoint; LongRoPE.

llama.cpp runs its sliding window as full attention.
"""

from typing import Any

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.family import Family, Row, decoder


def _context(config: Config, args: Arguments) -> dict[str, Any]:
    original = args.rope.original_context or config.integer("original_max_position_embeddings", args.context)
    # llama.cpp expects 0 for a model without a window
    return {"rope.scaling.original_context_length": original, "attention.sliding_window": args.window or 0}


def phi3_config(stored: StoredKeys) -> dict[str, Any]:
    original = stored.get("rope.scaling.original_context_length") or stored.values["max_position_embeddings"]
    rules = dict(stored.values["rope_parameters"])
    if stored.get("rope.scaling.attn_factor"):
        rules["attention_factor"] = stored.get("rope.scaling.attn_factor")
    if "rope_factors_long.weight" in stored.names:
        rules["original_max_position_embeddings"] = original
    return {"original_max_position_embeddings": original, "rope_parameters": rules}


PHI3 = Family(
    titles=("Phi-3 to Phi-4",),
    arch="phi3",
    architectures=("Phi3ForCausalLM",),
    model_type="phi3",
    keys={"sliding_window": None, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    metadata=(Computed(_context, phi3_config),),
    table=decoder(
        Row("input_layernorm", "hidden"),
        Row("self_attn.qkv_proj", "q+kv+kv hidden", apart=tuple(f"self_attn.{part}_proj" for part in "qkv")),
        Row("self_attn.o_proj", "hidden q"),
        Row("post_attention_layernorm", "hidden"),
        Row("mlp.gate_up_proj", "inner+inner hidden", apart=("mlp.gate_proj", "mlp.up_proj")),
        Row("mlp.down_proj", "hidden inner", columns_of=("mlp.gate_up_proj",)),
    ),
)
