"""A checkpoint's claims about its own quantization: one dataclass for all formats, and GPTQ's config for writing.

Readers trust the tensors over the claims, and note where they disagree.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import bridge
from bridge.checkpoint.formats.zeros import OWN_BITS_SINCE
from bridge.checkpoint.tensor_names import pattern_of
from bridge.errors import BridgeError
from bridge.system.fields import table, whole_number
from bridge.system.patterns import matched

# GPTQModel reads v1 with varying zero points only from itself; this version packs as we do
OWN_BITS_WRITER = f"gptqmodel:{'.'.join(map(str, OWN_BITS_SINCE))}"


@dataclass(frozen=True)
class QuantConfig:
    """The quantization that a checkpoint's configs claim.

    method             a key of `formats.registry.READERS`, or None for a checkpoint of plain floats
    title              the format's name in messages: "AWQ version gemm"
    claims             its description in messages, if bits, group_size and sym are not enough
    bits, group_size   defaults; group_size -1 is one group per row
    sym                whether zero points are all 2**(bits-1)
    desc_act           whether act-order was requested; g_idx shows whether it was used
    checkpoint_format  GPTQ's label: gptq (v1), gptq_v2, gptq_p, marlin, ...
    version            AWQ's label: gemm, gemv, gemv_fast, llm-awq, ...
    dynamic            GPTQModel's per-module overrides: {regex: False or {bits: ..}}
    quantizer          the program that wrote it, e.g. ("gptqmodel:7.6.0",)
    packer             the program that rewrote its zero points, e.g. ("gguf-bridge:0.1.0",); see bridge.repack
    model              config.json, or its part of the language model: sizes that some shapes do not tell
    notes              which of its entries were ignored, in words
    """

    method: str | None = None
    title: str = ""
    claims: tuple[str, ...] = ()
    bits: int = 4
    group_size: int = 128
    sym: bool = True
    desc_act: bool = False
    checkpoint_format: str = ""
    version: str = ""
    dynamic: dict[str, Any] = field(default_factory=dict)
    quantizer: tuple[str, ...] = ()
    packer: tuple[str, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict)
    source: Path | None = None
    model: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def for_module(self, name: str) -> Self | None:
        """The config with the dynamic overrides for one module; None if it must stay unquantized.

        Negative patterns (-:) come first; the first match from the name's start applies.
        """
        ordered = sorted(self.dynamic.items(), key=lambda item: not item[0].startswith("-:"))
        for pattern, change in ordered:
            if not matched("match", pattern[2:] if pattern[:2] in ("-:", "+:") else pattern, name, self.source):
                continue
            if pattern.startswith("-:") or change is False:
                return None
            return self._with(change)
        extra = self.extra
        if name in extra:
            return self._with(extra[name])
        for pattern, change in extra.items():
            if change and matched("search", pattern, name, self.source):
                return self._with(change)
        return self

    def names(self, module: str) -> bool:
        """Whether the config names this module as quantized, by a rule or by an entry under its name.

        mlx-lm writes such entries, and GPTQ writes "lm_head": true.
        """
        config = self.for_module(module)
        return config is not None and (config is not self or bool(self.raw.get(module)))

    @property
    def extra(self) -> dict[str, Any]:
        """auto-round's settings of single modules: by name, else by the first regex that matches within the name."""
        return table(self.raw.get("extra_config"))

    def _with(self, change: dict[str, Any]) -> Self | None:
        numbers = {k: whole_number(change.get(k)) for k in ("bits", "group_size")}
        if (numbers["bits"] or 0) >= 16:
            return None
        known = numbers | {k: change.get(k) for k in ("sym", "desc_act")}
        return replace(self, **{k: value for k, value in known.items() if value is not None})  # type: ignore[arg-type]

    def describe(self) -> str:
        """The format and its claims in words."""
        if not self.labelled:
            return "nothing about quantization"
        if self.claims:
            return ", ".join([self.title, *self.claims])
        rules = len(self.dynamic) + len(self.extra)
        overrides = f", {rules} rule{'s' * (rules != 1)} for single modules" if rules else ""
        groups = "one group a row" if self.group_size <= 0 else f"groups of {self.group_size}"
        sym, order = "symmetric" if self.sym else "asymmetric", "act-order" if self.desc_act else "no act-order"
        return ", ".join([self.title, f"{self.bits} bits", groups, sym, order]) + overrides

    @property
    def labelled(self) -> bool:
        """Whether a config claims this; otherwise it follows from the tensors' shapes."""
        return bool(self.raw)

    @property
    def packed_here(self) -> bool:
        """Whether this program wrote the zero points, as the label says."""
        return any(writer.startswith("gguf-bridge:") for writer in self.packer)

    @property
    def gptqmodel(self) -> tuple[int, ...] | None:
        """GPTQModel's version as numbers, or None if another program wrote the checkpoint.

        For a checkpoint that `repack` has rewritten, it is the first version that writes zero points alike.
        """
        if self.packed_here:
            return OWN_BITS_SINCE
        for writer in self.quantizer:
            name, _, version = writer.partition(":")
            if name.strip().lower() == "gptqmodel":
                return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
        return None


def gptq_labels(
    checkpoint_format: str, bits: int, group_size: int, *, desc_act: bool, sym: bool, floats: Iterable[str] = (),
    others: Mapping[str, dict[str, Any]] | None = None, parts: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A quantization_config.

    checkpoint_format  gptq (v1) or gptq_v2
    floats             modules that are not quantized
    others             {module: its bits and group_size}, if these are not the default
    parts              it is a model of several, before whose names programs have something else
    """
    rules: dict[str, Any] = {f"-:{pattern_of(name, parts)}": {} for name in floats}
    rules |= {f"+:{pattern_of(name, parts)}": sizes for name, sizes in (others or {}).items()}
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": desc_act, "sym": sym,
        "checkpoint_format": checkpoint_format, **({"dynamic": rules} if rules else {}),
    }  # fmt: skip


def packer() -> list[str]:
    """The `packer` of a config's meta: the program that wrote the zero points, see `QuantConfig.gptqmodel`."""
    return [f"gguf-bridge:{bridge.__version__}"]


def bits_claims(quant: QuantConfig) -> tuple[str, ...]:
    """What EXL2 and EXL3 say of the average bits of a weight, and of the head's."""
    claims = []
    for key, title in (("bits", ""), ("head_bits", "head ")):
        value = quant.raw.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 16:
            raise BridgeError(f"{quant.source}: {key} is {value!r:.80}, must be a number up to 16; mend the file")
        claims.append(f"{title}{value} bits")
    return tuple(claims)
