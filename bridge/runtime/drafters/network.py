"""The network of a drafter's layer."""

import numpy as np

from bridge.runtime.decoder.experts import ACTIVATIONS
from bridge.runtime.decoder.numpy_machine import rms
from bridge.runtime.drafters.draft_file import DraftFile


class Network:
    """W_down (silu(W_gate x^) * W_up x^) with x^ = norm(x), or gelu, of one layer of a file."""

    def __init__(self, file: DraftFile, layer: int):
        hidden, inner = file.config.hidden, file.config.inner
        self._norm, self._eps = file.vector(f"blk.{layer}.ffn_norm", hidden), file.config.norm_eps
        self._gate, self._up = (file.matrix(f"blk.{layer}.ffn_{name}", inner, hidden) for name in ("gate", "up"))
        self._down = file.matrix(f"blk.{layer}.ffn_down", hidden, inner)
        self._activation = ACTIVATIONS[file.config.activation]

    def __call__(self, x: np.ndarray, precision: str) -> np.ndarray:
        normed = rms(x, self._norm, self._eps)
        gate, up = (matrix.matmul(normed, precision=precision) for matrix in (self._gate, self._up))
        return self._down.matmul(self._activation(gate, up), precision=precision)
