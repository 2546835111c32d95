"""Weights of 4-bit floats, two kinds of them, and the one in-memory form of both.

              codes        a scale for        as               and for the whole tensor
    NVFP4     F4_E2M1      16 columns         F8_E4M3          a float32
    MXFP4     F4_E2M1      32 columns         F8_E8M0          -

    W[o, k] = tensor_scale * scales[o, k // 16 or 32] * E2M1[codes[o, k]]

Codes are packed two a byte along the row, the first in the low nibble. NVFP4's scale may be that of 32 columns
(ModelOpt's W4A8_NVFP4_FP8): it is repeated. GGUF's blocks MXFP4 and NVFP4 hold all of it bit for bit; the tensor's
scale is a separate tensor.
"""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from bridge.checkpoint.decoded import DecodedTensor, distortion_of
from bridge.checkpoint.files.dtypes import as_float32
from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import check_shapes
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, module_info
from bridge.checkpoint.formats.written import Parts, Shapes
from bridge.checkpoint.grouped import CodedTensor, PackedTensor
from bridge.errors import BridgeError

# the value of a code: a sign, two bits of exponent, one of mantissa
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# the mean squared error of what is rounded to each: (a^3 + b^3) / (3 (a + b)) for a cell that reaches a down and b up
_NOISE = np.tile(np.array([1 / 48, 1 / 48, 1 / 48, 1 / 48, 1 / 16, 1 / 12, 1 / 4, 1 / 3]), 2)
GROUPS = {"NVFP4": 16, "MXFP4": 32}
INPUTS = ("input_scale", "input_global_scale")  # of activations: a GGUF has a place for NVFP4's
_LARGEST = np.float32(6 * 448)  # code times scale of NVFP4
_KINDS = {"F8_E4M3": "NVFP4", "F8_E8M0": "MXFP4", "U8": "MXFP4"}  # by the dtype of their scales
_SCALES = {"NVFP4": "F8_E4M3", "MXFP4": "F8_E8M0"}


@dataclass(frozen=True, repr=False)
class Fp4Tensor(CodedTensor):
    """A linear layer's weight as 4-bit floats.

    kind             NVFP4 or MXFP4
    codes            uint8 [out, in], 0..15
    scales           uint8 [out, G], the bits of 8-bit floats
    tensor_scale     of the whole tensor
    group_size       16 or 32
    group_of_column  int32 [in], or None where column k is in group k // group_size
    """

    name: str
    kind: str
    codes: np.ndarray
    scales: np.ndarray
    group_size: int
    tensor_scale: float = 1.0
    group_of_column: np.ndarray | None = None
    bias: np.ndarray | None = None
    notes: tuple[str, ...] = field(default=())
    bits: int = 4
    per_group: ClassVar = ("scales",)

    def scale_values(self, rows: slice = slice(None)) -> np.ndarray:
        """float32 [out, G]: the scales, without that of the tensor."""
        return as_float32(self.scales[rows], _SCALES[self.kind])

    def dequantize(self, rows: slice = slice(None)) -> np.ndarray:
        """float32 [out, in], or some of its rows."""
        weights = E2M1[self.codes[rows]]
        weights *= self.scale_values(rows)[:, self.groups()]
        weights *= np.float32(self.tensor_scale)
        return weights

    def scaled(self, factor: np.ndarray) -> CodedTensor:
        weights = self.dequantize() * factor[:, None]
        noise = self.noise() * float(np.square(factor, dtype=np.float64).mean())
        return DecodedTensor(
            self.name, 4, weights, distortion_of(noise, weights), f"{self.kind} codes of multiplied rows",
            bias=self.bias, notes=self.notes,
        )  # fmt: skip

    def noise(self) -> float:
        """The checkpoint's own expected quantization noise, summed over all weights."""
        scales = self.scale_values().astype(np.float64) * self.tensor_scale
        return float((np.square(scales)[:, self.groups()] * _NOISE[self.codes]).sum())


class Fp4Parts(NamedTuple):
    """A format's names for the tensors of a module, and how to read and write them.

    codes         uint8 or int8 [out, in/2]
    scales        [out, G]: F8_E4M3 of NVFP4, bytes of MXFP4
    tensor_scale  the scale of the whole tensor, which MXFP4 lacks
    reciprocal    whether that scale and the activations' divide
    """

    codes: str
    scales: str
    tensor_scale: str
    reciprocal: bool

    def shapes(self, kind: str, shape: tuple[int, int]) -> Shapes:
        """The dtypes and shapes of a module's tensors, as they are written."""
        out, columns = shape
        nvfp4 = kind == "NVFP4"
        return {
            self.codes: ("U8", (out, columns // 2)),
            self.scales: ("F8_E4M3" if nvfp4 else "U8", (out, columns // GROUPS[kind])),
            **({self.tensor_scale: ("F32", (1,))} if nvfp4 else {}),
        }

    def pack(self, tensor: PackedTensor) -> Parts:
        """A module's tensors."""
        matrix_scale = np.array([tensor.tensor_scale], np.float32)
        scale = 1 / matrix_scale if self.reciprocal else matrix_scale
        return {self.codes: tensor.words.view(np.uint8), self.scales: tensor.scales, self.tensor_scale: scale}

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        """The module. Raises BridgeError if its shapes do not fit together or NVFP4's tensor scale is missing."""
        codes, scales = tensors[self.codes], tensors[self.scales]
        kind = _KINDS.get(scales.dtype, "")
        if kind == "NVFP4" and self.tensor_scale not in tensors:
            raise BridgeError(
                f"{codes.file}: {name} has {self.codes} and {self.scales} but no {self.tensor_scale}; "
                "is the checkpoint complete?"
            )
        fits = codes.is_matrix and bool(kind) and not (kind == "MXFP4" and self.tensor_scale in tensors)
        check_shapes(fits, name, tensors)
        out, columns = codes.shape[0], 2 * codes.shape[1]
        single = (t for part, t in tensors.items() if part in (self.tensor_scale, *INPUTS))
        sizes = (16, 32) if kind == "NVFP4" else (32,)
        fits = any(columns % size == 0 and scales.shape == (out, columns // size) for size in sizes)
        fits = fits and codes.dtype in ("U8", "I8") and all(t.floating and t.size == 1 for t in single)
        check_shapes(fits, name, tensors)
        return module_info(name, tensors, 4, GROUPS[kind], (out, columns))

    def read(self, reader: Reader, info: ModuleInfo, rows: np.ndarray | None = None) -> Fp4Tensor:
        """A module, or some of its rows without its bias."""
        name = info.name
        kind = _KINDS[info.tensors[self.scales].dtype]
        codes = unpacked(reader.part(name, self.codes, rows).view(np.uint8))
        scales = checked_scales(kind, reader.part(name, self.scales, rows), info.tensors[self.scales])
        scales = np.repeat(scales, info.shape[1] // info.group_size // scales.shape[1], axis=1)
        factors, bias = self.tensor_scales(reader, info), reader.bias(name, rows)
        unusable = [part for part in INPUTS if part in info.tensors] if "input_scale" not in factors else []
        notes = tuple(
            f"{name}: {part} is {_number(reader, info.tensors[part]):g}, no scale of activations, as of an expert that "
            "calibration never reached; left out: the weights do not depend on it"
            for part in unusable
        )
        return Fp4Tensor(name, kind, codes, scales, info.group_size, factors["scale"], bias=bias, notes=notes)

    def tensor_scales(self, reader: Reader, module: ModuleInfo) -> dict[str, float]:
        """The scale of a module's whole weight, and that of its activations where there is one that is positive."""
        factors = {"scale": 1.0}
        for part, key in ((self.tensor_scale, "scale"), *((part, "input_scale") for part in INPUTS)):
            if (info := module.tensors.get(part)) is not None:
                value = _number(reader, info)
                with np.errstate(all="ignore"):
                    factor = np.float32(1) / value if self.reciprocal else value
                    usable = bool(np.isfinite(value) and value > 0 and np.isfinite(factor * _LARGEST))
                if not usable and key == "scale":
                    raise BridgeError(f"{info.file}: {info.name} is {value:g}, not a scale; quantize the model again")
                if usable:
                    factors[key] = float(factor)
        return factors


def _number(reader: Reader, info: TensorInfo) -> np.float32:
    """A stored tensor of one value."""
    return reader.store.read_float(info.name).reshape(-1)[0]


def unpacked(packed: np.ndarray) -> np.ndarray:
    """uint8 [rows, n], two codes a byte -> uint8 [rows, 2n]."""
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, ::2])
    np.right_shift(packed, 4, out=codes[:, 1::2])
    return codes


def checked_scales(kind: str, bits: np.ndarray, info: TensorInfo) -> np.ndarray:
    """The stored scales. Raises BridgeError if one is negative or NaN."""
    bad = bits == 255 if kind.startswith("MXFP") else bits >= 127
    if bad.any():
        raise BridgeError(
            f"{info.file}: {np.count_nonzero(bad)} of {bits.size} values of {info.name} are NaN or negative; "
            "quantize the model again"
        )
    return bits
