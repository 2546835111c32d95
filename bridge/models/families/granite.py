"""Granite 3: Llama's decoder with four factors: of embeddings, attention scores, each layer's output, and logits."""

from dataclasses import replace
from typing import Any

from bridge.models.arguments import Arguments
from bridge.models.families.llama import LLAMA
from bridge.models.model_config import Config


def _factors(config: Config, _args: Arguments) -> dict[str, Any]:
    return {
        "attention.scale": config.number("attention_multiplier", 1.0),
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "logit_scale": config.number("logits_scaling", 1.0),
    }


GRANITE = replace(LLAMA, arch="granite", architectures=("GraniteForCausalLM",), model_type="granite", metadata=_factors)
