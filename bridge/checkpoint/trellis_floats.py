"""Weights that came as codes no block type has a place for: floats, with the noise that coding them made.

It goes where a GroupedTensor goes; only carrying its codes is impossible.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from bridge.errors import BridgeError


@dataclass(frozen=True, eq=False)
class DecodedTensor:
    """A linear layer's weight as floats.

    weights     float32 [out, in]
    bits        per weight, of the codes
    distortion  mean squared error over the weights' variance that those codes cost
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

    sequential: ClassVar = True
    why_not: ClassVar = "trellis codes have no place in GGUF"

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.weights.shape  # type: ignore[return-value]

    def dequantize(self, rows: slice = slice(None)) -> np.ndarray:
        """float32 [out, in], or some of its rows."""
        return self.weights[rows]

    def noise(self) -> float:
        """The expected squared error of the codes, over all weights: what is left of a Gaussian's variance.

        Values of the code have (1 - distortion) of the variance of what they stand for.
        """
        kept = float(np.square(self.weights, dtype=np.float64).sum())
        return self.distortion * kept / (1 - self.distortion)

    def take_rows(self, order: np.ndarray) -> DecodedTensor:
        """Permute the rows, the bias with them."""
        return replace(self, weights=self.weights[order], bias=None if self.bias is None else self.bias[order])

    def take_columns(self, order: np.ndarray) -> DecodedTensor:
        """Permute the columns."""
        return replace(self, weights=np.ascontiguousarray(self.weights[:, order]))

    def crop(self, out: int, columns: int) -> DecodedTensor:
        """The first `out` rows and `columns` columns. Raises BridgeError where the tensor is smaller than that."""
        if self.shape[0] < out or self.shape[1] < columns:
            raise BridgeError(
                f"{self.name}: is {list(self.shape)} but the config asks for {[out, columns]}; "
                "config.json belongs to another model"
            )
        bias = None if self.bias is None else self.bias[:out]
        return replace(self, weights=np.ascontiguousarray(self.weights[:out, :columns]), bias=bias)
