"""4-bit and 8-bit floats, distinguished by each module's tensors: NVIDIA's ModelOpt, and auto-round's nvfp4 and mxfp4.

             codes           scales          of the whole weight              of activations
ModelOpt     weight          weight_scale    weight_scale_2, multiplies       input_scale
auto-round   weight_packed   weight_scale    weight_global_scale, divides     input_global_scale

`fp4` describes their contents; modules of 8-bit floats are those of `fp8`.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.compressed import FP4
from bridge.checkpoint.formats.fp4 import INPUTS, Fp4Parts
from bridge.checkpoint.formats.fp8 import Fp8Reader, ScaledFloats
from bridge.checkpoint.formats.module_reader import ModuleInfo
from bridge.checkpoint.grouped import CodedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError

_MODELOPT = Fp4Parts("weight", "weight_scale", "weight_scale_2", reciprocal=False)
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "MXFP4", "MIXED_PRECISION")  # besides FP8's


class ModelOptReader(Fp8Reader):
    """Reads checkpoints whose linear layers are floats of 4 or 8 bits."""

    parts: ClassVar = (
        "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "bias",
        *INPUTS,
    )  # fmt: skip
    plain: ClassVar = frozenset({"weight", "bias", *INPUTS})

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        if label in ("nvfp4", "mxfp4"):  # auto-round's
            size = 16 if label == "nvfp4" else 32
            return replace(quant, title=label, claims=("4-bit floats", f"groups of {size}"), group_size=size)
        algorithm = str(quant.raw.get("quant_algo") or "FP8").upper()
        if algorithm.startswith("FP8"):
            return super().complete(quant, label)
        if algorithm not in _ALGORITHMS:
            raise BridgeError(
                f"{quant.source}: {quant.method} with quant_algo {algorithm} is not supported (FP8, "
                f"{', '.join(_ALGORITHMS)} are); convert the unquantized model instead"
            )
        if algorithm == "MIXED_PRECISION":
            return replace(quant, title="ModelOpt", claims=("floats of 4 and 8 bits",))
        size = 32 if algorithm == "MXFP4" else 16
        return replace(
            quant, title=f"ModelOpt {algorithm}", claims=("4-bit floats", f"groups of {size}"), group_size=size
        )

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        return ("weight_scale", "weight_packed") if "weight_packed" in tensors else super().required_parts(tensors)

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo | ScaledFloats:
        if "weight_packed" in tensors or tensors["weight"].dtype == "U8":
            return self._fp4(tensors).describe(name, tensors)
        return super().describe(name, tensors)

    def read(self, name: str, rows: np.ndarray | None = None) -> CodedTensor:
        return self._fp4(self.modules[name].tensors).read(self, name, rows)

    def tensor_scales(self, name: str) -> dict[str, float]:
        return self._fp4(self.modules[name].tensors).tensor_scales(self, name)

    @staticmethod
    def _fp4(tensors: dict[str, TensorInfo]) -> Fp4Parts:
        return FP4 if "weight_packed" in tensors else _MODELOPT
