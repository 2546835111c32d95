"""AMD's Quark, as its export for transformers writes it: integers and floats of 4 and 8 bits, floats of 6.

                        weight                  weight_scale         weight_zero_point
    int4, uint4
      groups            int32 [in, out / 8]     float [G, out]       int32 [G, out / 8]
      a row             int32 [out, in / 8]     float [out]          int32 [out / 8]
    int8, uint8
      groups            int8, uint8 [in, out]   float [G, out]       like weight [G, out]
      a row, the whole  int8, uint8 [out, in]   float [out], []      likewise
    fp8_e4m3, fp8_e5m2  F8 [out, in]            float, as in `fp8`   -
    fp4 (MXFP4)         uint8 [out, in / 2]     uint8 [out, in / 32] -
    fp6_e2m3, fp6_e3m2  uint8 [out, 3 in / 4]   uint8 [out, in / 32] -
    bias                float [out]

    W = scale * (q - zero point)

Nibble i of a word is number 0 2 4 6 1 3 5 7 of its eight, or number i where pack_method is "order". int4 and int8 are
in two's complement, their zero points too. Codes of 6 bits are a stream, the lowest bit first; those of E2M3 are
carried as whole eighths, those of E3M2, up to 28, are read as floats. The config says which: global_quant_config or a
pattern of layer_quant_config, {weight: {dtype, qscheme, group_size, ..}}.

Learned from amd-quark 0.13 (torch/utils/pack.py, torch/export/nn/modules/realquantizer.py; MIT).
"""

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.decoded import DecodedTensor, level_noise, rounding_distortion
from bridge.checkpoint.files.dtypes import as_float32
from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import check_shapes, contradiction
from bridge.checkpoint.formats.fp4 import checked_scales
from bridge.checkpoint.formats.fp8 import FLOAT8
from bridge.checkpoint.formats.modelopt import ModelOptReader
from bridge.checkpoint.formats.module_reader import FloatWeight, ModuleInfo, module_info
from bridge.checkpoint.grouped import CodedTensor, GroupedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.system.fields import table, whole_number

_INTEGERS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}


def _levels(mantissa: int) -> np.ndarray:
    """float32 [64]: the values of floats of 6 bits, a sign, the exponent, so many bits of mantissa."""
    fields = np.arange(32, dtype=np.int32)
    exponent, rest, bias = fields >> mantissa, fields & (2**mantissa - 1), 2 ** (4 - mantissa) - 1
    significands = np.where(exponent > 0, rest + 2**mantissa, rest).astype(np.float32)
    values = np.ldexp(significands, np.maximum(exponent, 1) - bias - mantissa)
    return np.concatenate([values, -values])


_FP6 = {"fp6_e2m3": _levels(3), "fp6_e3m2": _levels(2)}
_DTYPES = (*_INTEGERS, "fp8_e4m3", "fp8_e5m2", "fp4", *_FP6)
_REORDERED = (0, 2, 4, 6, 1, 3, 5, 7)


class QuarkReader(ModelOptReader):
    """Reads Quark's exports; floats are stored as ModelOpt's."""

    parts: ClassVar[tuple[str, ...]] = (*ModelOptReader.parts, "weight_zero_point")

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        if (form := table(quant.raw.get("export")).get("weight_format", "real_quantized")) != "real_quantized":
            raise BridgeError(
                f"{quant.source}: weight_format is {form!r}: the weights are floats that were rounded; convert the "
                "unquantized model instead, or export it as real_quantized"
            )
        algorithms = quant.raw.get("algo_config") or []
        if any("rotation" in str(a).lower() for a in (algorithms if isinstance(algorithms, list) else [algorithms])):
            raise BridgeError(
                f"{quant.source}: algo_config rotates activations, which needs a transform at run time that GGUF "
                "lacks; use a checkpoint quantized without rotation"
            )
        weights = list(_weight_settings(quant.raw))
        for settings in weights:
            if settings.get("dtype") not in _DTYPES:
                raise BridgeError(
                    f"{quant.source}: Quark's {settings.get('dtype')!r} is not supported ({', '.join(_DTYPES)} are); "
                    "convert the unquantized model instead"
                )
        if not weights:
            return replace(quant, title="Quark", claims=("no weights",))
        first = weights[0]
        dtype, size = str(first["dtype"]), whole_number(first.get("group_size"))
        grouped = first.get("qscheme") == "per_group" and size is not None
        groups = f"groups of {size}" if grouped else "one scale a row" if first.get("qscheme") == "per_channel" else ""
        return replace(
            quant, title="Quark", claims=(dtype, *([groups] if groups else [])), bits=_INTEGERS.get(dtype, 4),
            group_size=size if grouped and size else -1,
        )  # fmt: skip

    def _settings(self, name: str) -> dict[str, Any]:
        """What the config says of a module's weight."""
        for pattern, entry in table(self.quant.raw.get("layer_quant_config")).items():
            if fnmatch(name, pattern) and (weight := _weight_of(entry)) is not None:
                return weight
        return _weight_of(self.quant.raw.get("global_quant_config")) or {}

    def claimed_bits(self, module: str) -> int | None:
        return _INTEGERS.get(str(self._settings(module).get("dtype")))

    def _describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo | FloatWeight:
        weight, scale = tensors["weight"], tensors.get("weight_scale")
        if scale is not None and weight.dtype == "U8" and self._settings(name).get("dtype") in _FP6:
            check_shapes(weight.is_matrix and 0 not in weight.shape, name, tensors)
            out, columns = weight.shape[0], weight.shape[1] * 4 // 3
            fits = scale.dtype in ("U8", "F8_E8M0") and scale.shape == (out, columns // 32)
            check_shapes(fits and columns % 32 == 0 and columns * 3 == weight.shape[1] * 4, name, tensors)
            return module_info(name, tensors, 6, 32, (out, columns))
        if scale is None or weight.dtype in FLOAT8 or not scale.floating:
            return super()._describe(name, tensors)
        bits = {"I32": 4, "I8": 8, "U8": 8}.get(weight.dtype)
        if bits is None or not weight.is_matrix:
            raise contradiction(name, tensors)
        a, b = weight.shape[0], weight.shape[1] * (8 if bits == 4 else 1)
        grouped = len(scale.shape) == 2
        out, columns = (b, a) if grouped else (a, b)
        groups = scale.shape[0] if grouped else 1
        fits = scale.shape in ((groups, out), (out,), (), (1,)) and groups > 0 and columns % groups == 0
        zeros = tensors.get("weight_zero_point")
        if zeros is not None and fits:
            lanes = 8 if bits == 4 and scale.shape not in ((), (1,)) else 1
            fits = zeros.dtype in ("I32", "I8", "U8") and zeros.shape == (
                *scale.shape[:-1], *(n // lanes for n in scale.shape[-1:]),
            )  # fmt: skip
        check_shapes(fits, name, tensors)
        return module_info(name, tensors, bits, columns // groups, (out, columns))

    def _integers(self, info: ModuleInfo) -> bool:
        return info.tensors["weight"].dtype in ("I32", "I8", "U8") and info.tensors["weight_scale"].floating

    def tensor_scales(self, name: str) -> dict[str, float]:
        info = self.modules[name]
        return {} if self._integers(info) or info.bits == 6 else super().tensor_scales(name)

    def _read_fp6(self, info: ModuleInfo, rows: np.ndarray | None) -> CodedTensor:
        from bridge.checkpoint.formats.bits import unpack_rows

        name, levels = info.name, _FP6[str(self._settings(info.name)["dtype"])]
        codes, bias = unpack_rows(self.part(name, "weight", rows), 6, info.shape[1]), self.bias(name, rows)
        exponents = self.part(name, "weight_scale", rows).view(np.uint8)
        scales = as_float32(checked_scales("MXFP6", exponents, info.tensors["weight_scale"]), "F8_E8M0")
        if levels is _FP6["fp6_e2m3"]:
            eighths = (levels * 8 + 128).astype(np.uint8)
            scales /= 8
            return GroupedTensor(name, 8, eighths[codes], scales, np.full_like(scales, 128), 32, bias=bias)
        scales = np.repeat(scales, 32, axis=1)
        weights = levels[codes] * scales
        noise = float((np.square(scales, dtype=np.float64) * level_noise(levels)[codes]).sum())
        share = rounding_distortion(noise, weights)
        return DecodedTensor(name, 6, weights, share, "6-bit floats of 3 bits of exponent", bias=bias)

    def _read(self, info: ModuleInfo, rows: np.ndarray | None = None) -> CodedTensor:
        if info.bits == 6:
            return self._read_fp6(info, rows)
        if not self._integers(info):
            return super()._read(info, rows)
        name, (out, _) = info.name, info.shape
        grouped = len(info.tensors["weight_scale"].shape) == 2
        codes = self._codes(info, self.part(name, "weight"))
        codes = np.ascontiguousarray(codes.T if grouped else codes)
        scales = self.scales(name, "weight_scale")
        zeros = np.zeros_like(scales)
        signed = not str(self._settings(name).get("dtype")).startswith("u") and info.tensors["weight"].dtype != "U8"
        half = 1 << (info.bits - 1) if signed else 0
        if "weight_zero_point" in info.tensors:
            stored = self.part(name, "weight_zero_point")
            if stored.size != scales.size:
                stored = self._codes(info, stored.reshape(-1, stored.shape[-1])).reshape(scales.shape)
            zeros = ((stored.astype(np.int64) ^ half) & (2**info.bits - 1)).astype(np.float32)
        else:
            zeros += half
        if not grouped:
            scales, zeros = (np.broadcast_to(x.reshape(1, -1), (1, out)) for x in (scales, zeros))
        codes ^= np.uint8(half)
        scales, zeros = scales.T, zeros.T
        if rows is not None:
            codes, scales, zeros = codes[rows], scales[rows], zeros[rows]
        scales, zeros = np.ascontiguousarray(scales), np.ascontiguousarray(zeros)
        return GroupedTensor(name, info.bits, codes, scales, zeros, info.group_size, bias=self.bias(name, rows))

    def _codes(self, info: ModuleInfo, stored: np.ndarray) -> np.ndarray:
        """uint8 [rows, n] of words int32 [rows, n / 8], or of bytes [rows, n]."""
        from bridge.checkpoint.formats.bits import unpack_words

        if info.bits == 8:
            return stored.view(np.uint8)
        codes = unpack_words(stored, 4, stored.shape[1] * 8)
        if table(self.quant.raw.get("export")).get("pack_method") == "order":
            return codes
        return codes.reshape(len(codes), -1, 8)[:, :, np.argsort(_REORDERED)].reshape(codes.shape)


def _weight_of(settings: Any) -> dict[str, Any] | None:
    """The weight's entry of a layer's settings, the first where there are several."""
    weight = table(settings).get("weight")
    weight = weight[0] if isinstance(weight, list) and weight else weight
    return weight if isinstance(weight, dict) else None


def _weight_settings(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The weights' entries: the default one, then those of single layers."""
    for settings in (raw.get("global_quant_config"), *table(raw.get("layer_quant_config")).values()):
        if (weight := _weight_of(settings)) is not None:
            yield weight
