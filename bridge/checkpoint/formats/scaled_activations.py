"""AWQ's scaled activations: Falcon, MPT, Bloom and others whose activation function is followed by `/ scales`.

    mlp.act.scales             float [in]     MPT: ffn.act; Bloom: mlp.gelu_impl
    mlp.dense_4h_to_h.qweight  ...            the linear layer that is fed by it: as wide, and beside it

AWQ could not fold these scales into the layer before, for the function stands between. What the two compute is a
linear layer with its input columns divided, which no group of codes holds: it is handed out as floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import finite_scales
from bridge.checkpoint.formats.module_reader import ModuleInfo
from bridge.checkpoint.formats.scaled_floats import ScaledFloats
from bridge.checkpoint.grouped import GroupedTensor
from bridge.errors import BridgeError


@dataclass(frozen=True)
class Divided(ScaledFloats):
    """A weight to be divided by the activation's scales; `codes` reads it where it is quantized."""

    codes: Callable[[], GroupedTensor] | None = None

    def __str__(self) -> str:
        return f"{'codes' if self.codes else self.weight.dtype} over activation scales"

    def read(self, store: Store, rows: tuple[int, int] | None = None) -> np.ndarray:
        scales = finite_scales(store, self.scale.name).reshape(-1)
        if not scales.all():
            raise BridgeError(f"{self.scale.file}: {self.scale.name} holds zeros; quantize the model again")
        weight = self.codes().dequantize(slice(*(rows or (None,)))) if self.codes else store.read_float(
            self.weight.name, rows
        )  # fmt: skip
        return weight / scales


def fed_by(store: Store, modules: dict[str, ModuleInfo], scales: TensorInfo) -> tuple[str, tuple[int, int]]:
    """(module, shape) of the one linear layer beside an activation that is as wide; BridgeError where there is none."""
    activation = scales.name.removesuffix(".scales")
    beside = activation.rpartition(".")[0] + "."
    width = int(np.prod(scales.shape))
    shapes = {name: info.shape for name, info in modules.items()}
    for name, info in store.tensors.items():
        if name.endswith(".weight") and info.floating and len(info.shape) == 2:
            shapes[name.removesuffix(".weight")] = (info.shape[0], info.shape[1])
    found = [n for n, s in shapes.items() if n.startswith(beside) and "." not in n[len(beside) :] and s[1] == width]
    if len(found) != 1:
        named = ", ".join(found) or "none"
        raise BridgeError(
            f"{scales.file}: {scales.name} divides the input of one linear layer beside it, and {len(found)} are "
            f"{width} wide ({named}); quantize the model again without scaled activations"
        )
    return found[0], shapes[found[0]]
