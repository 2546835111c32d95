"""bitsandbytes: 4-bit codes of 16 unequal levels (NF4, FP4) in blocks, and LLM.int8's rows of integers.

4 bits

    weight                 uint8 [n / 2, 1]   two codes a byte, the first in the high nibble, row after row;
                                              or these bytes as another dtype (bnb_4bit_quant_storage)
    weight.absmax          float [n / block]  of each block of consecutive weights; nested: uint8, codes of 256 levels
    weight.quant_map       float [16]         the levels, from -1 to 1
    weight.quant_state.bitsandbytes__nf4      uint8, JSON: {quant_type, blocksize, shape, dtype, nested_blocksize,
                           (or __fp4)         nested_dtype, nested_offset}
    weight.nested_absmax   float [blocks / nested_blocksize]     only nested: "double quantization"
    weight.nested_quant_map  float [256]

    W = quant_map[code] * absmax;   nested: absmax = nested_quant_map[code] * nested_absmax + nested_offset

8 bits

    weight                 int8 [out, in]
    SCB                    float [out]        the largest magnitude of each row
    weight_format          uint8, 0 for rows; 1 to 3 are layouts of one GPU each
    W[o, k] = weight[o, k] * SCB[o] / 127

Learned from bitsandbytes 0.50's `functional.QuantState` and `nn.modules`, and its files. NF4's levels are quantiles of
the normal distribution (Dettmers et al. 2023, QLoRA); no table of a GGUF type has them. LLM.int8 finds columns with
outliers in the activations as it multiplies: the file has them as integers, as all others.
"""

import json
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.decoded import DecodedTensor, level_noise, rounding_distortion
from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import check_shapes
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, counted, module_info, modules_with
from bridge.checkpoint.grouped import CodedTensor, GroupedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.system.fields import integers, whole_number

STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_INT8_SCALE = np.float32(1 / 127)
_CHUNK = 1 << 22  # weights decoded together


@dataclass(frozen=True)
class _State:
    """What the JSON of a 4-bit module says."""

    kind: str
    block: int
    shape: tuple[int, int]
    nested_block: int
    offset: np.float32


class BitsAndBytesReader(Reader):
    """Reads NF4, FP4 and LLM.int8."""

    parts: ClassVar = (
        "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *STATES,
        "SCB", "weight_format", "bias",
    )  # fmt: skip

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        self._states: dict[str, _State] = {}
        super().__init__(store, quant)

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        raw = quant.raw
        if raw.get("load_in_8bit") or raw.get("_load_in_8bit"):
            return replace(quant, title="bitsandbytes LLM.int8", bits=8, group_size=-1, sym=True)
        kind = str(raw.get("bnb_4bit_quant_type") or "fp4").upper()
        nested = ("nested scales",) if raw.get("bnb_4bit_use_double_quant") else ()
        return replace(quant, title=f"bitsandbytes {kind}", claims=("4 bits", *nested))

    @staticmethod
    def split(name: str) -> tuple[str, str]:
        module, dot, part = name.partition(".weight.")
        return (module, f"weight.{part}") if dot else Reader.split(name)

    def is_plain(self, tensors: dict[str, TensorInfo]) -> bool:
        weight = tensors.get("weight")
        return {"weight", "bias"}.issuperset(tensors) and (weight is None or weight.floating)

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        state = next((part for part in STATES if part in tensors), None)
        if "SCB" in tensors or (self.quant.bits == 8 and state is None):
            return "SCB", "weight"
        nested = ("weight.nested_absmax", "weight.nested_quant_map") if "weight.nested_absmax" in tensors else ()
        return state or STATES[0], "weight", "weight.absmax", "weight.quant_map", *nested

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        if "SCB" in tensors:
            return self._describe_rows(name, tensors)
        state = self._states[name] = self._state(name, tensors)
        absmax, nested = tensors["weight.absmax"], tensors.get("weight.nested_absmax")
        count = math.prod(state.shape)
        blocks = -(-count // state.block)
        fits = tensors["weight"].nbytes == -(-count // 2) and tensors["weight.quant_map"].size == 16
        fits = fits and absmax.size == blocks and (absmax.dtype == "U8" if nested else absmax.floating)
        if nested:
            fits = fits and nested.size == -(-blocks // state.nested_block)
            fits = fits and tensors["weight.nested_quant_map"].size == 256
        check_shapes(fits, name, tensors)
        return module_info(name, tensors, 4, state.block, state.shape)

    def _describe_rows(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        weight, scale, layout = tensors["weight"], tensors["SCB"], tensors.get("weight_format")
        if layout is not None and self.store.read(layout.name).any():
            raise BridgeError(
                f"{weight.file}: {name}.weight_format is not 0: the weights are in a layout of one GPU; load the model "
                "with bitsandbytes 0.45 or later and save it again"
            )
        fits = weight.is_matrix and weight.dtype == "I8" and scale.floating and scale.size == weight.shape[0]
        check_shapes(fits, name, tensors)
        out, columns = weight.shape
        return module_info(name, tensors, 8, columns, (out, columns))

    def _state(self, name: str, tensors: dict[str, TensorInfo]) -> _State:
        info = tensors[self.required_parts(tensors)[0]]
        try:
            fields: Any = json.loads(self.store.read(info.name).tobytes())
            block, nested_block = (whole_number(fields.get(key, 256)) or 0 for key in ("blocksize", "nested_blocksize"))
            shape, offset = fields["shape"], float(fields.get("nested_offset", 0))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            block = nested_block = 0
            shape, offset = None, 0.0
        if not integers(shape, 2, 1) or not math.isfinite(offset) or min(block, nested_block) <= 0:
            raise BridgeError(
                f"{info.file}: {info.name} does not give the shape and the blocks of a matrix; the checkpoint is "
                "damaged, or its layer is not a linear one"
            )
        return _State(info.name[-3:].upper(), block, (shape[0], shape[1]), nested_block, np.float32(offset))

    def claimed_bits(self, module: str) -> int | None:
        return self.quant.bits

    def disagreements(self) -> list[str]:
        label = str(self.quant.raw.get("bnb_4bit_quant_type") or "fp4").upper()
        nested = bool(self.quant.raw.get("bnb_4bit_use_double_quant"))
        kinds = (f"levels of {s.kind}, but the label says {label}" for s in self._states.values() if s.kind != label)
        other = (
            "scales that are not nested, but the label says they are"
            if nested
            else "nested scales, but the label does not say so"
        )
        scales = (other for name in self._states if _nested(self.modules[name]) != nested)
        return super().disagreements() + modules_with([*kinds, *scales])

    def in_words(self) -> str:
        kinds = []
        for name, info in self.modules.items():
            if (state := self._states.get(name)) is None:
                kinds.append("8 bits with one group a row")
            else:
                nested = " with nested scales" if _nested(info) else ""
                kinds.append(f"{state.kind} in blocks of {state.block}{nested}")
        return counted(kinds)

    def read(self, name: str, rows: np.ndarray | None = None) -> CodedTensor:
        if (state := self._states.get(name)) is not None:
            return self._read_levels(name, state, rows)
        codes = self.part(name, "weight", rows).view(np.uint8) ^ np.uint8(128)  # two's complement
        scales = self.scales(name, "SCB").reshape(-1, 1) * _INT8_SCALE
        scales = scales if rows is None else np.ascontiguousarray(scales[rows])
        zeros = np.full_like(scales, 128)
        return GroupedTensor(name, 8, codes, scales, zeros, codes.shape[1], bias=self.bias(name, rows))

    def _read_levels(self, name: str, state: _State, rows: np.ndarray | None) -> DecodedTensor:
        out, columns = state.shape
        stored, absmax = self.store.view(f"{name}.weight"), self._absmax(name, state)
        packed = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        by_row = columns % 2 == 0 and columns % state.block == 0
        if by_row and rows is not None:  # other rows are not decoded
            packed, absmax = packed.reshape(out, -1)[rows], absmax.reshape(out, -1)[rows]
        levels = self.scales(name, "weight.quant_map").reshape(-1)
        errors = level_noise(levels).astype(np.float32)
        count = (out if rows is None or not by_row else len(rows)) * columns
        flat, noise = np.empty(count, np.float32), 0.0
        packed, absmax = packed.reshape(-1), absmax.reshape(-1)
        step = -(-_CHUNK // state.block) * state.block
        for start in range(0, count, step):
            codes = _nibbles(packed[start // 2 : -(-(start + step) // 2)])[: count - start]
            scale = np.repeat(absmax[start // state.block : (start + step) // state.block], state.block)[: len(codes)]
            np.multiply(levels[codes], scale, out=flat[start : start + step])
            noise += float((errors[codes] * scale * scale).sum(dtype=np.float64))
        weights = flat.reshape(-1, columns)
        share = rounding_distortion(noise, weights)
        weights = weights if by_row or rows is None else weights[rows]
        return DecodedTensor(name, 4, weights, share, f"{state.kind}'s levels", bias=self.bias(name, rows))

    def _absmax(self, name: str, state: _State) -> np.ndarray:
        """float32: the largest magnitude of each block."""
        if not _nested(self.modules[name]):
            return self.scales(name, "weight.absmax").reshape(-1)
        codes = self.part(name, "weight.absmax").reshape(-1)
        outer = self.scales(name, "weight.nested_absmax").reshape(-1)
        levels = self.scales(name, "weight.nested_quant_map").reshape(-1)
        scaled = levels[codes] * np.repeat(outer, state.nested_block)[: len(codes)]
        return scaled + state.offset


def _nested(info: ModuleInfo) -> bool:
    return "weight.nested_absmax" in info.tensors


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [n], two codes a byte, the first in the high nibble -> uint8 [2 n]."""
    return np.stack([packed >> 4, packed & np.uint8(15)], 1).reshape(-1)
