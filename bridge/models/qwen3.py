"""Qwen3 (dense): no biases, heads of q and k normalized, head_dim independent of the hidden size."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.models.decoder import QKV, DecoderArgs, Family, common_args
from bridge.models.model_config import Config
from bridge.models.qwen2 import notes, read_window


@dataclass(frozen=True)
class Qwen3Args(DecoderArgs):
    attention_bias: bool  # on q, k and v
    sliding_window: int | None  # tokens; used by the upper layers where use_sliding_window is set


def read(config: Config) -> Qwen3Args:
    window = read_window(config)
    common = common_args(config, context=32768)
    # 128 is transformers' default, whatever hidden_size / num_attention_heads is
    common = common if config.get("head_dim") else common_args(config.with_values(head_dim=128), context=32768)
    return Qwen3Args(**vars(common), attention_bias=bool(config.get("attention_bias", False)), sliding_window=window)


def needs_bias(args: DecoderArgs) -> tuple[str, ...]:
    assert isinstance(args, Qwen3Args)
    return QKV if args.attention_bias else ()


QWEN3 = Family("qwen3", read, needs_bias, biases=QKV, qk_norm=True, notes=notes)
