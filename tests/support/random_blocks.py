"""Matrices of random blocks, whatever a quantizer would make of real weights."""

from __future__ import annotations

import gguf
import numpy as np

from bridge.blocks import BlockType
from bridge.runtime import QuantTensor


def random_matrix(block: BlockType, rows: int, columns: int, seed: int = 0) -> tuple[QuantTensor, np.ndarray]:
    """Blocks of random bits, so that all codes and scales occur, and what they mean, float64."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, columns // block.size, block.nbytes)).astype(np.uint8)
    for at in (block.d_at, block.dmin_at):
        if at >= 0:
            halves = (rng.standard_normal(raw.shape[:2]) * 0.01).astype(np.float16)
            raw[:, :, at : at + 2] = halves[..., None].view(np.uint8)
    raw = raw.reshape(rows, -1)
    weights = gguf.quants.dequantize(raw, block.ggml).astype(np.float64)
    return QuantTensor(f"w{seed}", block.name, (rows, columns), raw.reshape(-1)), weights
