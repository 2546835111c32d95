"""Keys and values of the tokens so far, one layer after another; see cpu/ops/attention.py for the layout, or for latent
vectors cpu/ops/latent_attention.py.

Layers with a state have none; their state is here too (recurrent_state.py).
Memory is reserved for the whole context and taken as it fills: an untouched page costs nothing.
Bytes a token and layer: 2 * kv_heads * head_dim, times 2 (f16), 4 (f32) or 1.06 (q8_0); of latent
vectors head_dim, padded to 16, times the same. An x86 CPU from before
2012 has no instructions for halves: float32 is stored there, whatever was asked for.
"""

import platform
from collections.abc import Sequence
from typing import Self

import numpy as np

from bridge.errors import BridgeError
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.layers.recurrent_state import RecurrentState
from bridge.system.cpu.memory import zeros_filled_later

KINDS = {"f16": np.uint16, "q8_0": np.int8, "f32": np.float32}
_LANES, _BLOCK = 16, 32


class KVCache:
    """`length` tokens of at most `context` are stored."""

    def __init__(self, config: DecoderConfig, context: int, kind: str = "f16"):
        if kind not in KINDS:
            raise BridgeError(f"unknown kv {kind!r}: choose {', '.join(KINDS)}")
        self.kind = kind = kind if _has_halves() else "f32"
        self.context = context
        self.rows = -(-context // _LANES) * _LANES
        self.state = RecurrentState(config.recurrent) if config.recurrent is not None else None
        self._length = 0
        self.tokens: list[int] = []  # those that are stored; what lies beyond `length` is no longer valid
        self.keys: list[np.ndarray] = []  # of each place that `DecoderConfig.stored` names; so are the others
        self.values: list[np.ndarray] = []
        self.key_scales: list[np.ndarray] = []
        self.value_scales: list[np.ndarray] = []
        latent = config.latent is not None
        slots = {slot: config.heads_of(layer) for layer, slot in reversed(config.stored.items())}
        for _, heads in sorted(slots.items()):
            padded = -(-heads.dim // _LANES) * _LANES
            scales = -(-heads.dim // _BLOCK) * self.rows if kind == "q8_0" else 0
            if latent:  # values are the first elements of keys, whose rows lie one after another
                keys, values = (_LANES, padded), (0, self.rows, _LANES)
            else:
                keys, values = (heads.dim, _LANES), (padded // _LANES, self.rows, _LANES)
            self.keys.append(zeros_filled_later((heads.kv, self.rows // _LANES, *keys), KINDS[kind]))
            self.values.append(zeros_filled_later((heads.kv, *values), KINDS[kind]))
            self.key_scales.append(zeros_filled_later((heads.kv, scales), np.uint16))
            self.value_scales.append(zeros_filled_later((heads.kv, 0 if latent else scales), np.uint16))

    @property
    def length(self) -> int:
        """Tokens that are stored; a smaller number forgets those beyond it, if `reach` says that it can."""
        return self._length

    @length.setter
    def length(self, count: int) -> None:
        if self.state is not None:
            self.state.cut(count)
        self._length = count

    def reach(self, count: int) -> int:
        """The most of the first `count` tokens that `length` can be set to: fewer only for layers with a state."""
        return count if self.state is None else self.state.reach(count)

    def come_back_to(self, count: int) -> None:
        """Let `length` be set to `count` once tokens beyond it have been read; at least the present length."""
        if self.state is not None:
            self.state.wanted = count

    def append(self, tokens: Sequence[int]) -> None:
        """Note that the keys and values of these follow the others."""
        self.tokens[self._length :] = tokens
        self._length += len(tokens)
        if self.state is not None:
            self.state.append(len(tokens))

    def copy_prefix(self, other: Self, count: int) -> None:
        """Hold the first `count` tokens of another cache, of the same model and kind, and nothing else.

        The other cache must reach so many.
        """
        groups = -(-count // _LANES)
        for target, source in zip(self.keys, other.keys, strict=True):
            target[:, :groups] = source[:, :groups]
        for target, source in zip(self.values, other.values, strict=True):
            target[:, :, :count] = source[:, :, :count]
        for tokens, (targets, sources) in (
            (groups * _LANES, (self.key_scales, other.key_scales)),
            (count, (self.value_scales, other.value_scales)),
        ):
            for target, source in zip(targets, sources, strict=True):
                size = tokens * target.shape[1] // self.rows
                target[:, :size] = source[:, :size]
        if self.state is not None and other.state is not None:
            self.state.copy(other.state, count)
        self.tokens[:] = other.tokens[:count]
        self._length = count

    @property
    def nbytes(self) -> int:
        """Bytes when it is full."""
        total = sum(a.nbytes for kind in (self.keys, self.values, self.key_scales, self.value_scales) for a in kind)
        return total if self.state is None else total + self.state.nbytes


def _has_halves() -> bool:
    """Whether compiled code converts halves by itself; LLVM would call a function that may not be there."""
    from bridge.system.cpu import machine

    return platform.machine() not in ("x86_64", "AMD64") or "f16c" in machine.features()
