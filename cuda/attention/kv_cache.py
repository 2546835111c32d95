"""Keys and values on the device, keys after their rotation; in one of several forms.

There is a slot for each place that `DecoderConfig.stored` names: layers with attention have one, and some share it. Its
keys are one array of int32 words, [kv_heads, rows, head_dim] numbers and then their scales, if any; so are
its values; a latent vector has keys alone. Slots may differ in their heads. Bytes a number:

    f16     2
    f32     4
    q8_0    1.0625    int8 with a step for 32 of them, a half: largest magnitude / 127. The steps of a row lie together,
                      padded to whole words

Rows are reserved for the whole context, in multiples of 64, attention.py's largest tile, so that a tile's steps begin
at whole 16 bytes. What has not been written yet is zero, so that it is finite.
"""

from dataclasses import dataclass
from typing import Any

from bridge.cuda.recurrent.layer import DeviceState, state_bytes
from bridge.cuda.toolchain.device import Device, zeros

from bridge.errors import BridgeError
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.layers.recurrent_state import COPIES, crowded

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

    def load(self, part: Any, stop: int, heads: int, dtype: Any, first: int = 0) -> Any:
        """Rows `first` to `stop` - 1 of each head of a layer, [heads, rows, head_dim]."""
        numbers, steps = self._split(part, heads)
        values = numbers[:, first:stop]
        if steps is None:
            return values.to(dtype)
        halves = steps[:, first:stop].to(dtype).repeat_interleave(2, dim=2)[:, :, : self.head_dim // 16]
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


def width_of(rank: int, rotated: int) -> int:
    """Numbers of a row of latent vectors, with those that fill it up."""
    return -(-(rank + rotated) // BLOCK) * BLOCK


def latent_form(c: DecoderConfig, kind: str) -> KVForm:
    """The form of rows of latent vectors, each with its rotated part."""
    assert c.latent is not None
    return KVForm(kind, width_of(c.latent.rank, c.head_dim - c.latent.rank))


@dataclass
class KVSlot:
    """Keys and values of a layer, or of several that share them: int32 [words] of torch, once they are reserved."""

    form: KVForm
    heads: int
    rows: int
    keys: Any = None
    values: Any = None

    @property
    def words(self) -> int:
        """Words of the keys, and of the values."""
        return self.form.words(self.heads * self.rows)


class KVCache:
    """`length` tokens of at most `context` are stored; `slots` are those of `DecoderConfig.stored`.

    state   of the layers that have one, after `length` tokens once `settle` was called; None where there are none
    passed  states after the tokens of the last step of several, but its last token

    A state cannot be cut back: there are snapshots of it, by the tokens that they are after.
    """

    def __init__(self, config: DecoderConfig, context: int, kind: str = "f16"):
        self.kind = kind
        self.context = context
        self.rows = -(-context // _ROWS) * _ROWS
        self._latent, self._recurrent = config.latent is not None, config.recurrent
        heads = {slot: config.heads_of(layer) for layer, slot in reversed(config.stored.items())}
        self.slots = [
            KVSlot(latent_form(config, kind) if self._latent else KVForm(kind, own.dim), own.kv, self.rows)
            for _, own in sorted(heads.items())
        ]
        self.state: DeviceState | None = None
        self.passed: list[DeviceState] = []
        self._after = 0  # tokens that the state is after
        self._wanted = 0  # a number of tokens after which the state is needed again
        self._snapshots: dict[int, Any] = {}
        self._passed: dict[int, Any] = {}  # the same of `passed`
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens that are stored; a smaller number forgets those beyond it, if `reach` says that it can."""
        return self._length

    @length.setter
    def length(self, count: int) -> None:
        if self.state is not None and count not in (self._length, *self._kept()):
            raise BridgeError(f"the state after {count} of {self._length} tokens is not kept; read them again")
        self._length = count

    def advance(self, count: int) -> None:
        """So many more tokens are stored, in one step or as part of a prompt."""
        self._length += count
        self._after = self._length

    def stepped(self, count: int) -> None:
        """A step stored so many tokens, and left the states after them in `passed`."""
        states = self.passed[: count - 1]
        self._passed = {self._length + 1 + i: state.memory for i, state in enumerate(states)}
        self.advance(count)

    def settle(self) -> None:
        """Bring the state to `length` tokens, which others are going to follow; keep it where it is `_wanted`."""
        if self.state is None:
            return
        if not self._length:
            self.state.reset()
        elif self._length != self._after:
            self.state.restore({**self._snapshots, **self._passed}[self._length])
        self._after = self._length
        for kept in (self._snapshots, self._passed):
            for length in [length for length in kept if length > self._length]:
                del kept[length]
        if self._wanted == self._length:
            self._keep(self.state)
            self._wanted = 0

    def _kept(self) -> list[int]:
        """Numbers of tokens that states are known after."""
        return [0, self._after, *self._snapshots, *self._passed]

    def reach(self, count: int) -> int:
        """The most of the first `count` tokens that `length` can be set to: fewer only for layers with a state."""
        if self.state is None or count >= self._length:
            return min(count, self._length)
        return max(length for length in self._kept() if length <= count)

    def come_back_to(self, count: int) -> None:
        """Let `length` be set to `count`, the present one, once tokens beyond it have been read."""
        self._wanted = count

    def remember(self) -> None:
        """Keep the state after the present tokens, and forget another one if there are too many."""
        self._wanted = self._length
        self.settle()

    def _keep(self, state: DeviceState) -> None:
        if self._length and self._length not in self._snapshots:
            if len(self._snapshots) == COPIES:
                del self._snapshots[crowded([*self._snapshots, self._length])]
            self._snapshots[self._length] = state.save()

    @property
    def nbytes(self) -> int:
        """Bytes on the device, with all snapshots."""
        stored = sum((4 if self._latent else 8) * slot.words for slot in self.slots)
        return stored if self._recurrent is None else stored + (1 + COPIES) * state_bytes(self._recurrent)

    def reserve_step(self, tokens: int) -> None:
        """Allocate what a step of so many tokens leaves in `passed`."""
        if self._recurrent is not None and self.state is not None:
            missing = tokens - 1 - len(self.passed)
            self.passed += [DeviceState(self._recurrent, self._device) for _ in range(missing)]

    def reserve(self, device: Device) -> None:
        """Allocate the memory."""
        import torch

        self._device = device
        for slot in self.slots:
            slot.keys = zeros(device, slot.words, torch.int32)
            slot.values = slot.keys if self._latent else zeros(device, slot.words, torch.int32)
        if self._recurrent is not None:
            self.state = DeviceState(self._recurrent, device)
