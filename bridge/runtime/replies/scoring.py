"""What a model thinks of a text: the probability of each token."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bridge.runtime.replies.generation import ScoredToken
from bridge.runtime.sampling import probabilities
from bridge.runtime.tokenizer import Tokenizer

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
