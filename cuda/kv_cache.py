"""Keys and values on the device, halves: [layers, kv_heads, rows, head_dim], keys after their rotation.

Bytes a token and layer: 4 * kv_heads * head_dim. Rows are reserved for the whole context, in multiples of 64,
as attention.py reads whole groups of rows; what has not been written yet is zero, so that it is finite.
"""

from __future__ import annotations

from typing import Any

from bridge.cuda.buffers import zeros
from bridge.cuda.device import Device

from bridge.errors import BridgeError
from bridge.runtime.decoder_config import DecoderConfig

_ROWS = 64


class KVCache:
    """`length` tokens of at most `context` are stored."""

    keys: Any  # torch float16
    values: Any

    def __init__(self, config: DecoderConfig, context: int, kind: str):
        if kind != "f16":
            raise BridgeError(f"kv {kind!r}: on CUDA keys and values are f16")
        self.context = context
        self.rows = -(-context // _ROWS) * _ROWS
        self.length = 0
        self._shape = (config.layers, config.kv_heads, self.rows, config.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        layers, heads, rows, head_dim = self._shape
        return 4 * layers * heads * rows * head_dim

    def reserve(self, device: Device) -> None:
        """Take the memory."""
        import torch

        self.keys, self.values = (zeros(device, self._shape, torch.float16) for _ in range(2))
