"""HQQ: fractional zero points, W = (q - zero) * scale; as transformers saves it, or hqq itself (qmodel.pt).

    W_q         uint8 or int32   codes of the matrix cut into groups, [G * out, group size], packed down the rows
    scale,zero  float [G * out, 1]
    shape       int   [2]        (out, in)
    nbits, group_size, axis, packing, view_as_float   numbers and a text, each a tensor
    bias        float [out]      optional

Packing takes the first half of the rows as the high nibbles of bytes and the second half as the low ones;
2 and 1 bits likewise in quarters and eighths, 3 bits in tenths of an int32 (two bits are left over), 5, 6
and 8 bits a byte each. 1.58 bits are 2 with three codes. view_as_float only renames the dtype of W_q.

Groups run along the input features with axis 1. With axis 0 they run down the output features, a stride apart:
every weight of a row then has a scale of its own, which no GGUF block has room for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.config import QuantConfig
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.reader import ModuleInfo, Reader, contradiction
from bridge.checkpoint.store import TensorInfo
from bridge.errors import BridgeError

# packing -> bits of a code, codes of a word, the word
_PACKINGS: dict[str, tuple[int, int, np.dtype]] = {
    "8bit_u8": (8, 1, np.dtype("u1")),
    "4bit_u8": (4, 2, np.dtype("u1")),
    "3bit_32": (3, 10, np.dtype("<u4")),
    "2bit_u8": (2, 4, np.dtype("u1")),
    "1bit_u8": (1, 8, np.dtype("u1")),
}
_PACKING_OF = {8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


class HqqReader(Reader):
    """Reads HQQ checkpoints of axis 1."""

    # the last three are those of quantized scales and zero points
    parts: ClassVar = (
        "W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "packing", "view_as_float", "bias",
        "scale_q", "zero_q", "zero_scale",
    )  # fmt: skip
    required: ClassVar = ("W_q", "shape")
    plain: ClassVar = frozenset({"bias"})

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        settings = quant.raw.get("quant_config")
        settings = settings if isinstance(settings, dict) else {}
        own = settings.get("weight_quant_params")
        if not isinstance(own, dict):  # one such table for each of several kinds of layers
            own = next((v["weight_quant_params"] for v in settings.values() if _has_params(v)), {})
        bits, size = own.get("nbits", quant.bits), own.get("group_size", quant.group_size)
        size = -1 if size is None else size
        if not isinstance(bits, (int, float)) or not isinstance(size, int):
            raise BridgeError(f"{quant.source}: nbits is {bits!r} and group_size {size!r}, no numbers; mend the file")
        return replace(quant, bits=math.ceil(bits), group_size=size, sym=False, title="HQQ")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.format = "hqq"

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        weight = tensors["W_q"]
        for part in ("scale_q", "zero_q", "zero_scale"):
            if part in tensors:
                raise BridgeError(
                    f"{weight.file}: {name} has its scales or zero points quantized too ({part}), which is not "
                    "supported; quantize the model again with quant_scale=False, quant_zero=False"
                )
        if not {"scale", "zero"} <= tensors.keys() or tensors["shape"].shape != (2,):
            raise contradiction(name, tensors)
        if self._number(tensors, "axis", 1) == 0:
            raise BridgeError(
                f"{weight.file}: {name} has groups along axis 0, where every weight of a row has a scale of its own, "
                "and no GGUF type can hold that; quantize the model again with axis=1"
            )
        out, columns = (int(n) for n in self.store.read(tensors["shape"].name))
        bits = math.ceil(self._number(tensors, "nbits", self.quant.bits))
        _, lanes, word = _PACKINGS[self._packing(tensors, bits)]
        runs = math.prod(tensors["scale"].shape)
        if min(out, columns, runs) <= 0 or out * columns % runs:
            raise contradiction(name, tensors)
        size = out * columns // runs
        if self._number(tensors, "group_size", size) != size:
            raise contradiction(name, tensors)
        if columns % size:
            raise BridgeError(
                f"{weight.file}: {name}: groups of {size} run over the ends of rows of {columns}, which no GGUF type "
                "can hold; quantize the model again with a group_size that divides them"
            )
        fits = weight.nbytes == -(-runs // lanes) * size * word.itemsize and (lanes == 10 or runs % lanes == 0)
        fits = fits and all(tensors[p].floating and math.prod(tensors[p].shape) == runs for p in ("scale", "zero"))
        if not fits or ("bias" in tensors and tensors["bias"].shape != (out,)):
            raise contradiction(name, tensors)
        return ModuleInfo(name, bits, size, (out, columns), sum(t.nbytes for t in tensors.values()), tensors)

    def _number(self, tensors: dict[str, TensorInfo], part: str, default: float) -> float:
        """A setting stored as a tensor of one element."""
        if part not in tensors:
            return default
        values = self.store.read(tensors[part].name).reshape(-1)
        if values.size != 1 or not np.isfinite(values[0]):
            raise BridgeError(f"{tensors[part].file}: {tensors[part].name} is no number; the checkpoint is damaged")
        return float(values[0])

    def _packing(self, tensors: dict[str, TensorInfo], bits: int) -> str:
        packing = _PACKING_OF.get(bits, f"{bits} bits")
        if "packing" in tensors:
            packing = bytes(self.store.read(tensors["packing"].name).astype(np.uint8)).decode("latin-1")
        if packing not in _PACKINGS or _PACKINGS[packing][0] < bits:
            info = tensors["W_q"]
            raise BridgeError(
                f"{info.file}: {info.name} is packed as {packing!r} with nbits {bits}; known: {', '.join(_PACKINGS)}; "
                "the checkpoint is damaged or of a newer hqq"
            )
        return packing

    def read(self, name: str) -> GroupedTensor:
        info = self.modules[name]
        out, columns = info.shape
        width, lanes, word = _PACKINGS[self._packing(info.tensors, info.bits)]
        groups = columns // info.group_size
        words = self.part(name, "W_q").reshape(-1).view(word).reshape(-1, info.group_size)
        rows = np.empty((lanes, *words.shape), np.uint8)
        for i in range(lanes):  # the first lane is the highest
            rows[i] = words >> word.type(width * (lanes - 1 - i)) & word.type(2**width - 1)
        codes = rows.reshape(-1, info.group_size)[: out * groups].reshape(out, columns)
        if width > info.bits and codes.max() >= 2**info.bits:
            raise BridgeError(
                f"{info.file}: {name} has the code {codes.max()}, beyond nbits {info.bits}; the checkpoint is damaged"
            )
        return GroupedTensor(
            name=name,
            bits=info.bits,
            codes=codes,
            scales=self.scales(name, "scale").reshape(out, groups),
            zeros=self.scales(name, "zero").reshape(out, groups),
            group_size=info.group_size,
            bias=self.bias(name),
        )


def _has_params(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("weight_quant_params"), dict)
