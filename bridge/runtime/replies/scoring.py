"""What a model thinks of texts: the probability of each token, and one vector for a whole text."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.runtime.replies.generation import ScoredToken
from bridge.runtime.sampling import probabilities
from bridge.runtime.tokenizer import Tokenizer

POOLINGS = ("mean", "last")
_ROWS = 32  # tokens whose logits are computed at a time: 20 MB for a vocabulary of 150,000


class TokenScorer:
    """Scores the tokens of a text, whose states come part by part; a `Reader` of `Batch`.

    ids   the text's tokens
    top   number of the most likely tokens to note in each place
    """

    def __init__(self, decoder: Any, tokenizer: Tokenizer, ids: Sequence[int], top: int):
        self.tokens: list[ScoredToken] = []  # of all but the first token, which nothing predicts
        self._decoder, self._tokenizer, self._ids, self._top = decoder, tokenizer, ids, top

    def __call__(self, position: int, states: np.ndarray) -> None:
        """States float32 [n, hidden] of the tokens from `position` on."""
        for first in range(0, min(len(states), len(self._ids) - 1 - position), _ROWS):
            rows = self._decoder.logits(states[first : first + _ROWS])
            following = self._ids[position + first + 1 :][: len(rows)]
            noted_rows = probabilities(rows[: len(following)], following, self._top)
            for token, noted in zip(following, noted_rows, strict=True):
                text = self._tokenizer.piece(token).decode("utf-8", "replace")
                self.tokens.append(ScoredToken(token, text, noted.logprob, noted.top))


class Pooler:
    """One vector of the states of a text, which come part by part; a `Reader` of `Batch`."""

    def __init__(self, pooling: str):
        if pooling not in POOLINGS:
            raise BridgeError(f"{parameter('pooling', pooling)}: choose {' or '.join(POOLINGS)}")
        self._mean, self._sum, self._count = pooling == "mean", np.zeros(0), 0

    def __call__(self, position: int, states: np.ndarray) -> None:
        """States float32 [n, hidden] of the tokens from `position` on."""
        states = states if self._mean else states[-1:]
        summed = states.sum(0, dtype=np.float64)
        if position and self._mean:
            self._sum, self._count = self._sum + summed, self._count + len(states)
        else:
            self._sum, self._count = summed, len(states)

    def vector(self, normalize: bool, size: int | None = None) -> np.ndarray:
        """float32 [size], of length 1 if `normalize`; the first of [hidden], or all."""
        mean = (self._sum / self._count)[:size]
        norm = float(np.linalg.norm(mean)) if normalize else 1.0
        return (mean / norm if norm else mean).astype(np.float32)
