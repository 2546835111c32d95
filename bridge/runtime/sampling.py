"""The next token from logits: greedily, or drawn at random from the likely ones.

In llama.cpp's order: biases are added; the logits of tokens that were seen lately are made less likely; the top_k most
likely; of these the fewest whose probabilities sum to top_p; of these the ones at least min_p times as likely as the
first; then the temperature, then the draw.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge.errors import BridgeError


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 leave everything in; seed None: another every time.

    repeat_penalty  positive logits of the tokens seen lately are divided by it, the others multiplied; 1: nothing
    repeat_last_n   how many tokens of prompt and reply count as seen lately; 0: none, -1: all
    logit_bias      added to the logits of tokens, by id; -inf forbids one
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and self.seed < 0:
            raise BridgeError(f"seed {self.seed}: 0 or more are possible; without one it is another every time")
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1):
            raise BridgeError(
                f"sampling with temperature {self.temperature}, top_k {self.top_k}, top_p {self.top_p}, min_p "
                f"{self.min_p}: temperature and top_k are at least 0, top_p is in (0, 1], min_p in [0, 1]"
            )
        if not 0 < self.repeat_penalty < math.inf or self.repeat_last_n < -1:
            raise BridgeError(
                f"repeat_penalty {self.repeat_penalty} over the last {self.repeat_last_n} tokens: the penalty is above "
                "0 (1 changes nothing), the number of tokens 0 or more, or -1 for all"
            )
        for token, bias in (self.logit_bias or {}).items():
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or token < 0:
                raise BridgeError(f"logit_bias of token {token!r}: the key is a token's id")
            if not bias < math.inf:
                raise BridgeError(f"logit_bias {bias} of token {token}: a number or -inf is wanted")

    @property
    def penalizes(self) -> bool:
        """Whether it matters which tokens were seen."""
        return self.repeat_penalty != 1 and self.repeat_last_n != 0


@dataclass(frozen=True)
class Probabilities:
    """Of a token that was drawn: natural logarithms of the model's own probabilities, before any sampling.

    top  the most likely tokens and theirs, most likely first
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Draws tokens one after another.

    logprobs  so many of the most likely tokens are noted in `probabilities` with every draw; None: nothing is
    """

    def __init__(self, how: Sampling, logprobs: int | None = None):
        if logprobs is not None and logprobs < 0:
            raise BridgeError(f"logprobs of the {logprobs} most likely tokens: 0 or more are possible")
        self.how = how
        self.probabilities: Probabilities | None = None  # of the last draw
        self._logprobs = logprobs
        self._random = np.random.default_rng(how.seed)
        self._seen: deque[int] = deque(maxlen=how.repeat_last_n if how.repeat_last_n >= 0 else None)
        bias = how.logit_bias or {}
        self._biased = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)

    @property
    def plain(self) -> bool:
        """Whether a draw depends on nothing but its logits, and nothing is noted of it."""
        return not (self.how.penalizes or self._biased.size) and self._logprobs is None

    def see(self, tokens: Sequence[int]) -> None:
        """The tokens of a prompt; those drawn are seen by themselves."""
        if self.how.penalizes:
            self._seen.extend(tokens)

    def check(self, vocab: int) -> None:
        """Raise BridgeError where a biased token is none of the vocabulary's."""
        if self._biased.size and (largest := int(self._biased.max())) >= vocab:
            raise BridgeError(f"logit_bias of token {largest}: the vocabulary has {vocab}")

    def __call__(self, logits: np.ndarray) -> int:
        """A token for logits float32 [vocab]. Raises BridgeError where they are NaN, or none is finite."""
        top = logits.max()  # NaN, where there is one
        if not np.isfinite(top):
            raise BridgeError(f"the model computes {top} for the next token: the file is damaged; convert it again")
        token = self._drawn(self._adjusted(logits))
        if self.how.penalizes:
            self._seen.append(token)
        if self._logprobs is not None:
            self.probabilities = self._note(logits, token)
        return token

    def _drawn(self, logits: np.ndarray) -> int:
        if self.how.temperature == 0:
            return int(logits.argmax())
        tokens, scores = self._candidates(logits.astype(np.float64))
        weights = np.cumsum(np.exp((scores - scores[0]) / self.how.temperature))
        drawn = self._random.random() * weights[-1]
        return int(tokens[min(np.searchsorted(weights, drawn, "right"), len(tokens) - 1)])

    def _adjusted(self, logits: np.ndarray) -> np.ndarray:
        """With biases, then with the penalty of repetition; a copy where there are any."""
        if not self._biased.size and not self._seen:
            return logits
        logits = logits.copy()
        logits[self._biased] += self._bias
        if self._seen:
            seen = np.unique(np.array(self._seen))
            values, penalty = logits[seen], np.float32(self.how.repeat_penalty)
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        if not np.isfinite(logits.max()):
            raise BridgeError("logit_bias leaves no token that could be next; forbid fewer")
        return logits

    def _note(self, logits: np.ndarray, token: int) -> Probabilities:
        values = logits.astype(np.float64) - logits.max()
        values -= np.log(np.exp(values).sum())
        best = np.argsort(-values, kind="stable")[: self._logprobs]
        return Probabilities(float(values[token]), tuple((int(t), float(values[t])) for t in best))

    def uniform(self, count: int) -> np.ndarray:
        """float64 [count]: the numbers in [0, 1) that as many draws would use, for a device that draws by itself."""
        return self._random.random(count)

    def _candidates(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that remain, most likely first, and their logits."""
        k = self.how.top_k
        if 0 < k < logits.size:
            tokens = np.argpartition(logits, -k)[-k:]
            tokens = tokens[np.lexsort((tokens, -logits[tokens]))]
        else:
            tokens = np.argsort(-logits, kind="stable")
        scores = logits[tokens]
        weights = np.exp(scores - scores[0])
        kept = len(tokens)
        if self.how.top_p < 1:
            kept = int(np.searchsorted(np.cumsum(weights), self.how.top_p * weights.sum())) + 1
        if self.how.min_p > 0:
            kept = min(kept, int((weights >= self.how.min_p).sum()))
        return tokens[:kept], scores[:kept]


def drawn_on_host(decoder: Any, row: np.ndarray, sampler: Sampler) -> Iterator[int]:
    """Tokens one by one until a decoder's context is full, the first from logits float32 [vocab]."""
    while True:
        token = sampler(row)
        yield token
        if decoder.cache.length == decoder.cache.context:
            return
        row = decoder.next_scores(token)
