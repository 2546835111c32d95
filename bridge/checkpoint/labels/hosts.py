"""Programs that checkpoints are written for, and what each reads of a format.

Names, and the labels of what is not quantized, need no choice: they fit all of these programs. What a program lacks
narrows the format, and layers are planned as for one that cannot hold it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.checkpoint.formats.written import WrittenFormat
from bridge.errors import parameter, refused

_MARLIN = {"bits": (4, 8), "zeros": "middle", "rounding": "symmetric"}
_NO_ACT_ORDER = {"act_order": False, "order_part": ""}


@dataclass(frozen=True)
class Host:
    """A program that loads checkpoints.

    formats  those that it reads beside floats -> the fields of the format that differ for it
    joins    it makes one layer of several, such as q, k and v, which must then be quantized alike
    """

    formats: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    joins: bool = False


HOSTS = {
    "transformers": Host({
        "compressed-tensors": {"zeros": "middle", **_NO_ACT_ORDER}, "gptq": {}, "gptq_v2": {}, "gptq_p": {}, "awq": {},
        "hqq": {},
    }),
    "vllm": Host({
        "compressed-tensors": _NO_ACT_ORDER, "gptq": _MARLIN | _NO_ACT_ORDER, "gptq_v2": _MARLIN | _NO_ACT_ORDER,
        "awq": {}, "modelopt": {},
    }, joins=True),
    "sglang": Host(
        {"compressed-tensors": {}, "gptq": _MARLIN, "gptq_v2": _MARLIN, "awq": {}, "modelopt": {}}, joins=True
    ),
    "mlx": Host({"mlx": {}}),
}  # fmt: skip


def for_host(written: WrittenFormat | None, host: str) -> WrittenFormat | None:
    """What the program holds of a format, or of floats, None. Raises BridgeError if it does not read the format."""
    if written is None:
        return None
    formats = HOSTS[host].formats
    if written.name not in formats:
        others = ", ".join(["floats", *formats])
        raise refused("host", host, f"it does not read {written.name}; choose another {parameter('format')}: {others}")
    return replace(written, **formats[written.name])
