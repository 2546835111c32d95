"""Keys and values on the device, [layers, words] each, keys after their rotation; in one of several forms.

A layer's keys are one array of int32 words, [kv_heads, rows, head_dim] numbers and then their scales, if any; so are
its values. Bytes a number:

    f16     2
    f32     4
    q8_0    1.0625    int8 with a step for 32 of them, a half: largest magnitude / 127. The steps of a row lie together,
                      padded to whole words

Rows are reserved for the whole context, in multiples of 64, attention.py's largest tile, so that a tile's steps begin
at whole 16 bytes. What has not been written yet is zero, so that it is finite.
"""

from dataclasses import dataclass
from typing import Any

from bridge.cuda.toolchain.device import Device, zeros

from bridge.errors import BridgeError
from bridge.runtime.config.decoder_config import DecoderConfig

BLOCK = 32  # numbers that share a step
_ROWS = 64
_BYTES = {"f16": 2, "q8_0": 1, "f32": 4}


@dataclass(frozen=True)
class KVForm:
    """A form of keys and values, and its sizes."""

    kind: str
    head_dim: int

    def __post_init__(self) -> None:
        if self.kind not in _BYTES:
            raise BridgeError(f"unknown kv {self.kind!r}: choose {', '.join(_BYTES)}")
        if self.head_dim * _BYTES[self.kind] % 16:
            raise BridgeError(
                f"kv {self.kind!r}: on CUDA a head of {self.head_dim} is not a multiple of 16 bytes; use f16"
            )

    @property
    def row_words(self) -> int:
        """Words of a row's numbers."""
        return self.head_dim * _BYTES[self.kind] // 4

    @property
    def step_words(self) -> int:
        """Words of a row's steps."""
        return -(-self.head_dim // (2 * BLOCK)) if self.kind == "q8_0" else 0

    def words(self, rows: int) -> int:
        """Words of a number of rows."""
        return rows * (self.row_words + self.step_words)

    def rows(self, part: Any, heads: int) -> int:
        """Rows of each head in a layer's words."""
        return int(part.numel()) // (heads * (self.row_words + self.step_words))

    def store(self, part: Any, start: int, x: Any) -> None:
        """Put x f32 [n, kv_heads, head_dim] into a layer's rows from `start` on; part int32 [words], of torch."""
        numbers, steps = self._split(part, x.shape[1])
        x = x.transpose(0, 1)
        rows = slice(start, start + x.shape[1])
        if steps is None:
            numbers[:, rows] = x
            return
        import torch

        heads, n, _ = x.shape
        blocks = torch.zeros((heads, n, self.step_words * 2 * BLOCK), dtype=torch.float32, device=x.device)
        blocks[:, :, : self.head_dim] = x
        blocks = blocks.reshape(heads, n, -1, BLOCK)
        step = blocks.abs().amax(3) / 127
        inverse = torch.where(step > 0, 1 / step, 0)
        codes = (blocks * inverse[..., None]).round().to(torch.int8)
        numbers[:, rows] = codes.reshape(heads, n, -1)[:, :, : self.head_dim]
        steps[:, rows] = step.half()

    def load(self, part: Any, count: int, heads: int, dtype: Any) -> Any:
        """The first `count` rows of each head of a layer, [heads, count, head_dim]."""
        numbers, steps = self._split(part, heads)
        values = numbers[:, :count]
        if steps is None:
            return values.to(dtype)
        halves = steps[:, :count].to(dtype).repeat_interleave(2, dim=2)[:, :, : self.head_dim // 16]
        return (values.unflatten(2, (-1, 16)) * halves[..., None]).flatten(2)  # heads may end in half a block

    def _split(self, part: Any, heads: int) -> tuple[Any, Any]:
        """Numbers [heads, rows, head_dim] and steps [heads, rows, 2 * step_words] or None, as views."""
        import torch

        rows = self.rows(part, heads)
        kind = {"f16": torch.float16, "f32": torch.float32, "q8_0": torch.int8}[self.kind]
        end = heads * rows * self.row_words
        numbers = part[:end].view(kind).reshape(heads, rows, self.head_dim)
        if not self.step_words:
            return numbers, None
        return numbers, part[end:].view(torch.float16).reshape(heads, rows, 2 * self.step_words)


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
        """Allocate the memory."""
        import torch

        self.keys, self.values = (zeros(device, self._shape, torch.int32) for _ in range(2))
