"""Jamba: most layers are Mamba's, with norms of their own, a few have attention without rotation; some have experts."""

from typing import Any

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.family import (
    SILU,
    Expected,
    Family,
    Row,
    attention,
    decoder,
    gated_mlp,
    in_layers,
    other_layers,
    required,
    stacked,
)


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    rank = config.get("mamba_dt_rank", "auto")
    return {
        "ssm_inner": 2 * args.hidden,
        "dt_rank": -(-args.hidden // 16) if rank == "auto" else config.side("mamba_dt_rank"),
        "attention_period": config.integer("attn_layer_period", 8),
        "attention_first": config.count("attn_layer_offset", 4),
        "experts_period": config.integer("expert_layer_period", 2),
        "experts_first": config.count("expert_layer_offset", 1),
    }  # fmt: skip


def _attends(args: Arguments, layer: int) -> bool:
    return layer % args.more["attention_period"] == args.more["attention_first"]


def _chooses(args: Arguments, layer: int) -> bool:
    """Whether a layer has experts."""
    return args.experts > 1 and layer % args.more["experts_period"] == args.more["experts_first"]


def _heads(_config: Config, args: Arguments) -> dict[str, Any]:
    return {"attention.head_count_kv": [args.kv_heads if _attends(args, i) else 0 for i in range(args.layers)]}


def _period(layers: list[int], count: int) -> tuple[int, int]:
    """The distance of evenly spaced layers, and the first of them."""
    if len(layers) < 2:
        return count, layers[0] if layers else count - 1
    return layers[1] - layers[0], layers[0]


def _config(stored: StoredKeys) -> dict[str, Any]:
    layers = stored.values["num_hidden_layers"]
    attention = [i for i, count in enumerate(stored.get("attention.head_count_kv")) if count]
    experts = [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" in stored.names]
    (period, first), (expert_period, expert_first) = _period(attention, layers), _period(experts, layers)
    return {
        "attn_layer_period": period, "attn_layer_offset": first, "expert_layer_period": expert_period,
        "expert_layer_offset": expert_first,
    }  # fmt: skip


def _mamba(part: str, shape: str, **more: Any) -> Row:
    return Row(f"mamba.{part}", shape, layers=other_layers(_attends), **more)


JAMBA = Family(
    titles=("Jamba",), arch="jamba", architectures=("JambaForCausalLM",), model_type="jamba",
    keys={"num_experts": 16},
    expects=(
        SILU, Expected("mamba_proj_bias", (False,)), Expected("mamba_conv_bias", (True,)),
        Expected("mamba_expand", (2,), written=True),
    ),
    sizes=_sizes,
    metadata=(
        Computed(_heads, _config), Key("ssm.conv_kernel", "mamba_d_conv", 4, defines="kernel"),
        Key("ssm.state_size", "mamba_d_state", 16, defines="state"), Key("ssm.inner_size", size="ssm_inner"),
        Key("ssm.time_step_rank", "mamba_dt_rank", size="dt_rank"),
    ),
    lacks=("head_dim",), rotary=False,
    table=decoder(
        Row("input_layernorm", "hidden"),
        _mamba("in_proj", "ssm_inner+ssm_inner hidden"),
        _mamba("conv1d", "ssm_inner kernel", bias=required, floats="F32", change="squeezed"),
        _mamba("x_proj", "dt_rank+state+state ssm_inner"),
        _mamba("dt_layernorm", "dt_rank"),
        _mamba("b_layernorm", "state"),
        _mamba("c_layernorm", "state"),
        _mamba("dt_proj", "ssm_inner dt_rank", bias=required),
        _mamba("A_log", "ssm_inner state", exact=True, name="ssm_a", floats="F32", change="-exp"),
        _mamba("D", "ssm_inner", exact=True, name="ssm_d"),
        _mamba("out_proj", "hidden ssm_inner"),
        *in_layers(_attends, *attention()),
        Row("pre_ff_layernorm", "hidden"),
        *in_layers(other_layers(_chooses), *gated_mlp("feed_forward", "inner")),
        Row("feed_forward.router", "experts hidden", floats="F32", layers=_chooses),
        *in_layers(_chooses, *stacked("feed_forward.experts", *gated_mlp("feed_forward.experts.*", "expert"))),
        norm=Row("model.final_layernorm", "hidden"),
    ),
)  # fmt: skip
