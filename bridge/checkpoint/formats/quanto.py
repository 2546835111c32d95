"""optimum-quanto: QuantizedModelForCausalLM's files, with quanto_qmap.json; names start with the weight's.

    qint8, qfloat8     _data         int8 or F8 [out, in]
                       _scale        float [out, 1]
                       W = _scale * _data
    qint2, qint4       _data._data   uint8 [ceil(n / lanes), g]     codes of the groups, [n, g]: the first of `lanes`
                                     (4 or 2) equal parts of the rows are the lowest bits of the bytes, and so on
                       _scale        float [n, 1]
                       _shift        float [n, 1]; uint8: a zero point instead
                       W = _scale * code - _shift, or _scale * (code - _shift), cut into rows of `in`
    bias               float [out]   optional, under its own name

Groups are of 128 columns, else of 96, 64 or 32 if these divide rows that 128 does not; rows of up to 128 columns, or of
those that none divides, are a group. No tensor holds `in`: it follows from the bias, the group, or the model's width,
which all linears of a transformer either read or write.

Learned from optimum-quanto 0.2.7 (tensor/packed.py, grouped.py, qbits.py, nn/qmodule.py).
"""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import check_shapes, contradiction
from bridge.checkpoint.formats.fp8 import FLOAT8, RenamedFloats
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, module_info
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.system.fields import table, whole_number

_BYTES, _PACKED, _SCALE, _SHIFT = "weight._data", "weight._data._data", "weight._scale", "weight._shift"
_READING = frozenset({
    "q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "lm_head", "w1", "w3", "wqkv",
    "Wqkv", "query_key_value", "dense_h_to_4h", "fc1", "c_fc", "q_a_proj", "kv_a_proj_with_mqa", "in_proj",
})  # fmt: skip
_WRITING = frozenset({"o_proj", "down_proj", "w2", "wo", "out_proj", "dense_4h_to_h", "fc2", "c_proj"})


class QuantoReader(Reader):
    """Reads optimum-quanto's tensors."""

    parts: ClassVar = (_BYTES, _PACKED, _SCALE, _SHIFT, "bias")

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        types = {str(value) for value in (quant.raw.get("weights"), *_types(quant).values()) if value}
        return replace(quant, title="quanto", claims=tuple(sorted(types)) or ("no type of weights",))

    def claimed_bits(self, module: str) -> int | None:
        dtype = str(_types(self.quant).get(module) or self.quant.raw.get("weights")).removeprefix("q")
        return {"int2": 2, "int4": 4, "int8": 8}.get(dtype)

    @staticmethod
    def split(name: str) -> tuple[str, str]:
        module, dot, part = name.partition(".weight.")
        return (module, f"weight.{part}") if dot else Reader.split(name)

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        return (_PACKED, _SCALE, _SHIFT) if _PACKED in tensors or _SHIFT in tensors else (_BYTES, _SCALE)

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo | RenamedFloats:
        codes, scale = tensors.get(_PACKED) or tensors[_BYTES], tensors[_SCALE]
        check_shapes(codes.is_matrix and scale.floating, name, tensors)
        (rows, columns), count = codes.shape, scale.size
        if _PACKED not in tensors:
            check_shapes(count == rows and codes.dtype in ("I8", *FLOAT8), name, tensors)
            info = module_info(name, tensors, 8, columns, (rows, columns))
            if codes.dtype == "I8":
                return info
            return RenamedFloats(replace(codes, name=f"{name}.weight"), scale, (1, columns), codes)
        shift = tensors[_SHIFT]
        lanes = next((n for n in (2, 4) if rows == -(-count // n)), None)
        fits = codes.dtype == "U8" and shift.shape == scale.shape and (shift.floating or shift.dtype == "U8")
        if lanes is None or not fits:
            raise contradiction(name, tensors)
        return module_info(name, tensors, 8 // lanes, columns, self._shape(name, tensors, count, columns))

    def _shape(self, name: str, tensors: dict[str, TensorInfo], count: int, size: int) -> tuple[int, int]:
        """(out, in) of a weight of `count` groups of `size`."""
        last, hidden = name.rpartition(".")[2], whole_number(self.quant.model.get("hidden_size"))
        if "bias" in tensors:
            out = tensors["bias"].size
        elif size % 32 or size > 128:
            out = count
        elif hidden and last in _READING:
            out = count * size // hidden
        elif hidden and last in _WRITING:
            out = hidden
        else:
            raise BridgeError(
                f"{tensors[_PACKED].file}: {name} does not hold the shape of its matrix, and config.json does not tell "
                "it; dequantize the model with optimum-quanto, or convert the unquantized model"
            )
        columns = count * size // max(1, out)
        check_shapes(out * columns == count * size and _group_size(columns) == size, name, tensors)
        return out, columns

    def read_all_rows(self, name: str) -> GroupedTensor:
        info = self.modules[name]
        (out, columns), half = info.shape, np.uint8(128)
        scales = self.scales(name, _SCALE).reshape(out, -1)
        if info.bits == 8:
            codes, zeros = self.part(name, _BYTES).view(np.uint8) ^ half, np.full_like(scales, half)
        else:
            words, mask = self.part(name, _PACKED), np.uint8(2**info.bits - 1)
            lanes = [words >> np.uint8(shift) & mask for shift in range(0, 8, info.bits)]
            codes = np.concatenate(lanes)[: scales.size].reshape(out, columns)
            zeros = self._zeros(name, scales)
        return GroupedTensor(name, info.bits, codes, scales, zeros, info.group_size, bias=self.bias(name))

    def _zeros(self, name: str, scales: np.ndarray) -> np.ndarray:
        info = self.modules[name]
        if not info.tensors[_SHIFT].floating:
            return self.part(name, _SHIFT).astype(np.float32).reshape(scales.shape)
        shift = self.scales(name, _SHIFT).reshape(scales.shape)
        if (shift[scales == 0] != 0).any():
            raise BridgeError(f"{info.file}: {name} has groups with a shift but no scale; it is damaged")
        return np.divide(shift, scales, out=np.zeros_like(shift), where=scales != 0)


def _group_size(columns: int) -> int:
    """What optimum-quanto cuts rows into."""
    return next((n for n in (128, 96, 64, 32) if columns > 128 and columns % n == 0), columns)


def _types(quant: QuantConfig) -> dict[str, Any]:
    """The type of each module's weights, as quanto_qmap.json has them."""
    modules = table(quant.raw.get("modules"))
    return {name: settings.get("weights") for name, settings in modules.items() if isinstance(settings, dict)}
