"""Mistral 4: DeepSeek's attention and experts, stretched by yarn as Ministral 3 is, inside a vision model.

q is multiplied by a temperature that grows with the position beyond the original context.
"""

from dataclasses import replace
from typing import Any

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_number, rope_rules
from bridge.models.families.deepseek import DEEPSEEK2, LATENT, latent_rules, latent_table
from bridge.models.family import Row, experts_with_gate_up


def _temperature(config: Config, args: Arguments) -> dict[str, Any]:
    if not args.rope.original_context or not rope_rules(config).get("llama_4_scaling_beta"):
        return {}
    return {
        "attention.temperature_scale": rope_number(config, rope_rules(config), "llama_4_scaling_beta"),
        "attention.temperature_length": args.rope.original_context,
    }


def _config(stored: StoredKeys) -> dict[str, Any]:
    rules, beta = latent_rules(stored)["rope_parameters"], stored.get("attention.temperature_scale")
    return {"rope_parameters": rules if beta is None else {**rules, "llama_4_scaling_beta": beta}}


MISTRAL4 = replace(
    DEEPSEEK2,
    titles=("Mistral 4",), arch="mistral4", architectures=("Mistral3ForConditionalGeneration", "Mistral4ForCausalLM"),
    model_type="mistral4",
    keys={**DEEPSEEK2.keys, "partial_rotary_factor": 1.0},
    chosen=lambda config: (config.get("text_config") or config.values).get("model_type", "mistral4") == "mistral4",
    metadata=(*LATENT, Constant("expert_gating_func", 1), Computed(_temperature, _config)),  # 1: softmax
    language_model=("mistral4", "Mistral4ForCausalLM"), lacks=("scoring_func", "topk_method"), predicts=None,
    alternative="mlp.experts.",
    table=latent_table(Row("mlp.gate", "experts hidden", floats="F32"), *experts_with_gate_up("mlp.experts")),
)  # fmt: skip
