"""GPTQ's labels as they are written: the other direction of `quant_config`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import bridge


def gptq_labels(
    checkpoint_format: str,
    bits: int,
    group_size: int,
    *,
    desc_act: bool,
    sym: bool,
    floats: Iterable[str] = (),
    others: Mapping[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A quantization_config.

    checkpoint_format  gptq (v1) or gptq_v2
    floats             modules that are not quantized
    others             {module: its bits and group_size}, where these are not the default
    """
    rules: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in floats}
    rules |= {f"+:^{re.escape(name)}$": own for name, own in (others or {}).items()}
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": desc_act,
        "sym": sym,
        "checkpoint_format": checkpoint_format,
        **({"dynamic": rules} if rules else {}),
    }


def packer() -> list[str]:
    """The `packer` of a config's meta: who wrote the zero points, see `QuantConfig.gptqmodel`."""
    return [f"gguf-bridge:{bridge.__version__}"]
