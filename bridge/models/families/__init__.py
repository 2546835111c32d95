"""The families that are known, by every name that a config.json may give them."""

from __future__ import annotations

from bridge.models.families.llama import LLAMA
from bridge.models.families.mistral import MISTRAL, MIXTRAL
from bridge.models.families.qwen2 import QWEN2, QWEN2_MOE
from bridge.models.families.qwen3 import QWEN3, QWEN3_MOE
from bridge.models.family import Family

ALL = (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE)
FAMILIES: dict[str, Family] = {name: family for family in ALL for name in (*family.architectures, family.model_type)}
