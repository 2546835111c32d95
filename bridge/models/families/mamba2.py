"""Mamba-2's layers, of a family of their own and of the hybrids.

llama.cpp has one more dimension in A and D, and the norm's groups are rows of a matrix.
"""

from collections.abc import Callable
from typing import Any

from bridge.models.arguments import Arguments
from bridge.models.family import Row, required
from bridge.models.outline import Part

CONTEXT = 2**20  # nothing depends on positions, so there is no length of training to keep to


def mamba2_sizes(heads: int, inner: int, groups: int, state: int, kernel: int) -> dict[str, int]:
    """The names that `mamba2` uses; `inner` elements in `heads` heads and `groups` groups."""
    return {
        "ssm_heads": heads, "ssm_inner": inner, "state": state, "groups": groups, "group": inner // groups,
        "kernel": kernel, "one": 1, "convolved": inner + 2 * groups * state,
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
        row("in_proj", "ssm_inner+convolved+ssm_heads hidden"),
        row("conv1d", "convolved kernel", bias=required, floats="F32", change="squeezed"),
        row("dt_bias", "ssm_heads", exact=True, name="ssm_dt.bias"),
        row("A_log", "ssm_heads one", exact=True, name="ssm_a", floats="F32", parts=_vector("ssm_heads", "-exp")),
        row("D", "ssm_heads one", exact=True, name="ssm_d", floats="F32", parts=_vector("ssm_heads")),
        row("norm", "groups group", floats="F32", parts=_vector("ssm_inner")),
        row("out_proj", "hidden ssm_inner"),
    )
