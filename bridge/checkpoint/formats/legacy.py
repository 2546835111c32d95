"""The first GPTQ tools: IST-DASLab/gptq, GPTQ-for-LLaMa, and others that wrote GPTQ tensors without a config.

    qweight  int32 [in*b/32, out]          codes, as in `gptq`
    scales   float [out, 1] or [G, out]
    zeros    like scales                   s*z: W = s*q - zeros
    bias     float [out]                   always written; zeros if the layer has no bias
    g_idx    int32 [in]                    group of each input feature; absent before April 2023

IST-DASLab's Quant3Linear has 3 bits and one group a row; until March 2023 GPTQ-for-LLaMa stored 2, 3, 4 and 8 bits in
the same way. Its later files have qzeros like AutoGPTQ's, read as GPTQ v1. Bits and group size follow from shapes.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import check_shapes
from bridge.checkpoint.formats.gptq import GptqReader
from bridge.checkpoint.formats.module_reader import ModuleInfo, module_info
from bridge.checkpoint.formats.zeros import unscaled
from bridge.checkpoint.grouped import GroupedTensor, fit_group_size
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError

BITS = (2, 3, 4, 8)


class FloatZerosReader(GptqReader):
    """Reads GPTQ codes whose zero points are stored as floats, multiplied by their scales."""

    short: ClassVar = "gptq with float zeros"
    parts: ClassVar = ("qweight", "zeros", "scales", "g_idx", "bias")
    required: ClassVar = ("qweight", "zeros", "scales")

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        return replace(quant, title="GPTQ with float zero points")

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        weight, zeros, scales = (tensors[p] for p in ("qweight", "zeros", "scales"))
        bits, g_idx = self.quant.bits, tensors.get("g_idx")
        fits = weight.is_matrix and weight.dtype == "I32" and len(scales.shape) == 2
        check_shapes(fits and zeros.floating and zeros.shape == scales.shape, name, tensors)
        (rows, out), columns = weight.shape, weight.shape[0] * 32 // bits
        groups = 1 if scales.shape == (out, 1) else scales.shape[0]
        size = fit_group_size(columns, groups, self.quant.group_size)
        fits = scales.shape in ((out, 1), (groups, out)) and columns * bits == rows * 32
        check_shapes(fits and (g_idx.shape == (columns,) if g_idx else size is not None), name, tensors)
        return module_info(name, tensors, bits, size or -(-columns // groups), (out, columns))

    def read(self, name: str, rows: np.ndarray | None = None) -> GroupedTensor:
        from bridge.checkpoint.formats.bits import unpack_columns

        info = self.modules[name]
        notes: list[str] = []
        size, order = self._groups(name, notes)
        scales, products = self.scales(name), self.scales(name, "zeros")
        if scales.shape != (info.shape[0], 1):
            scales, products = (np.ascontiguousarray(x.T) for x in (scales, products))
        if (products[scales == 0] != 0).any():
            raise BridgeError(
                f"{info.file}: {name} has zeros that are not 0 for groups whose scale is 0; the checkpoint is damaged"
            )
        if rows is not None:
            scales, products = scales[rows], products[rows]
        codes = unpack_columns(self.part(name, "qweight", rows, axis=1), info.bits, info.shape[1])
        zeros, bias = unscaled(scales, products), self.bias(name, rows)
        return GroupedTensor(name, info.bits, codes, scales, zeros, size, order, bias, tuple(notes))

    def _stored_groups(self, name: str) -> int:
        info = self.modules[name]
        stored = info.tensors["scales"].shape
        return 1 if stored == (info.shape[0], 1) else stored[0]
