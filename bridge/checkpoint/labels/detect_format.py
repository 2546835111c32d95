"""Which quantization method a checkpoint's configs name.

quantize_config.json   GPTQModel, AutoGPTQ (no quant_method: gptq)
quant_config.json      AutoAWQ, llm-awq (w_bit, q_group_size)
config.json            quantization_config, written by all of them today; QTIP has quip_params
quantization_config.json   EXL3, a copy with a list of the tensors; counts where the others say nothing
quanto_qmap.json       optimum-quanto: {module: {weights: qint4, ..}}; the model's width is config.json's
hf_quant_config.json   ModelOpt: {quantization: {quant_algo: FP8, ...}}; used if the others name no quantization

The first that exists is used, completed from config.json. `unlabelled` is for checkpoints without any.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.checkpoint.formats.fp8 import read_block
from bridge.checkpoint.formats.registry import READERS
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.system.fields import table, whole_number
from bridge.system.patterns import pattern_problem
from bridge.system.storage.files import read_json

# methods of transformers that are not read: why, and what to do
REFUSED = {"gguf": "the weights are those of a GGUF file; give that file in place of this folder"}
# files with nothing else in them
QUANT_CONFIGS = (
    "quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json", "quanto_qmap.json",
)  # fmt: skip
_NONE = "(none)"  # no method is named
_METHOD_KEYS = ("quant_method", "quantization_method", "method")  # the second is SINQ's
NAMES = tuple(sorted({*READERS} - {"gptq-float-zeros"}))


def read_quant_config(folder: Path, config: dict[str, Any]) -> QuantConfig:
    """The quantization of the checkpoint in `folder`; `config` is its config.json.

    Raises BridgeError for methods and layouts that no reader supports.
    """
    inner = (q for part in _parts(config) if isinstance(q := part.get("quantization_config"), dict))
    raw: dict[str, Any] = dict(next(inner, {}))
    if not raw and (old := table(config.get("compression_config"))):  # its name in 2024
        raw = {"quant_method": "compressed-tensors", **old}
    source = folder / "config.json"
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (folder / name).exists():
            source = folder / name
            raw = {**raw, **{k: v for k, v in read_json(source).items() if v is not None}}
            raw.setdefault("quant_method", raw.get("method", method))
            break
    mlx = config.get("quantization")  # mlx-lm's; its quantization_config is a copy
    if not raw.keys() & {"quant_method", "method"} or str(raw.get("packing_format")).endswith("mlx"):
        mlx = mlx if isinstance(mlx, dict) else raw
        if {"bits", "group_size"} <= mlx.keys() and not mlx.keys() & {"desc_act", "sym", "zero_point"}:
            raw = {**mlx, "quant_method": "mlx"}
    if not raw and isinstance(config.get("quip_params"), dict):
        raw = {**config["quip_params"], "quant_method": "qtip"}
    if not raw:
        separate = read_json(folder / "quantization_config.json", optional=True)
        if separate.get("quant_method"):
            source, raw = folder / "quantization_config.json", separate
    if not raw and (modules := read_json(folder / "quanto_qmap.json", optional=True)):
        source, raw = folder / "quanto_qmap.json", {"quant_method": "quanto", "modules": modules}
    if not raw:
        source = folder / "hf_quant_config.json"
        quantization = table(read_json(source, optional=True).get("quantization"))
        if not quantization.get("quant_algo"):  # only the key-value cache is quantized
            return QuantConfig(source=None)
        raw = {"quant_method": "modelopt", **quantization}
    if raw.get("load_in_4bit") or raw.get("load_in_8bit"):  # transformers before 4.32 wrote no quant_method
        raw.setdefault("quant_method", "bitsandbytes")
    method = str(next((raw[key] for key in _METHOD_KEYS if raw.get(key)), _NONE)).lower()
    label = str(raw.get("checkpoint_format") or raw.get("format") or "").lower()
    auto_round = method in ("auto-round", "auto_round", "intel/auto-round")
    if auto_round:
        method, label = _auto_round(source, raw)
    if method in REFUSED:
        raise BridgeError(f"{source}: {REFUSED[method]}")
    if method == _NONE:
        keys = ", ".join(map(str, raw))
        raise BridgeError(
            f"{source}: describes a quantization ({keys:.80}) without quant_method; add it ({', '.join(NAMES)}), or "
            "remove the description where the tensors are floats"
        )
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
            f"use the checkpoint from which it was made, in the {'gemm' if method == 'awq' else 'gptq'} layout"
        )
    rotation = raw.get("rotation") or raw.get("rotation_config")  # GPTQModel's, auto-round's
    if rotation and str(rotation).lower() != "none":
        raise BridgeError(
            f"{source}: rotation {rotation!r} needs a Hadamard transform at run time, which GGUF lacks; "
            "use a checkpoint quantized without rotation"
        )
    if read_block(raw.get("group_size")):  # auto-round's FP8
        raw = {"weight_block_size": raw["group_size"], **raw, "group_size": -1}
    writers = [table(raw.get("meta")).get(key) for key in ("quantizer", "packer")]
    quantizer, packer = (tuple(map(str, w if isinstance(w, list) else [w] if w else [])) for w in writers)
    result = QuantConfig(
        method=method, raw=raw, source=source, quantizer=quantizer, packer=packer,
        bits=4 if method in ("exl2", "exl3") else _number(source, raw, ("bits", "w_bit"), 4),  # theirs are averages
        group_size=_number(source, raw, ("group_size", "q_group_size"), 128),
        sym=bool(raw.get("sym", not raw.get("zero_point", method == "awq"))),
        desc_act=bool(raw.get("desc_act", False)),
        dynamic=table(raw.get("dynamic")),
        model=next((part for part in _parts(config) if part.get("hidden_size")), {}),
    )  # fmt: skip
    result = replace(result, notes=tuple(_unread_patterns(result)))
    result = READERS[method].complete(result, label)
    return replace(result, title=f"auto-round, packed as {result.title}") if auto_round else result


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a config.json that may hold quantization_config: the whole, and the language model's part."""
    parts = (config.get(key) for key in ("text_config", "language_config", "llm_config"))
    return [config, *(part for part in parts if isinstance(part, dict))]


def _number(source: Path, raw: dict[str, Any], keys: tuple[str, ...], default: int) -> int:
    for key in keys:
        value = raw.get(key)
        if value is not None:
            if (number := whole_number(value)) is None:
                raise BridgeError(f"{source}: {key} is {value!r}, not a whole number; correct the file")
            return number
    return default


def _auto_round(source: Path, raw: dict[str, Any]) -> tuple[str, str]:
    """(method, label) of auto-round's packing_format, which used to be called backend.

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
    bits = whole_number(raw.get("bits"))
    if bits == 4 and kind in ("nvfp4_v2", "mx_int", "mx_int4"):
        return "auto-round", "nvfp4_e5m3" if kind.startswith("nv") else "mxint4"
    if bits == 4 and kind.startswith(("nv_fp", "nvfp4")):
        return "modelopt", "nvfp4"
    if bits in (4, 8) and kind.startswith(("mx_fp", "mxfp")):
        return "modelopt", f"mxfp{bits}"
    if kind.startswith("fp") and bits == 8 and words <= {"fp8", "fp8_static"}:
        return "fp8", ""
    raise BridgeError(
        f"{source}: auto-round's packing_format {packing!r} with data_type {kind!r} is not supported (supported: "
        "int as auto_round, auto_round:auto_gptq, auto_round:gptqmodel, auto_round:auto_awq, auto_round:mlx; 8-bit fp "
        "as auto_round:fp8, auto_round:fp8_static; 4-bit nv_fp, nvfp4_v2, mx_fp and mx_int; 8-bit mx_fp); export it as "
        "one of these"
    )


def _unread_patterns(quant: QuantConfig) -> Iterator[str]:
    """A note on each ignored pattern: globs, or PCRE that Python cannot compile. The tensors tell enough without it.

    Raises BridgeError if a pattern's settings are not a table.
    """
    for key, rules in (("dynamic", quant.dynamic), ("extra_config", quant.extra)):
        for pattern, change in rules.items():
            if not isinstance(change, dict) and not (key == "dynamic" and (change is False or pattern[:2] == "-:")):
                raise BridgeError(f"{quant.source}: {key} {pattern!r} is {change!r}, not a table; correct the file")
            by_name = key == "dynamic" and pattern[:2] in ("-:", "+:")
            if problem := pattern_problem(pattern[2:] if by_name else pattern):
                yield f"{key} has the pattern {pattern!r:.80}, which cannot be read ({problem}) and is ignored"
