"""gpt-oss (quant_method mxfp4): the experts of a layer as stacks of 4-bit floats; rows of gate and up alternate.

    gate_up_proj_blocks   uint8 [experts, 2 * out, G, 16]   32 codes of a group, two a byte, the first in the low nibble
    gate_up_proj_scales   uint8 [experts, 2 * out, G]       F8_E8M0
    down_proj_blocks      uint8 [experts, out, G, 16]       and so on

They become modules of their own, experts.E.gate_proj (the even rows), .up_proj (the odd ones) and .down_proj. Biases
(gate_up_proj_bias [experts, 2 * out]) are plain floats.
"""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import check_shapes
from bridge.checkpoint.formats.fp4 import Fp4Tensor, checked_scales, unpacked
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader
from bridge.checkpoint.grouped import CodedTensor


class GptOssReader(Reader):
    """Reads stacks of MXFP4 experts."""

    parts: ClassVar = ("blocks", "scales")
    required: ClassVar = ("blocks", "scales")
    claim: ClassVar = {"title": "MXFP4 experts", "claims": ("4-bit floats", "groups of 32"), "group_size": 32}

    def __init__(self, *args: Any) -> None:
        self._location: dict[str, tuple[str, int, slice]] = {}  # module -> its stack, which expert, which rows
        super().__init__(*args)
        for stack, info in list(self.modules.items()):
            del self.modules[stack]
            folder, _, what = stack.rpartition(".")
            pairs = what == "gate_up_proj"
            names = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)} if pairs else {what: slice(None)}
            count = info.tensors["blocks"].shape[0]
            shape = info.shape[0] // len(names), info.shape[1]
            for expert in range(count):
                for name, rows in names.items():
                    module = f"{folder}.{expert}.{name}"
                    self._location[module] = stack, expert, rows
                    nbytes = info.nbytes // count // len(names)
                    self.modules[module] = replace(info, name=module, shape=shape, nbytes=nbytes)

    @staticmethod
    def split(name: str) -> tuple[str, str]:
        module, _, part = name.rpartition("_")
        return module, part

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        blocks, scales = tensors["blocks"], tensors["scales"]
        shape = blocks.shape
        fits = len(shape) == 4 and 0 not in shape and shape[3] == 16 and scales.shape == shape[:3]
        fits = fits and not (name.endswith("gate_up_proj") and shape[1] % 2)
        check_shapes(fits and blocks.dtype == "U8" and scales.dtype in ("U8", "F8_E8M0"), name, tensors)
        return ModuleInfo(name, 4, 32, (shape[1], 32 * shape[2]), blocks.nbytes + scales.nbytes, tensors)

    def read(self, name: str, rows: np.ndarray | None = None) -> CodedTensor:
        stack, expert, expert_rows = self._location[name]
        info = self.modules[name]
        rows = np.arange(info.shape[0]) if rows is None else rows

        def part(kind: str) -> np.ndarray:
            return np.ascontiguousarray(self.store.view(f"{stack}_{kind}")[expert, expert_rows][rows])

        codes = unpacked(part("blocks").reshape(len(rows), -1))
        scales = checked_scales("MXFP4", part("scales"), info.tensors["scales"])
        return Fp4Tensor(name, "MXFP4", codes, scales, 32)
