"""Mistral Small 3.1 and similar: Mistral's language model inside a vision model. Ministral 3 needs a template."""

from dataclasses import replace

from bridge.models.families.mistral import MISTRAL
from bridge.models.family import SILU, Expected

MISTRAL3 = replace(
    MISTRAL,
    arch="mistral3",
    architectures=("Mistral3ForConditionalGeneration",),
    model_type="mistral3",
    expects=(
        SILU,
        Expected("model_type", ("mistral", "mistral3"), "this language model is not in the table", by_template=True),
    ),
    wrapped=True,
)
