"""BitNet, as transformers has it (quant_method bitnet): -1, 0 and 1 times one scale a matrix.

    weight         uint8 [out / 4, in]   byte [r, k]: bits 2j, 2j+1 hold q[j * out / 4 + r, k]
                   or float [out, in]    q - 1
    weight_scale   float, one number
    bias           float [out]           optional

    W = s * (q - 1), q 0..2

s is weight_scale where linear_class is autobitlinear, and 1 / weight_scale where it is bitlinear, the default.

With quantization_mode online, the layers' matrices are floats without a weight_scale, which every use rounds:
s = mean |W|, and q - 1 is W / s rounded to -1, 0 or 1.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.files.dtypes import not_finite
from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import check_shapes
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, module_info
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.checkpoint.tensor_names import layer_of
from bridge.errors import BridgeError
from bridge.system.patterns import matched

_LINEAR_CLASSES, _MODES = ("bitlinear", "autobitlinear"), ("offline", "online")
_SMALLEST_MEAN = np.float32(1e-5)  # of online weights


class BitnetReader(Reader):
    """Reads ternary weights."""

    parts: ClassVar = ("weight", "weight_scale", "bias")
    required: ClassVar = ("weight_scale", "weight")

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        self._inverted = _setting(quant, "linear_class", _LINEAR_CLASSES) == "bitlinear"
        self._online = not self._inverted and _setting(quant, "quantization_mode", _MODES) == "online"
        excluded = quant.raw.get("modules_to_not_convert")
        self._excluded = [name for name in excluded if isinstance(name, str)] if isinstance(excluded, list) else []
        super().__init__(store, quant)
        self.notes.append(
            "the model rounds activations to 8 bits, with one scale a token; llama.cpp rounds them in blocks of 256"
        )

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        if quant.raw.get("use_rms_norm"):
            raise BridgeError(
                f"{quant.source}: use_rms_norm is true: every linear layer has a norm of its own, for which llama.cpp "
                "has no place; use a model without them"
            )
        return replace(quant, title="BitNet", claims=("ternary", "one scale a matrix"))

    def in_words(self) -> str:
        return "ternary, one scale a matrix"

    def is_plain(self, tensors: dict[str, TensorInfo]) -> bool:
        weight = tensors.get("weight")
        if "weight_scale" in tensors or weight is None or not weight.floating:
            return False
        name = weight.name.removesuffix(".weight")
        return not self._online or len(weight.shape) != 2 or layer_of(name) is None or self._not_converted(name)

    def _not_converted(self, name: str) -> bool:
        """Whether the config leaves a layer out: by the beginning of its name or a regular expression for it, up to a
        dot, or by its end."""
        at_dot = r"(?:(?<=\.)|(?=\.|$))"
        source = self.quant.source
        return any(name.endswith(k) or matched("match", f"(?:{k}){at_dot}", name, source) for k in self._excluded)

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        return self.required[self._online and "weight_scale" not in tensors :]

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        weight, scale = tensors["weight"], tensors.get("weight_scale")
        packed = weight.dtype == "U8"
        fits = len(weight.shape) == 2 and (packed or weight.floating)
        check_shapes(fits and (scale is None or (scale.floating and scale.shape in ((), (1,)))), name, tensors)
        out, columns = weight.shape
        return module_info(name, tensors, 2, columns, (4 * out if packed else out, columns))

    def read(self, name: str, rows: np.ndarray | None = None) -> GroupedTensor:
        info = self.modules[name]
        codes, scale = self._codes_and_scale(info, rows)
        if (codes > 2).any():
            raise BridgeError(f"{info.file}: {name} has weights besides -1, 0 and 1; the checkpoint is damaged")
        scales = np.full((len(codes), 1), scale, np.float32)
        bias = self.bias(name, rows)
        return GroupedTensor(name, 2, codes, scales, np.ones_like(scales), info.shape[1], bias=bias, ternary=True)

    def _codes_and_scale(self, info: ModuleInfo, rows: np.ndarray | None) -> tuple[np.ndarray, np.float32]:
        """q uint8 [out, in] or some of its rows, and s; another number than 0, 1 or 2 for no ternary weight."""
        name = info.name
        if "weight_scale" not in info.tensors:
            weights = self._finite(info, None)
            scale = max(np.float32(np.abs(weights).mean(dtype=np.float64)), _SMALLEST_MEAN)
            weights = weights if rows is None else weights[rows]
            return (np.clip(np.rint(weights * (np.float32(1) / scale)), -1, 1) + 1).astype(np.uint8), scale
        scale = self.scales(name, "weight_scale").reshape(-1)[0]
        if not scale > 0:
            raise BridgeError(
                f"{info.file}: {name}.weight_scale is {scale}, must be positive; the checkpoint is damaged"
            )
        scale = np.float32(1) / scale if self._inverted else scale
        if info.tensors["weight"].dtype != "U8":
            weights = self._finite(info, rows)
            return np.where(np.isin(weights, (-1, 0, 1)), weights + 1, 3).astype(np.uint8), scale
        quarter = info.shape[0] // 4
        if rows is not None:
            shifts = (2 * (rows // quarter)).astype(np.uint8)
            return (self.part(name, "weight", rows % quarter) >> shifts[:, None]) & np.uint8(3), scale
        packed = self.part(name, "weight")
        codes = np.empty(info.shape, np.uint8)
        for j in range(4):
            np.bitwise_and(packed >> np.uint8(2 * j), np.uint8(3), out=codes[j * quarter : (j + 1) * quarter])
        return codes, scale

    def _finite(self, info: ModuleInfo, rows: np.ndarray | None) -> np.ndarray:
        """float32 of a weight that is stored as floats, or some of its rows."""
        weights = self.store.read_float(info.tensors["weight"].name)
        if not np.isfinite(weights).all():
            raise not_finite(info.file, info.name)
        return weights if rows is None else weights[rows]


def _setting(quant: QuantConfig, key: str, known: tuple[str, ...]) -> str:
    """A setting of the config, the first of the known ones if it has none; BridgeError if it is another."""
    value = quant.raw.get(key) or known[0]
    if value not in known:
        raise BridgeError(f"{quant.source}: {key} is {value!r}, must be {' or '.join(known)}; correct the file")
    return str(value)
