"""Mixtral: Mistral's decoder with experts; in GGUF it is `llama` with an expert_count.

The weights of the chosen experts are normalized to a sum of one, in transformers and in llama.cpp alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf

from bridge.models import mistral
from bridge.models.decoder import ATTENTION, DecoderArgs, Family
from bridge.models.mistral import MistralArgs
from bridge.models.model_config import Config
from bridge.models.moe import Experts, add_expert_counts, add_experts, read_experts


@dataclass(frozen=True)
class MixtralArgs(MistralArgs):
    experts: Experts


def read(config: Config) -> MixtralArgs:
    return MixtralArgs(**vars(mistral.read(config)), experts=read_experts(config, "intermediate_size"))


def add_metadata(args: DecoderArgs, writer: gguf.GGUFWriter) -> None:
    mistral.add_metadata(args, writer)
    add_expert_counts(args, writer)


MIXTRAL = Family(
    "llama", read, lambda _args: (), biases=ATTENTION, interleaved=True,
    feed_forward=add_experts, add_metadata=add_metadata, notes=mistral.notes,
)  # fmt: skip
