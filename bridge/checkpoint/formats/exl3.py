"""EXL3 (exllamav3): trellis codes between Hadamard transforms in blocks of 128.

    trellis     int16 [in/16, out/16, 16K], K of each tensor its own
    suh, svh    fp16 [in], [out]: scales and signs; or, of either side where it has none,
    su, sv      int16 [in/16], [out/16]: signs, bit i of word w of element 16 w + i, set for -1
    mcg, mul1   int32 scalar: the codebook, and its multiplier; neither: 3inst
    bias        float [out]

Both sides are padded to multiples of 128. The head is coded too, even in models whose config ties it.
"""

import math
from dataclasses import replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import check_shapes
from bridge.checkpoint.formats.module_reader import ModuleInfo, module_info
from bridge.checkpoint.formats.trellis_coded import TrellisReader
from bridge.checkpoint.labels.quant_config import QuantConfig, bits_claims
from bridge.errors import BridgeError
from bridge.trellis.codebooks import EXL3_MODES, BitshiftCodebook
from bridge.trellis.layer import TrellisLayer
from bridge.trellis.packed import EXL3_BLOCK, exl3_layer

_SIGNS = ("su", "sv")
_SLACK = 0.5  # of the average bits: what allocation to whole bits may leave


class Exl3Reader(TrellisReader):
    """Reads EXL3 checkpoints."""

    parts: ClassVar = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1", "bias")
    plain: ClassVar = frozenset({"bias"})
    padding: ClassVar = EXL3_BLOCK

    @classmethod
    def label_of(cls, parts: set[str]) -> str | None:
        return "" if "trellis" in parts and parts & {"suh", "svh", "su", "sv"} else None

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        return replace(quant, title="EXL3", claims=bits_claims(quant))

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        sides = (old if old in tensors and new not in tensors else new for old, new in (("su", "suh"), ("sv", "svh")))
        return "trellis", *sides

    def claimed_bits(self, module: str) -> int | None:
        head = self.quant.raw.get("head_bits")
        return head if isinstance(head, int) and module.endswith("lm_head") else None

    def disagreements(self) -> list[str]:
        wrong, claimed = super().disagreements(), self.quant.raw.get("bits")
        layers = [m for name, m in self.modules.items() if not name.endswith("lm_head")]
        weights = sum(math.prod(m.shape) for m in layers)
        average = sum(math.prod(m.shape) * m.bits for m in layers) / max(1, weights)
        if layers and claimed is not None and abs(average - claimed) > _SLACK:
            wrong.append(f"the codes have {average:.3g} bits on average, but the label says {claimed}")
        return wrong

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        trellis = tensors["trellis"]
        _, *sides = self.required_parts(tensors)
        fits = trellis.dtype == "I16" and len(trellis.shape) == 3 and 0 not in trellis.shape
        check_shapes(fits, name, tensors)
        inputs, outputs, words = trellis.shape
        bits, rest = divmod(words, 16)
        if rest or not 1 <= bits <= 8:
            raise BridgeError(
                f"{trellis.file}: {name}.trellis has {words} words for a tile of 256 weights; 16 for each of 1 to 8 "
                "bits are supported, half bits are not; quantize the model again"
            )
        shape = 16 * outputs, 16 * inputs
        if shape[0] % EXL3_BLOCK or shape[1] % EXL3_BLOCK:
            raise BridgeError(
                f"{trellis.file}: {name} is {shape[0]} x {shape[1]}, not multiples of the transforms' {EXL3_BLOCK}; "
                "the checkpoint is damaged"
            )
        for part, size in zip(sides, (shape[1], shape[0]), strict=True):
            if part in _SIGNS:
                fits = tensors[part].dtype == "I16" and tensors[part].shape == (size // 16,)
            else:
                fits = tensors[part].floating and tensors[part].shape == (size,)
            check_shapes(fits, name, tensors)
        bias = tensors["bias"].shape if "bias" in tensors else shape[:1]
        if len(bias) == 1 and shape[0] - EXL3_BLOCK < bias[0] < shape[0]:
            shape = bias[0], shape[1]
        return module_info(name, tensors, bits, 0, shape)

    def layer(self, name: str) -> TrellisLayer:
        info, where = self.modules[name], self.label(name)
        _, *sides = self.required_parts(info.tensors)
        su, sv = (signs(self.part(name, p)) if p in _SIGNS else self.vector(name, p) for p in sides)
        mode = next((part for part in EXL3_MODES if part in info.tensors), "3inst")
        multiplier = self.scalar(name, mode) & 0xFFFFFFFF if mode != "3inst" else None
        book = BitshiftCodebook(16, info.bits, 1, 0, mode, None, multiplier, where)
        layer = exl3_layer(where, self.part(name, "trellis"), book, su, sv, self.bias(name))
        return layer.cropped(*info.shape)


def signs(words: np.ndarray) -> np.ndarray:
    """float32 [16 n]: +1 and -1 of int16 [n]."""
    bits = words.view(np.uint16)[:, None] >> np.arange(16, dtype=np.uint16) & 1
    return (1 - 2 * bits.astype(np.float32)).reshape(-1)
