"""Gemma 4's assistants: a few small layers that guess a model's next tokens from its states, keys and values.

They have embeddings, which are the head too, but no keys and values: every layer reads those of the model's last layer
of its kind. Two matrices bring the model's states to their width, and theirs back.
"""

from dataclasses import replace

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Key
from bridge.models.config.model_config import Config
from bridge.models.families.gemma4 import GEMMA4, gemma4_sizes
from bridge.models.family import Expected, Row


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    return {**gemma4_sizes(config, args), "own_kv": 0, "pair": 2 * config.integer("backbone_hidden_size")}


def _layers(config: Config, args: Arguments) -> dict[str, int]:
    return {"nextn_predict_layers": args.layers}


GEMMA4_ASSISTANT = replace(
    GEMMA4,
    titles=("Gemma 4 assistants",), arch="gemma4-assistant", named_as="gemma4", drafter=True,
    architectures=("Gemma4AssistantForCausalLM",), model_type="gemma4_assistant", language_model=None,
    expects=(
        *GEMMA4.expects, Expected("enable_moe_block", (False,)), Expected("use_double_wide_mlp", (False,)),
        Expected("hidden_size_per_layer_input", (0,)),
    ),
    sizes=_sizes,
    metadata=(
        *GEMMA4.metadata, Key("embedding_length_out", "backbone_hidden_size", defines="backbone"), Computed(_layers),
    ),
    ignored=("masked_embedding.",),
    table=(
        *GEMMA4.table,
        Row("pre_projection", "hidden pair", name="nextn.pre_projection.weight"),
        Row("post_projection", "backbone hidden", name="nextn.post_projection.weight"),
    ),
)  # fmt: skip

GEMMA4_UNIFIED_ASSISTANT = replace(
    GEMMA4_ASSISTANT,
    titles=("Gemma 4 12B's assistant",), architectures=("Gemma4UnifiedAssistantForCausalLM",),
    model_type="gemma4_unified_assistant",
)  # fmt: skip
