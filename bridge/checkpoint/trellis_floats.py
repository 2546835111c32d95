"""Weights decoded from codes that no block type can hold: floats, and the noise of their coding."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np

from bridge.checkpoint.grouped import CodedTensor


@dataclass(frozen=True, eq=False)
class DecodedTensor(CodedTensor):
    """A linear layer's weight as floats, without groups.

    weights     float32 [out, in]
    bits        per weight, of the codes
    distortion  of the codes: mean squared error over the weights' variance
    padding     sides may be padded to multiples of this, with values that are not zeros
    bias        float32 [out] or None
    """

    name: str
    bits: int
    weights: np.ndarray
    distortion: float
    padding: int = 1
    bias: np.ndarray | None = None
    notes: tuple[str, ...] = field(default=())

    group_size = 1
    per_weight: ClassVar = "weights"
    per_group: ClassVar = ()
    obstacle: ClassVar = "trellis codes have no place in GGUF"

    def dequantize(self, rows: slice = slice(None)) -> np.ndarray:
        """float32 [out, in], or some of its rows."""
        return self.weights[rows]

    def noise(self) -> float:
        """The expected squared error of the codes, summed over all weights, which are taken to be Gaussian.

        Decoded values have (1 - distortion) of the variance of the weights that they replace.
        """
        kept = float(np.square(self.weights, dtype=np.float64).sum())
        return self.distortion * kept / (1 - self.distortion)

    def take_columns(self, order: np.ndarray) -> Self:
        """Permute the columns."""
        return replace(self, weights=np.ascontiguousarray(self.weights[:, order]))
