"""MLX: what Apple's mlx-lm writes, 2 to 8 bits; embeddings and head may be quantized too.

    weight   uint32 [out, in*b/32]   codes, a stream of b bits along the row
    scales   float  [out, G]         may be negative
    biases   float  [out, G]         W = s * q + b
    bias     float  [out]            the layer's own, optional

A mixture's experts are stacked, switch_mlp.gate_proj.weight [experts, out, in*b/32] and so on: they become modules
of their own, experts.E.gate_proj.

config.json: quantization {group_size, bits, mode}, in the same table by module: false, or {group_size, bits},
where null stands for mlx's own defaults, 64 and 4.
The zero point is -b/s. mlx chooses b as s times an integer, then rounds both: it comes out near that integer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.config import QuantConfig, whole_number
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.reader import ModuleInfo, Reader, contradiction, finite_scales
from bridge.checkpoint.store import TensorInfo
from bridge.errors import BridgeError

_FAR = 1 << 12  # a zero point so many steps away is that of a constant group: mlx's smallest scale is 1e-7


class MlxReader(Reader):
    """Reads mlx-lm's affine mode."""

    parts: ClassVar = ("weight", "scales", "biases", "bias")
    required: ClassVar = ("weight", "scales", "biases")

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        for module, own in [("", quant.raw), *quant.raw.items()]:
            if isinstance(own, dict) and own.get("mode", "affine") != "affine":
                raise BridgeError(
                    f"{quant.source}: {module + ': ' if module else ''}MLX's mode {own['mode']!r} is not supported, "
                    "only affine is; quantize the model again with --q-mode affine"
                )
        default = 64 if quant.raw.get("group_size") is None else quant.group_size
        return replace(quant, sym=False, group_size=default, title="MLX, affine")

    def __init__(self, *args: Any) -> None:
        self._expert: dict[str, tuple[str, int]] = {}  # module -> the stack that it is in, and where
        super().__init__(*args)
        self.format = "mlx"
        for stack, info in list(self.modules.items()):
            count = info.tensors["weight"].shape[0]
            if len(info.tensors["weight"].shape) == 3:
                del self.modules[stack]
                for i in range(count):
                    name = stack.replace(".switch_mlp.", f".experts.{i}.")
                    self._expert[name] = stack, i
                    self.modules[name] = replace(info, name=name, nbytes=info.nbytes // count)

    def is_plain(self, tensors: dict[str, TensorInfo]) -> bool:
        return tensors.keys() <= {"weight", "bias"} and not ("weight" in tensors and tensors["weight"].dtype == "U32")

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        weight, scales, biases = (tensors[part] for part in self.required)
        dimensions = 3 if ".switch_mlp." in name else 2
        if any(len(t.shape) != dimensions or 0 in t.shape for t in (weight, scales, biases)) or not (
            weight.dtype == "U32" and scales.floating and biases.floating
        ):
            raise contradiction(name, tensors)
        (*rows, words), groups = weight.shape, scales.shape[-1]
        out = rows[-1]
        bits, size = self._claims(name)
        if scales.shape != (*rows, groups) or biases.shape != scales.shape:
            raise contradiction(name, tensors)
        if words * 32 != groups * size * bits or not 2 <= bits <= 8:
            raise BridgeError(
                f"{weight.file}: {name} has {words} words and {groups} groups a row, which are not {bits} bits in "
                f"groups of {size} as {self.quant.source} says; take config and weights of the same model"
            )
        if "bias" in tensors and tensors["bias"].shape != tuple(rows):
            raise contradiction(name, tensors)
        nbytes = sum(t.nbytes for t in tensors.values())
        return ModuleInfo(name, bits, size, (out, groups * size), nbytes, tensors)

    def _claims(self, name: str) -> tuple[int, int]:
        """(bits, group size) of a module, which shapes alone do not tell: 4 bits by 64 look like 8 by 32."""
        own = self.quant.raw.get(name)
        own = own if isinstance(own, dict) else {"bits": self.quant.bits, "group_size": self.quant.group_size}
        said = tuple(default if own.get(k) is None else own[k] for k, default in (("bits", 4), ("group_size", 64)))
        bits, size = map(whole_number, said)
        if bits is None or size is None:
            raise BridgeError(
                f"{self.quant.source}: {name} has bits {said[0]!r}, group_size {said[1]!r}; mend the file"
            )
        return bits, size

    def read(self, name: str) -> GroupedTensor:
        from bridge.checkpoint.bits import unpack_rows

        info = self.modules[name]
        stack, at = self._expert.get(name, (name, None))
        rows = None if at is None else (at, at + 1)
        scales_of = partial(finite_scales, self.store)
        words, scales, offsets = (
            read(f"{stack}.{part}", rows).reshape(-1, info.tensors[part].shape[-1])
            for read, part in ((self.store.read, "weight"), (scales_of, "scales"), (scales_of, "biases"))
        )
        codes = unpack_rows(words, info.bits, info.shape[1])
        notes = []
        if self.quant.raw.get(stack) is False:
            notes.append(f"{name}: quantization says it is not quantized, but it is; read as it is stored")
        scales, zeros = affine_zeros(codes, scales, offsets, info.group_size)
        if not np.isfinite(zeros).all():
            raise BridgeError(
                f"{info.file}: {name} has biases out of all proportion to its scales; the checkpoint is damaged"
            )
        return GroupedTensor(
            name=name,
            bits=info.bits,
            codes=codes,
            scales=scales,
            zeros=zeros,
            group_size=info.group_size,
            bias=self.store.read_float(f"{stack}.bias", rows).reshape(-1) if "bias" in info.tensors else None,
            notes=tuple(notes),
        )


def affine_zeros(
    codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray, group_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """(scales, zero points) float32 [out, G] of W = s * q + offset; groups are runs of `group_size` columns.

    Groups of one value have a scale of nothing and so no zero point, or one out of all proportion. Their codes,
    which say nothing, are overwritten: 1, with the value for scale and 0 for zero point. In place.
    """
    with np.errstate(over="ignore"):
        zeros = np.divide(-offsets, scales, out=np.zeros_like(scales), where=scales != 0)
    far = (np.abs(zeros) > _FAR) | ((scales == 0) & (offsets != 0))
    if not far.any():
        return scales, zeros
    scales = scales.copy()
    for row, group in zip(*np.nonzero(far), strict=True):
        run = codes[row, group * group_size : (group + 1) * group_size]
        if (run == run[0]).all() or scales[row, group] == 0:
            scales[row, group] = scales[row, group] * run[0] + offsets[row, group]
            zeros[row, group] = 0
            run[:] = 1
    return scales, zeros
