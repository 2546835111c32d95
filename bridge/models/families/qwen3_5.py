"""Qwen3.5 and 3.6: Qwen3-Next's layers, dense or with experts, mostly as the language model of a vision model.

The linear layers' matrices are apart, with all value heads of one key head next to each other. llama.cpp repeats the
key heads as a whole, so GGUF has the first value head of every key head first, then the second of each.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.qwen import rope_sections
from bridge.models.families.qwen3_next import (
    FULL,
    QWEN3_NEXT,
    SHARED,
    delta_sizes,
    linear_row,
)
from bridge.models.family import EXPERTS, NO_BIASES, NORM, SILU, Row, decoder, gated_mlp
from bridge.models.outline import Part
from bridge.models.prediction import prediction


def _sections(config: Config, args: Arguments) -> dict[str, Any]:
    return rope_sections(config, args, [11, 11, 10])


def _config(stored: StoredKeys) -> dict[str, Any]:
    sections = (stored.get("rope.dimension_sections") or [])[:3]
    more = {"mrope_section": sections, "mrope_interleaved": True} if sections else {}
    return {"rope_parameters": {**stored.values["rope_parameters"], **more}}


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    if args.more["v_heads"] % args.more["k_heads"]:
        raise ValueError(f"{args.more['v_heads']} value heads cannot share {args.more['k_heads']} key heads")
    return delta_sizes(config, args)


def _values(args: Arguments, width: int) -> np.ndarray:
    """The elements of the value heads, `width` each, in the GGUF's order."""
    heads = np.arange(args.more["v_heads"]).reshape(args.more["k_heads"], -1).T.reshape(-1, 1)
    return (width * heads + np.arange(width)).reshape(-1)


def _heads(size: str, *others: str, change: str | None = None) -> Callable[[Arguments, str], tuple[Part, ...]]:
    """Rows of value heads, `size` each (a head's elements or one), after all of q and k where `others` says so."""

    def parts(args: Arguments, source: str) -> tuple[Part, ...]:
        m = args.sizes
        start = 2 * m["keys"] if "after qk" in others else 0
        rows = np.concatenate([np.arange(start), start + _values(args, m.get(size, 1))])
        width = [m[name] for name in others if name in m]
        return (Part(source, (len(rows), *width), rows, change=change),)

    return parts


def _columns(args: Arguments, source: str) -> tuple[Part, ...]:
    columns = _values(args, args.more["v_dim"])
    return (Part(source, (args.hidden, len(columns)), columns=columns),)


_ATTENTION = (
    Row("input_layernorm", "hidden", change="+1"),
    *FULL,
    linear_row("in_proj_qkv", "keys+keys+values hidden", parts=_heads("v_dim", "after qk", "hidden")),
    linear_row("in_proj_z", "values hidden", parts=_heads("v_dim", "hidden")),
    linear_row("in_proj_a", "v_heads hidden", parts=_heads("", "hidden")),
    linear_row("in_proj_b", "v_heads hidden", parts=_heads("", "hidden")),
    linear_row(
        "conv1d", "keys+keys+values kernel", floats="F32",
        parts=_heads("v_dim", "after qk", "kernel", change="squeezed"),
    ),
    linear_row("dt_bias", "v_heads", exact=True, name="ssm_dt.bias", parts=_heads("")),
    linear_row("A_log", "v_heads", exact=True, name="ssm_a", parts=_heads("", change="-exp")),
    linear_row("norm", "v_dim"),
    linear_row("out_proj", "hidden values", parts=_columns),
    Row("post_attention_layernorm", "hidden", change="+1"),
)  # fmt: skip
_NORM = Row(NORM.source, "hidden", change="+1")
_EXPERT_KEYS = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")

QWEN3_5 = replace(
    QWEN3_NEXT,
    titles=("Qwen3.5 and 3.6",),
    arch="qwen35",
    architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    model_type="qwen3_5",
    keys={"max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25},
    expects=(SILU, NO_BIASES),
    sizes=_sizes,
    metadata=(*QWEN3_NEXT.metadata, Computed(_sections, _config)),
    language_model=("qwen3_5_text", "Qwen3_5ForCausalLM"),
    wrapped=True,
    table=decoder(*_ATTENTION, *gated_mlp("mlp", "inner"), *prediction("+1"), norm=_NORM),
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    titles=("Qwen3.5 and 3.6 MoE",),
    arch="qwen35moe",
    architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    model_type="qwen3_5_moe",
    language_model=("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    keys={**QWEN3_5.keys, **dict.fromkeys(_EXPERT_KEYS)},
    table=decoder(*_ATTENTION, *EXPERTS, *SHARED, *prediction("+1"), norm=_NORM),
)
