"""From drawn tokens to replies: stop texts, the probabilities of tokens, and several replies at once.

A decode step reads every weight once, however many tokens it computes: the kernels of 4 and 8 columns multiply a word
of weights with as many vectors while it is in a register. So `BatchRunner` takes a token of each sequence through the
layers together. Prompts are read one after another, each into a context of its own; where there are more sequences
than a step takes, the next one begins when another has ended.
"""

import codecs
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from bridge.errors import BridgeError, parameter
from bridge.runtime.decoder import Decoder
from bridge.runtime.kv_cache import KVCache
from bridge.runtime.sampling import Sampler
from bridge.runtime.tokenizer import Tokenizer

MAX_BATCH = 8  # sequences in a step: columns of the widest kernel


@dataclass(frozen=True)
class ScoredToken:
    """A token of a reply, its own text (bytes that are no whole character become U+FFFD), and how likely it was.

    logprob  natural logarithm of the model's own probability
    top      the most likely tokens in its place and theirs, most likely first
    """

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, float], ...]


def stop_texts(stop: str | Sequence[str] | None) -> list[str]:
    """One text or several as a list, without empty ones. Raises BridgeError if one is not a text."""
    stops: list[Any] = [stop] if isinstance(stop, str) or not isinstance(stop, Iterable) else list(stop)
    for text in stops:
        if not isinstance(text, str | None):
            raise BridgeError(f"{parameter('stop')} {text!r}: must be a text or a list of texts")
    return [text for text in stops if text]


class Stopping:
    """Text in pieces that ends before the first stop text; a piece that may be the start of one is held back."""

    def __init__(self, stops: list[str]):
        self.ended = False
        self.held = ""
        self._stops = stops

    def add(self, piece: str) -> str:
        """The text that may be shown now."""
        text = self.held + piece
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.ended, self.held = True, ""
            return text[: min(found)]
        shown = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self.held = text[shown:]
        return text[:shown]


def until(pieces: Iterator[str], stops: list[str]) -> Iterator[str]:
    """Pieces up to the first of the stops."""
    text = Stopping(stops)
    for piece in pieces:
        if shown := text.add(piece):
            yield shown
        if text.ended:
            return
    if text.held:
        yield text.held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def scored(tokenizer: Tokenizer, tokens: Iterator[int], sampler: Sampler, stops: list[str]) -> Iterator[ScoredToken]:
    """The tokens whose text lies before the first of the stops, held back as text is; the sampler drew them."""
    waiting: deque[tuple[int, ScoredToken]] = deque()  # each with where its text ends
    drawn: deque[ScoredToken] = deque()

    def noted() -> Iterator[int]:
        for token in tokens:
            noted = sampler.probabilities
            assert noted is not None
            text = tokenizer.piece(token).decode("utf-8", "replace")
            drawn.append(ScoredToken(token, text, noted.logprob, noted.top))
            yield token

    def pieces() -> Iterator[str]:
        end = 0
        for piece in tokenizer.stream(noted()):
            end += len(piece)
            if drawn:  # else these are the last bytes, which no token ended
                waiting.append((end, drawn.popleft()))
            yield piece

    shown = 0
    for text in chain(until(pieces(), stops), [""]):  # the last tokens may have no text
        shown += len(text)
        while waiting and waiting[0][0] <= shown:
            yield waiting.popleft()[1]


class Reply:
    """The text of tokens that are handed in one by one: whole characters, up to the first of the stops."""

    def __init__(self, tokenizer: Tokenizer, stops: list[str]):
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = Stopping(stops)
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """All of it, once the last token is in."""
        rest = "" if self._text.ended else self._text.add(self._bytes.decode(b"", True)) + self._text.held
        return "".join(self._shown) + rest

    def add(self, token: int) -> bool:
        """Whether more may come."""
        if token in self._tokenizer.stops:
            return False
        self._shown.append(self._text.add(self._bytes.decode(self._tokenizer.piece(token))))
        return not self._text.ended


@dataclass
class SequenceState:
    """One of the sequences: its prompt and the reply so far."""

    prompt: list[int]
    sampler: Sampler
    reply: Reply
    max_tokens: int
    made: int = 0
    token: int = -1  # the last one, which is not in the context yet

    def take(self, token: int, cache: KVCache) -> bool:
        """Add the next token; whether another may follow."""
        self.made += 1
        self.token = token
        return self.reply.add(token) and self.made < self.max_tokens and cache.length < cache.context


class BatchRunner:
    """Runs several sequences step by step."""

    def __init__(self, decoder: Decoder, sequences: Sequence[SequenceState]):
        self._decoder = decoder
        self._waiting = deque(sequence for sequence in sequences if sequence.max_tokens)
        self._free = [decoder.new_cache() for _ in range(min(MAX_BATCH, len(self._waiting)))]
        self._running: list[tuple[SequenceState, KVCache]] = []
        self.steps = 0
        self.tokens = 0  # made so far, without the first of each sequence

    def advance(self) -> bool:
        """Read a prompt if one can begin, else make one more token of each; whether there is more to do."""
        if self._waiting and self._free:
            sequence, cache = self._waiting.popleft(), self._free.pop()
            cache.length = 0
            row = self._decoder.logits(self._decoder.run(sequence.prompt, cache=cache))[0]
            self._go_on([(sequence, cache)], [sequence.sampler(row)])
        elif self._running:
            running, self._running = self._running, []
            rows = self._decoder.step([cache for _, cache in running], [sequence.token for sequence, _ in running])
            self.steps += 1
            self.tokens += len(running)
            self._go_on(running, [sequence.sampler(row) for (sequence, _), row in zip(running, rows, strict=True)])
        return bool(self._waiting or self._running)

    def _go_on(self, running: list[tuple[SequenceState, KVCache]], tokens: list[int]) -> None:
        """Hand the tokens to their sequences; those that end leave their context to others."""
        for (sequence, cache), token in zip(running, tokens, strict=True):
            if sequence.take(token, cache):
                self._running.append((sequence, cache))
            else:
                self._free.append(cache)
