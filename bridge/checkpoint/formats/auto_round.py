"""auto-round's formats that no other tool has: MXINT4, and NVFP4 with wider scales (NVFP4_E5M3).

                   MXINT4                          NVFP4_E5M3
    weight_packed  uint8 [out, in/2]               uint8 [out, in/2]
    weight_scale   uint8 [out, in/32], F8_E8M0     uint8 [out, in/16] or [out, in/32], E5M3
    bias           float [out]                     float [out]

Two codes are in a byte, the first in the low nibble. A nibble of MXINT4 is a sign and m, 0..7: W = ±m / 4 * scale. One
of NVFP4 is F4_E2M1. E5M3 has no sign, five bits of exponent and three of mantissa. In a matrix whose scales differ by
less than 2^13, they are E4M3's times a power of two, and the matrix is GGUF's NVFP4; others are floats.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.decoded import DecodedTensor, level_noise, rounding_distortion
from bridge.checkpoint.files.dtypes import as_float32
from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import check_shapes
from bridge.checkpoint.formats.fp4 import E2M1, Fp4Tensor, checked_scales, unpacked
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, module_info
from bridge.checkpoint.grouped import CodedTensor, GroupedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig

_CODES, _SCALES = "weight_packed", "weight_scale"
_E4M3 = as_float32(np.arange(127, dtype=np.uint8), "F8_E4M3")  # the finite ones without a sign


class AutoRoundReader(Reader):
    """Reads MXINT4 and NVFP4_E5M3."""

    parts: ClassVar = (_CODES, _SCALES, "bias")
    required: ClassVar = (_CODES, _SCALES)

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        size = 16 if label == "nvfp4_e5m3" and quant.group_size == 16 else 32
        return replace(quant, title=label.upper(), claims=(f"groups of {size}",), group_size=size, version=label)

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        codes, scales = tensors[_CODES], tensors[_SCALES]
        check_shapes(codes.is_matrix and codes.dtype == scales.dtype == "U8", name, tensors)
        out, columns, size = codes.shape[0], 2 * codes.shape[1], self.quant.group_size
        check_shapes(columns % size == 0 and scales.shape == (out, columns // size), name, tensors)
        return module_info(name, tensors, 4, 32 if self._integers else 16, (out, columns))

    @property
    def _integers(self) -> bool:
        return self.quant.version == "mxint4"

    def tensor_scales(self, name: str) -> dict[str, float]:
        fitted = None if self._integers else _fitted(self._scale_bits(name))
        return {"scale": fitted[1]} if fitted else {}

    def read_all_rows(self, name: str) -> CodedTensor:
        info, bits = self.modules[name], self._scale_bits(name)
        codes, bias = unpacked(self.part(name, _CODES)), self.bias(name)
        if self._integers:
            size = codes & np.uint8(7)
            codes = np.where(codes & np.uint8(8), np.uint8(8) - size, np.uint8(8) + size)
            scales = as_float32(bits, "F8_E8M0") / np.float32(4)
            return GroupedTensor(name, 4, codes, scales, np.full_like(scales, 8), info.group_size, bias=bias)
        if (fitted := _fitted(bits)) is not None:
            return Fp4Tensor(name, "NVFP4", codes, fitted[0], info.group_size, fitted[1], bias=bias)
        scales = np.repeat(_e5m3(bits), info.group_size, axis=1)
        weights = E2M1[codes] * scales
        noise = float((np.square(scales, dtype=np.float64) * level_noise(E2M1)[codes]).sum())
        share = rounding_distortion(noise, weights)
        return DecodedTensor(name, 4, weights, share, "codes with scales too far apart for E4M3", bias=bias)

    def _scale_bits(self, name: str) -> np.ndarray:
        bits = checked_scales("MXFP4", self.part(name, _SCALES), self.modules[name].tensors[_SCALES])
        return np.repeat(bits, self.quant.group_size // self.modules[name].group_size, axis=1)


def _e5m3(bits: np.ndarray) -> np.ndarray:
    """float32: the values of E5M3."""
    exponent, mantissa = (bits >> np.uint8(3)).astype(np.int32), (bits & np.uint8(7)).astype(np.float32)
    return np.ldexp(np.where(exponent > 0, mantissa + 8, mantissa), np.maximum(exponent, 1) - 18)


def _fitted(bits: np.ndarray) -> tuple[np.ndarray, float] | None:
    """E5M3 as bits of E4M3, and the power of two that multiplies these; None if E4M3 lacks one of the quotients."""
    power = int(bits.max() >> 3) - 22  # the greatest becomes one of 128 to 240
    scales = np.ldexp(_e5m3(bits), -power)
    places = np.minimum(np.searchsorted(_E4M3, scales), len(_E4M3) - 1)
    return (places.astype(np.uint8), 2.0**power) if np.array_equal(_E4M3[places], scales) else None
