"""FP-Quant: 4-bit floats of rotated weights (Castro et al. 2025), as the fp_quant package and transformers store them.

    qweight                  uint8 [out, in / 2]      two codes a byte, the first in the low nibble
    scales                   uint8 [128 n, in / g]    bits of F8_E8M0 (MXFP4, g = 32) or F8_E4M3 (NVFP4, g = 16); rows
                                                      beyond out are padding
    weight_global_scale      float [1]                divides
    forward_hadamard_matrix  float [h, h]             the rotation of h columns, an identity where there is none
    dqweight                 float [out, in]          instead of qweight and scales: rounded, not packed
    weight                   float [out, in]          instead of all these: not rounded yet (store_master_weights)
    act_global_scale, backward_hadamard_matrix        are not needed
    bias                     float [out]              optional

    stored = E2M1[code] * scale / weight_global_scale, or dqweight
    W[o, h i ..] = stored[o, h i ..] * forward_hadamard_matrix^T

Codes that are not rotated are carried to MXFP4 and NVFP4 blocks; others come as floats. The format rounds activations
too, which is left out. Learned from fp_quant 0.3.2 (module/linear.py, module/linear_fns.py), and QuTLASS's tests of its
kernels for the order of nibbles and scales (Apache-2.0).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.decoded import DecodedTensor, rounding_distortion
from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import check_shapes, finite_scales, positive_scale
from bridge.checkpoint.formats.fp4 import GROUPS, Fp4Tensor, checked_scales, unpacked
from bridge.checkpoint.formats.module_reader import FloatWeight, ModuleInfo, Reader, counted, module_info
from bridge.checkpoint.grouped import CodedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError

_GLOBAL, _MATRIX = "weight_global_scale", "forward_hadamard_matrix"
_FLOATS = ("dqweight", "weight")


@dataclass(frozen=True)
class RotatedFloats(FloatWeight):
    """A weight of floats, `stored`, which the matrix `scale` rotated if `rotated`.

    others  the other tensors of its module, by full name
    """

    stored: TensorInfo
    rotated: bool
    others: frozenset[str]

    def __str__(self) -> str:
        return f"{self.stored.dtype}, rotated" if self.rotated else self.stored.dtype

    @property
    def stored_names(self) -> set[str]:
        return {*self.others}

    def read(self, store: Store, rows: tuple[int, int] | None = None) -> np.ndarray:
        values = store.read_float(self.stored.name, rows)
        return unrotated(values, finite_scales(store, self.scale.name)) if self.rotated else values


class FpQuantReader(Reader):
    """Reads FP-Quant checkpoints."""

    parts: ClassVar = (
        "qweight", "scales", "dqweight", "weight", _GLOBAL, _MATRIX, "act_global_scale", "backward_hadamard_matrix",
        "bias",
    )  # fmt: skip
    plain: ClassVar = frozenset({"weight", "bias"})

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        raw = quant.raw
        kind = str(raw.get("forward_dtype", "nvfp4")).upper()
        if kind not in GROUPS:
            raise BridgeError(
                f"{quant.source}: forward_dtype is {kind.lower()!r}, FP-Quant has mxfp4 and nvfp4; convert the "
                "unquantized model instead"
            )
        form = (
            "rounded floats" if raw.get("pseudoquantization") else "floats" if raw.get("store_master_weights") else ""
        )
        rotation, size = str(raw.get("transform_init", "hadamard")), raw.get("hadamard_group_size") or GROUPS[kind]
        claims = (kind, *([form] if form else []), f"{rotation} blocks of {size}")
        return replace(quant, title="FP-Quant", claims=claims, bits=4, raw={**raw, "forward_dtype": kind})

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        held = {part for part, info in tensors.items() if 0 not in info.shape}  # empty ones only keep a place
        floats = next((part for part in _FLOATS if part in held), None)
        return (floats, _MATRIX) if floats and "qweight" not in held else ("qweight", "scales", _GLOBAL, _MATRIX)

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo | RotatedFloats:
        part, matrix = self.required_parts(tensors)[0], tensors[_MATRIX]
        codes, kind = tensors[part], self.quant.raw["forward_dtype"]
        fits = len(codes.shape) == len(matrix.shape) == 2 and matrix.shape[0] == matrix.shape[1] and matrix.floating
        check_shapes(fits, name, tensors)
        out, columns = codes.shape[0], codes.shape[1] * (2 if part == "qweight" else 1)
        fits = columns % matrix.shape[0] == 0
        if part != "qweight":
            check_shapes(fits and codes.floating, name, tensors)
            others = frozenset(info.name for key, info in tensors.items() if key not in ("weight", "bias"))
            return RotatedFloats(replace(codes, name=f"{name}.weight"), matrix, codes, part == "dqweight", others)
        scales, global_scale, size = tensors["scales"], tensors[_GLOBAL], GROUPS[kind]
        fits = fits and codes.dtype == scales.dtype == "U8" and len(scales.shape) == 2 and scales.shape[0] >= out
        fits = fits and scales.shape[1] == columns / size and global_scale.floating and global_scale.size == 1
        check_shapes(fits, name, tensors)
        return module_info(name, tensors, 4, size, (out, columns))

    def in_words(self) -> str:
        sizes = (f"{self.quant.raw['forward_dtype']} {self._rotation(name)}" for name in self.modules)
        return counted(sizes)

    def _rotation(self, name: str) -> str:
        size = self.modules[name].tensors[_MATRIX].shape[0]
        return "not rotated" if self._plain(name) else f"rotated in blocks of {size}"

    def _plain(self, name: str) -> bool:
        """Whether a module's codes are those of the weights themselves, and blocks can hold its scale."""
        matrix = self.store.read_float(f"{name}.{_MATRIX}")
        scale_fits = self.quant.raw["forward_dtype"] == "NVFP4" or self._scale(name) == 1
        return scale_fits and np.array_equal(matrix, np.eye(len(matrix)))

    def _scale(self, name: str) -> float:
        """The scale of a module's whole weight."""
        return float(np.float32(1) / positive_scale(self.store, self.modules[name].tensors[_GLOBAL]))

    def tensor_scales(self, name: str) -> dict[str, float]:
        return {"scale": self._scale(name)} if name in self.modules and self._plain(name) else {}

    def read(self, name: str, rows: np.ndarray | None = None) -> CodedTensor:
        info, kind = self.modules[name], self.quant.raw["forward_dtype"]
        codes = unpacked(self.part(name, "qweight", rows))
        row_indices = np.arange(info.shape[0]) if rows is None else rows
        scales = checked_scales(kind, self.part(name, "scales", row_indices), info.tensors["scales"])
        t = Fp4Tensor(name, kind, codes, scales, info.group_size, self._scale(name), bias=self.bias(name, rows))
        if self._plain(name):
            return t
        weights = unrotated(t.dequantize(), self.scales(name, _MATRIX))
        share = rounding_distortion(t.noise(), weights)
        return DecodedTensor(name, 4, weights, share, "rotated codes", bias=t.bias)


def unrotated(stored: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """float32 [rows, in]: each run of h columns times the transpose of a matrix [h, h]."""
    return (stored.reshape(len(stored), -1, len(matrix)) @ matrix.T).reshape(stored.shape)
