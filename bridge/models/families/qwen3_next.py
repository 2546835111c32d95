"""Qwen3-Next: three of four layers have linear attention (a gated delta net), the fourth full attention with a gate.

The linear layers' q, k, v and z are head by head in one matrix; GGUF has all q, all k and all v in one, z in another.
All norms except the linear layers' are stored minus one.
"""

from typing import Any

import numpy as np

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Key, StoredKeys
from bridge.models.config.model_config import Config
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


def delta_sizes(config: Config, args: Arguments) -> dict[str, int]:
    m, v_dim = args.more, config.side("linear_value_head_dim")
    return {
        "v_dim": v_dim, "keys": m["k_heads"] * m["k_dim"], "values": m["v_heads"] * v_dim,
        "interval": config.integer("full_attention_interval", 4),
    }  # fmt: skip


def _linear(args: Arguments, layer: int) -> bool:
    return (layer + 1) % args.more["interval"] != 0 and not predicts(args, layer)


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
    expected = ["linear_attention" if _linear(args, i) else "full_attention" for i in range(args.layers)]
    config.expect("layer_types", (expected,), "the layers with full attention must be at a fixed interval", expected)
    stateful = [_linear(args, layer) for layer in range(args.layers + args.predicting)]
    return {"attention.recurrent_layers": stateful}


def _config(stored: StoredKeys) -> dict[str, Any]:
    interval, layers = stored.get("full_attention_interval", 4), range(stored.values["num_hidden_layers"])
    return {
        "linear_value_head_dim": stored.get("ssm.inner_size") // stored.get("ssm.time_step_rank"),
        "layer_types": ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in layers],
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def linear_row(module: str, shape: str, **more: Any) -> Row:
    return Row(f"linear_attn.{module}", shape, layers=_linear, **more)


def full_row(module: str, shape: str, **more: Any) -> Row:
    return Row(f"self_attn.{module}", shape, layers=other_layers(_linear), **more)


FULL = (
    full_row("q_proj", "q+q hidden"),  # with the gate, head by head
    full_row("k_proj", "kv hidden"),
    full_row("v_proj", "kv hidden"),
    full_row("q_norm", "head", change="+1"),
    full_row("k_norm", "head", change="+1"),
    full_row("o_proj", "hidden q"),
)
SHARED = (Row("mlp.shared_expert_gate", "hidden", change="squeezed"), *gated_mlp("mlp.shared_expert", "shared"))

QWEN3_NEXT = Family(
    titles=("Qwen3-Next",),
    arch="qwen3next",
    architectures=("Qwen3NextForCausalLM",),
    model_type="qwen3_next",
    keys={
        "max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25, "num_experts": None,
        "moe_intermediate_size": None, "shared_expert_intermediate_size": None, "norm_topk_prob": True,
    },
    expects=(
        SILU, *ALL_SPARSE,
        Expected("norm_topk_prob", (True,), "llama.cpp normalizes this architecture's expert weights"), NO_BIASES,
    ),
    sizes=delta_sizes,
    metadata=(
        Key("ssm.conv_kernel", "linear_conv_kernel_dim", defines="kernel"),
        Key("ssm.state_size", "linear_key_head_dim", defines="k_dim"),
        Key("ssm.group_count", "linear_num_key_heads", defines="k_heads"),
        Key("ssm.time_step_rank", "linear_num_value_heads", defines="v_heads"), Key("ssm.inner_size", size="values"),
        Key("full_attention_interval", size="interval"), Computed(_linear_layers, _config),
    ),
    predicts="carried",
    mtp=QWENS,
    table=decoder(
        Row("input_layernorm", "hidden", change="+1"),
        *FULL,
        linear_row("in_proj_qkvz", "keys+keys+values hidden", name="attn_qkv.weight", parts=_part(slice(0, 3))),
        linear_row("in_proj_qkvz", "values hidden", name="attn_gate.weight", parts=_part(slice(3, 4))),
        linear_row("in_proj_ba", "v_heads+v_heads hidden"),
        linear_row("conv1d", "keys+keys+values kernel", change="squeezed", floats="F32"),
        linear_row("dt_bias", "v_heads", exact=True, name="ssm_dt.bias"),
        linear_row("A_log", "v_heads", exact=True, name="ssm_a", change="-exp"),
        linear_row("norm", "v_dim"),
        linear_row("out_proj", "hidden values"),
        Row("post_attention_layernorm", "hidden", change="+1"),
        *EXPERTS,
        *SHARED,
        *prediction("+1"),
        norm=Row(NORM.source, "hidden", change="+1"),
    ),
)  # fmt: skip
