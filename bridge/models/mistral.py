"""Mistral: Llama's graph, in GGUF as in the paper but for the sliding window.

llama.cpp's llama graph attends to the whole context. A window is written to the metadata and
reported; up to its length the two agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf

from bridge.models.decoder import ATTENTION, MLP, DecoderArgs, Family, common_args
from bridge.models.model_config import Config


@dataclass(frozen=True)
class MistralArgs(DecoderArgs):
    sliding_window: int | None  # tokens


def read(config: Config) -> MistralArgs:
    window = config.integer("sliding_window") if config.get("sliding_window") else None
    return MistralArgs(**vars(common_args(config)), sliding_window=window)


def add_metadata(args: DecoderArgs, writer: gguf.GGUFWriter) -> None:
    assert isinstance(args, MistralArgs)
    if args.sliding_window is not None:
        writer.add_sliding_window(args.sliding_window)


def notes(args: DecoderArgs) -> list[str]:
    assert isinstance(args, MistralArgs)
    if args.sliding_window is None or args.sliding_window >= args.context:
        return []
    return [f"llama.cpp does not apply the sliding window of {args.sliding_window} tokens: it attends to all of them"]


MISTRAL = Family(
    "llama", read, lambda _args: (), biases=(*ATTENTION, *MLP), interleaved=True, add_metadata=add_metadata, notes=notes
)
