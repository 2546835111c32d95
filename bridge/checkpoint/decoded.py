"""Weights decoded from codes that no block type can hold: floats, and the noise of their coding."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np

from bridge.checkpoint.grouped import CodedTensor

_ROUNDED = 0.86  # see `rounding_distortion`


@dataclass(frozen=True, eq=False, repr=False)
class DecodedTensor(CodedTensor):
    """A linear layer's weight as floats, without groups.

    weights     float32 [out, in]
    bits        per weight, of the codes, rounded up
    distortion  of the codes: mean squared error over the weights' variance
    coding      what the codes are, a plural: "trellis codes"
    padding     sides may be padded to multiples of this, with values that are not zeros
    bias        float32 [out] or None
    """

    name: str
    bits: int
    weights: np.ndarray
    distortion: float
    coding: str
    padding: int = 1
    bias: np.ndarray | None = None
    notes: tuple[str, ...] = field(default=())

    group_size = 1
    per_weight: ClassVar = "weights"
    per_group: ClassVar = ()

    @property
    def obstacle(self) -> str:
        """Why no block type can carry the codes."""
        return f"{self.coding} have no place in GGUF"

    def dequantize(self, rows: slice = slice(None)) -> np.ndarray:
        """float32 [out, in], or some of its rows."""
        return self.weights[rows]

    def noise(self) -> float:
        """The expected squared error of the codes, summed over all weights.

        Decoded values have (1 - distortion) of the variance of the weights that they replace.
        """
        squares = float(np.square(self.weights, dtype=np.float64).sum())
        return self.distortion * squares / (1 - self.distortion)

    def scaled(self, factor: np.ndarray) -> Self:
        return replace(self, weights=self.weights * factor[:, None])

    def take_columns(self, order: np.ndarray) -> Self:
        """Permute the columns."""
        return replace(self, weights=np.ascontiguousarray(self.weights[:, order]))


def distortion_of(noise: float, weights: np.ndarray) -> float:
    """The distortion of codes whose expected squared error, summed over these decoded weights, is known."""
    total = noise + float(np.square(weights, dtype=np.float64).sum())
    return noise / total if total else 0.0


def rounding_distortion(noise: float, weights: np.ndarray) -> float:
    """`distortion_of` unequal levels or HQQ's codes, where `noise` takes weights to be uniform within each cell.

    The tools make less noise than that: on small models, 0.91 to 0.93 of it with HQQ along axis 0, 0.88 to 0.89 with
    FP4, 0.86 to 0.88 with NF4. The least is taken, so that types are not chosen too small. Equal levels between the
    least and the greatest weight, as SINQ's, make 0.99 to 1.01 of it.
    """
    return distortion_of(_ROUNDED * noise, weights)


def level_noise(levels: np.ndarray) -> np.ndarray:
    """float64, for each of some levels (in any order, possibly repeated): the mean squared error of what is rounded
    to it.

    A cell that reaches a down and b up, half-way to its neighbours, has (a^3 + b^3) / (3 (a + b)), as weights are
    taken to be uniform within it. Those of the least and the greatest level end there.
    """
    distinct, index = np.unique(levels.astype(np.float64), return_inverse=True)
    half = np.diff(distinct) / 2
    down, up = np.append(0, half), np.append(half, 0)
    return ((down**3 + up**3) / (3 * np.maximum(down + up, np.finfo(np.float64).tiny)))[index]
