"""Keys and values on the device, [layers, words] each in a form of kv_forms.py, keys after their rotation.

Rows are reserved for the whole context, in multiples of 64, attention.py's largest tile, so that a tile's steps begin
at whole 16 bytes. What has not been written yet is zero, so that it is finite.
"""

from typing import Any

from bridge.cuda.buffers import zeros
from bridge.cuda.device import Device
from bridge.cuda.kv_forms import KVForm

from bridge.runtime.decoder_config import DecoderConfig

_ROWS = 64


class KVCache:
    """`length` tokens of at most `context` are stored."""

    keys: Any  # torch int32
    values: Any

    def __init__(self, config: DecoderConfig, context: int, kind: str = "f16"):
        self.form = KVForm(kind, config.head_dim)
        self.context = context
        self.rows = -(-context // _ROWS) * _ROWS
        self.length = 0
        self._shape = config.layers, self.form.words(config.kv_heads * self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        layers, words = self._shape
        return 8 * layers * words

    def reserve(self, device: Device) -> None:
        """Take the memory."""
        import torch

        self.keys, self.values = (zeros(device, self._shape, torch.int32) for _ in range(2))
