"""NVFP4 and MXFP4 as two tools pack them for the tensor cores of Blackwell: transformers' nvfp4, and Four Over Six.

    transformers (quant_method nvfp4)
    weight                          uint8 [out, in / 2]     two codes a byte, the first in the low nibble
    weight_sf_rowmajor              uint8 [out, in / 16]    bits of F8_E4M3
    weight_sf                       int32                   the same in tiles, four bytes a word
    weight_global_scale             float [1]               divides

    Four Over Six (quant_method fouroversix)
    quantized_weight_values         uint8 [R, C / 2]        two codes a byte, the first in the low nibble
    quantized_weight_scale_factors  F8_E4M3 or F8_E8M0 [R C / g]   in tiles, or row after row
    quantized_weight_amax           float [] or [1]         the largest magnitude; the tensor's scale follows from it
    quantized_weight_metadata       int32 [6]               out, in, R, C, 1, and whether scales are in tiles
    bias                            float [out]             optional

    W = E2M1[code] * scale / weight_global_scale            NVFP4 (g = 16), transformers
    W = E2M1[code] * scale * amax / (largest code * largest scale)    NVFP4, Four Over Six
    W = E2M1[code] * scale                                  MXFP4 (g = 32), Four Over Six

R and C are out and in, padded. The largest scale is 448 where one rule (static_6, static_4) sets all scales, else 256;
the largest code is 6, or 4 for static_4. Tiles hold 128 rows of 4 scales: those of row r are the four bytes at
16 (r mod 32) + 4 (r // 32). Codes are carried: both are the codes of GGUF's blocks.

Learned from transformers' integrations/nvfp4.py and its kernel's packing.py and benchmark, from fouroversix 1.0
(model/modules/linear.py, quantize/backend.py, utils.py; MIT), and from cuBLAS's layout of block scaling factors.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import check_shapes, positive_scale
from bridge.checkpoint.formats.fp4 import GROUPS, Fp4Tensor, checked_scales, unpacked
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, counted, module_info
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError

_SF, _ROW_MAJOR, _GLOBAL = "weight_sf", "weight_sf_rowmajor", "weight_global_scale"
_VALUES, _FACTORS, _AMAX, _METADATA = (
    f"quantized_weight_{part}" for part in ("values", "scale_factors", "amax", "metadata")
)
_RULES = ("mse", "mae", "abs_max", "static_6", "static_4")
_STACKED = ("quantized_gate_up_proj_values", "quantized_down_proj_values")


def tiled_shape(rows: int, columns: int) -> tuple[int, int]:
    """The sides of a matrix of scales, padded to whole tiles."""
    return -(-rows // 128) * 128, -(-columns // 4) * 4


def row_major(stored: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """uint8 [rows, columns]: scales out of tiles of 128 rows and 4 columns, whose order is that of rows of tiles."""
    high, wide = tiled_shape(rows, columns)
    tiles = stored.reshape(high // 128, wide // 4, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles.reshape(high, wide)[:rows, :columns])


class Fp4KernelReader(Reader):
    """What the readers of both tools share: codes in `codes_part`, scales from `scale_bits`."""

    codes_part: ClassVar[str]

    def kind(self) -> str:
        """NVFP4 or MXFP4."""
        return "NVFP4"

    def in_words(self) -> str:
        return counted(f"{self.kind()} in blocks of {m.group_size}" for m in self.modules.values())

    def scale_bits(self, info: ModuleInfo) -> np.ndarray:
        """uint8 [out, in / g]: the bits of a module's scales."""
        raise NotImplementedError

    def tensor_scale(self, info: ModuleInfo) -> float:
        """The scale of a module's whole weight."""
        raise NotImplementedError

    def tensor_scales(self, name: str) -> dict[str, float]:
        return {"scale": self.tensor_scale(self.modules[name])} if name in self.modules else {}

    def read_all_rows(self, name: str) -> Fp4Tensor:
        info, kind = self.modules[name], self.kind()
        out, columns = info.shape
        codes = np.ascontiguousarray(unpacked(self.part(name, self.codes_part)[:out])[:, :columns])
        scales = checked_scales(kind, self.scale_bits(info), info.tensors[self.required_parts(info.tensors)[1]])
        return Fp4Tensor(name, kind, codes, scales, info.group_size, self.tensor_scale(info), bias=self.bias(name))


class Nvfp4Reader(Fp4KernelReader):
    """Reads transformers' NVFP4."""

    parts: ClassVar = ("weight", _SF, _ROW_MAJOR, _GLOBAL, "bias")
    plain: ClassVar = frozenset({"weight", "bias"})
    codes_part: ClassVar = "weight"
    claim: ClassVar = {"title": "NVFP4 of transformers", "claims": ("4-bit floats", "groups of 16")}

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        return _GLOBAL, _SF if _SF in tensors and _ROW_MAJOR not in tensors else _ROW_MAJOR, "weight"

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        codes, global_scale = tensors["weight"], tensors[_GLOBAL]
        scales = tensors[self.required_parts(tensors)[1]]
        check_shapes(codes.dtype == "U8" and codes.is_matrix and len(scales.shape) == 2, name, tensors)
        out, columns = codes.shape[0], 2 * codes.shape[1]
        high, wide = tiled_shape(out, columns // 16)
        meant = ("U8", (out, columns // 16)) if _ROW_MAJOR in tensors else ("I32", (high, wide // 4))
        fits = columns % 16 == 0 and (scales.dtype, scales.shape) == meant
        check_shapes(fits and global_scale.floating and global_scale.size == 1, name, tensors)
        return module_info(name, tensors, 4, 16, (out, columns))

    def scale_bits(self, info: ModuleInfo) -> np.ndarray:
        if _ROW_MAJOR in info.tensors:
            return self.part(info.name, _ROW_MAJOR)
        return row_major(self.part(info.name, _SF).view(np.uint8), info.shape[0], info.shape[1] // 16)

    def tensor_scale(self, info: ModuleInfo) -> float:
        return float(np.float32(1) / positive_scale(self.store, info.tensors[_GLOBAL]))


class FourOverSixReader(Fp4KernelReader):
    """Reads Four Over Six's NVFP4 and MXFP4."""

    parts: ClassVar = (_VALUES, _FACTORS, _AMAX, _METADATA, "bias")
    codes_part: ClassVar = _VALUES

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        raw = quant.raw
        kind = str(raw.get("weight_dtype") or raw.get("dtype") or "nvfp4").upper()
        rule = str(raw.get("weight_scale_rule") or raw.get("scale_rule") or "mse")
        if kind not in GROUPS or rule not in _RULES:
            raise BridgeError(
                f"{quant.source}: weights are {kind.lower()!r} by the rule {rule!r}; of Four Over Six, nvfp4 and mxfp4 "
                f"by {', '.join(_RULES)} are supported; quantize the model again, or convert the unquantized model"
            )
        raw = {**raw, "weight_dtype": kind, "weight_scale_rule": rule}
        return replace(quant, title="Four Over Six", claims=(kind, f"scales by {rule}"), raw=raw)

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        stacked = next((i for n, i in self.store.tensors.items() if n.rpartition(".")[2] in _STACKED), None)
        if stacked is not None:
            raise BridgeError(
                f"{stacked.file}: {stacked.name} are experts of Four Over Six, which are not supported; quantize the "
                "model with llm-compressor or ModelOpt, or convert the unquantized model"
            )

    def expected(self) -> bool:
        return not self.quant.raw.get("keep_master_weights")

    def kind(self) -> str:
        return str(self.quant.raw["weight_dtype"])

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        return _VALUES, _FACTORS, _AMAX, _METADATA

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        values, factors, metadata = tensors[_VALUES], tensors[_FACTORS], tensors[_METADATA]
        check_shapes(not metadata.floating and metadata.shape == (6,), name, tensors)
        out, columns, high, wide = map(int, self.store.read(metadata.name)[:4])
        size = GROUPS[self.kind()]
        fits = 0 < out <= high and 0 < columns <= wide and columns % size == wide % size == 0
        fits = fits and values.dtype == "U8" and values.shape == (high, wide // 2)
        fits = fits and factors.nbytes == high * wide // size and tensors[_AMAX].size == 1
        fits = fits and (not self._tiled(name) or (high, wide // size) == tiled_shape(high, wide // size))
        check_shapes(fits, name, tensors)
        return module_info(name, tensors, 4, size, (out, columns))

    def _tiled(self, name: str) -> bool:
        return bool(self.store.read(f"{name}.{_METADATA}")[5] == 1)

    def scale_bits(self, info: ModuleInfo) -> np.ndarray:
        high, wide = (int(n) for n in self.store.read(f"{info.name}.{_METADATA}")[2:4])
        stored = self.part(info.name, _FACTORS).view(np.uint8).reshape(-1)
        out, groups = info.shape[0], wide // info.group_size
        scales = row_major(stored, high, groups) if self._tiled(info.name) else stored.reshape(high, groups)
        return np.ascontiguousarray(scales[:out, : info.shape[1] // info.group_size])

    def tensor_scale(self, info: ModuleInfo) -> float:
        if self.kind() == "MXFP4":
            return 1.0
        rule = self.quant.raw["weight_scale_rule"]
        largest = (4 if rule == "static_4" else 6) * (448 if rule.startswith("static") else 256)
        return float(positive_scale(self.store, info.tensors[_AMAX]) / np.float32(largest))
