"""MiniCPM 1, 2 and 4: Granite's decoder, with factors that are made of the model's sizes; LongRoPE in MiniCPM 4.

    embeddings                 * scale_emb
    what each layer adds       * scale_depth / sqrt(layers)
    logits                     / (hidden / dim_model_base)

MiniCPM 5 is a Llama.
"""

from dataclasses import replace
from typing import Any

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import ATTENTION_BIAS, Computed, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.granite import GRANITE
from bridge.models.family import SILU, Expected


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "residual_scale": config.number("scale_depth", 1.0) / args.layers**0.5,
        "logit_scale": args.hidden / config.number("dim_model_base", 1.0),
    }
    return {**keys, "rope.scaling.type": "longrope"} if args.rope.type == "longrope" else keys


def _config(stored: StoredKeys) -> dict[str, Any]:
    hidden, layers = stored.values["hidden_size"], stored.values["num_hidden_layers"]
    config = {
        "scale_depth": stored.get("residual_scale") * layers**0.5,
        "dim_model_base": round(hidden / stored.get("logit_scale")),
    }
    if "rope_factors_long.weight" not in stored.names:
        return config
    rules = {
        **stored.values["rope_parameters"],
        "original_max_position_embeddings": stored.get(
            "rope.scaling.original_context_length", stored.values["max_position_embeddings"]
        ),
    }
    if stored.get("rope.scaling.attn_factor"):
        rules["attention_factor"] = stored.get("rope.scaling.attn_factor")
    return {**config, "rope_parameters": rules}


def _notes(config: Config) -> list[str]:
    sparse = config.get("sparse_config")
    if not isinstance(sparse, dict):
        return []
    return ["sparse_config is dropped: llama.cpp attends to all tokens, where the model chooses blocks of a long text"]


MINICPM = replace(
    GRANITE,
    titles=("MiniCPM 1 and 2", "MiniCPM 4"), arch="minicpm", architectures=("MiniCPMForCausalLM",),
    model_type="minicpm",
    keys={"max_position_embeddings": 2048, "attention_bias": False, "tie_word_embeddings": True},
    expects=(SILU, Expected("num_experts", (0,), "llama.cpp's converter knows no experts of this architecture")),
    metadata=(
        Key("embedding_scale", "scale_emb", 1.0), Computed(_metadata, _config), ATTENTION_BIAS,
    ),
    notes=_notes,
)  # fmt: skip
