"""What guesses the tokens that follow a text. `replies/speculation.py` checks the guesses, several at a time."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from bridge.runtime.decoder.decoder import WIDEST

FIRST = 3  # guesses at first: with the token before them the columns of a narrower kernel


class Drafter:
    """What guesses the tokens that follow a text.

    first, longest  tokens guessed at first, and after guesses that were all right
    reads_states    whether it wants the model's states of all tokens
    taps            layers before which it reads the model's states, see `Decoder.tap`
    """

    first, longest = FIRST, WIDEST - 1
    reads_states = False
    taps: tuple[int, ...] = ()

    def another(self) -> Self:
        """One of the same layers for another text at the same time."""
        raise NotImplementedError

    def take_over(self, other: Self, count: int) -> None:
        """Know what another one knows of the first `count` tokens of its text, at most `other.known`."""

    @property
    def known(self) -> int:
        """Of how many first tokens of the text it has made something of the model's states."""
        return 0

    def begin(self, tokens: Sequence[int], cached: int, cache: Any) -> int:
        """How many of the prompt's first tokens the model need not read again, of `cached` that its cache has."""
        return cached

    def read(self, position: int, states: np.ndarray, tapped: np.ndarray | None) -> None:
        """What the model computed for the tokens from `position` on; it replaces what came before for these.

        states  float32 [n, hidden], normalized
        tapped  float32 [n, layers * hidden]: states before the layers that `Decoder.tap` was given
        """

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow these, all of prompt and reply so far, of which some may be known."""
        raise NotImplementedError
