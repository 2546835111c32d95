"""The next token from logits: greedily, or drawn at random from the likely ones.

In llama.cpp's order: biases are added; the logits of tokens that were seen lately are made less likely; the top_k most
likely; of these the fewest whose probabilities sum to top_p; of these the ones at least min_p times as likely as the
first; then the temperature, then the draw.
"""

import copy
import math
import re
from argparse import ArgumentTypeError
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.runtime.constraint import Constraint
from bridge.runtime.tokenizer import Tokenizer
from bridge.system.options import check_integer, is_integer, is_number, option

_MOST_TOKENS = 1 << 31  # more than any vocabulary or context has


def _id_and_bias(text: str) -> tuple[int, float]:
    """Of "15043-1.5": the token, and the number that is added to its logit."""
    token, added = re.fullmatch(r"([0-9]*)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        return int(token), float(added if added[:1] in ("+", "-") else "")
    except ValueError:
        raise ArgumentTypeError(f"{text!r}: must be a token id and a number, as 15043+1 or 15043-inf") from None


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: the defaults, in Python and on the command line, are llama.cpp's."""

    temperature: float = option(
        0.8, "divisor of the logits before the draw; 0: always the most likely token", flag="--temp --temperature",
        metavar="T",
    )  # fmt: skip
    top_k: int = option(40, "number of the most likely tokens to draw from; 0: all", metavar="K")
    top_p: float = option(0.95, "draw from the fewest tokens whose probabilities add up to P; 1: all", metavar="P")
    min_p: float = option(
        0.05, "draw from tokens at least P times as likely as the most likely one; 0: all", metavar="P"
    )
    seed: int | None = option(
        None, "seed of the draws: the same one gives the same text", metavar="N", parse=int, says="random"
    )
    repeat_penalty: float = option(
        1.0, "divisor of the positive logits, and factor of the negative ones, of recent tokens; 1: none", metavar="R"
    )
    repeat_last_n: int = option(
        64, "number of tokens of prompt and reply that count as recent; 0: none, -1: all", metavar="N"
    )
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = option(
        (), "number to add to a token's logit, as 15043+1, 15043-1.5 or 15043-inf (never drawn); may be repeated",
        metavar="ID+B", parse=_id_and_bias,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name, kind in (*NUMBERS.items(), *(() if self.seed is None else [("seed", int)])):
            value = getattr(self, name)
            if not (is_integer(value) if kind is int else is_number(value)):
                raise BridgeError(f"{parameter(name, value)}: must be {'an integer' if kind is int else 'a number'}")
        ranges: dict[str, tuple[bool, str]] = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "seed": (self.seed is None or self.seed >= 0, "at least 0"),
            "repeat_penalty": (0 < self.repeat_penalty < math.inf, "above 0; 1 changes nothing"),
            "repeat_last_n": (self.repeat_last_n >= -1, "at least 0, or -1 for all tokens"),
        }
        for name, (fits, range) in ranges.items():
            if not fits:
                raise BridgeError(f"{parameter(name)} {getattr(self, name)}: must be {range}")
        try:
            biases = self.biases
        except (TypeError, ValueError):
            raise BridgeError(f"{parameter('logit_bias', self.logit_bias)}: must be {{token id: number}}") from None
        for token, bias in biases.items():
            if not is_integer(token) or not 0 <= token < _MOST_TOKENS:
                raise BridgeError(f"{parameter('logit_bias')} of token {token!r}: the key must be a token id")
            if not is_number(bias) or not bias < math.inf:
                raise BridgeError(f"{parameter('logit_bias')} {bias} of token {token}: must be a number or -inf")

    @property
    def biases(self) -> dict[int, float]:
        """What is added to the logits of tokens, by token id; -inf forbids one."""
        return dict(self.logit_bias or ())

    @property
    def penalizes(self) -> bool:
        """Whether it matters which tokens were seen."""
        return self.repeat_penalty != 1 and self.repeat_last_n != 0


# the fields that are one number each, and its type
NUMBERS = {setting.name: setting.type for setting in fields(Sampling) if setting.type in (int, float)}


@dataclass(frozen=True)
class Probabilities:
    """Natural logarithms of the model's own probabilities for a draw, before any sampling.

    logprob  of the drawn token
    top      (token, logprob) of the most likely tokens, most likely first
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Draws tokens one after another.

    logprobs    number of the most likely tokens that `probabilities` lists after every draw; None: it stays None
    constraint  what the reply must fit
    """

    def __init__(self, how: Sampling, logprobs: int | None = None, constraint: Constraint | None = None):
        if logprobs is not None:
            check_integer("logprobs", logprobs, 0)
        self.how = how
        self.probabilities: Probabilities | None = None  # of the last draw
        self._constraint, self._logprobs, self._seed = constraint, logprobs, how.seed
        self._seen: deque[int] = deque(maxlen=how.repeat_last_n if 0 <= how.repeat_last_n < _MOST_TOKENS else None)
        bias = how.biases
        self._biased = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, logprobs: int | None = None, schema: Any = None, regex: Any = None, **sampling: Any
    ) -> Self:
        """A sampler for fields of `Sampling`, and for what `Constraint` takes."""
        how = Sampling(**sampling)
        free = schema is None and regex is None
        return cls(how, logprobs, None if free else Constraint(tokenizer, schema, regex))

    def copy(self, seed: int | None) -> Self:
        """This sampler as it is now, with a seed of its own, for another reply to the same request."""
        other = copy.copy(self)
        other._seed = seed
        other.__dict__.pop("_random", None)
        other._seen = self._seen.copy()
        other._constraint = None if self._constraint is None else self._constraint.copy()
        return other

    @cached_property
    def _random(self) -> "np.random.Generator":
        return np.random.default_rng(self._seed)

    @property
    def plain(self) -> bool:
        """Whether a draw depends on its logits alone, and its probability is not asked for."""
        depends = self.how.penalizes or self._biased.size or self._constraint is not None
        return not depends and self._logprobs is None

    @property
    def complete(self) -> bool:
        """Whether the constraint allows nothing more."""
        return self._constraint is not None and self._constraint.complete

    def see(self, tokens: Sequence[int]) -> None:
        """Note the tokens of a prompt; those drawn are noted anyway."""
        if self.how.penalizes:
            self._seen.extend(tokens)

    def check(self, vocab: int) -> None:
        """Raise BridgeError if a biased token is not in the vocabulary."""
        if self._biased.size and (largest := int(self._biased.max())) >= vocab:
            raise BridgeError(f"{parameter('logit_bias')} of token {largest}: the vocabulary has {vocab} tokens")

    def __call__(self, logits: np.ndarray) -> int:
        """A token for logits float32 [vocab]. Raises BridgeError if one is NaN or none is finite."""
        top = logits.max()  # NaN, where there is one
        if not np.isfinite(top):
            raise not_finite(top)
        adjusted = self._adjusted(logits)
        if self._constraint is not None:
            adjusted = self._constraint.mask(adjusted)
            if adjusted.max() == -np.inf:
                raise BridgeError(f"{parameter('logit_bias')} forbids all tokens that the schema allows; forbid fewer")
        token = self._drawn(adjusted)
        if self._constraint is not None:
            self._constraint.accept(token)
        if self.how.penalizes:
            self._seen.append(token)
        if self._logprobs is not None:
            self.probabilities = probabilities(logits, token, self._logprobs)
        return token

    def _drawn(self, logits: np.ndarray) -> int:
        if self.how.temperature == 0:
            return int(logits.argmax())
        tokens, scores = self._candidates(logits.astype(np.float64))
        weights = np.cumsum(np.exp((scores - scores[0]) / self.how.temperature))
        drawn = self._random.random() * weights[-1]
        return int(tokens[min(np.searchsorted(weights, drawn, "right"), len(tokens) - 1)])

    def _adjusted(self, logits: np.ndarray) -> np.ndarray:
        """The logits with biases, then with the penalty of repetition; a copy if anything changes."""
        if not self._biased.size and not self._seen:
            return logits
        logits = logits.copy()
        logits[self._biased] += self._bias
        if self._seen:
            seen = np.unique(np.array(self._seen))
            values, penalty = logits[seen], np.float32(self.how.repeat_penalty)
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        if not np.isfinite(logits.max()):
            raise BridgeError(f"{parameter('logit_bias')} forbids every possible next token; forbid fewer")
        return logits

    def uniform(self, count: int) -> np.ndarray:
        """float64 [count]: the numbers in [0, 1) that the next draws would use, for a device that draws by itself."""
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
        count = len(tokens)
        if self.how.top_p < 1:
            count = int(np.searchsorted(np.cumsum(weights), self.how.top_p * weights.sum())) + 1
        if self.how.min_p > 0:
            count = min(count, int((weights >= self.how.min_p).sum()))
        return tokens[:count], scores[:count]


def probabilities(logits: np.ndarray, token: int, count: int) -> Probabilities:
    """The log-probabilities of a token and of the `count` most likely ones, for logits float32 [vocab]."""
    values = logits.astype(np.float64) - logits.max()
    values -= np.log(np.exp(values).sum())
    count = min(count, values.size)
    best = np.argpartition(-values, count - 1)[:count] if count else np.empty(0, np.int64)
    best = best[np.lexsort((best, -values[best]))]
    return Probabilities(float(values[token]), tuple((int(t), float(values[t])) for t in best))


def not_finite(value: object) -> BridgeError:
    """For logits among which there is such a value, or none besides."""
    return BridgeError(f"the model computes {value} for the next token: the file is damaged; convert it again")


def drawn_on_host(decoder: Any, row: np.ndarray, sampler: Sampler) -> Iterator[int]:
    """Tokens one by one until a decoder's context is full, the first from logits float32 [vocab]."""
    while True:
        token = sampler(row)
        yield token
        if decoder.cache.length == decoder.cache.context:
            return
        row = decoder.next_scores(token)
