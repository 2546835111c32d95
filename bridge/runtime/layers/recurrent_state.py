"""The state of one sequence in the layers that have one, and copies of earlier ones to go back to.

A state cannot be cut back as keys and values can: it holds all tokens so far in one sum. So while a prompt is read,
each batch leaves a copy of the state before its last token: the same prompt can be read again from there, as one that
ends in another way can from the copies of its earlier batches. There are at most `COPIES`, spread over the prompt.

A step of several guessed tokens leaves the state before it as it is, and writes to another: `RecurrentBuffers` keeps
what its layers made of the tokens, so that the state after any of them can be computed again, without the matrices.

    tails    float32 [layers, kernel - 1, channels]            the last inputs of the convolution
    heads    float32 [layers, heads, value_dim / 16, key_dim, 16]   16 columns of a state next to each other
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Self

import numpy as np

from bridge.errors import BridgeError
from bridge.runtime.config.recurrent_config import RecurrentConfig
from bridge.system.records import record

COPIES = 4
_LANES = 16


@record
class Memory:
    """The state of all layers at one position."""

    tails: np.ndarray
    heads: np.ndarray

    @classmethod
    def of(cls, c: RecurrentConfig) -> Self:
        """The state before any token."""
        layers = sum(c.layers)
        blocks = -(-c.value_dim // _LANES)
        return cls(
            np.zeros((layers, c.kernel - 1, c.channels), np.float32),
            np.zeros((layers, c.heads, blocks, c.key_dim, _LANES), np.float32),
        )

    def become(self, other: Self | None) -> None:
        """Another's values; of None those before any token."""
        self.tails[:] = 0 if other is None else other.tails
        self.heads[:] = 0 if other is None else other.heads

    @property
    def nbytes(self) -> int:
        return self.tails.nbytes + self.heads.nbytes


def crowded(copies: Iterable[int]) -> int:
    """Of the numbers of tokens that copies are after, all but the last, the one whose neighbours are nearest."""
    lengths = [0, *sorted(copies)]
    gaps = {lengths[i]: lengths[i + 1] - lengths[i - 1] for i in range(1, len(lengths) - 1)}
    return min(gaps, key=lambda length: gaps[length])


class Passage(NamedTuple):
    """What the layers do with a state while they read tokens: from one memory to another, or in the same.

    after  the number of tokens after which a copy is left in `copy`; 0: none
    """

    source: Memory
    target: Memory
    after: int
    copy: Memory | None


class RecurrentState:
    """The state after `length` tokens, and copies of it by the number of tokens they are after."""

    def __init__(self, config: RecurrentConfig):
        self._config = config
        self.length = 0
        self.wanted = 0  # a number of tokens after which the state is needed again
        self.copies: dict[int, Memory] = {}
        self._coming: tuple[int, Memory] | None = None
        self._now, self._now_length = Memory.of(config), 0  # a state, and the tokens that it is after
        self._before: Memory | None = None  # the state before the last step that can be undone,
        self._begin: int | None = None  # the tokens that it is after,
        self._end = 0  # and those that the step ended with
        self._redo: Callable[[int], None] | None = None  # the first so many tokens of that step, from `_before`

    @property
    def now(self) -> Memory:
        """The state after `length` tokens."""
        if self._now_length != self.length and self.length == self._begin and self._before is not None:
            self._now, self._before, self._begin, self._redo = self._before, self._now, None, None
            self._now_length = self.length
        elif self._now_length != self.length:
            self._go(self.length)
        return self._now

    def _go(self, length: int) -> None:
        """Redo the last step as far as there."""
        assert self._redo is not None
        assert self._begin is not None
        self._redo(length - self._begin)
        self._now_length = length

    def _known(self, length: int) -> Memory | None:
        """The state after so many tokens, which must be known, to copy it; None: before any."""
        if not length or length == self._begin:
            return self._before if length else None
        if length != self._now_length and length in self.copies:
            return self.copies[length]
        if length != self._now_length:
            self._go(length)
        return self._now

    def _redoes(self, length: int) -> bool:
        """Whether the state after so many tokens is, or is within, the last step."""
        return self._begin is not None and self._begin <= length <= (self._begin if self._redo is None else self._end)

    def settle(self) -> None:
        """Redo what was asked for: what the last step left is going to be overwritten."""
        assert self.now is not None
        self._redo = None

    def reach(self, length: int) -> int:
        """The most tokens, of the first `length`, after which the state is known."""
        length = min(length, self.length)
        known = [0, self.length, *self.copies, *([] if self._begin is None else [self._begin])]
        return length if self._redoes(length) else max(count for count in known if count <= length)

    def cut(self, length: int) -> None:
        """Go back to the state after `length` tokens; the copies of what came later are gone."""
        if length != self.length and not self._redoes(length):
            if length and length not in self.copies:
                raise BridgeError(
                    f"the state after {length} of {self.length} tokens is not kept; read the tokens again from "
                    f"{self.reach(length)}"
                )
            self._now.become(self.copies[length] if length else None)
            self._now_length = length
        self.length = length
        self._forget()

    def _forget(self) -> None:
        """What is known of the tokens after `length`, but for those of the last step."""
        self.copies = {length: memory for length, memory in self.copies.items() if length <= self.length}
        self._coming = None
        if self._begin is not None and self._begin > self.length:
            self._begin = self._redo = None

    def copy(self, other: Self, length: int) -> None:
        """Become another's state after `length` tokens, which it must know."""
        self._now.become(other._known(length))
        self.length = self._now_length = length
        self._begin = self._redo = None
        self.copies = dict(other.copies)  # nobody writes to them
        self._forget()

    def begin(self, tokens: int, redo: Callable[[int], None] | None = None) -> Passage:
        """How the layers read the next tokens.

        redo  repeats the first so many of them, from the state before; None: they are part of a prompt, which stays
        """
        source = target = self.now
        if redo is not None and (tokens > 1 or 0 < self.wanted == self.length):
            target = self._before or Memory.of(self._config)
            self._now, self._before, self._begin = target, source, self.length
            self._redo, self._end = redo if tokens > 1 else None, self.length + tokens
        else:
            self._redo = None
        after = 0
        if self.length < self.wanted <= self.length + tokens:
            after = self.wanted - self.length
        elif redo is None:
            after = tokens - 1
        copy = Memory.of(self._config) if after else None
        self._coming = None if copy is None else (self.length + after, copy)
        return Passage(source, target, after, copy)

    def append(self, tokens: int) -> None:
        """The layers have read so many tokens more."""
        self.length += tokens
        self._now_length = self.length
        if self._coming is not None:
            length, memory = self._coming
            self.copies[length] = memory
            self._coming = None
            self.wanted = 0 if self.wanted == length else self.wanted
        while len(self.copies) > COPIES:
            del self.copies[crowded(self.copies)]

    @property
    def nbytes(self) -> int:
        """Bytes with all copies."""
        return self._now.nbytes * (1 + COPIES)
