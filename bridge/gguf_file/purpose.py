"""What a GGUF is for, by its metadata: which command to offer for it."""

from typing import Literal

from gguf import PoolingType

from bridge.gguf_file.architectures import ARCHITECTURES, DRAFTERS
from bridge.gguf_file.header import Metadata

Purpose = Literal["text", "text elsewhere", "vectors", "scores", "guesses"]


def purpose(metadata: Metadata) -> Purpose:
    """Texts (of an architecture that runs here or in llama.cpp alone), vectors of texts, scores of documents for a
    query, or guesses of tokens for another model."""
    arch = metadata.get("general.architecture")
    pooling = metadata.get(f"{arch}.pooling_type", 0)
    if arch in DRAFTERS:
        return "guesses"
    if pooling == PoolingType.RANK:
        return "scores"
    if pooling or is_encoder(metadata):
        return "vectors"
    return "text" if arch in ARCHITECTURES else "text elsewhere"


def is_encoder(metadata: Metadata) -> bool:
    """Whether tokens attend to those that follow, so that a text cannot be continued."""
    arch = str(metadata.get("general.architecture"))
    return arch in ARCHITECTURES and not metadata.get(f"{arch}.attention.causal", ARCHITECTURES[arch].causal)
