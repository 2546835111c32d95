"""transformers' layout for Metal: MLX's affine integers of 2, 4 and 8 bits, with another name for the offsets.

    weight   uint32 [out, in * b / 32]   codes, a stream of b bits along the row
    scales   float  [out, G]
    qbiases  float  [out, G]             W = s * q + qbias
    bias     float  [out]                optional

config.json has bits and group_size for all modules. Learned from transformers' integrations/metal_quantization.py,
whose own functions wrote the tests' files.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import check_shapes
from bridge.checkpoint.formats.mlx import affine_zeros
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, module_info
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError


class MetalReader(Reader):
    """Reads transformers' Metal checkpoints."""

    parts: ClassVar = ("weight", "scales", "qbiases", "bias")
    required: ClassVar = ("qbiases", "scales", "weight")
    plain: ClassVar = frozenset({"weight", "bias"})

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        size = 64 if quant.raw.get("group_size") is None else quant.group_size
        return replace(quant, title="Metal (transformers)", sym=False, group_size=size)

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        weight, scales, offsets = (tensors[part] for part in ("weight", "scales", "qbiases"))
        bits, size = self.quant.bits, self.quant.group_size
        check_shapes(weight.dtype == "U32" and weight.is_matrix and scales.is_matrix, name, tensors)
        (out, words), groups = weight.shape, scales.shape[1]
        fits = scales.shape == offsets.shape == (out, groups) and scales.floating and offsets.floating
        check_shapes(fits, name, tensors)
        if bits not in (2, 4, 8) or words * 32 != groups * size * bits:
            raise BridgeError(
                f"{weight.file}: {name} has {words} words and {groups} groups a row, which are not {bits} bits in "
                f"groups of {size} as {self.quant.source} says; take config and weights of the same model"
            )
        return module_info(name, tensors, bits, size, (out, groups * size))

    def read(self, name: str, rows: np.ndarray | None = None) -> GroupedTensor:
        from bridge.checkpoint.formats.bits import unpack_rows

        info = self.modules[name]
        scales, offsets = self.scales(name), self.scales(name, "qbiases")
        if rows is not None:
            scales, offsets = scales[rows], offsets[rows]
        codes = unpack_rows(self.part(name, "weight", rows), info.bits, info.shape[1])
        scales, zeros = affine_zeros(codes, scales, offsets, info.group_size)
        if not np.isfinite(zeros).all():
            raise BridgeError(f"{info.file}: {name} has qbiases far too large for its scales; it is damaged")
        return GroupedTensor(name, info.bits, codes, scales, zeros, info.group_size, bias=self.bias(name, rows))
