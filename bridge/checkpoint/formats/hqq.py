"""HQQ: W = (q - zero) * scale with fractional zero points; as transformers or hqq itself (qmodel.pt) saves it.

    W_q         uint8 or int32   codes of the matrix cut into groups, [G * out, group size], packed down the rows
    scale,zero  float [G * out, 1]
    shape       int   [2]        (out, in)
    nbits, group_size, axis, packing, view_as_float   numbers and a text, each a tensor
    bias        float [out]      optional

The first half of the rows becomes the high nibbles of bytes and the second half the low ones. 2 and 1 bits are packed
in quarters and eighths, 3 bits in tenths of an int32 (two bits are left over); 5, 6 and 8 bits take a byte
each. 1.58 bits are 2 bits with three codes. view_as_float only renames the dtype of W_q.

With axis 1 groups run along the input features. With axis 0 the matrix is cut into [group size, out * in / group size],
and scale and zero are [1, out * in / group size]: groups run down the output features, a stride apart, so every weight
of a row has a scale of its own, for which no GGUF block has room. These come as floats.

Scales, zero points or both may be quantized in the same way (quant_scale, quant_zero; only in a qmodel.pt):

    scale_q, zero_q               codes, instead of `scale`, `zero`
    meta_scale.X, meta_zero.X     to dequantize them: scale, zero, shape, packing; along either axis, or one pair
    zero_scale                    [2, ...] zeros, then scales, instead of both (offload_meta): floats or codes

Codes are written with axis 1, and scales and zero points as they are.
"""

import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.decoded import DecodedTensor, rounding_distortion
from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import check_shapes
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, module_info
from bridge.checkpoint.formats.written import Groups, Parts, QuantizedLayers, Shapes, WrittenFormat
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.system.fields import table, whole_number

# packing -> bits of a code, codes of a word, the word
PACKINGS: dict[str, tuple[int, int, np.dtype]] = {
    "8bit_u8": (8, 1, np.dtype("u1")),
    "6bit_32": (6, 5, np.dtype("<u4")),  # these two are SINQ's
    "5bit_32": (5, 6, np.dtype("<u4")),
    "4bit_u8": (4, 2, np.dtype("u1")),
    "3bit_32": (3, 10, np.dtype("<u4")),
    "2bit_u8": (2, 4, np.dtype("u1")),
    "1bit_u8": (1, 8, np.dtype("u1")),
}
_PACKING_OF = {8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


class HqqReader(Reader):
    """Reads HQQ checkpoints; the codes of axis 0 as floats."""

    short: ClassVar = "hqq"
    parts: ClassVar = (
        "W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "packing", "view_as_float", "bias",
        "scale_q", "zero_q", "zero_scale",
        *(f"meta_{what}.{part}" for what in ("scale", "zero") for part in ("scale", "zero", "shape", "packing")),
    )  # fmt: skip
    required: ClassVar = ("W_q", "shape")
    settings: ClassVar = frozenset({
        "channel_wise", "compute_dtype", "encoded_state_dict", "offload_meta", "optimize", "quant_scale", "quant_zero",
        "round_zero", "stores_quant_config", "unpack_view_dtype",
    })  # fmt: skip
    plain: ClassVar = frozenset({"bias"})

    @classmethod
    def label_of(cls, parts: set[str]) -> str | None:
        return "" if "W_q" in parts else None

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        settings = table(quant.raw.get("quant_config"))
        params = settings.get("weight_quant_params")
        if not isinstance(params, dict):  # or a table for each kind of layer
            params = next((v["weight_quant_params"] for v in settings.values() if _has_params(v)), {})
        nbits, size = params.get("nbits", quant.bits), params.get("group_size", quant.group_size)
        bits = math.ceil(nbits) if isinstance(nbits, float) and math.isfinite(nbits) else whole_number(nbits)
        groups = -1 if size is None else whole_number(size)
        if bits is None or groups is None:
            raise BridgeError(f"{quant.source}: nbits is {nbits!r} and group_size {size!r}, not numbers; edit the file")
        return replace(quant, bits=bits, group_size=groups, sym=False, title="HQQ")

    @staticmethod
    def split(name: str) -> tuple[str, str]:
        module, _, part = name.rpartition(".")
        outer, _, table = module.rpartition(".")
        return (outer, f"{table}.{part}") if table in ("meta_scale", "meta_zero") else (module, part)

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        needed = [*self.required]
        both = tensors.get("zero_scale")
        for what in ("scale", "zero"):
            quantized = f"{what}_q" in tensors if both is None else not both.floating
            if both is None:
                needed.append(f"{what}_q" if quantized else what)
            if quantized:
                needed += [f"meta_{what}.{part}" for part in ("scale", "zero", "shape", "packing")]
        return tuple(needed)

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        weight = tensors["W_q"]
        check_shapes(tensors["shape"].shape == (2,), name, tensors)
        out, columns = (int(n) for n in self.store.read(tensors["shape"].name))
        bits = math.ceil(self._number(tensors, "nbits", self.quant.bits))
        _, lanes, word = PACKINGS[self._packing(tensors, bits)]
        runs = self._count(tensors, "scale")
        check_shapes(min(out, columns, runs) > 0 and out * columns % runs == 0, name, tensors)
        size = out * columns // runs
        check_shapes(self._number(tensors, "group_size", size) == size, name, tensors)
        down = self._axis(tensors) == 0
        if columns % size and not down:
            raise BridgeError(
                f"{weight.file}: {name}: groups of {size} cross the ends of rows of {columns}, which no GGUF type "
                "can hold; quantize the model again with a group_size that divides them"
            )
        packed, wide = (size, runs) if down else (runs, size)  # rows and columns of the matrix that is packed
        fits = weight.nbytes == -(-packed // lanes) * wide * word.itemsize and self._count(tensors, "zero") == runs
        check_shapes(fits and (word.itemsize == 4 or packed % lanes == 0), name, tensors)
        return module_info(name, tensors, bits, size, (out, columns))

    def claimed_bits(self, module: str) -> int | None:
        settings = table(self.quant.raw.get("quant_config"))
        entry: Any = next((value for kind, value in settings.items() if module.endswith(f".{kind}")), settings)
        bits = entry["weight_quant_params"].get("nbits") if _has_params(entry) else None
        return math.ceil(bits) if isinstance(bits, float) and math.isfinite(bits) else whole_number(bits)

    def _axis(self, tensors: dict[str, TensorInfo]) -> float:
        return self._number(tensors, "axis", 1)

    def in_words(self) -> str:
        down = sum(self._axis(m.tensors) == 0 for m in self.modules.values())
        return super().in_words() + (f", along axis 0 in {down}" if down else "")

    def _number(self, tensors: dict[str, TensorInfo], part: str, default: float) -> float:
        """A setting stored as a tensor of one element."""
        if part not in tensors:
            return default
        values = self.store.read(tensors[part].name).reshape(-1)
        if values.size != 1 or not np.isfinite(values[0]):
            raise BridgeError(f"{tensors[part].file}: {tensors[part].name} is not a number; the checkpoint is damaged")
        return float(values[0])

    def _count(self, tensors: dict[str, TensorInfo], what: str) -> int:
        """How many scales or zero points there are; 0 if they are not floats."""
        stored = tensors.get(what) or tensors.get("zero_scale")
        if stored is not None and stored.floating:
            return math.prod(stored.shape[1:] if what not in tensors else stored.shape)
        meta = f"meta_{what}.shape"
        return int(np.prod(self.store.read(tensors[meta].name))) if meta in tensors else 0

    def _packing(self, tensors: dict[str, TensorInfo], bits: int, table: str = "") -> str:
        packing = _PACKING_OF.get(bits, f"{bits} bits")
        if f"{table}packing" in tensors:
            packing = bytes(self.store.read(tensors[f"{table}packing"].name).astype(np.uint8)).decode("latin-1")
        if packing not in PACKINGS or PACKINGS[packing][0] < bits:
            info = tensors["W_q"]
            raise BridgeError(
                f"{info.file}: {info.name} is packed as {packing!r} with nbits {bits} (known: {', '.join(PACKINGS)}); "
                "the checkpoint is damaged or from a newer hqq"
            )
        return packing

    def read_all_rows(self, name: str) -> GroupedTensor | DecodedTensor:
        info = self.modules[name]
        out, columns = info.shape
        down, runs = self._axis(info.tensors) == 0, out * columns // info.group_size
        wide = runs if down else info.group_size
        rows = unpack_lanes(self.part(name, "W_q"), wide, self._packing(info.tensors, info.bits))
        codes = rows[: out * columns // wide].reshape(out, columns)
        if codes.max() >= 2**info.bits:
            raise BridgeError(
                f"{info.file}: {name} has the code {codes.max()}, beyond nbits {info.bits}; the checkpoint is damaged"
            )
        if down:
            scales, zeros = (self._values(name, what).reshape(1, runs) for what in ("scale", "zero"))
            weights = ((codes.reshape(-1, runs) - zeros) * scales).reshape(out, columns)
            share = rounding_distortion(
                float(np.square(scales, dtype=np.float64).sum() * info.group_size / 12), weights
            )
            return DecodedTensor(name, info.bits, weights, share, "codes grouped along axis 0", bias=self.bias(name))
        scales, zeros = (self._values(name, what).reshape(out, -1) for what in ("scale", "zero"))
        return GroupedTensor(name, info.bits, codes, scales, zeros, info.group_size, bias=self.bias(name))

    def _values(self, name: str, what: str) -> np.ndarray:
        """float32: the module's scales or zero points, dequantized if they are stored as codes."""
        tensors = self.modules[name].tensors
        if what in tensors:
            return self.scales(name, what)
        half = 0 if what == "zero" else 1
        if "zero_scale" in tensors and tensors["zero_scale"].floating:
            return self.scales(name, "zero_scale")[half]
        words = self.part(name, "zero_scale")[half] if "zero_scale" in tensors else self.part(name, f"{what}_q")
        count = self._count(tensors, what)
        scale, zero = (self.scales(name, f"meta_{what}.{part}") for part in ("scale", "zero"))
        packing = self._packing(tensors, 1, f"meta_{what}.")
        check_shapes(words.size > 0 and words.dtype.itemsize == PACKINGS[packing][2].itemsize, name, tensors)
        columns = words.shape[-1] if words.ndim else 1
        codes = unpack_lanes(words, columns, packing)[: count // columns]
        grouped = scale.size == 1 or scale.shape in ((1, columns), (len(codes), 1))
        check_shapes(codes.size == count and scale.shape == zero.shape and grouped, name, tensors)
        return (codes - zero) * scale


def unpack_lanes(words: np.ndarray, columns: int, packing: str) -> np.ndarray:
    """uint8 [lanes * words / columns, columns]: the codes of packed words, down the rows."""
    width, lanes, word = PACKINGS[packing]
    words = words.reshape(-1).view(word).reshape(-1, columns)
    rows = np.empty((lanes, *words.shape), np.uint8)
    for i in range(lanes):  # the first lane is the highest
        rows[i] = words >> word.type(width * (lanes - 1 - i)) & word.type(2**width - 1)
    return rows.reshape(-1, columns)


def _has_params(value: Any) -> bool:
    return isinstance(table(value).get("weight_quant_params"), dict)


def _refusal(groups: Groups, shape: tuple[int, int]) -> str | None:
    bits, size = groups.bits, groups.group_size
    if bits not in WRITTEN.bits:
        return f"HQQ cannot hold {bits} bits; choose one of {', '.join(map(str, WRITTEN.bits))}"
    if size <= 0 or shape[1] % size:
        return f"groups of {size} do not divide {shape[1]} columns; leave it in floats"
    runs, (_, lanes, word) = math.prod(shape) // size, PACKINGS[_PACKING_OF[bits]]
    if runs % lanes and word.itemsize == 1:  # the last word of wider ones may be padded
        return f"{runs} groups do not fill words of {lanes}; leave it in floats"
    return None


def _shapes(groups: Groups, shape: tuple[int, int]) -> Shapes:
    packing = _PACKING_OF[groups.bits]
    runs, (_, lanes, word) = math.prod(shape) // groups.group_size, PACKINGS[packing]
    return {
        "W_q": ("U8" if word.itemsize == 1 else "I32", (-(-runs // lanes), groups.group_size)),
        "scale": ("F16", (runs, 1)), "zero": ("F16", (runs, 1)), "shape": ("I64", (2,)),
        **{name: ("I64", (1,)) for name in ("nbits", "group_size", "axis")}, "packing": ("U8", (len(packing),)),
    }  # fmt: skip


def _pack(tensor: GroupedTensor) -> Parts:
    scales, packing = WRITTEN.stored_scales(tensor), _PACKING_OF[tensor.bits]
    numbers = {"nbits": tensor.bits, "group_size": tensor.group_size, "axis": 1}
    return {
        "W_q": _pack_lanes(tensor.codes.reshape(-1, tensor.group_size), packing), "scale": scales.reshape(-1, 1),
        "zero": tensor.zeros.astype(np.float16).reshape(-1, 1), "shape": np.array(tensor.shape, np.int64),
        **{name: np.array([number], np.int64) for name, number in numbers.items()},
        "packing": np.frombuffer(packing.encode(), np.uint8),
    }  # fmt: skip


def _pack_lanes(rows: np.ndarray, packing: str) -> np.ndarray:
    """The inverse of `unpack_lanes`: words [rows / lanes, columns], uint8 or int32."""
    width, lanes, word = PACKINGS[packing]
    count = -(-len(rows) // lanes)
    packed = np.zeros((count, rows.shape[1]), word)
    for i in range(lanes):  # the first lane is the highest
        lane = rows[i * count : (i + 1) * count]
        packed <<= word.type(width if i else 0)
        packed[: len(lane)] |= lane
    return packed if word.itemsize == 1 else packed.view(np.int32)


def _labels(layers: QuantizedLayers) -> dict[str, Any]:
    usual = layers.usual
    params = {"nbits": usual.bits, "group_size": usual.group_size, "axis": 1, "view_as_float": False}
    settings, left = {"weight_quant_params": params}, [*layers.floats, "lm_head"]
    return {"quantization_config": {"quant_method": "hqq", "quant_config": settings, "skip_modules": left}}


WRITTEN = WrittenFormat(
    "hqq", bits=(1, 2, 3, 4, 5, 6, 8), group_sizes=(16, 32, 64, 128, 256), zeros="halves", refusal=_refusal,
    shapes=_shapes, pack=_pack, labels=_labels, shape_part="shape",
    lanes=lambda bits: PACKINGS[_PACKING_OF[bits]][1],
)  # fmt: skip
HqqReader.written = (WRITTEN,)
