"""The state of one sequence in the layers that have one, and copies of earlier ones to go back to.

A state cannot be cut back as keys and values can: it holds all tokens so far in one sum. So while a prompt is read,
each batch leaves a copy of the state before its last token: the same prompt can be read again from there, as one that
ends in another way can from the copies of its earlier batches. There are at most `COPIES`, spread over the prompt.

    tails    float32 [layers, kernel - 1, channels]            the last inputs of the convolution
    heads    float32 [layers, heads, value_dim / 16, key_dim, 16]   16 columns of a state next to each other
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from bridge.errors import BridgeError
from bridge.runtime.recurrent_config import RecurrentConfig

COPIES = 4
_LANES = 16


@dataclass(frozen=True)
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


class RecurrentState:
    """The state after `length` tokens, and copies of it by the number of tokens they are after."""

    def __init__(self, config: RecurrentConfig):
        self._config = config
        self.now = Memory.of(config)
        self.length = 0
        self.wanted = 0  # a number of tokens after which a copy is needed
        self.copies: dict[int, Memory] = {}
        self._coming: tuple[int, Memory] | None = None

    def reach(self, length: int) -> int:
        """The most tokens, of the first `length`, after which the state is known."""
        known = [0, self.length, *self.copies]
        return max(count for count in known if count <= length)

    def cut(self, length: int) -> None:
        """Go back to the state after `length` tokens; the copies of what came later are gone."""
        if length != self.length:
            if length and length not in self.copies:
                raise BridgeError(
                    f"the state after {length} of {self.length} tokens is not kept; read the tokens again from "
                    f"{self.reach(length)}"
                )
            self.now.become(self.copies[length] if length else None)
            self.length = length
        self.copies = {at: memory for at, memory in self.copies.items() if at <= length}
        self._coming = None

    def copy(self, other: Self, length: int) -> None:
        """Become another's state after `length` tokens, which it must know."""
        if length == other.length:
            self.now.become(other.now)
        else:
            self.now.become(other.copies[length] if length else None)
        self.length = length
        self.copies = {at: memory for at, memory in other.copies.items() if at <= length}  # nobody writes to them
        self._coming = None

    def expect(self, tokens: int) -> tuple[int, Memory | None]:
        """After how many of the next tokens a copy is made, and where to; 0 and None where there is none."""
        after = self.wanted - self.length if self.length < self.wanted <= self.length + tokens else tokens - 1
        if after < 1:
            return 0, None
        self._coming = self.length + after, Memory.of(self._config)
        return after, self._coming[1]

    def append(self, tokens: int) -> None:
        """The layers have read so many tokens more."""
        self.length += tokens
        if self._coming is not None:
            at, memory = self._coming
            self.copies[at] = memory
            self._coming = None
            self.wanted = 0 if self.wanted == at else self.wanted
        while len(self.copies) > COPIES:
            places = [0, *sorted(self.copies)]
            gaps = {places[i]: places[i + 1] - places[i - 1] for i in range(1, len(places) - 1)}
            del self.copies[min(gaps, key=lambda place: gaps[place])]

    @property
    def nbytes(self) -> int:
        """Bytes with all copies."""
        return self.now.nbytes * (1 + COPIES)
