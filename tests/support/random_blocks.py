"""Matrices of random blocks, whatever a quantizer would make of real weights, and what their products must be."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from bridge.blocks import NEWER, ROUNDED, BlockType
from bridge.blocks.read import WRITTEN
from bridge.runtime import QuantTensor
from bridge.runtime.bench import put_d, put_dmin
from bridge.runtime.cpu.forms import activations
from scripts.peers.llama import ggml

# of the IQ and TQ types one of each kind is in every run: a table, codebooks with signs and with shifts, base 3
SPARED = {*ROUNDED} - {"IQ4_XS", "IQ3_S", "IQ2_XS", "IQ1_M", "TQ1_0"}
# tests of one type go to one worker, which compiles its kernels once
ALL = pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            block, id=name, marks=[pytest.mark.xdist_group(name), *[pytest.mark.exhaustive] * (name in SPARED)]
        )
        for name, block in WRITTEN.items()
    ],
)


FACTOR = np.array([0.37], np.float32)  # of tensors in NVFP4


def random_matrix(
    block: BlockType, rows: int, columns: int, seed: int = 0, factors: np.ndarray | None = None
) -> tuple[QuantTensor, np.ndarray]:
    """Blocks of random bits, so that all codes and scales occur, and what they mean, float64.

    factors   the separate scales of NVFP4; other types have none
    """
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, columns // block.size, block.nbytes)).astype(np.uint8)
    for put in (put_d, put_dmin):
        put(block, raw, (rng.standard_normal(raw.shape[:2]) * 0.01).astype(np.float16))
    if block.scales:  # near 1, and no NaN
        low, high = (115, 135) if block.subs == 1 else (0, 127)
        raw[:, :, : block.subs] = rng.integers(low, high, (*raw.shape[:2], block.subs))
    raw = raw.reshape(rows, -1)
    known = block.name not in (*NEWER, "Q1_0")  # to the gguf package
    weights = gguf.quants.dequantize(raw, block.ggml) if known else ggml.dequantize(raw, block.ggml)
    tensor = QuantTensor(f"w{seed}", block.name, (rows, columns), raw.reshape(-1))
    if block.name == "NVFP4" and factors is not None:
        tensor.factors = factors
        weights *= factors[0]
    return tensor, weights.astype(np.float64)


def rounded(x: np.ndarray) -> np.ndarray:
    """What int8 records of blocks of 32 make of x, as the CPU runtime defines it, in float64."""
    parts = [round32(part, 32) for part in x.astype(np.float32).reshape(-1, 32)]
    return np.array([q * np.float64(d) for q, d, _ in parts]).reshape(x.shape)


def assert_product(y: np.ndarray, x: np.ndarray, weights: np.ndarray, limit: float = 2e-6) -> None:
    """y [n, rows] is x times weights, within float32 rounding of the sum, whose terms may cancel."""
    scale = np.sqrt((x.astype(np.float64) ** 2) @ (weights.T**2))
    assert np.abs((y - x @ weights.T) / scale).max() < limit


def round32(x: np.ndarray, sub: int) -> tuple[np.ndarray, np.float32, np.ndarray]:
    """q int8 [32], d and the sums int32 [32/sub] for x float32 [32], as the code of activations.py computes them."""
    if not np.isfinite(x).all():
        return np.zeros(32, np.int8), np.float32(np.nan), np.zeros(32 // sub, np.int32)
    largest = np.abs(x).max()
    if largest.view(np.uint32) < activations._TINY:
        return np.zeros(32, np.int8), np.float32(0), np.zeros(32 // sub, np.int32)
    sign = np.float32(-1 if largest in x else 1)
    q = np.minimum(np.rint(x * (np.float32(128) * sign / largest)), 127).astype(np.int8)
    return q, largest / np.float32(128) * sign, q.reshape(-1, sub).sum(1, dtype=np.int32)
