"""The labels of a quantized checkpoint: what config.json says about its layers, in the words of each format."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bridge.checkpoint.formats.zeros import OWN_BITS_SINCE
from bridge.checkpoint.labels.quant_config import gptq_labels, packer
from bridge.errors import BridgeError


class Groups(NamedTuple):
    """How one layer is quantized.

    bits        per code; ternary codes have 2
    group_size  -1: one group per row
    symmetric   zero points are not stored, where the format allows that
    kind        of the codes: int, or NVFP4 or MXFP4
    """

    bits: int
    group_size: int
    symmetric: bool = False
    kind: str = "int"

    def sizes(self) -> dict[str, int]:
        return {"bits": self.bits, "group_size": self.group_size}


def labels_of(
    format: str,
    layers: Mapping[str, Groups],
    floats: list[str],
    *,
    asymmetric: bool,
    scattered: bool,
    towers: bool = False,
) -> dict[str, Any]:
    """The keys of config.json that describe quantized layers.

    layers      by name, at least one
    floats      matrices of blocks that are not quantized, which a reader would expect to be
    asymmetric  whether a layer has zero points other than the middle
    scattered   whether a layer has act-order
    towers      whether the model has other parts than a language model, though their tensors may be missing

    Raises BridgeError for AWQ layers of different group sizes.
    """
    usual = Counter(layers.values()).most_common(1)[0][0]
    if format == "mlx":
        own = {name: _mlx_mode(groups) for name, groups in layers.items() if groups != usual}
        said = {**_mlx_mode(usual), **own}
        return {"quantization": said, "quantization_config": said}
    if format == "compressed-tensors":
        return {"quantization_config": _compressed_labels(layers, [*floats, *([_TOWERS] if towers else [])])}
    if format == "hqq":
        params = {"nbits": usual.bits, "group_size": usual.group_size, "axis": 1, "view_as_float": False}
        settings = {"weight_quant_params": params}
        left = [*floats, "lm_head"]
        return {"quantization_config": {"quant_method": "hqq", "quant_config": settings, "skip_modules": left}}
    if format == "modelopt":
        return {"quantization_config": _modelopt_labels(usual, floats)}
    if format == "awq":
        return {"quantization_config": _awq_labels(layers, usual, floats)}
    writers = packer()
    if asymmetric and format == "gptq":
        # GPTQModel reads v1 with varying zero points only from itself; this version packs as we do
        writers.append(f"gptqmodel:{'.'.join(map(str, OWN_BITS_SINCE))}")
    labels = gptq_labels(
        format,
        usual.bits,
        usual.group_size,
        desc_act=scattered,
        sym=not asymmetric,
        floats=floats,
        others={name: groups.sizes() for name, groups in layers.items() if groups != usual},
    )
    labels |= {"lm_head": "lm_head" in layers, "format": format, "pack_dtype": "int32"}
    return {"quantization_config": labels | {"meta": {"quantizer": writers, "packer": packer()}}}


def _mlx_mode(groups: Groups) -> dict[str, Any]:
    return {**groups.sizes(), "mode": "affine" if groups.kind == "int" else groups.kind.lower()}


def _modelopt_labels(usual: Groups, floats: Iterable[str]) -> dict[str, Any]:
    """Without scales of activations, which are not quantized."""
    return {
        "quant_method": "modelopt",
        "quant_algo": f"W4A16_{usual.kind}",
        "group_size": usual.group_size,
        "ignore": [*floats, "lm_head"],
    }


def _awq_labels(layers: Mapping[str, Groups], usual: Groups, floats: Iterable[str]) -> dict[str, Any]:
    if len(set(layers.values())) > 1:
        raise BridgeError("AWQ has one group size for all layers; gptq_v2 has one per layer")
    # readers search names within names: one that is part of a quantized layer's would exclude that too
    left = [name for name in floats if not any(name in layer for layer in layers)]
    return {
        **usual.sizes(),
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,  # qzeros exist, symmetric or not
        "modules_to_not_convert": left or None,
    }


def _compressed_labels(layers: Mapping[str, Groups], floats: Iterable[str]) -> dict[str, Any]:
    """One scheme for all linear layers, or several that name their layers."""
    schemes: dict[Groups, list[str]] = {}
    for name, groups in layers.items():
        schemes.setdefault(groups, []).append(name)
    formats = {
        groups: "pack-quantized" if groups.kind == "int" else f"{groups.kind.lower()}-pack-quantized"
        for groups in schemes
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if len({*formats.values()}) > 1 else next(iter(formats.values())),
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "format": formats[groups],
                "targets": [*map(_target, names)] if len(schemes) > 1 else ["Linear"],
                "weights": {
                    "num_bits": groups.bits,
                    "type": "int" if groups.kind == "int" else "float",
                    "symmetric": groups.symmetric,
                    "strategy": "tensor_group"
                    if groups.kind == "NVFP4"
                    else "group"
                    if groups.group_size > 0
                    else "channel",
                    "group_size": groups.group_size if groups.group_size > 0 else None,
                },
            }
            for i, (groups, names) in enumerate(schemes.items())
        },
        "ignore": [*map(_target, floats), *(["lm_head"] if "lm_head" not in layers else [])],
    }


def _target(name: str) -> str:
    """A layer's name; a pattern of both where transformers' modules have other names than checkpoints."""
    if name == _TOWERS:
        return name
    pattern = re.escape(name)
    for ours, both in _RENAMED.items():
        pattern = pattern.replace(re.escape(ours), both)
    return name if pattern == re.escape(name) else f"re:{pattern}$"


_TOWERS = r"re:.*(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|embed_vision|embed_audio)\."
_RENAMED = {
    "backbone.": r"(backbone|model)\.",  # Nemotron-H
    "block_sparse_moe.gate": r"(block_sparse_moe\.gate|mlp\.(gate|router))",
}
