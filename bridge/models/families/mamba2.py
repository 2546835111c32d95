"""Mamba-2: its layers, which the hybrids have too, and the models that have nothing else.

llama.cpp has one more dimension in A and D, and the norm's groups are rows of a matrix.
"""

from collections.abc import Callable
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Entry, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.family import SILU, Expected, Family, Row, decoder, required
from bridge.models.outline import Part

CONTEXT = 2**20  # nothing depends on positions, so there is no length of training to keep to


def mamba2_sizes(config: Config, args: Arguments, inner: int) -> dict[str, int]:
    """The names that `mamba2` uses beside those of `mamba2_keys`, for `inner` elements."""
    heads, groups, states = args.more["ssm_heads"], args.more["groups"], args.more["groups"] * args.more["state"]
    if inner % heads or inner % groups:
        raise BridgeError(f"{config.path}: {inner} elements of a Mamba layer in {heads} heads and {groups} groups")
    return {
        "ssm_inner": inner, "group": inner // groups, "one": 1, "states": states, "convolved": inner + 2 * states,
    }  # fmt: skip


Named = tuple[str, int | None]  # a key of config.json, and its default


def mamba2_keys(kernel: Named, state: Named, groups: Named, heads: Named) -> tuple[Entry, ...]:
    return (
        Key("ssm.conv_kernel", *kernel, defines="kernel"), Key("ssm.state_size", *state, defines="state"),
        Key("ssm.group_count", *groups, defines="groups"), Key("ssm.inner_size", size="ssm_inner"),
        Key("ssm.time_step_rank", *heads, defines="ssm_heads"), Constant("context_length", CONTEXT),
    )  # fmt: skip


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
    heads, groups = args.more["ssm_heads"], args.more["groups"]
    inner = config.integer("expand", 2) * args.hidden
    if inner != heads * args.head_dim or inner % groups:
        split = f"{heads} heads of {args.head_dim} and {groups} groups"
        raise BridgeError(f"{config.path}: {inner} elements of a layer cannot be {split}")
    return mamba2_sizes(config, args, inner)


def _config(stored: StoredKeys) -> dict[str, Any]:
    inner = stored.get("ssm.inner_size")
    return {"head_dim": inner // stored.get("ssm.time_step_rank"), "expand": inner // stored.values["hidden_size"]}


MAMBA2 = Family(
    titles=("Mamba-2",), arch="mamba2", architectures=("Mamba2ForCausalLM",), model_type="mamba2",
    keys={
        "num_attention_heads": 1, "inner_per_hidden": 2, "head_dim": 64, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
    },
    expects=(SILU, Expected("use_bias", (False,)), Expected("use_conv_bias", (True,))),
    names={"rms_norm_eps": "layer_norm_epsilon"},
    sizes=_sizes,
    metadata=(
        *mamba2_keys(("conv_kernel", 4), ("state_size", 128), ("n_groups", 1), ("num_heads", None)),
        Computed(config=_config), Constant("feed_forward_length", 0), Constant("attention.head_count", 0),
        *(Constant(f"attention.{key}", None) for key in ("head_count_kv", "key_length", "value_length")),
    ),
    lacks=("intermediate_size", "num_attention_heads", "num_key_value_heads"), rotary=False,
    table=decoder(
        Row("norm", "hidden"),
        *mamba2("mixer"),
        first=(Row("backbone.embeddings", "vocab hidden"),),
        norm=Row("backbone.norm_f", "hidden"),
        block="backbone.layers",
    ),
)  # fmt: skip
