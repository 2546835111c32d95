"""compressed-tensors, which llm-compressor writes. A module's tensors show how it is stored:

weight_packed      int32 [out, w]    codes + 2**(b-1), along the rows of the weight: a dense stream of b bits
                                     (w = ceil(in*b / 32)) or, for 3, 5, 6, 7 bits before May 2026,
                                     32 // b to a word (w = ceil(in / (32 // b)))
                   uint8 [out, in/2] 4-bit floats (nvfp4-pack-quantized, mxfp4-pack-quantized): see `fp4`
                   uint8 [out, 3 in/4]  6-bit floats (mxfp6-pack-quantized): four codes in three bytes, a stream of 6
                                     bits, the first code in the lowest ones; weight_scale uint8 [out, in/32]
weight_shape       int [2]           out, in; only with integer codes in weight_packed
weight             int8 [out, in]    signed codes, the least -2**(b-1) (int-quantized, naive-quantized)
                   F8_E4M3           8-bit floats, which are not codes: see `fp8`; mxfp8-quantized: scales are bytes
weight_scale       float [1], [out, 1], [out, G], or one for each block of rows and columns
weight_zero_point  int8, shaped as the scale; since April 2025 int32 [packed out, G] for packed weights
weight_g_idx       int32 [in]        group of each input feature (act-order); -1 everywhere means none
weight_global_scale  float32 [1]     nvfp4-pack-quantized; a divisor, as is input_global_scale
bias               float [out]       optional

W[o, k] = scale * (code - zero point), both signed; here 2**(b-1) is added to both

Floats of 6 bits are E2M3: a sign, the code's highest bit; two bits of exponent; three of mantissa. Their magnitudes are
m/8 (exponent 0) and 2**(e-1) * (1 + m/8), at most 7.5: whole eighths. Their scales are F8_E8M0, 2**(byte - 127). So a
module is read as codes of 8 bits, eight times the float plus 128, whose scales are an eighth of the stored ones: Q8_0
holds all of it. Learned from compressed-tensors 0.20 (compressors/mxfp6, mx_utils.py).

What is written: pack-quantized of 4 and 8 bits in a dense stream, with zero points in words, which symmetric modules
lack; and floats of 4 and 8 bits.
"""

import math
from dataclasses import replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.files.dtypes import as_float32
from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import check_shapes, contradiction
from bridge.checkpoint.formats.fp4 import Fp4Parts, checked_scales
from bridge.checkpoint.formats.fp8 import (
    BLOCK,
    FLOAT8,
    ScaledFloats,
    block_of,
    fp8_parts,
    fp8_shapes,
    scaled_floats,
    spread,
)
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, module_info
from bridge.checkpoint.formats.written import Groups, Parts, Shapes, WrittenFormat
from bridge.checkpoint.grouped import CodedTensor, GroupedTensor, PackedTensor, column_group_size
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.checkpoint.labels.schemes import Scheme, ignored, matches, read_schemes, scheme_of, schemes_of
from bridge.errors import BridgeError
from bridge.system.text import few_of

_E2M3 = np.array([m if e == 0 else (8 + m) << (e - 1) for e in range(4) for m in range(8)], np.uint8)  # in eighths
_EIGHTHS = np.concatenate([128 + _E2M3, 128 - _E2M3])  # of a code, plus 128
_MX_GROUP = 32
FP4 = Fp4Parts("weight_packed", "weight_scale", "weight_global_scale", reciprocal=True)


class CompressedReader(Reader):
    """Reads integers and floats of all formats that `schemes` lists, and mixtures of them."""

    parts: ClassVar = (
        "weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "bias",
        "weight_global_scale", "input_global_scale",
    )  # fmt: skip
    plain: ClassVar = frozenset({"weight", "bias", "input_global_scale"})

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        schemes = read_schemes(quant)
        formats = list(dict.fromkeys(s.format for s in schemes)) or [label or "dense"]
        several = len(schemes) > 1
        first = next((s for s in schemes if s.bits == 4 or not s.floats), None)
        return replace(
            quant,
            title=f"compressed-tensors {' and '.join(formats)}",
            claims=tuple(f"({s} for {few_of(sorted(s.targets))})" if several else str(s) for s in schemes)
            or ("no weights",),
            bits=first.bits if first else 8,
            group_size=(first.block[1] or -1) if first else -1,
            sym=all(s.sym for s in schemes),
            desc_act=any(s.act_order for s in schemes),
        )

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        self._schemes = read_schemes(quant)
        self._ignored = ignored(quant)
        self._blocks: dict[str, tuple[int, int]] = {}
        super().__init__(store, quant)
        if any(s.activations for s in self._schemes):
            self.on_activations.append(
                "the config quantizes activations too; a GGUF holds only weights, and llama.cpp rounds activations "
                "to 8 bits itself"
            )

    def expected(self) -> bool:
        return bool(self._schemes)

    def claimed(self, module: str) -> bool:
        source = self.quant.source
        named = any(matches(module, scheme.targets, source) for scheme in self._schemes)
        return named and not matches(module, self._ignored, source)  # which must list every linear layer of floats

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        if "weight" in tensors or _packs_floats(tensors):
            return "weight_scale", "weight" if "weight" in tensors else "weight_packed"
        return "weight_scale", "weight_packed", "weight_shape"

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo | ScaledFloats:
        scheme = scheme_of(name, self._schemes, self.quant.source)
        weight, scale = tensors.get("weight_packed") or tensors["weight"], tensors["weight_scale"]
        if scheme is None:
            raise BridgeError(
                f"{weight.file}: {name} is quantized, but no target in {self.quant.source} matches it; "
                "download config.json again"
            )
        if _packs_floats(tensors) and scheme.bits == 6:
            return _describe_fp6(name, tensors)
        if _packs_floats(tensors):
            return FP4.describe(name, tensors)
        if weight.dtype in FLOAT8:
            if "weight_zero_point" in tensors:
                raise BridgeError(
                    f"{weight.file}: {name} has 8-bit floats with zero points, which is not supported; "
                    "convert the unquantized model instead"
                )
            return scaled_floats(name, tensors, "weight_scale", _claimed(scheme))
        if weight.floating:
            raise BridgeError(
                f"{weight.file}: {name} has a weight_scale, but its weight is {weight.dtype}: it was saved before "
                "it was compressed; save it with save_compressed=True"
            )
        packed = "weight_packed" in tensors
        integers = weight.dtype == ("I32" if packed else "I8") and not scheme.floats
        check_shapes(integers and len(weight.shape) == 2 and not (packed and "weight" in tensors), name, tensors)
        shape = self._shape(name, tensors, scheme.bits)
        block = block_of(shape, scale.shape, _claimed(scheme)) if scale.floating else None
        if block is None and "weight_g_idx" in tensors and len(scale.shape) == 2 and scale.shape[0] == shape[0]:
            block = 1, -(-shape[1] // max(1, scale.shape[1]))  # one group per scale; g_idx assigns the columns
        if block is None or not self._rest_fits(tensors, shape, scheme):
            raise contradiction(name, tensors)
        if not scheme.sym and "weight_zero_point" not in tensors:
            raise BridgeError(
                f"{weight.file}: {name} has no weight_zero_point, but the config says asymmetric; "
                "is the checkpoint complete?"
            )
        self._blocks[name] = block
        return ModuleInfo(name, scheme.bits, block[1], shape, sum(t.nbytes for t in tensors.values()), tensors)

    def _shape(self, name: str, tensors: dict[str, TensorInfo], bits: int) -> tuple[int, int]:
        """(out, in), which weight_packed alone does not determine."""
        if "weight" in tensors:
            return tensors["weight"].shape  # type: ignore[return-value]
        words, told = tensors["weight_packed"], tensors["weight_shape"]
        shape = self.part(name, "weight_shape").tolist() if told.dtype in ("I64", "I32") and told.shape == (2,) else []
        lengths = [_length(shape[1], bits, by_words) for by_words in (False, True)] if shape else []
        if not shape or min(shape) < 1 or shape[0] != words.shape[0] or words.shape[1] not in lengths:
            raise BridgeError(
                f"{words.file}: {name}: weight_shape {shape} does not fit weight_packed {list(words.shape)} of "
                f"{bits} bits; the checkpoint is damaged, or config.json is another model's"
            )
        return shape[0], shape[1]

    def _rest_fits(self, tensors: dict[str, TensorInfo], shape: tuple[int, int], scheme: Scheme) -> bool:
        """Whether the shapes of zero points, g_idx and bias fit the weight and its scale."""
        scale, zeros = tensors["weight_scale"].shape, tensors.get("weight_zero_point")
        if zeros is not None and zeros.dtype == "I32":
            words = _length(shape[0], scheme.bits, _by_words(tensors, shape, scheme.bits))
            if "weight_packed" not in tensors or len(scale) != 2 or scale[0] != shape[0]:
                return False
            if zeros.shape != (words, scale[1]):
                return False
        elif zeros is not None and (zeros.dtype != "I8" or zeros.shape != scale):
            return False
        g_idx = tensors.get("weight_g_idx")
        if g_idx is not None and (g_idx.dtype not in ("I32", "I64") or g_idx.shape != shape[1:]):
            return False
        return "bias" not in tensors or tensors["bias"].shape == shape[:1]

    def read(self, name: str, rows: np.ndarray | None = None) -> CodedTensor:
        info = self.modules[name]
        if not _packs_floats(info.tensors):
            tensor: CodedTensor = self._read(name, rows)
        else:
            tensor = self._read_fp6(info, rows) if info.bits == 6 else FP4.read(self, info, rows)
        if matches(name, self._ignored, self.quant.source):
            note = f"{name}: ignore says it is not quantized, but it is; read as it is stored"
            tensor = replace(tensor, notes=(note, *tensor.notes))  # type: ignore[type-var]
        return tensor

    def tensor_scales(self, name: str) -> dict[str, float]:
        info = self.modules[name]
        return FP4.tensor_scales(self, info) if _packs_floats(info.tensors) and info.bits == 4 else {}

    def _read_fp6(self, info: ModuleInfo, rows: np.ndarray | None) -> GroupedTensor:
        from bridge.checkpoint.formats.bits import unpack_rows

        packed, scale = self.part(info.name, "weight_packed", rows), info.tensors["weight_scale"]
        codes = _EIGHTHS[unpack_rows(packed.view(np.uint32), 6, info.shape[1])]
        exponents = checked_scales("MXFP6", self.part(info.name, "weight_scale", rows).view(np.uint8), scale)
        scales = as_float32(exponents, "F8_E8M0") / np.float32(8)
        zeros = np.full_like(scales, 128)
        return GroupedTensor(info.name, 8, codes, scales, zeros, _MX_GROUP, bias=self.bias(info.name, rows))

    def _read(self, name: str, rows: np.ndarray | None) -> GroupedTensor:
        info, scheme = self.modules[name], self._scheme(name)
        size, order = self._groups(name)
        height = self._blocks[name][0]
        zeros = self._zeros(name, scheme.bits)
        notes = []
        if scheme.strategy == "group" and order is None and size not in (scheme.block[1], info.shape[1]):
            notes.append(f"{name}: groups of {size} but the config says {scheme.block[1]}; read as {size}")
        if scheme.sym and (zeros != 1 << (scheme.bits - 1)).any():
            notes.append(f"{name}: has zero points but the config says symmetric; read as asymmetric")
        scales, zeros = (spread(x, info.shape[0], height) for x in (self.scales(name, "weight_scale"), zeros))
        if rows is not None:
            scales, zeros = scales[rows], zeros[rows]
        codes, bias = self._codes(name, scheme.bits, rows), self.bias(name, rows)
        return GroupedTensor(name, scheme.bits, codes, scales, zeros, size, order, bias, tuple(notes))

    def group_order(self, name: str) -> np.ndarray | None:
        return self._groups(name)[1] if self.modules[name].stores_g_idx else None

    def _scheme(self, name: str) -> Scheme:
        scheme = scheme_of(name, self._schemes, self.quant.source)
        assert scheme is not None  # describe saw to it
        return scheme

    def _groups(self, name: str) -> tuple[int, np.ndarray | None]:
        """(group size, None) where groups are consecutive, else (average size, int32 [in])."""
        info = self.modules[name]
        if not info.stores_g_idx:
            return info.group_size, None
        group = self.part(name, "weight_g_idx").astype(np.int64)
        if (group == -1).all():  # allocated, never filled
            return info.group_size, None
        groups = math.prod(info.tensors["weight_scale"].shape[1:])
        if group.min() < 0 or group.max() >= groups:
            raise BridgeError(
                f"{info.tensors['weight_g_idx'].file}: {name}.weight_g_idx names a group beyond the {groups} that "
                "have scales; the checkpoint is damaged"
            )
        size = column_group_size(group)
        if size and -(-info.shape[1] // size) == groups:
            return size, None
        return info.group_size, group.astype(np.int32)

    def _codes(self, name: str, bits: int, rows: np.ndarray | None) -> np.ndarray:
        """uint8 [out, in], or some of the rows."""
        info = self.modules[name]
        if "weight_packed" in info.tensors:
            by_words = _by_words(info.tensors, info.shape, bits)
            return _unpack(self.part(name, "weight_packed", rows), bits, info.shape[1], by_words)
        signed, half = self.part(name, "weight", rows), 1 << (bits - 1)
        if bits < 8 and (signed.min() < -half or signed.max() >= half):
            raise BridgeError(
                f"{info.file}: {name}.weight has codes beyond {-half}..{half - 1}, but the config says {bits} bits; "
                "the checkpoint is damaged, or config.json is another model's"
            )
        return signed.view(np.uint8) + np.uint8(half)

    def _zeros(self, name: str, bits: int) -> np.ndarray:
        """True zero points as float32, laid out as the scale."""
        info, half = self.modules[name], 1 << (bits - 1)
        stored = info.tensors.get("weight_zero_point")
        if stored is None:
            return np.full(info.tensors["weight_scale"].shape, half, np.float32)
        zeros = self.part(name, "weight_zero_point")
        if stored.dtype == "I8":
            return zeros.astype(np.float32) + np.float32(half)
        by_words = _by_words(info.tensors, info.shape, bits)
        return np.ascontiguousarray(_unpack(zeros.T, bits, info.shape[0], by_words).T).astype(np.float32)


def _describe_fp6(name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
    """A module of 6-bit floats. Raises BridgeError if its shapes do not fit together."""
    codes, scale = tensors["weight_packed"], tensors["weight_scale"]
    out, columns = codes.shape[0], scale.shape[-1] * _MX_GROUP if scale.shape else 0
    fits = scale.dtype in ("U8", "F8_E8M0") and scale.shape == (out, columns // _MX_GROUP)
    fits = fits and codes.shape == (out, columns * 3 // 4) and 0 not in codes.shape
    check_shapes(fits and "weight_zero_point" not in tensors, name, tensors)
    return module_info(name, tensors, 6, _MX_GROUP, (out, columns))


def _packs_floats(tensors: dict[str, TensorInfo]) -> bool:
    """Whether these are floats of 4 or 6 bits: codes of integers are packed in words."""
    return "weight_packed" in tensors and tensors["weight_packed"].dtype == "U8"


def _claimed(scheme: Scheme) -> tuple[int, int]:
    """The block that the config claims, as `block_of` takes it."""
    return scheme.block[0] or BLOCK[0], scheme.block[1] or BLOCK[1]


def _length(n: int, bits: int, by_words: bool) -> int:
    """Words of n packed codes."""
    return -(-n // (32 // bits)) if by_words else -(-n * bits // 32)


def _by_words(tensors: dict[str, TensorInfo], shape: tuple[int, int], bits: int) -> bool:
    """Whether no code crosses a word. The weight's width shows it, unless its rows are short and end within a word."""
    words = tensors.get("weight_packed")
    return words is not None and words.shape[1] != _length(shape[1], bits, False)


def _unpack(words: np.ndarray, bits: int, n: int, by_words: bool) -> np.ndarray:
    """int32 [rows, w] -> uint8 [rows, n]."""
    from bridge.checkpoint.formats.bits import unpack_rows, unpack_words

    return unpack_words(words, bits, n) if by_words else unpack_rows(words, bits, n)


def _refusal(groups: Groups, shape: tuple[int, int]) -> str | None:
    if groups.bits not in (4, 8):
        return f"compressed-tensors cannot hold {groups.bits} bits in a form that is widely read; choose 4 or 8"
    return groups.indivisible(shape[1], ", as compressed-tensors needs")


def _shapes(groups: Groups, shape: tuple[int, int]) -> Shapes:
    if groups.kind != "int":
        return FP4.shapes(groups.kind, shape) if groups.bits == 4 else fp8_shapes(groups, shape)
    (out, columns), count = shape, groups.count(shape[1])
    return {
        "weight_packed": ("I32", (out, _length(columns, groups.bits, False))),
        "weight_scale": (groups.scales, (out, count)),
        "weight_zero_point": ("I32", (_length(out, groups.bits, False), count)),
        "weight_shape": ("I64", (2,)), "weight_g_idx": ("I32", (columns,)),
    }  # fmt: skip


def _pack(tensor: GroupedTensor | PackedTensor) -> Parts:
    from bridge.checkpoint.formats.packing import pack_columns, pack_rows

    shape = np.array(tensor.shape, np.int64)
    if isinstance(tensor, GroupedTensor):
        zeros = pack_columns(np.ascontiguousarray(tensor.zeros.astype(np.uint8).T), tensor.bits)
        words, scales = pack_rows(tensor.codes, tensor.bits).view(np.int32), PACKED.stored_scales(tensor)
        return {
            "weight_packed": words, "weight_scale": scales, "weight_shape": shape, "weight_zero_point": zeros,
            "weight_g_idx": tensor.groups().astype(np.int32),
        }  # fmt: skip
    if tensor.kind != "int":
        return FP4.pack(tensor) if tensor.bits == 4 else fp8_parts(tensor)
    return {"weight_packed": tensor.words.view(np.int32), "weight_scale": tensor.scales, "weight_shape": shape}


PACKED = WrittenFormat(
    "compressed-tensors", hint="pack-quantized, or floats of 4 or 8 bits", bits=(4, 8), fp4=("NVFP4", "MXFP4"),
    fp8=("static tensor", "static channel", "tensor", "channel", "block", "group"),
    refusal=_refusal, shapes=_shapes, pack=_pack, labels=lambda layers: {"quantization_config": schemes_of(layers)},
    rounding="symmetric",  # transformers loads no others
    in_words=True, zeros_part="weight_zero_point", order_part="weight_g_idx", act_order=True,
    scale_dtypes=("F16", "BF16", "F32"), shape_part="weight_shape",
    head=True,
)  # fmt: skip
CompressedReader.written = (PACKED,)
