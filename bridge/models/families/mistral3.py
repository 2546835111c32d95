"""Mistral Small 3.1 and its kin: Mistral's language model inside one that sees. Ministral 3 goes by a template."""

from __future__ import annotations

from dataclasses import replace

from bridge.models.families.mistral import MISTRAL
from bridge.models.family import SILU, Expected

MISTRAL3 = replace(
    MISTRAL,
    arch="mistral3",
    architectures=("Mistral3ForConditionalGeneration",),
    model_type="mistral3",
    expects=(SILU, Expected("model_type", ("mistral", "mistral3"), "another language model than Mistral's is inside")),
    wrapped=True,
)
