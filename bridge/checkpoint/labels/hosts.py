"""Programs that checkpoints are written for, and what each reads of a format.

Names, and the labels of what is not quantized, need no choice: they fit all of these programs. What a program lacks
narrows the format, and layers are planned as for one that cannot hold it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bridge.checkpoint.formats.mlx_models import mlx_config
from bridge.checkpoint.formats.written import Groups, WrittenFormat
from bridge.checkpoint.tensor_names import expert_of, part_of_block
from bridge.errors import BridgeError, parameter, refused


@dataclass(frozen=True)
class Reading:
    """What a program reads of a format.

    changes   fields of the format's record that differ
    one_form  what must all be quantized alike, "layers" or "experts"
    experts   whether the experts of a mixture may have codes
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    one_form: Literal["", "layers", "experts"] = ""
    experts: bool = True


@dataclass(frozen=True)
class Host:
    """A program that loads checkpoints.

    formats  those that it reads beside floats
    joins    it makes one layer of several, such as q, k and v, which must then be quantized alike
    config   config.json of floats as it needs it
    """

    formats: Mapping[str, Reading]
    joins: bool = False
    config: Callable[[dict[str, Any]], dict[str, Any]] = dict


_NO_ACT_ORDER: Mapping[str, Any] = {"act_order": False, "order_part": ""}
_MARLIN: dict[str, Any] = {"bits": (4, 8), "zeros": "middle", "rounding": "symmetric"}
_MIDDLE = Reading({"zeros": "middle", **_NO_ACT_ORDER}, one_form="experts")
_OPTIMUM = Reading({"head": False}, one_form="layers", experts=False)  # which loads GPTQ for transformers
_VLLM_GPTQ, _SGLANG_GPTQ = Reading({**_MARLIN, **_NO_ACT_ORDER}), Reading(_MARLIN)

HOSTS = {
    "transformers": Host({
        "compressed-tensors": _MIDDLE, "awq": Reading(experts=False), "gptq": _OPTIMUM, "gptq_v2": _OPTIMUM,
        "fp8": Reading(),
    }),
    "vllm": Host({
        "compressed-tensors": Reading(_NO_ACT_ORDER), "awq": Reading(), "gptq": _VLLM_GPTQ, "gptq_v2": _VLLM_GPTQ,
        "modelopt": Reading(), "fp8": Reading(),
    }, joins=True),
    "sglang": Host({
        "compressed-tensors": Reading(), "awq": Reading(), "gptq": _SGLANG_GPTQ, "gptq_v2": _SGLANG_GPTQ,
        "modelopt": Reading(), "fp8": Reading(),
    }, joins=True),
    "mlx": Host({"mlx": Reading()}, config=mlx_config),
}  # fmt: skip

_DROPPED = {"compressed-tensors": _NO_ACT_ORDER}  # what only older programs read, and SGLang


def for_host(written: WrittenFormat | None, host: str | None) -> WrittenFormat | None:
    """What the program holds of a format, or of floats, None; without a program, what several do.

    Raises BridgeError if it does not read the format.
    """
    if written is None:
        return None
    if host is None:
        return replace(written, **_DROPPED.get(written.name, {}))
    formats = HOSTS[host].formats
    if written.name not in formats:
        raise _refused(host, f"it does not read {written.name}", ["floats", *formats])
    return replace(written, **formats[written.name].changes)


def programs_with_act_order(written: WrittenFormat) -> list[str]:
    """The programs that read act-order in a format."""
    reads = [name for name, host in HOSTS.items() if written.name in host.formats]
    return [name for name in reads if (format := for_host(written, name)) is not None and format.act_order]


def check_for_host(layers: Mapping[str, Groups], floats: Collection[str], format: str, host: str) -> None:
    """Raise BridgeError if the program does not read layers of these groups, beside these modules of floats."""
    reading, experts = HOSTS[host].formats[format], {module for module in (*layers, *floats) if expert_of(module)}
    others = [name for name, other in HOSTS[host].formats.items() if other != reading]
    if not reading.experts and not experts.isdisjoint(layers):
        raise _refused(host, f"it reads no experts of {format}", ["floats", *others])
    alike = experts if reading.one_form == "experts" else {*layers} if reading.one_form else set()
    parts = {*map(part_of_block, alike)}
    forms = {(g.bits, g.group_size, g.kind) for g in map(layers.get, alike) if g}
    if len(forms) > 1 or any(part_of_block(module) in parts for module in floats):
        raise _refused(host, f"it reads {format} only if all {reading.one_form} have the same bits and groups", others)


def _refused(host: str, why: str, others: list[str]) -> BridgeError:
    return refused("host", host, f"{why}; choose another {parameter('format')}: {', '.join(others)}")
