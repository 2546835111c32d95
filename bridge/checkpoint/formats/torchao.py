"""torchao, as its safetensors support and transformers flatten a weight: the tensors of its class, by attribute.

                     _weight_qdata        _weight_scale      _weight_zero_point
    Int4Tensor       8-bit [out, in/2]    float [G, out]     float [G, out]          W = s * q + z
    Int4PlainInt32-  int32 [out, in/8]    float [G, out]     int8 [G, out]           W = s * (q - z)
    IntxUnpackedTo-  int8 [out, in]       float [out, G]     int8 or float, alike    W = s * (q - z)
    Int8Tensor       int8 [out, in]       float [out, G]     absent, or likewise     W = s * (q - z)
    Float8Tensor     F8 [out, in]         float [out, G]     absent                  W = s * q
    MXTensor         F8 [out, in]         F8_E8M0, G = in/32 absent                  W = s * q
                     uint8 [out, in/2]    likewise           absent                  MXFP4, see `fp4`
    NVFP4Tensor      uint8 [out, in/2]    F8_E4M3, G = in/16 absent                  NVFP4, see `fp4`
                     and _weight_per_tensor_scale, float []; _weight_act_per_tensor_scale is not needed
    Int4TilePacked-  int32 [n/8, k/128, 32, 4], _weight_scale_and_zero float [G, n, 2]   W = s * (q - 8) + z
    bias             float [out], under its own name

Int4Tensor has two codes a byte along the row, the first in the low nibble, from -8 to 7; its zero points are values,
not codes. Int4PlainInt32Tensor has eight from 0 to 15 in a word, the first lowest. IntxUnpackedToInt8Tensor holds codes
of 1 to 8 bits, in two's complement; the file's header says how many, in JSON under the weight's name:
{_type, _data: {target_dtype: {_data: "int4"}, shape: [..], ..}}. Blocks of rows may share a scale. The scales of MX and
NVFP4 tensors may be in tiles, see `blackwell`: their shape tells.

Tiles of Int4TilePackedTo4dTensor are 8 rows of 128 columns; n and k are out and in, padded, and the header has the
weight's own shape. Nibble 4h + g of word j of lane 4r + c is the code of row r and column 32j + 8g + 2c + h.

Learned from torchao 0.18 (prototype/safetensors, quantize_/workflows, prototype/mx_formats), FBGEMM's
int4_row_quantize_zp, and PyTorch's int4mm.cu for the tiles.

Not read: int4 of NPUs, and weights whose input is multiplied by _weight_act_pre_scale. Pickles (.bin) hold torchao's
classes, which only torchao can load.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.files.dtypes import as_float32
from bridge.checkpoint.files.store import Store, TensorInfo, read_metadata
from bridge.checkpoint.formats.blackwell import row_major, tiled_shape
from bridge.checkpoint.formats.checks import check_shapes, contradiction, positive_scale
from bridge.checkpoint.formats.fp4 import GROUPS, Fp4Tensor, checked_scales, unpacked
from bridge.checkpoint.formats.fp8 import FLOAT8, RenamedFloats, block_of, spread
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, counted, in_words, module_info
from bridge.checkpoint.grouped import CodedTensor, GroupedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.system.fields import integers, table

_CODES, _SCALE, _ZEROS = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_TILES, _INPUTS, _TENSOR_SCALE = "_weight_scale_and_zero", "_weight_act_pre_scale", "_weight_per_tensor_scale"
_FP4 = {"F8_E4M3": "NVFP4", "F8_E8M0": "MXFP4"}  # by the dtype of the scales


@dataclass(frozen=True)
class TiledMxfp8(RenamedFloats):
    """A weight of MXFP8 whose scales are in tiles."""

    def scales(self, store: Store) -> np.ndarray:
        out, columns = self.weight.shape
        return as_float32(row_major(store.read(self.scale.name).view(np.uint8), out, columns // 32), "F8_E8M0")


class TorchaoReader(Reader):
    """Reads torchao's flattened tensors."""

    parts: ClassVar = (
        _CODES, _SCALE, _ZEROS, _TILES, _INPUTS, _TENSOR_SCALE, "_weight_act_per_tensor_scale", "bias",
    )  # fmt: skip

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        files = [file for file in store.files if file.suffix == ".safetensors"]
        self._metadata = {name: text for file in files for name, text in read_metadata(file).items()}
        super().__init__(store, quant)

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        kind = quant.raw.get("quant_type")
        while isinstance(kind, dict) and "_type" not in kind:  # {"default": {"_type": ..}}, or a table for each module
            kind = next(iter(kind.values()), None)
        data = _data(kind)
        size = data.get("group_size") or _data(data.get("granularity")).get("group_size")
        words = [kind.get("_type") if isinstance(kind, dict) else kind, table(data.get("weight_dtype")).get("_data")]
        words += [f"groups of {size}"] if size else []
        return replace(quant, title="torchao", claims=tuple(str(w) for w in words if w) or ("no type of quantization",))

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        return _CODES, _TILES if _TILES in tensors else _SCALE

    def is_plain(self, tensors: dict[str, TensorInfo]) -> bool:
        if (info := tensors.get(_INPUTS)) is not None:
            raise BridgeError(
                f"{info.file}: the codes of {info.name.removesuffix(_INPUTS)[:-1]} follow a scale of their inputs "
                "(AWQ, SmoothQuant); convert the unquantized model instead"
            )
        return super().is_plain(tensors)

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo | RenamedFloats:
        codes = tensors[_CODES]
        if _TILES in tensors:
            return self._describe_tiles(name, tensors)
        scale, zeros = tensors[_SCALE], tensors.get(_ZEROS)
        fits = codes.is_matrix and scale.floating and (zeros is None or zeros.shape == scale.shape)
        check_shapes(fits, name, tensors)
        out, columns = codes.shape
        if codes.dtype in FLOAT8:
            tiles = scale.dtype == "F8_E8M0" and scale.shape == _in_tiles(out, columns // 32)
            block = (1, 32) if tiles else block_of((out, columns), scale.shape, (1, 128))
            if block is None or zeros or ("bias" in tensors and tensors["bias"].shape != (out,)):
                raise contradiction(name, tensors)
            weight_class = TiledMxfp8 if tiles else RenamedFloats
            return weight_class(replace(codes, name=f"{name}.weight"), scale, block, codes)
        if scale.dtype in _FP4:
            return self._describe_fp4(name, tensors)
        check_shapes(_TENSOR_SCALE not in tensors and codes.dtype in ("I32", "I8", "U8"), name, tensors)
        if codes.dtype == "I32":
            if zeros is not None and zeros.floating:
                raise BridgeError(
                    f"{codes.file}: the codes of {name} are packed for an NPU; quantize the model again with "
                    "int4_packing_format='plain'"
                )
            groups, columns = scale.shape[0], 8 * columns
            fits = zeros is not None and zeros.dtype == "I8" and scale.shape[1:] == (out,) and columns % groups == 0
            check_shapes(fits, name, tensors)
            return module_info(name, tensors, 4, columns // groups, (out, columns))
        if self._packed(tensors):
            groups, columns = scale.shape[0], 2 * columns
            check_shapes(columns % groups == 0 and zeros is not None and zeros.floating, name, tensors)
            return module_info(name, tensors, 4, columns // groups, (out, columns))
        block = block_of((out, columns), scale.shape, (1, 128))
        if block is None or (zeros and not (zeros.floating or zeros.dtype == "I8")):
            raise contradiction(name, tensors)
        return module_info(name, tensors, self._bits(name), block[1], (out, columns))

    def _describe_fp4(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        codes, scale = tensors[_CODES], tensors[_SCALE]
        out, columns, size = codes.shape[0], 2 * codes.shape[1], GROUPS[_FP4[scale.dtype]]
        groups = columns // size
        fits = codes.dtype == "U8" and columns % size == 0 and scale.shape in ((out, groups), _in_tiles(out, groups))
        tensor_scale = tensors.get(_TENSOR_SCALE)
        fits = fits and _ZEROS not in tensors and (tensor_scale is None or tensor_scale.size == 1)
        check_shapes(fits, name, tensors)
        return module_info(name, tensors, 4, size, (out, columns))

    def _describe_tiles(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        codes, scale = tensors[_CODES], tensors[_TILES]
        fits = codes.dtype == "I32" and len(codes.shape) == 4 and codes.shape[2:] == (32, 4) and 0 not in codes.shape
        check_shapes(fits, name, tensors)
        high, wide = 8 * codes.shape[0], 128 * codes.shape[1]
        groups = scale.shape[0]
        shape = self._attribute(name, "shape")
        out, columns = shape if integers(shape, 2) else (high, wide)
        fits = scale.floating and scale.shape[1:] == (high, 2) and groups > 0 and wide % groups == 0
        check_shapes(fits and 0 < out <= high and 0 < columns <= wide, name, tensors)
        return module_info(name, tensors, 4, wide // groups, (out, columns))

    def _attribute(self, name: str, key: str) -> Any:
        """An attribute of a weight's class as the file's header has it; None if it has none."""
        try:
            value = json.loads(self._metadata[f"{name}.weight"])["_data"][key]
        except (KeyError, TypeError, ValueError, RecursionError):
            return None
        return value["_data"] if isinstance(value, dict) and "_data" in value else value

    def _bits(self, name: str) -> int:
        """The bits of codes that are stored as bytes: 8 unless the file's header says otherwise."""
        dtype = re.fullmatch(r"int([1-8])", str(self._attribute(name, "target_dtype")))
        return int(dtype[1]) if dtype else 8

    @staticmethod
    def _packed(tensors: dict[str, TensorInfo]) -> bool:
        """Whether codes are nibbles, with the scales of each group in a row."""
        codes, scale = tensors[_CODES], tensors[_SCALE]
        return len(scale.shape) == 2 and scale.shape[1] == codes.shape[0] and scale.shape[0] != codes.shape[0]

    def _fp4(self, name: str) -> str:
        """NVFP4, MXFP4, or nothing for modules of integers."""
        scale = self.modules[name].tensors.get(_SCALE)
        return _FP4.get(scale.dtype, "") if scale else ""

    def in_words(self) -> str:
        floats = [f"{kind} in blocks of {GROUPS[kind]}" for name in self.modules if (kind := self._fp4(name))]
        codes = [m for name, m in self.modules.items() if not self._fp4(name)]
        return ", ".join([*([in_words(codes)] if codes or not floats else []), *([counted(floats)] if floats else [])])

    def tensor_scales(self, name: str) -> dict[str, float]:
        if name not in self.modules or not self._fp4(name):
            return {}
        info = self.modules[name].tensors.get(_TENSOR_SCALE)
        return {"scale": 1.0 if info is None else float(positive_scale(self.store, info))}

    def read(self, name: str, rows: np.ndarray | None = None) -> CodedTensor:
        from bridge.checkpoint.formats.bits import unpack_rows

        info = self.modules[name]
        if _TILES in info.tensors:
            t = self._read_tiles(info)
            return t if rows is None else t.take_rows(rows)
        if kind := self._fp4(name):
            return self._read_fp4(info, kind, rows)
        stored = self.part(name, _CODES, rows)
        scales, half = self.scales(name, _SCALE), 1 << (info.bits - 1)
        zeros = np.zeros_like(scales)
        if (held := info.tensors.get(_ZEROS)) is not None:
            zeros = self.scales(name, _ZEROS) if held.floating else self.part(name, _ZEROS).astype(np.float32)
        if info.tensors[_CODES].dtype == "I32":
            codes, scales, zeros = unpack_rows(stored, 4, info.shape[1]), scales.T, zeros.T
        elif self._packed(info.tensors):
            codes, scales, zeros = unpacked(stored.view(np.uint8)) ^ np.uint8(half), scales.T, zeros.T
            zeros = self._points(info, scales, zeros) + np.float32(half)
        else:
            codes = stored.view(np.uint8) + np.uint8(half)  # of two's complement
            if (codes >> info.bits if info.bits < 8 else codes & 0).any():
                raise BridgeError(f"{info.file}: {name} has codes beyond {info.bits} bits; the checkpoint is damaged")
            shared = block_of(info.shape, scales.shape, (1, 128))
            assert shared is not None  # as described
            scales, zeros = (spread(x, info.shape[0], shared[0]) for x in (scales, zeros))
            zeros = zeros + np.float32(half)
        if rows is not None:
            scales, zeros = scales[rows], zeros[rows]
        scales, zeros = np.ascontiguousarray(scales), np.ascontiguousarray(zeros)
        return GroupedTensor(name, info.bits, codes, scales, zeros, info.group_size, bias=self.bias(name, rows))

    @staticmethod
    def _points(info: ModuleInfo, scales: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The zero points, as codes, of offsets that are values."""
        if (values[scales == 0] != 0).any():
            raise BridgeError(f"{info.file}: {info.name} has groups with a zero point but no scale; it is damaged")
        return -np.divide(values, scales, out=np.zeros_like(values), where=scales != 0)

    def _read_fp4(self, info: ModuleInfo, kind: str, rows: np.ndarray | None) -> Fp4Tensor:
        name, groups = info.name, info.shape[1] // info.group_size
        bits = self.part(name, _SCALE).view(np.uint8)
        bits = bits if bits.shape == (info.shape[0], groups) else row_major(bits, info.shape[0], groups)
        scales = checked_scales(kind, bits if rows is None else bits[rows], info.tensors[_SCALE])
        codes, tensor_scale = unpacked(self.part(name, _CODES, rows)), self.tensor_scales(name)["scale"]
        return Fp4Tensor(name, kind, codes, scales, info.group_size, tensor_scale, bias=self.bias(name, rows))

    def _read_tiles(self, info: ModuleInfo) -> GroupedTensor:
        words, (out, columns) = self.part(info.name, _CODES).view(np.uint32), info.shape
        high, wide = words.shape[0], words.shape[1]
        nibbles = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)).astype(np.uint8) & np.uint8(15)
        lanes = nibbles.reshape(high, wide, 8, 4, 4, 2, 4)  # tiles down, along; row, c; word; h, g
        codes = lanes.transpose(0, 2, 1, 4, 6, 3, 5).reshape(8 * high, 128 * wide)[:out, :columns]
        pairs, groups = self.scales(info.name, _TILES), -(-columns // info.group_size)
        scales, values = (np.ascontiguousarray(pairs[:groups, :out, i].T) for i in range(2))
        zeros = self._points(info, scales, values) + np.float32(8)
        codes, bias = np.ascontiguousarray(codes), self.bias(info.name)
        return GroupedTensor(info.name, 4, codes, scales, zeros, info.group_size, bias=bias)


def _in_tiles(rows: int, columns: int) -> tuple[int, int]:
    """The shape as which torchao stores scales [rows, columns] in tiles: of 32 rows and 16 columns each."""
    high, wide = tiled_shape(rows, columns)
    return high // 4, wide * 4


def _data(config: Any) -> dict[str, Any]:
    """The settings of an object as torchao writes it to JSON: {"_type": .., "_data": {..}}."""
    return table(table(config).get("_data"))
