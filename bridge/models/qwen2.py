"""Qwen2 and Qwen2.5: Llama's decoder with biases on q, k and v; heads are rotated by halves."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.models.decoder import QKV, DecoderArgs, Family, common_args
from bridge.models.model_config import Config


@dataclass(frozen=True)
class Qwen2Args(DecoderArgs):
    sliding_window: int | None  # tokens; used by the upper layers where use_sliding_window is set


def read_window(config: Config) -> int | None:
    """The sliding window in tokens, None where none is used."""
    used = config.get("use_sliding_window", False) and config.get("sliding_window") is not None
    return config.integer("sliding_window") if used else None


def read(config: Config) -> Qwen2Args:
    window = read_window(config)
    return Qwen2Args(**vars(common_args(config, context=32768)), sliding_window=window)


def notes(args: DecoderArgs) -> list[str]:
    window = getattr(args, "sliding_window", None)
    if window is None or window >= args.context:
        return []
    return [f"llama.cpp does not apply the sliding window of {window} tokens: it attends to all of them"]


QWEN2 = Family("qwen2", read, lambda _args: QKV, biases=QKV, notes=notes)
