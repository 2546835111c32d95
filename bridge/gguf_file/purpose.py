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
    graph, pooling = ARCHITECTURES.get(str(arch)), metadata.get(f"{arch}.pooling_type", 0)
    if arch in DRAFTERS:
        return "guesses"
    if pooling == PoolingType.RANK:
        return "scores"
    if pooling or (graph is not None and not graph.causal):
        return "vectors"
    return "text elsewhere" if graph is None else "text"
