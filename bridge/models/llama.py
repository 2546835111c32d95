"""Llama 1 to 3.x, and the many models that publish themselves as LlamaForCausalLM."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.models.decoder import ATTENTION, MLP, DecoderArgs, Family, common_args
from bridge.models.model_config import Config


@dataclass(frozen=True)
class LlamaArgs(DecoderArgs):
    attention_bias: bool  # on q, k, v and o
    mlp_bias: bool


def read(config: Config) -> LlamaArgs:
    # 2048 is what transformers assumes for the configs of the first Llama
    common = common_args(config, norm_eps=1e-6, context=2048)
    return LlamaArgs(
        **vars(common),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def needs_bias(args: DecoderArgs) -> tuple[str, ...]:
    assert isinstance(args, LlamaArgs)
    return (ATTENTION if args.attention_bias else ()) + (MLP if args.mlp_bias else ())


LLAMA = Family("llama", read, needs_bias, biases=(*ATTENTION, *MLP), interleaved=True)
