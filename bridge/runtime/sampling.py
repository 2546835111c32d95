"""The next token from logits: greedily, or drawn at random from the likely ones.

In llama.cpp's order: biases are added; tokens that were seen are made less likely; the top_k most likely; of these the
fewest whose probabilities sum to top_p; of these the ones at least min_p times as likely as the first; then the
temperature, then the draw.

repeat_penalty is llama.cpp's, of the last tokens of prompt and reply; frequency_penalty and presence_penalty are
OpenAI's, of all tokens of the reply and none of the prompt.
"""

import copy
import math
import re
from argparse import ArgumentTypeError
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self, TypedDict, Unpack

import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.runtime.constraint import Constraint
from bridge.runtime.cpu.ops import sampling_ops as ops
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
    """How the next token is drawn. The defaults are llama.cpp's.

    Steps come in llama.cpp's order: biases, penalties, top_k, top_p, min_p, temperature, draw. Raises BridgeError for
    values out of range.
    """

    temperature: float = option(
        0.8, "divisor of the logits before the draw; 0: always the most likely token", flag="--temp --temperature",
        metavar="T", usual=True,
    )  # fmt: skip
    top_k: int = option(40, "number of the most likely tokens to draw from; 0: all", metavar="K")
    top_p: float = option(0.95, "draw from the fewest tokens whose probabilities add up to P; 1: all", metavar="P")
    min_p: float = option(
        0.05, "draw from tokens at least P times as likely as the most likely one; 0: all", metavar="P"
    )
    seed: int | None = option(
        None, "seed of the draws: the same one gives the same text", metavar="N", parse=int, says="random", usual=True
    )
    repeat_penalty: float = option(
        1.0, "divisor of the positive logits, and factor of the negative ones, of recent tokens; 1: none", metavar="R"
    )
    repeat_last_n: int = option(
        64, "number of tokens of prompt and reply that count as recent; 0: none, -1: all", metavar="N"
    )
    frequency_penalty: float = option(
        0.0, "number to subtract from a token's logit for each time that the reply has it", metavar="F"
    )
    presence_penalty: float = option(
        0.0, "number to subtract from the logits of tokens that the reply has, however often", metavar="F"
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
            "frequency_penalty": (abs(self.frequency_penalty) <= 100, "between -100 and 100"),
            "presence_penalty": (abs(self.presence_penalty) <= 100, "between -100 and 100"),
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
        repeats = self.repeat_penalty != 1 and self.repeat_last_n != 0
        return repeats or self.frequency_penalty != 0 or self.presence_penalty != 0


class SamplingKeywords(TypedDict, total=False):
    """The fields of `Sampling`, as keywords of functions."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    repeat_penalty: float
    repeat_last_n: int
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None


class ReplyKeywords(SamplingKeywords, total=False):
    """Those of `Sampling`, and of what a reply has to fit; see `Constraint`."""

    schema: Mapping[str, Any] | str | None
    regex: str | None


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


class Draw:
    """What is asked about one row of logits, and what `make_draws` answers.

    words    int64 [ops.WORDS]: settings, then also results, see sampling_ops.py
    numbers  the same words as float64
    """

    def __init__(self, words: np.ndarray, logits: np.ndarray, listed: int | None, allowed: np.ndarray | None = None):
        """logits: float32 [vocab]; listed: number of tokens whose probabilities are wanted; None: of none, not even
        the sum; allowed: what words[ops.ALLOWED] points to."""
        self.words, self.numbers = words, words.view(np.float64)
        self._allowed = allowed
        self._logits = np.ascontiguousarray(logits, np.float32)
        words[ops.LOGITS], words[ops.VOCAB] = self._logits.ctypes.data, self._logits.size
        words[ops.LISTED] = -1
        if listed is not None:
            self._list = np.empty(logits.size + ops.BLOCK, np.uint32)
            words[ops.LISTED], words[ops.LIST] = min(listed, logits.size), self._list.ctypes.data

    def check(self) -> None:
        """Raise BridgeError if a logit is NaN or none is finite."""
        if not math.isfinite(top := float(self.numbers[ops.TOP])):
            raise not_finite(top)

    def probabilities(self, token: int) -> Probabilities:
        """Those of a token, and of the tokens that were to be listed."""
        self.check()
        top, log_sum = float(self.numbers[ops.TOP]), math.log(self.numbers[ops.SUM])
        ids = self._list[: self.words[ops.LISTED]]
        ids = ids[np.argsort(-self._logits[ids], kind="stable")]
        logprobs = self._logits[ids].astype(np.float64) - top - log_sum
        likely = zip(ids.tolist(), logprobs.tolist(), strict=True)
        return Probabilities(float(self._logits[token]) - top - log_sum, tuple(likely))


def make_draws(draws: Sequence[Draw]) -> None:
    """Answer what is asked about rows, in parallel."""
    if len(draws) == 1:
        ops.sample(draws[0].words[None])
    elif draws:
        ops.sample(table := np.stack([draw.words for draw in draws]))
        for draw, words in zip(draws, table, strict=True):
            draw.words[:] = words


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
        self._seen = array("q")  # the prompt, then the reply
        self._prompt = 0  # its tokens
        self._ahead: list[float] = []  # numbers of the next draws
        bias = how.biases
        self._biased = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)
        self._words = np.zeros(ops.WORDS, np.int64)  # of every draw
        words, numbers = self._words, self._words.view(np.float64)
        words[ops.DRAWN], words[ops.TOP_K] = 1, min(how.top_k, _MOST_TOKENS)
        numbers[[ops.TEMPERATURE, ops.TOP_P, ops.MIN_P]] = how.temperature, how.top_p, how.min_p
        numbers[[ops.PENALTY, ops.FREQUENCY, ops.PRESENCE]] = (
            how.repeat_penalty, how.frequency_penalty, how.presence_penalty
        )  # fmt: skip
        words[[ops.BIASED, ops.BIASES]] = self._biased.ctypes.data, self._bias.ctypes.data
        words[ops.BIASED_COUNT] = words[ops.ADJUSTED] = self._biased.size

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, logprobs: int | None = None, schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None, around: Callable[[str], str] | None = None, **sampling: Unpack[SamplingKeywords],
    ) -> Self:  # fmt: skip
        """A sampler for fields of `Sampling`, and for what `Constraint` takes."""
        how = Sampling(**sampling)
        free = schema is None and regex is None and around is None
        return cls(how, logprobs, None if free else Constraint(tokenizer, schema, regex, around))

    def copy(self, seed: int | None) -> Self:
        """This sampler as it is now, with a seed of its own, for another reply to the same request."""
        other = copy.copy(self)
        other._seed, other._ahead = seed, []
        other.__dict__.pop("_random", None)
        other._seen = self._seen[:]
        other._constraint = None if self._constraint is None else self._constraint.copy()
        return other

    @cached_property
    def _random(self) -> "np.random.Generator":
        return np.random.default_rng(self._seed)

    @property
    def plain(self) -> bool:
        """Whether a draw depends on its logits alone, and its probability is not asked for."""
        return self.independent and not self._biased.size and self._logprobs is None

    @property
    def independent(self) -> bool:
        """Whether a draw depends on the tokens before it by its logits alone."""
        return not self.how.penalizes and self._constraint is None

    @property
    def complete(self) -> bool:
        """Whether the constraint allows nothing more."""
        return self._constraint is not None and self._constraint.complete

    def see(self, tokens: Sequence[int]) -> None:
        """Note the tokens of a prompt; those drawn are noted anyway."""
        if self.how.penalizes:
            self._seen.extend(tokens)
            self._prompt = len(self._seen)

    def check(self, vocab: int) -> None:
        """Raise BridgeError if a biased token is not in the vocabulary."""
        if self._biased.size and (largest := int(self._biased.max())) >= vocab:
            raise BridgeError(f"{parameter('logit_bias')} of token {largest}: the vocabulary has {vocab} tokens")

    def __call__(self, logits: np.ndarray, draw: Draw | None = None) -> int:
        """A token for logits float32 [vocab]; `draw`: their draw, if it has been made.

        Raises BridgeError if one of them is NaN or none is finite.
        """
        if draw is None:
            make_draws([draw := self.draw(logits)])
        draw.check()
        if not math.isfinite(draw.numbers[ops.ADJUSTED_TOP]):
            forbidden = "every possible next token" if self._constraint is None else "all tokens that the schema allows"
            raise BridgeError(f"{parameter('logit_bias')} forbids {forbidden}; forbid fewer")
        token = int(draw.words[ops.TOKEN])
        del self._ahead[:1]
        if self._constraint is not None:
            self._constraint.accept(token)
        if self.how.penalizes:
            self._seen.append(token)
        if self._logprobs is not None:
            self.probabilities = draw.probabilities(token)
        return token

    def draw(self, logits: np.ndarray, before: int = 0) -> Draw:
        """The draw from logits float32 [vocab], to be made before the next token is noted.

        before  number of tokens that will have been drawn by then, if a draw does not depend on them
        """
        self.check(logits.size)
        allowed = None if self._constraint is None else self._constraint.allowed()
        draw = Draw(self._words.copy(), logits, self._logprobs, allowed)
        words = draw.words
        if self.how.temperature > 0:
            self._look_ahead(before + 1)
            draw.numbers[ops.UNIFORM] = self._ahead[before]
        if self._seen:
            start, count = self._seen.buffer_info()
            recent = count if self.how.repeat_last_n < 0 else min(count, self.how.repeat_last_n)
            words[ops.SEEN], words[ops.SEEN_COUNT] = start + 8 * (count - recent), recent
            words[ops.REPLY], words[ops.REPLY_COUNT] = start + 8 * self._prompt, count - self._prompt
            words[ops.ADJUSTED] = 1
        if self._constraint is not None and allowed is not None:
            words[ops.ALLOWED], words[ops.ALLOWED_COUNT] = allowed.ctypes.data, self._constraint.vocab
            words[ops.ADJUSTED] = 1
        return draw

    def uniform(self, count: int) -> np.ndarray:
        """float64 [count]: the numbers in [0, 1) of the next draws, which a device makes by itself."""
        self._look_ahead(count)
        numbers, self._ahead = self._ahead[:count], self._ahead[count:]
        return np.array(numbers)

    def _look_ahead(self, count: int) -> None:
        """Have the numbers of so many draws."""
        if (missing := count - len(self._ahead)) > 0:
            self._ahead += self._random.random(missing).tolist()


def draws_ahead(samplers: Sequence[tuple[Sampler, int]], rows: np.ndarray) -> list[Draw | None]:
    """The draws of rows float32 [n, vocab], so many in turn for each of the samplers; None for one to be made later.

    A draw that depends on tokens that other rows of its sampler give is left for later, and so is one that fails: it
    fails again then.
    """
    draws: list[Draw | None] = []
    for sampler, count in samplers:
        for before in range(count):
            draw = None
            if before == 0 or sampler.independent:
                with suppress(BridgeError):
                    draw = sampler.draw(rows[len(draws)], before)
            draws.append(draw)
    make_draws([draw for draw in draws if draw is not None])
    return draws


def probabilities(rows: np.ndarray, tokens: Sequence[int], count: int) -> list[Probabilities]:
    """For rows of logits float32 [n, vocab]: log-probabilities of a token each, and of the `count` most likely ones."""
    draws = [Draw(np.zeros(ops.WORDS, np.int64), row, count) for row in rows]
    make_draws(draws)
    return [draw.probabilities(token) for draw, token in zip(draws, tokens, strict=True)]


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
