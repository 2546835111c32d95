"""Weights of 8-bit floats with scales beside them: read as the float32 values they stand for.

    weight            F8_E4M3 or F8_E5M2 [out, in]
    weight_scale      float [] or [1], [out] or [out, 1], or [out/r, in/c]: one, one a row, one a block
    weight_scale_inv  the same under another name: it multiplies too
    bias              float [out]

    W[o, k] = scale[o // r, k // c] * weight[o, k]

The labels fp8 (DeepSeek, Qwen: blocks of 128 x 128) and fbgemm_fp8 mean this and nothing else; modelopt and
compressed-tensors have it among others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader
from bridge.checkpoint.formats.scale_blocks import read_block
from bridge.checkpoint.formats.scaled_floats import BLOCK, FLOAT8, ScaledFloats, scaled_floats
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError


class Fp8Reader(Reader):
    """Reads checkpoints whose linear layers are 8-bit floats."""

    parts: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_scale_inv", "bias")
    plain: ClassVar = frozenset({"weight", "bias"})

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        block = read_block(quant.raw.get("weight_block_size"))
        said = (f"blocks of {block[0]}x{block[1]}",) if block else ()
        return replace(
            quant, title="FP8" if quant.method == "fp8" else f"FP8 ({quant.method})", claims=("8-bit floats", *said)
        )

    def needs(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        return "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale", "weight"

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo | ScaledFloats:
        weight = tensors["weight"]
        if weight.dtype not in FLOAT8:
            raise BridgeError(
                f"{weight.file}: {name} has scales but its weight is {weight.dtype}, not 8-bit floats; "
                "the checkpoint is not of the format that its config names"
            )
        block = read_block(self.quant.raw.get("weight_block_size"))
        return scaled_floats(name, tensors, self.needs(tensors)[0], block or BLOCK)
