"""torchao, as its safetensors support and transformers flatten a weight: the tensors of its class, by attribute.

                     _weight_qdata        _weight_scale      _weight_zero_point
    Int4Tensor       8-bit [out, in/2]    float [G, out]     float [G, out]          W = s * q + z
    IntxUnpackedTo-  int8 [out, in]       float [out, G]     int8 or float, alike    W = s * (q - z)
    Int8Tensor       int8 [out, in]       float [out, G]     absent, or likewise     W = s * (q - z)
    Float8Tensor     F8 [out, in]         float [out, G]     absent                  W = s * q
    bias             float [out], under its own name

Int4Tensor has two codes a byte along the row, the first in the low nibble, from -8 to 7; its zero points are values,
not codes. IntxUnpackedToInt8Tensor holds codes of 1 to 8 bits, in two's complement; the file's header says how many, in
JSON under the weight's name: {_type, _data: {target_dtype: {_data: "int4"}, ..}}. Blocks of rows may share a scale.

Learned from torchao 0.18 (prototype/safetensors, quantize_/workflows) and FBGEMM's int4_row_quantize_zp.

Not read: Int4TilePackedTo4dTensor (tiles for one kind of GPU), MX and NVFP4 tensors, and weights whose input is
multiplied by _weight_act_pre_scale. Pickles (.bin) hold torchao's classes, which only torchao can load.
"""

import json
import re
from dataclasses import replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.files.store import Store, TensorInfo, read_metadata
from bridge.checkpoint.formats.fp4 import unpacked
from bridge.checkpoint.formats.fp8 import FLOAT8, RenamedFloats, block_of, spread
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, contradiction, module_info
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError

_CODES, _SCALE, _ZEROS = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_TILES, _INPUTS = "_weight_scale_and_zero", "_weight_act_pre_scale"
_OTHERS = {
    _TILES: "are tiles for one kind of GPU; quantize the model again with int4_packing_format='plain'",
    _INPUTS: "follow a scale of their inputs (AWQ, SmoothQuant); convert the unquantized model instead",
    "_weight_per_tensor_scale": "are NVFP4 of torchao's own layout; quantize the model with llm-compressor or ModelOpt",
}


class TorchaoReader(Reader):
    """Reads torchao's flattened tensors."""

    parts: ClassVar = (_CODES, _SCALE, _ZEROS, *_OTHERS, "bias")

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        files = [file for file in store.files if file.suffix == ".safetensors"]
        self._metadata = {name: text for file in files for name, text in read_metadata(file).items()}
        super().__init__(store, quant)

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        said = quant.raw.get("quant_type")
        while isinstance(said, dict):  # {"default": {"_type": ..}}, or a table for each module
            said = said.get("_type") or next(iter(said.values()), None)
        return replace(quant, title="torchao", claims=(str(said),) if said else ("no type of quantization",))

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        return _CODES, _SCALE

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo | RenamedFloats:
        codes, scale, zeros = tensors[_CODES], tensors[_SCALE], tensors.get(_ZEROS)
        if len(codes.shape) != 2 or 0 in codes.shape or not scale.floating or (zeros and zeros.shape != scale.shape):
            raise contradiction(name, tensors)
        out, columns = codes.shape
        if codes.dtype in FLOAT8:
            block = block_of((out, columns), scale.shape, (1, 128))
            if block is None or zeros or ("bias" in tensors and tensors["bias"].shape != (out,)):
                raise contradiction(name, tensors)
            return RenamedFloats(replace(codes, name=f"{name}.weight"), scale, block, codes)
        if codes.dtype not in ("I8", "U8"):
            raise contradiction(name, tensors)
        if self._packed(tensors):
            groups, columns = scale.shape[0], 2 * columns
            if columns % groups or zeros is None or not zeros.floating:
                raise contradiction(name, tensors)
            return module_info(name, tensors, 4, columns // groups, (out, columns))
        block = block_of((out, columns), scale.shape, (1, 128))
        if block is None or (zeros and not (zeros.floating or zeros.dtype == "I8")):
            raise contradiction(name, tensors)
        return module_info(name, tensors, self._bits(name), block[1], (out, columns))

    def _bits(self, name: str) -> int:
        """The bits of codes that are stored as bytes: 8 unless the file's header says otherwise."""
        try:
            said = json.loads(self._metadata[f"{name}.weight"])["_data"]["target_dtype"]["_data"]
            return int(re.fullmatch(r"int([1-8])", said)[1])  # type: ignore[index]
        except (KeyError, TypeError, ValueError, RecursionError):
            return 8

    @staticmethod
    def _packed(tensors: dict[str, TensorInfo]) -> bool:
        """Whether codes are nibbles, with the scales of each group in a row."""
        codes, scale = tensors[_CODES], tensors[_SCALE]
        return len(scale.shape) == 2 and scale.shape[1] == codes.shape[0] and scale.shape[0] != codes.shape[0]

    def is_plain(self, tensors: dict[str, TensorInfo]) -> bool:
        for part, why in _OTHERS.items():
            if (info := tensors.get(part)) is not None:
                raise BridgeError(f"{info.file}: the codes of {info.name.removesuffix(part)[:-1]} {why}")
        return super().is_plain(tensors)

    def read(self, name: str, rows: np.ndarray | None = None) -> GroupedTensor:
        info = self.modules[name]
        stored = self.part(name, _CODES, rows).view(np.uint8)
        scales, half = self.scales(name, _SCALE), 1 << (info.bits - 1)
        zeros = np.zeros_like(scales)
        if (held := info.tensors.get(_ZEROS)) is not None:
            zeros = self.scales(name, _ZEROS) if held.floating else self.part(name, _ZEROS).astype(np.float32)
        if self._packed(info.tensors):
            codes, scales, zeros = unpacked(stored) ^ np.uint8(half), scales.T, zeros.T
            if (zeros[scales == 0] != 0).any():
                raise BridgeError(f"{info.file}: {name} has groups with a zero point but no scale; it is damaged")
            zeros = -np.divide(zeros, scales, out=np.zeros_like(zeros), where=scales != 0)
        else:
            codes = stored + np.uint8(half)  # of two's complement
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
