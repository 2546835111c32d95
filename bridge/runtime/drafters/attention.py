"""The parts of a drafter's layers in NumPy: norms, rotation, attention to keys and values of float32."""

import numpy as np

from bridge.runtime.config.decoder_config import DecoderConfig, Heads
from bridge.runtime.decoder.numpy_machine import rms, turned
from bridge.runtime.decoder.positions import Positions
from bridge.system.cpu.memory import zeros_filled_later


class KeysAndValues:
    """Of a layer: float32 [kv_heads, context, dim] each, in memory that is taken as it fills."""

    def __init__(self, heads: Heads, context: int):
        self.keys, self.values = (zeros_filled_later((heads.kv, context, heads.dim), np.float32) for _ in range(2))

    def store(self, position: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Keys and values [n, kv_heads, dim] of the tokens from a position on."""
        stop = position + len(keys)
        self.keys[:, position:stop] = keys.transpose(1, 0, 2)
        self.values[:, position:stop] = values.transpose(1, 0, 2)

    def copy_prefix(self, other: "KeysAndValues", count: int) -> None:
        """Hold the first `count` of another layer of this shape."""
        self.keys[:, :count] = other.keys[:, :count]
        self.values[:, :count] = other.values[:, :count]


def attended(
    queries: np.ndarray, stored: KeysAndValues, length: int, scale: float, seen: np.ndarray | None
) -> np.ndarray:
    """softmax(scale q k^T) v over the first `length` positions: float32 [n, heads * dim].

    queries  [n, heads, dim]
    seen     bool [n, length], what each attends to; None: everything
    """
    n, heads, dim = queries.shape
    keys, values = stored.keys[:, :length], stored.values[:, :length]
    rows = queries.reshape(n, len(keys), -1, dim).transpose(1, 2, 0, 3).reshape(len(keys), -1, dim)
    scores = np.matmul(rows, keys.transpose(0, 2, 1)) * np.float32(scale)
    if seen is not None:
        scores.reshape(-1, n, length)[:, ~seen] = -np.inf
    scores -= scores.max(2, keepdims=True)
    np.exp(scores, scores)
    results = np.matmul(scores, values) / scores.sum(2, keepdims=True)
    return results.reshape(len(keys), -1, n, dim).transpose(2, 0, 1, 3).reshape(n, heads * dim).astype(np.float32)


def within(positions: np.ndarray, length: int, window: int = 0, causal: bool = True) -> np.ndarray:
    """bool [n, length]: which positions those of `positions` see, of a window where it is not 0."""
    places = np.arange(length)
    seen = places <= positions[:, None] if causal else np.ones((len(positions), length), bool)
    return seen & (places > positions[:, None] - window) if window else seen


class Rotation:
    """Turns heads by the positions of their tokens."""

    def __init__(self, config: DecoderConfig, context: int, factors: np.ndarray | None):
        self._config, self._positions = config, Positions(config, context, factors)

    def __call__(self, x: np.ndarray, positions: np.ndarray, layer: int) -> np.ndarray:
        """x [n, heads, dim] of a layer, turned."""
        config = self._config
        self._positions.reach(int(positions.max()) + 1)
        tables = self._positions.local_angles if config.windowed(layer) else self._positions.angles
        cos, sin = (table[positions][:, None] for table in tables)
        return turned(x, cos, sin, config.graph.neighbours)


def headwise(x: np.ndarray, dim: int, norm: np.ndarray | None, eps: float) -> np.ndarray:
    """x [n, heads * dim] as [n, heads, dim], each head normalized where there is a norm."""
    heads = x.reshape(len(x), -1, dim)
    return heads if norm is None else rms(heads, norm, eps)
