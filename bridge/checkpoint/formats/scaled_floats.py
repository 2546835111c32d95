"""Weights of 8-bit floats with scales: W[o, k] = scale[o // r, k // c] * weight[o, k], read as float32.

These are no codes: steps between 8-bit floats grow with the value, so no block type holds them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import contradiction, finite_scales
from bridge.checkpoint.formats.scale_blocks import block_of, spread

FLOAT8 = ("F8_E4M3", "F8_E5M2")
BLOCK = (128, 128)  # what everybody uses


@dataclass(frozen=True)
class ScaledFloats:
    """A weight of 8-bit floats; `block`: (rows, columns) that share a scale."""

    weight: TensorInfo
    scale: TensorInfo
    block: tuple[int, int]

    def __str__(self) -> str:
        rows, columns = self.block
        wide = columns >= self.weight.shape[1]
        if wide and rows >= self.weight.shape[0]:
            return f"{self.weight.dtype}, one scale"
        if rows == 1:
            return f"{self.weight.dtype}, " + ("one scale a row" if wide else f"groups of {columns}")
        return f"{self.weight.dtype}, blocks of {rows}x{columns}"

    def read(self, store: Store, rows: tuple[int, int] | None = None) -> np.ndarray:
        """float32 [out, in], or its rows start..stop alone. Raises BridgeError where a scale is no number."""
        out, scales = self.stored(store, rows)
        start, stop = rows or (0, len(out))
        scale = spread(scales, stop, self.block[0])[start:]
        for i in range(0, len(out), 64):  # the scale of every weight would take as much memory again
            part = scale[i : i + 64]
            out[i : i + 64] *= np.repeat(part, self.block[1], axis=1)[:, : out.shape[1]]
        return out

    def stored(self, store: Store, rows: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray]:
        """float32: rows of the weight, still without scales, and all scales."""
        return store.read_float(self.weight.name, rows), finite_scales(store, self.scale.name)


def scaled_floats(name: str, tensors: dict[str, TensorInfo], scale: str, block: tuple[int, int]) -> ScaledFloats:
    """A module's weight with the scale of that name; `block` is what the config says of it.

    Raises BridgeError where the shapes do not fit together.
    """
    weight, scales = tensors["weight"], tensors[scale]
    fits = len(weight.shape) == 2 and 0 not in weight.shape and scales.floating
    found = block_of(weight.shape, scales.shape, block) if fits else None  # type: ignore[arg-type]
    if found is None or ("bias" in tensors and tensors["bias"].shape != weight.shape[:1]):
        raise contradiction(name, tensors)
    return ScaledFloats(weight, scales, found)
