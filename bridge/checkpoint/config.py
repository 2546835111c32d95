"""What a checkpoint says about its own quantization: one dataclass from four kinds of file.

quantize_config.json   GPTQModel, AutoGPTQ (no quant_method: gptq)
quant_config.json      AutoAWQ, llm-awq (w_bit, q_group_size)
config.json            quantization_config, written by all of them today
hf_quant_config.json   ModelOpt: {quantization: {quant_algo: FP8, ...}}; counts where the others say nothing

The first that exists counts, completed from config.json. It is a claim: readers trust the tensors
over it, and note where the two disagree.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.checkpoint.zeros import OWN_BITS_SINCE
from bridge.errors import BridgeError
from bridge.files import read_json

if TYPE_CHECKING:
    from bridge.checkpoint.reader import Reader

# quant_method -> its reader; auto-round packs as one or the other
METHODS = {
    "gptq": "bridge.checkpoint.gptq.GptqReader",
    "gptq-float-zeros": "bridge.checkpoint.legacy.FloatZerosReader",  # told by its tensors, never by a config
    "awq": "bridge.checkpoint.awq.AwqReader",
    "compressed-tensors": "bridge.checkpoint.compressed.CompressedReader",
    "fp8": "bridge.checkpoint.fp8.Fp8Reader",
    "fbgemm_fp8": "bridge.checkpoint.fp8.Fp8Reader",
    "modelopt": "bridge.checkpoint.fp8.Fp8Reader",
    "mlx": "bridge.checkpoint.mlx.MlxReader",
    "hqq": "bridge.checkpoint.hqq.HqqReader",
    "marlin": "bridge.checkpoint.marlin.MarlinReader",
}
NAMES = tuple(sorted({*METHODS, "auto-round"} - {"gptq-float-zeros"}))


@dataclass(frozen=True)
class QuantConfig:
    """How the checkpoint says it was quantized.

    method             a key of METHODS, or None for a checkpoint of plain floats
    title              the format's name for people: "AWQ version gemm"
    claims             what it says of itself, for people, where bits, group_size and sym do not tell
    bits, group_size   defaults; group_size -1 is one group per row
    sym                whether zero points are all 2**(bits-1)
    desc_act           act-order was asked for; g_idx says whether it happened
    checkpoint_format  GPTQ's label: gptq (v1), gptq_v2, gptq_p, marlin, ...
    version            AWQ's label: gemm, gemv, gemv_fast, llm-awq, ...
    dynamic            GPTQModel's per-module overrides: {regex: False or {bits: ..}}
    quantizer          who wrote it, e.g. ("gptqmodel:7.6.0",)
    packer             who rewrote its zero points, e.g. ("gguf-bridge:0.1.0",); see bridge.repack
    notes              what of it was passed over, for people
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
    notes: tuple[str, ...] = ()

    def for_module(self, name: str) -> QuantConfig | None:
        """The config with the dynamic overrides for one module; None where it is to stay unquantized.

        Negative patterns (-:) first, then the first that matches from the name's start.
        """
        ordered = sorted(self.dynamic.items(), key=lambda item: not item[0].startswith("-:"))
        for pattern, change in ordered:
            if not _found(re.match, pattern[2:] if pattern[:2] in ("-:", "+:") else pattern, name):
                continue
            if pattern.startswith("-:") or change is False:
                return None
            return self._with(change)
        extra = self.extra
        if name in extra:
            return self._with(extra[name])
        for pattern, change in extra.items():
            if change and _found(re.search, pattern, name):
                return self._with(change)
        return self

    def names(self, module: str) -> bool:
        """Whether the label says of this very module that it is quantized, by a rule or by an entry of its name.

        The entries are mlx-lm's, and "lm_head": true of GPTQ.
        """
        own = self.for_module(module)
        return own is not None and (own is not self or bool(self.raw.get(module)))

    @property
    def extra(self) -> dict[str, Any]:
        """auto-round's settings of single modules: by name, else by the first regex found in the name."""
        extra = self.raw.get("extra_config")
        return extra if isinstance(extra, dict) else {}

    def _with(self, change: dict[str, Any]) -> QuantConfig | None:
        numbers = {k: whole_number(change.get(k)) for k in ("bits", "group_size")}
        if (numbers["bits"] or 0) >= 16:
            return None
        known = numbers | {k: change.get(k) for k in ("sym", "desc_act")}
        return replace(self, **{k: value for k, value in known.items() if value is not None})  # type: ignore[arg-type]

    def describe(self) -> str:
        """For people: the format and what it says about itself."""
        if not self.labelled:
            return "nothing about quantization"
        if self.claims:
            return ", ".join([self.title, *self.claims])
        rules = len(self.dynamic) + len(self.extra)
        overrides = f", {rules} rule{'s' * (rules != 1)} for single modules" if rules else ""
        return ", ".join([
            self.title,
            f"{self.bits} bits",
            "one group a row" if self.group_size <= 0 else f"groups of {self.group_size}",
            "symmetric" if self.sym else "asymmetric",
            "act-order" if self.desc_act else "no act-order",
        ]) + overrides  # fmt: skip

    @property
    def labelled(self) -> bool:
        """Whether a config says this, and not the tensors' shapes alone."""
        return bool(self.raw)

    @property
    def gptqmodel(self) -> tuple[int, ...] | None:
        """GPTQModel's version as numbers, or None where something else wrote the checkpoint.

        Of a checkpoint that `repack` has rewritten it is the first version that writes zero points likewise.
        """
        if any(writer.startswith("gguf-bridge:") for writer in self.packer):
            return OWN_BITS_SINCE
        for writer in self.quantizer:
            name, _, version = writer.partition(":")
            if name.strip().lower() == "gptqmodel":
                return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
        return None


def read_quant_config(folder: Path, config: dict[str, Any]) -> QuantConfig:
    """The quantization of the checkpoint in `folder`, `config` being its config.json.

    Raises BridgeError for methods and layouts that no reader knows.
    """
    inner = next((q for part in _speaking(config) if isinstance(q := part.get("quantization_config"), dict)), None)
    raw: dict[str, Any] = dict(inner or {})
    if not raw and isinstance(old := config.get("compression_config"), dict) and old:  # its name in 2024
        raw = {"quant_method": "compressed-tensors", **old}
    source = folder / "config.json"
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (folder / name).exists():
            source = folder / name
            raw = {**raw, **{k: v for k, v in read_json(source).items() if v is not None}}
            raw.setdefault("quant_method", raw.get("method", method))
            break
    own = config.get("quantization")  # mlx-lm's; its quantization_config is a copy
    if not raw.keys() & {"quant_method", "method"} or str(raw.get("packing_format")).endswith("mlx"):
        own = own if isinstance(own, dict) else raw
        if {"bits", "group_size"} <= own.keys() and not own.keys() & {"desc_act", "sym", "zero_point"}:
            raw = {**own, "quant_method": "mlx"}
    if not raw:
        source = folder / "hf_quant_config.json"
        said = read_json(source, optional=True).get("quantization")
        if not isinstance(said, dict) or not said.get("quant_algo"):  # none: the key-value cache alone is quantized
            return QuantConfig(source=None)
        raw = {"quant_method": "modelopt", **said}
    method = str(raw.get("quant_method") or raw.get("method") or "(none)").lower()
    label = str(raw.get("checkpoint_format") or raw.get("format") or "").lower()
    auto_round = method in ("auto-round", "auto_round", "intel/auto-round")
    if auto_round:
        method, label = _auto_round(source, raw)
    if method not in NAMES:
        raise BridgeError(
            f"{source}: quantization method {method!r} is not supported (supported: {', '.join(NAMES)}); "
            "convert the unquantized model instead"
        )
    if raw.get("is_marlin_format") or "marlin" in (label, str(raw.get("version", "")).lower()):
        method = "marlin"
    if label in ("bitblas", "qqq", "ipex") and not (method == "awq" and label == "ipex"):
        raise BridgeError(
            f"{source}: the {label} layout is made for one GPU kernel and is not supported; "
            f"take the checkpoint that it was made from, in the {'gemm' if method == 'awq' else 'gptq'} layout"
        )
    rotation = raw.get("rotation") or raw.get("rotation_config")  # GPTQModel's, auto-round's
    if rotation and str(rotation).lower() != "none":
        raise BridgeError(
            f"{source}: rotation {rotation!r} needs a Hadamard transform at run time, which GGUF lacks; "
            "take a checkpoint quantized without rotation"
        )
    meta = raw.get("meta")
    writers = [meta.get(key) if isinstance(meta, dict) else None for key in ("quantizer", "packer")]
    quantizer, packer = (tuple(map(str, w if isinstance(w, list) else [w] if w else [])) for w in writers)
    dynamic = raw.get("dynamic")
    result = QuantConfig(
        method=method,
        bits=_number(source, raw, ("bits", "w_bit"), 4),
        group_size=_number(source, raw, ("group_size", "q_group_size"), 128),
        sym=bool(raw.get("sym", not raw.get("zero_point", method == "awq"))),
        desc_act=bool(raw.get("desc_act", False)),
        dynamic=dynamic if isinstance(dynamic, dict) else {},
        quantizer=quantizer,
        packer=packer,
        raw=raw,
        source=source,
    )
    result = replace(result, notes=tuple(_bad_patterns(result)))
    result = reader_class(method).complete(result, label)
    return replace(result, title=f"auto-round, packed as {result.title}") if auto_round else result


def _speaking(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a config.json that may speak of quantization: all of it, or the language model's part alone."""
    parts = (config.get(key) for key in ("text_config", "language_config", "llm_config"))
    return [config, *(part for part in parts if isinstance(part, dict))]


def reader_class(method: str) -> type[Reader]:
    """What reads the checkpoints of a key of METHODS."""
    module, _, name = METHODS[method].rpartition(".")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def whole_number(value: object) -> int | None:
    """An integer as JSON's writers spell it, 4, 4.0 or "4"; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,9}", value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def _number(source: Path, raw: dict[str, Any], keys: tuple[str, ...], default: int) -> int:
    for key in keys:
        value = raw.get(key)
        if value is not None:
            if (number := whole_number(value)) is None:
                raise BridgeError(f"{source}: {key} is {value!r}, not a whole number; mend the file")
            return number
    return default


def _auto_round(source: Path, raw: dict[str, Any]) -> tuple[str, str]:
    """(method, label) of auto-round's packing_format, or backend as it was called before.

    auto_round:auto_gptq stores z - 1; auto_round and auto_round:gptqmodel store z itself.
    """
    packing = str(raw.get("packing_format") or raw.get("backend") or "auto_round").lower()
    words = set(packing.removeprefix("auto_round").removeprefix("autoround").split(":")) - {""}
    kind = str(raw.get("data_type") or "int").lower()
    if kind in ("int", "int_sym", "int_asym"):
        if words & {"awq", "auto_awq"}:
            return "awq", "gemm"
        if words & {"gptq", "auto_gptq"}:
            return "gptq", "gptq"
        if words <= {"gptqmodel", "exllamav2", "tritonv2", "triton", "torch"}:
            return "gptq", "gptq_v2"
    if kind.startswith("fp") and whole_number(raw.get("bits")) == 8 and words <= {"fp8", "fp8_static"}:
        return "fp8", ""
    raise BridgeError(
        f"{source}: auto-round's packing_format {packing!r} with data_type {kind!r} is not supported (supported: "
        "int as auto_round, auto_round:auto_gptq, auto_round:gptqmodel, auto_round:auto_awq, auto_round:mlx; 8-bit fp "
        "as auto_round:fp8, auto_round:fp8_static); export it as one of these"
    )


def compiles(pattern: str) -> str | None:
    """What Python's regular expressions have against a pattern, None where they take it."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as problem:
        return str(problem)
    return None


def _found(find: Callable[[str, str], object], pattern: str, name: str) -> bool:
    return compiles(pattern) is None and find(pattern, name) is not None


def _bad_patterns(quant: QuantConfig) -> Iterator[str]:
    """A note on each pattern that is passed over: other tools' expressions (PCRE) or globs. The tensors tell enough.

    Raises BridgeError where a pattern's settings are no table.
    """
    for key, rules in (("dynamic", quant.dynamic), ("extra_config", quant.extra)):
        for pattern, change in rules.items():
            if not isinstance(change, dict) and not (key == "dynamic" and (change is False or pattern[:2] == "-:")):
                raise BridgeError(f"{quant.source}: {key} {pattern!r} is {change!r}, not a table; mend the file")
            by_name = key == "dynamic" and pattern[:2] in ("-:", "+:")
            if problem := compiles(pattern[2:] if by_name else pattern):
                yield f"{key} has the pattern {pattern!r:.80}, which cannot be read ({problem}); it is passed over"
