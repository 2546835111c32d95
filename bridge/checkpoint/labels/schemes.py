"""The schemes of a compressed-tensors config, and the scheme of each module.

    quantization_config
        format            pack-quantized, int-quantized, ...; "mixed-precision" if each group has its own
        config_groups     {name: {targets: [...], format, weights: {num_bits, type, symmetric, strategy,
                          group_size, block_structure, actorder}, input_activations, ...}}
        ignore            [...] as targets; written as floats
        transform_config  rotations: of weights, folded into them; of activations, not folded
        sparsity_config, kv_cache_scheme

A target is a module's name, "re:" and a regular expression that matches from the name's start, or a class
(Linear, Embedding). A name takes precedence over an expression, an expression over a class; of several
expressions the first in alphabetical order applies, as in the compressed-tensors package.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.checkpoint.formats.fp8 import read_block
from bridge.checkpoint.formats.written import Groups, QuantizedLayers
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.checkpoint.tensor_names import expert_of, pattern_of
from bridge.errors import BridgeError
from bridge.system.fields import table, whole_number
from bridge.system.patterns import matched, pattern_problem

FORMATS = (
    "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "dense", "mixed-precision",
)  # fmt: skip
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
# targets of what stays float: the towers of any model, and modules whose names in transformers are others
_TOWERS = (
    r"re:.*(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|vision_embedder|embed_vision|embed_audio)"
    r"\."
)
_RENAMED = {
    "backbone.": r"(backbone|model)\.",  # Nemotron-H
    "block_sparse_moe.gate": r"(block_sparse_moe\.gate|mlp\.(gate|router))",
}
# the format of written layers by the kind of their codes, and the dtype of scales that are exponents
_WRITTEN = {
    "int": "pack-quantized", "NVFP4": "nvfp4-pack-quantized", "MXFP4": "mxfp4-pack-quantized",
    "FP8": "float-quantized", "MXFP8": "mxfp8-quantized",
}  # fmt: skip
_BYTES = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
_FOLDED = ("weight_input", "weight_output")  # locations of rotations that are folded into the weights
EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)$")


@dataclass(frozen=True)
class Scheme:
    """How one group of modules is quantized.

    block        (rows, columns) that share a scale; 0 means all
    act_order    whether g_idx is stored
    activations  whether activations are quantized too
    """

    targets: tuple[str, ...]
    format: str
    bits: int
    floats: bool
    sym: bool
    strategy: str
    block: tuple[int, int]
    act_order: bool = False
    activations: bool = False

    def __str__(self) -> str:
        rows, columns = self.block
        where = f"blocks of {rows}x{columns}" if self.strategy == "block" else f"groups of {columns}"
        where = {"tensor": "one scale a tensor", "channel": "one group a row"}.get(self.strategy, where)
        if self.floats:
            return f"{self.bits}-bit floats, {where}"
        order = ", act-order" if self.act_order else ""
        return f"{self.bits} bits, {where}, {'symmetric' if self.sym else 'asymmetric'}{order}"


def matches(name: str, targets: Sequence[str], source: Path | None) -> bool:
    """Whether a target of a config, `source`, is the module's name, its class, or an expression that matches it."""
    return any(_rank(name, target, source) is not None for target in targets)


def scheme_of(name: str, schemes: Sequence[Scheme], source: Path | None) -> Scheme | None:
    """The scheme of a config, `source`, that applies to a module; if no target matches it, the only scheme."""
    targets = [(target, i) for i, scheme in enumerate(schemes) for target in scheme.targets]
    ranked = [(rank, i) for target, i in targets if (rank := _rank(name, target, source)) is not None]
    if ranked:
        return schemes[min(ranked)[1]]
    return schemes[0] if len(schemes) == 1 else None


def _rank(name: str, target: str, source: Path | None) -> tuple[int, str] | None:
    if target == name:
        return 0, target
    if target.startswith("re:"):
        return (1, target) if matched("match", target[3:], name, source) else None
    if target == ("Embedding" if EMBEDDING.match(name) else "Linear"):
        return 2, target
    return None


def read_schemes(quant: QuantConfig) -> list[Scheme]:
    """The schemes that quantize weights, in the config's order. Raises BridgeError for unsupported schemes."""
    raw, source = quant.raw, quant.source
    _check_transforms(quant)
    default = _format(quant, raw.get("format"))
    sparse = str(table(raw.get("sparsity_config")).get("format") or "dense")
    if sparse != "dense":
        raise BridgeError(
            f"{source}: sparsity format {sparse!r} is not supported; save the model again without sparse compression "
            "(save_pretrained(..., disable_sparse_compression=True) in llm-compressor), or use another one"
        )
    groups = raw.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise BridgeError(f"{source}: config_groups is not a table of tables; download config.json again")
    schemes = []
    for key, group in groups.items():
        weights = group.get("weights")
        if weights is not None:
            if not isinstance(weights, dict):
                raise BridgeError(f"{source}: weights of {key} is not a table; download config.json again")
            schemes.append(_scheme(quant, key, group, weights, default))
    patterns = [t for s in schemes for t in s.targets] + ignored(quant)
    for target in patterns:
        if target.startswith("re:") and (problem := pattern_problem(target[3:])):
            raise BridgeError(f"{source}: has the invalid pattern {target!r} ({problem}); correct the file")
    return schemes


def ignored(quant: QuantConfig) -> list[str]:
    """Targets of the modules that the config lists as not quantized."""
    ignore = quant.raw.get("ignore")
    return [t for t in ignore if isinstance(t, str)] if isinstance(ignore, list) else []


def _scheme(quant: QuantConfig, key: str, group: dict[str, Any], weights: dict[str, Any], default: str) -> Scheme:
    where = f"{quant.source}: {key}"
    form = _format(quant, group.get("format")) if group.get("format") else default
    kind, size = str(weights.get("type") or "int").lower(), whole_number(weights.get("group_size"))
    num_bits = weights.get("num_bits", 8)
    bits = whole_number(num_bits)
    if bits is None or bits not in {"int": range(2, 9), "float": (4, 6, 8)}.get(kind, ()):
        raise BridgeError(
            f"{where}: num_bits {num_bits!r} of type {kind!r} is not supported (integers of 2 to 8 bits and floats of "
            "4, 6 and 8 bits are); convert the unquantized model instead"
        )
    inferred = "channel" if size == -1 else "group" if (size or 0) > 0 else "tensor"
    strategy = str(weights.get("strategy") or inferred).lower()
    if strategy not in STRATEGIES:
        raise BridgeError(
            f"{where}: unknown strategy {strategy!r} (known: {', '.join(STRATEGIES)}); "
            "convert the unquantized model instead"
        )
    block = read_block(weights.get("block_structure"))
    if strategy in ("group", "tensor_group") and not (size or 0) > 0:
        raise BridgeError(
            f"{where}: strategy {strategy!r} has group_size {weights.get('group_size')!r}; download config.json again"
        )
    if strategy == "block" and block is None:
        raise BridgeError(
            f"{where}: block_structure {weights.get('block_structure')!r} is not [rows, columns]; "
            "download config.json again"
        )
    run = 1, size or 0
    blocks = {"tensor": (0, 0), "channel": (1, 0), "group": run, "tensor_group": run, "block": block or (0, 0)}
    listed = group.get("targets")
    targets = tuple(map(str, listed)) if isinstance(listed, list) else (str(listed),) if listed else ()
    sym, act_order = bool(weights.get("symmetric", True)), str(weights.get("actorder")).lower() in ("group", "dynamic")
    activations = bool(group.get("input_activations"))
    return Scheme(targets, form, bits, kind == "float", sym, strategy, blocks[strategy], act_order, activations)


def _format(quant: QuantConfig, value: object) -> str:
    name = str(value or "pack-quantized").lower()
    if name not in FORMATS:
        raise BridgeError(
            f"{quant.source}: compressed-tensors format {name!r} is not supported (supported: "
            f"{', '.join(FORMATS)}); quantize to pack-quantized (W4A16), or convert the unquantized model"
        )
    return name


def _check_transforms(quant: QuantConfig) -> None:
    """Refuse rotations of activations: they need a Hadamard transform at run time, which GGUF lacks."""
    transforms = quant.raw.get("transform_config")
    if not transforms:
        return
    groups = table(transforms).get("config_groups")
    for key, group in groups.items() if isinstance(groups, dict) else [("", {})]:
        try:
            locations = [str(step["location"]) for step in group["apply"]]
        except (TypeError, KeyError):
            locations = ["in an unknown location"]
        online = [location for location in locations if location not in _FOLDED]
        if online:
            raise BridgeError(
                f"{quant.source}: transform_config {key} rotates activations ({', '.join(online)}) at run time, which "
                "GGUF lacks; use a checkpoint without it, or one whose rotations are all folded into the weights"
            )


def schemes_of(layers: QuantizedLayers) -> dict[str, Any]:
    """The quantization_config of written layers: one scheme for all linear layers, or several that name theirs."""
    schemes: dict[Groups, list[str]] = {}
    for name, groups in layers.groups.items():
        schemes.setdefault(groups, []).append(name)
    formats, alike = {groups: _WRITTEN[groups.kind] for groups in schemes}, _alike(layers)
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if len({*formats.values()}) > 1 else next(iter(formats.values())),
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "format": formats[groups],
                "targets": _targets(names, layers.towers, alike) if len(schemes) > 1 else ["Linear"],
                "weights": _weights(groups),
                **_activations(groups),
            }
            for i, (groups, names) in enumerate(schemes.items())
        },
        "ignore": [
            *_targets(layers.floats, layers.towers, alike),
            *([_TOWERS] if layers.towers else []),
            *(["lm_head"] if "lm_head" not in layers.groups else []),
        ],
    }


def _weights(groups: Groups) -> dict[str, Any]:
    block = groups.strategy == "block"
    return {
        "num_bits": groups.bits, "type": "int" if groups.kind == "int" else "float", "symmetric": groups.symmetric,
        "strategy": "tensor_group" if groups.kind == "NVFP4" else groups.strategy,
        "group_size": groups.group_size if groups.group_size > 0 and not block else None,
        **({"block_structure": [groups.rows, groups.group_size]} if block else {}),
        **(_BYTES if groups.kind == "MXFP8" else {}),
        **({"actorder": "group"} if groups.act_order else {}),
    }  # fmt: skip


def _activations(groups: Groups) -> dict[str, Any]:
    """Activations of layers of 8-bit floats are such too, as the kernels of vLLM and others have them; those of other
    layers are as they are computed."""
    if groups.kind not in ("FP8", "MXFP8"):
        return {}
    each = {"tensor": "token", "channel": "token", "block": "group"}.get(groups.strategy, groups.strategy)
    return {
        "input_activations": {
            "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor" if groups.static else each,
            "dynamic": not groups.static, "group_size": groups.group_size if each == "group" else None,
            **(_BYTES if groups.kind == "MXFP8" else {}),
        }
    }  # fmt: skip


def _alike(layers: QuantizedLayers) -> set[str]:
    """The experts of a layer, by `ExpertName.pattern`, of which all have the same groups, or none."""
    groups_of_pattern: dict[str, set[Groups | None]] = {}
    for name, groups in {**layers.groups, **dict.fromkeys(layers.floats)}.items():
        if (expert := expert_of(name)) is not None:
            groups_of_pattern.setdefault(expert.pattern, set()).add(groups)
    return {pattern for pattern, groups in groups_of_pattern.items() if len(groups) == 1}


def _targets(names: Iterable[str], parts: bool, alike: set[str]) -> list[str]:
    """The names of layers; a pattern where modules of programs have other names than checkpoints, and one for all
    experts that are `alike`: transformers looks for their scheme among patterns."""
    targets = []
    for name in names:
        plain = pattern = pattern_of(name, parts)
        for ours, both in _RENAMED.items():
            pattern = pattern.replace(re.escape(ours), both)
        expert = expert_of(name)
        if expert is not None and expert.pattern in alike:
            pattern = pattern.replace(rf"experts\.{expert.number}\.", r"experts\.\d+\.")
        changed = parts or expert is not None or pattern != plain
        targets.append(f"re:{pattern}" if changed else name)
    return [*dict.fromkeys(targets)]
