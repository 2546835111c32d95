"""Mamba-2: its layers, which the hybrids have too, and the models that have nothing else.

llama.cpp has one more dimension in A and D, and the norm's groups are rows of a matrix.
"""

from collections.abc import Callable
from typing import Any

from bridge.errors import BridgeError
from bridge.models.arguments import Arguments
from bridge.models.family import NO_OTHER, SILU, Expected, Family, Row, decoder, required
from bridge.models.model_config import Config
from bridge.models.outline import Part

CONTEXT = 2**20  # nothing depends on positions, so there is no length of training to keep to


def mamba2_sizes(heads: int, inner: int, groups: int, state: int, kernel: int) -> dict[str, int]:
    """The names that `mamba2` uses; `inner` elements in `heads` heads and `groups` groups."""
    return {
        "ssm_heads": heads, "ssm_inner": inner, "state": state, "groups": groups, "group": inner // groups,
        "kernel": kernel, "one": 1, "states": groups * state, "convolved": inner + 2 * groups * state,
    }  # fmt: skip


def mamba2_keys(args: Arguments) -> dict[str, Any]:
    m = args.more
    return {
        "ssm.conv_kernel": m["kernel"], "ssm.state_size": m["state"], "ssm.group_count": m["groups"],
        "ssm.inner_size": m["ssm_inner"], "ssm.time_step_rank": m["ssm_heads"], "context_length": CONTEXT,
    }  # fmt: skip


def _vector(size: str, change: str | None = None) -> Callable[[Arguments, str], tuple[Part, ...]]:
    """A vector that is a matrix in the GGUF."""
    return lambda args, source: (Part(source, (args.more[size],), change=change),)


def mamba2(module: str, layers: Callable[[Arguments, int], bool] | None = None) -> tuple[Row, ...]:
    """The rows of the layers that mix so."""

    def row(part: str, shape: str, **more: Any) -> Row:
        return Row(f"{module}.{part}", shape, layers=layers, **more)

    return (
        row("in_proj", "ssm_inner+ssm_inner+states+states+ssm_heads hidden"),
        row("conv1d", "convolved kernel", bias=required, floats="F32", change="squeezed"),
        row("dt_bias", "ssm_heads", exact=True, name="ssm_dt.bias"),
        row("A_log", "ssm_heads one", exact=True, name="ssm_a", floats="F32", parts=_vector("ssm_heads", "-exp")),
        row("D", "ssm_heads one", exact=True, name="ssm_d", floats="F32", parts=_vector("ssm_heads")),
        row("norm", "groups group", floats="F32", parts=_vector("ssm_inner")),
        row("out_proj", "hidden ssm_inner"),
    )


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    heads, groups = config.side("num_heads"), config.side("n_groups", 1)
    inner, state = config.integer("expand", 2) * args.hidden, config.side("state_size", 128)
    if inner != heads * args.head_dim or inner % groups:
        split = f"{heads} heads of {args.head_dim} and {groups} groups"
        raise BridgeError(f"{config.path}: {inner} elements of a layer cannot be {split}")
    return mamba2_sizes(heads, inner, groups, state, config.side("conv_kernel", 4))


def _metadata(_config: Config, args: Arguments) -> dict[str, Any]:
    attention = ("head_count_kv", "key_length", "value_length")
    none = {"feed_forward_length": 0, "attention.head_count": 0, **{f"attention.{key}": None for key in attention}}
    return {**mamba2_keys(args), **none}


MAMBA2 = Family(
    titles=("Mamba-2",),
    arch="mamba2",
    architectures=("Mamba2ForCausalLM",),
    model_type="mamba2",
    keys={
        "num_attention_heads": 1, "inner_per_hidden": 2, "head_dim": 64, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
    },
    expects=(SILU, Expected("use_bias", (False,), NO_OTHER), Expected("use_conv_bias", (True,), NO_OTHER)),
    names={"rms_norm_eps": "layer_norm_epsilon"},
    sizes=_sizes,
    metadata=_metadata,
    rotary=False,
    table=decoder(
        Row("norm", "hidden"),
        *mamba2("mixer"),
        first=(Row("backbone.embeddings", "vocab hidden"),),
        norm=Row("backbone.norm_f", "hidden"),
        block="backbone.layers",
    ),
)  # fmt: skip
