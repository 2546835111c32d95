"""Qwen3-Next: three of four layers have linear attention (a gated delta net), the fourth full attention with a gate.

The linear layers' q, k, v and z are head by head in one matrix; GGUF has all q, all k and all v in one, z in another.
All norms except the linear layers' are stored minus one.

Qwen3.5 and 3.6 have these layers, dense or with experts, mostly as the language model of a vision model. The linear
layers' matrices are apart, with all value heads of one key head next to each other. llama.cpp repeats the key heads as
a whole, so GGUF has the first value head of every key head first, then the second of each.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.qwen import rope_sections
from bridge.models.family import (
    ALL_SPARSE,
    EXPERTS,
    NO_BIASES,
    NORM,
    SILU,
    Expected,
    Family,
    Row,
    decoder,
    gated_mlp,
    other_layers,
)
from bridge.models.outline import Part
from bridge.models.prediction import QWENS, prediction, predicts

LINEAR = "linear_attention"


def _next_sizes(config: Config, args: Arguments) -> dict[str, int]:
    m, v_dim = args.more, config.side("linear_value_head_dim")
    return {
        "v_dim": v_dim, "keys": m["k_heads"] * m["k_dim"], "values": m["v_heads"] * v_dim,
        "interval": config.integer("full_attention_interval", 4),
    }  # fmt: skip


def linear(args: Arguments, layer: int) -> bool:
    """Whether a layer has linear attention: what a family says of this layer, else all but every n-th have."""
    by_interval = (layer + 1) % args.more["interval"] != 0
    return bool(args.more.get(f"linear.{layer}", by_interval)) and not predicts(args, layer)


def _rows(args: Arguments, which: slice) -> np.ndarray:
    """The rows of in_proj_qkvz that are those of q, k, v and z that `which` selects, one head after another."""
    m = args.sizes
    widths = [m["k_dim"], m["k_dim"], *2 * [m["values"] // m["k_heads"]]]
    starts = np.cumsum([0, *widths])
    heads = np.arange(m["k_heads"])[:, None] * starts[-1]
    rows = [(heads + np.arange(starts[i], starts[i + 1])).reshape(-1) for i in range(4)]
    return np.concatenate(rows[which])


def _part(which: slice) -> Any:
    def parts(args: Arguments, source: str) -> tuple[Part, ...]:
        m, rows = args.sizes, _rows(args, which)
        stored = (2 * m["keys"] + 2 * m["values"], m["hidden"])
        return (Part(source, (len(rows), m["hidden"]), rows, stored=stored),)

    return parts


def _linear_layers(config: Config, args: Arguments) -> dict[str, Any]:
    expected = [LINEAR if linear(args, i) else "full_attention" for i in range(args.layers)]
    config.expect("layer_types", (expected,), expected, "the layers with full attention must be at a fixed interval")
    stateful = [linear(args, layer) for layer in range(args.layers + args.predicting)]
    return {"attention.recurrent_layers": stateful}


def _next_config(stored: StoredKeys) -> dict[str, Any]:
    interval, layers = stored.get("full_attention_interval", 4), range(stored.values["num_hidden_layers"])
    return {
        "linear_value_head_dim": stored.get("ssm.inner_size") // stored.get("ssm.time_step_rank"),
        "layer_types": ["full_attention" if (i + 1) % interval == 0 else LINEAR for i in layers],
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def _linear_row(module: str, shape: str, **more: Any) -> Row:
    return Row(f"linear_attn.{module}", shape, layers=linear, **more)


def _full_row(module: str, shape: str, **more: Any) -> Row:
    return Row(f"self_attn.{module}", shape, layers=other_layers(linear), **more)


FULL_ROWS = (
    _full_row("q_proj", "q+q hidden"),  # with the gate, head by head
    _full_row("k_proj", "kv hidden"),
    _full_row("v_proj", "kv hidden"),
    _full_row("q_norm", "head", change="+1"),
    _full_row("k_norm", "head", change="+1"),
    _full_row("o_proj", "hidden q"),
)
SHARED_ROWS = (Row("mlp.shared_expert_gate", "hidden", change="squeezed"), *gated_mlp("mlp.shared_expert", "shared"))

QWEN3_NEXT = Family(
    titles=("Qwen3-Next",), arch="qwen3next", architectures=("Qwen3NextForCausalLM",), model_type="qwen3_next",
    keys={
        "max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25, "num_experts": None,
        "moe_intermediate_size": None, "shared_expert_intermediate_size": None, "norm_topk_prob": True,
    },
    expects=(
        SILU, *ALL_SPARSE,
        Expected("norm_topk_prob", (True,), "llama.cpp normalizes this architecture's expert weights"), NO_BIASES,
    ),
    sizes=_next_sizes,
    metadata=(
        Key("ssm.conv_kernel", "linear_conv_kernel_dim", defines="kernel"),
        Key("ssm.state_size", "linear_key_head_dim", defines="k_dim"),
        Key("ssm.group_count", "linear_num_key_heads", defines="k_heads"),
        Key("ssm.time_step_rank", "linear_num_value_heads", defines="v_heads"), Key("ssm.inner_size", size="values"),
        Key("full_attention_interval", size="interval"), Computed(_linear_layers, _next_config),
    ),
    predicts="carried", mtp=QWENS,
    table=decoder(
        Row("input_layernorm", "hidden", change="+1"),
        *FULL_ROWS,
        _linear_row("in_proj_qkvz", "keys+keys+values hidden", name="attn_qkv.weight", parts=_part(slice(0, 3))),
        _linear_row("in_proj_qkvz", "values hidden", name="attn_gate.weight", parts=_part(slice(3, 4))),
        _linear_row("in_proj_ba", "v_heads+v_heads hidden"),
        _linear_row("conv1d", "keys+keys+values kernel", change="squeezed", floats="F32"),
        _linear_row("dt_bias", "v_heads", exact=True, name="ssm_dt.bias"),
        _linear_row("A_log", "v_heads", exact=True, name="ssm_a", change="-exp"),
        _linear_row("norm", "v_dim"),
        _linear_row("out_proj", "hidden values"),
        Row("post_attention_layernorm", "hidden", change="+1"),
        *EXPERTS,
        *SHARED_ROWS,
        *prediction("+1"),
        norm=Row(NORM.source, "hidden", change="+1"),
    ),
)  # fmt: skip


def _sections_config(stored: StoredKeys) -> dict[str, Any]:
    sections = (stored.get("rope.dimension_sections") or [])[:3]
    more = {"mrope_section": sections, "mrope_interleaved": True} if sections else {}
    return {"rope_parameters": {**stored.values["rope_parameters"], **more}}


# llama.cpp needs the key, which some config.json files leave out
SECTIONS = Computed(lambda config, args: rope_sections(config, args, [11, 11, 10]), _sections_config)


def delta_sizes(config: Config, args: Arguments) -> dict[str, int]:
    if args.more["v_heads"] % args.more["k_heads"]:
        raise ValueError(f"{args.more['v_heads']} value heads cannot share {args.more['k_heads']} key heads")
    return _next_sizes(config, args)


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


LINEAR_ROWS = (
    _linear_row("in_proj_qkv", "keys+keys+values hidden", parts=_heads("v_dim", "after qk", "hidden")),
    _linear_row("in_proj_z", "values hidden", parts=_heads("v_dim", "hidden")),
    _linear_row("in_proj_a", "v_heads hidden", parts=_heads("", "hidden")),
    _linear_row("in_proj_b", "v_heads hidden", parts=_heads("", "hidden")),
    _linear_row(
        "conv1d", "keys+keys+values kernel", floats="F32",
        parts=_heads("v_dim", "after qk", "kernel", change="squeezed"),
    ),
    _linear_row("dt_bias", "v_heads", exact=True, name="ssm_dt.bias", parts=_heads("")),
    _linear_row("A_log", "v_heads", exact=True, name="ssm_a", parts=_heads("", change="-exp")),
    _linear_row("norm", "v_dim"),
    _linear_row("out_proj", "hidden values", parts=_columns),
)  # fmt: skip
_ATTENTION = (
    Row("input_layernorm", "hidden", change="+1"),
    *FULL_ROWS,
    *LINEAR_ROWS,
    Row("post_attention_layernorm", "hidden", change="+1"),
)
_NORM = Row(NORM.source, "hidden", change="+1")
_EXPERT_KEYS = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")

QWEN3_5 = replace(
    QWEN3_NEXT,
    titles=("Qwen3.5 and 3.6",), arch="qwen35", architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    model_type="qwen3_5",
    keys={"max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25},
    expects=(SILU, NO_BIASES),
    sizes=delta_sizes,
    metadata=(*QWEN3_NEXT.metadata, SECTIONS),
    language_model=("qwen3_5_text", "Qwen3_5ForCausalLM"), wrapped=True,
    table=decoder(*_ATTENTION, *gated_mlp("mlp", "inner"), *prediction("+1"), norm=_NORM),
)  # fmt: skip

QWEN3_5_MOE = replace(
    QWEN3_5,
    titles=("Qwen3.5 and 3.6 MoE",), arch="qwen35moe",
    architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"), model_type="qwen3_5_moe",
    language_model=("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    keys={**QWEN3_5.keys, **dict.fromkeys(_EXPERT_KEYS)},
    table=decoder(*_ATTENTION, *EXPERTS, *SHARED_ROWS, *prediction("+1"), norm=_NORM),
)  # fmt: skip
