"""NVIDIA's ModelOpt, and auto-round's nvfp4, mxfp4 and mxfp8: each module's tensors tell its format.

                 codes                      scales                       of the whole weight
4-bit floats     weight                     weight_scale, bytes          weight_scale_2, multiplies
of auto-round    weight_packed              weight_scale, bytes          weight_global_scale, divides
8-bit floats     weight F8_E4M3             weight_scale                 -
4-bit integers   weight uint8 [out/2, in]   weight_scale float [out, G]  -
8-bit integers   weight int8 [out, in]      weight_scale float [out]     -

`fp4` and `fp8` describe the floats. Integers are signed and symmetric, W = scale * code; of 4 bits, byte r of a column
holds rows 2r (low nibble) and 2r + 1. W4A8_AWQ has weight_scale_2 too, for kernels that round the product to FP8.
Activations have input_scale; auto-round calls it input_global_scale, and divides.

The input of an AWQ or SmoothQuant layer may be multiplied by pre_quant_scale, float [in], where that could not be
folded into the layer before. W[o, k] * pre_quant_scale[k] is in no group: such a layer is read as floats. So is one of
SVDQuant, to whose codes a product is added before: weight_quantizer._svdquant_lora_b [out, rank] and _a [rank, in].

NVFP4 and 8-bit floats are written: FP8 with a scale of the weight and of its activations, otherwise one a row
(FP8_PER_CHANNEL_PER_TOKEN) or one a block, [out/128, 1, in/128, 1] (FP8_PB_WO); and MXFP8.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import check_shapes, contradiction, finite_scales
from bridge.checkpoint.formats.compressed import FP4
from bridge.checkpoint.formats.fp4 import INPUTS, Fp4Parts
from bridge.checkpoint.formats.fp8 import STACK, STACK_SCALE, Fp8Reader, block_of, fp8_parts, fp8_shapes, spread
from bridge.checkpoint.formats.module_reader import FloatWeight, ModuleInfo, module_info
from bridge.checkpoint.formats.written import Groups, Parts, QuantizedLayers, Shapes, WrittenFormat
from bridge.checkpoint.grouped import CodedTensor, GroupedTensor, PackedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError

_MODELOPT = Fp4Parts("weight", "weight_scale", "weight_scale_2", reciprocal=False)
# quant_algo, besides FP8's: floats of 4 bits and mixtures; integers, by their bits
_FLOATS = (
    "NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8", "MXFP4", "W4A8_MXFP4_FP8", "MXFP8",
    "MIXED_PRECISION",
)  # fmt: skip
_INTEGERS = {
    "W4A16_AWQ": 4, "W4A8_AWQ": 4, "INT4_AWQ": 4, "INT4_BLOCKWISE": 4, "W8A16": 8, "W8A8_SQ_PER_CHANNEL": 8, "INT8": 8,
    "INT8_SQ": 8, "INT8_WO": 8,
}  # fmt: skip


_PRODUCT = "_svdquant_lora_b", "_svdquant_lora_a"  # its factors


@dataclass(frozen=True)
class MultipliedFloats(FloatWeight):
    """A weight whose columns are multiplied by `scale`; `codes` reads some of its rows, to which `product` is added."""

    codes: Callable[[np.ndarray], CodedTensor]
    product: tuple[str, str] | None

    def __str__(self) -> str:
        return f"codes {'plus a product, ' if self.product else ''}times pre_quant_scale"

    def read(self, store: Store, rows: tuple[int, int] | None = None) -> np.ndarray:
        start, stop = rows or (0, self.weight.shape[0])
        weights = self.codes(np.arange(start, stop)).dequantize()
        if self.product is not None:
            left, right = self.product
            weights += finite_scales(store, left, (start, stop)) @ finite_scales(store, right)
        weights *= finite_scales(store, self.scale.name)
        return weights


class ModelOptReader(Fp8Reader):
    """Reads checkpoints whose linear layers are floats or integers of 4 or 8 bits."""

    parts: ClassVar[tuple[str, ...]] = (
        "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale",
        "pre_quant_scale", "bias", *INPUTS, STACK, STACK_SCALE, *_PRODUCT,
    )  # fmt: skip
    plain: ClassVar = frozenset({"weight", "bias", *INPUTS})

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        if label in ("nvfp4", "mxfp4", "mxfp8"):  # auto-round's
            size = 16 if label == "nvfp4" else 32
            return replace(quant, title=label, claims=(f"{label[-1]}-bit floats", f"groups of {size}"), group_size=size)
        algorithm = str(quant.raw.get("quant_algo") or "FP8").upper()
        title = f"ModelOpt {algorithm}"
        if algorithm.startswith("FP8"):
            return super().complete(quant, label)
        if (bits := _INTEGERS.get(algorithm)) is not None:
            return replace(quant, title=title, bits=bits, group_size=-1 if bits == 8 else quant.group_size, sym=True)
        if algorithm not in _FLOATS:
            raise BridgeError(
                f"{quant.source}: {quant.method} with quant_algo {algorithm} is not supported (FP8, "
                f"{', '.join((*_FLOATS, *_INTEGERS))} are); convert the unquantized model instead"
            )
        if algorithm == "MIXED_PRECISION":
            return replace(quant, title="ModelOpt", claims=("each layer in a format of its own",))
        size = 32 if "MXFP" in algorithm else 16
        floats = f"{8 if algorithm == 'MXFP8' else 4}-bit floats"
        return replace(quant, title=title, claims=(floats, f"groups of {size}"), group_size=size)

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        super().__init__(store, quant)
        self._multiplied: set[str] = set()  # tensors of modules that are read as floats
        names = [name for name, info in self.modules.items() if "pre_quant_scale" in info.tensors]
        for name in names:
            info = self.modules.pop(name)
            self._multiplied |= {t.name for part, t in info.tensors.items() if part != "bias"}
            codes = next(iter(info.tensors[part] for part in ("weight_packed", "weight") if part in info.tensors))
            weight = replace(codes, name=f"{name}.weight", shape=info.shape, nbytes=info.nbytes)
            left, right = (info.tensors.get(part) for part in _PRODUCT)
            product = (left.name, right.name) if left and right else None
            scale = info.tensors["pre_quant_scale"]
            self.floats[weight.name] = MultipliedFloats(weight, scale, partial(self._read, info), product)
        if names:
            self.notes.append(
                f"the inputs of {len(names)} layers are multiplied by pre_quant_scale ({names[0]} is the first), which "
                "codes cannot be; they are read as floats"
            )

    @staticmethod
    def split(name: str) -> tuple[str, str]:
        module, part = Fp8Reader.split(name)
        return (module.removesuffix(".weight_quantizer"), part) if part in _PRODUCT else (module, part)

    def claimed_bits(self, module: str) -> int | None:
        algorithm = str(self.quant.raw.get("quant_algo")).upper()
        return self.quant.bits if algorithm in _INTEGERS else None

    def owned(self) -> set[str]:
        return super().owned() | self._multiplied

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        if _PRODUCT[0] in tensors or _PRODUCT[1] in tensors:
            return ("weight_scale", "weight", "pre_quant_scale", *_PRODUCT)
        return ("weight_scale", "weight_packed") if "weight_packed" in tensors else super().required_parts(tensors)

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo | FloatWeight:
        described = self._describe(name, tensors)
        multiplied = tensors.get("pre_quant_scale")
        if multiplied is not None:
            width = described.shape[1] if isinstance(described, ModuleInfo) else None
            check_shapes(multiplied.floating and multiplied.shape == (width,), name, tensors)
        if _PRODUCT[0] in tensors and isinstance(described, ModuleInfo):
            left, right = (tensors[part] for part in _PRODUCT)
            fits = left.floating and right.floating and left.is_matrix and right.is_matrix
            fits = fits and (left.shape[0], right.shape[1]) == described.shape and left.shape[1] == right.shape[0]
            check_shapes(fits, name, tensors)
        return described

    def _describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo | FloatWeight:
        if STACK in tensors:
            return super().describe(name, tensors)
        if _integers(tensors):
            return self._describe_integers(name, tensors)
        if "weight_packed" in tensors or tensors["weight"].dtype == "U8":
            return _fp4(tensors).describe(name, tensors)
        return super().describe(name, tensors)

    def _describe_integers(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        check_shapes(weight.is_matrix and scale.floating, name, tensors)
        bits = 4 if weight.dtype == "U8" else 8
        shape = weight.shape[0] * (8 // bits), weight.shape[1]
        block = block_of(shape, scale.shape, (1, self.quant.group_size))
        if block is None or (block[0] != 1 and bits == 4):
            raise contradiction(name, tensors)
        return module_info(name, tensors, bits, block[1], shape)

    def read(self, name: str, rows: np.ndarray | None = None) -> CodedTensor:
        return self._read(self.modules[name], rows)

    def _read(self, info: ModuleInfo, rows: np.ndarray | None = None) -> CodedTensor:
        if not _integers(info.tensors):
            return _fp4(info.tensors).read(self, info, rows)
        name = info.name
        half = 1 << (info.bits - 1)
        if info.bits == 8:
            codes = self.part(name, "weight", rows).view(np.uint8) ^ np.uint8(half)  # two's complement
        else:
            row = np.arange(info.shape[0]) if rows is None else rows
            pairs = np.unique(row >> 1)
            packed = self.part(name, "weight", pairs)[np.searchsorted(pairs, row >> 1)]
            codes = (packed >> (row & 1).astype(np.uint8)[:, None] * np.uint8(4)) & np.uint8(15) ^ np.uint8(half)
        scales = self.scales(name, "weight_scale")
        scales = spread(scales, info.shape[0], 1 if scales.size > 1 else info.shape[0])
        scales = np.ascontiguousarray(scales if rows is None else scales[rows])
        zeros = np.full_like(scales, half)
        return GroupedTensor(name, info.bits, codes, scales, zeros, info.group_size, bias=self.bias(name, rows))

    def tensor_scales(self, name: str) -> dict[str, float]:
        info = self.modules[name]
        return {} if _integers(info.tensors) else _fp4(info.tensors).tensor_scales(self, info)


def _integers(tensors: dict[str, TensorInfo]) -> bool:
    """Whether the codes are integers: 4-bit floats have scales of bytes."""
    weight = tensors.get("weight")
    if weight is None or weight.dtype not in ("U8", "I8"):
        return False
    return weight.dtype == "I8" or tensors["weight_scale"].dtype in ("F32", "F16", "BF16")


def _fp4(tensors: dict[str, TensorInfo]) -> Fp4Parts:
    return FP4 if "weight_packed" in tensors else _MODELOPT


def _labels(layers: QuantizedLayers) -> dict[str, Any]:
    """The keys of config.json. Activations of NVFP4 are not quantized; of 8-bit floats they are."""
    algorithms = {name: _algorithm(groups) for name, groups in layers.groups.items()}
    several = len({*algorithms.values()}) > 1
    labels: dict[str, Any] = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION" if several else next(iter(algorithms.values())),
        "ignore": [*layers.floats, "lm_head"],
    }  # fmt: skip
    if several:
        sizes = {name: {"quant_algo": algorithm} | _size(layers.groups[name]) for name, algorithm in algorithms.items()}
        return {"quantization_config": {**labels, "quantized_layers": sizes}}
    return {"quantization_config": {**labels, **_size(layers.usual)}}


def _algorithm(groups: Groups) -> str:
    if groups.kind != "FP8":
        return groups.kind if groups.kind == "MXFP8" else f"W4A16_{groups.kind}"
    return {"tensor": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN", "block": "FP8_PB_WO"}[groups.strategy]


def _size(groups: Groups) -> dict[str, int]:
    return {"group_size": groups.group_size} if groups.strategy == "group" else {}


def _shapes(groups: Groups, shape: tuple[int, int]) -> Shapes:
    if groups.bits == 4:
        return _MODELOPT.shapes(groups.kind, shape)
    shapes = fp8_shapes(groups, shape)
    dtype, each = shapes["weight_scale"]
    return {**shapes, "weight_scale": (dtype, _each(groups.strategy, each))}


def _pack(tensor: PackedTensor) -> Parts:
    if tensor.bits == 4:
        return _MODELOPT.pack(tensor)
    parts = fp8_parts(tensor)
    strategy = Groups(8, tensor.group_size, kind=tensor.kind, rows=tensor.rows).strategy
    return {**parts, "weight_scale": parts["weight_scale"].reshape(_each(strategy, parts["weight_scale"].shape))}


def _each(strategy: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of scales, [rows, groups] or [1], as ModelOpt has it."""
    if strategy == "block":
        return shape[0], 1, shape[1], 1
    return shape[:1] if strategy == "channel" else shape


WRITTEN = WrittenFormat(
    "modelopt", hint="NVFP4, or 8-bit floats", bits=(), fp4=("NVFP4",),
    fp8=("static tensor", "channel", "block", "group"), pack=_pack, labels=_labels, shapes=_shapes,
)  # fmt: skip
ModelOptReader.written = (WRITTEN,)
