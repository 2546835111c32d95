"""From drawn tokens to replies: stop texts, and the probabilities of tokens."""

import codecs
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.errors import BridgeError, parameter
from bridge.runtime.sampling import Probabilities, Sampler
from bridge.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class ScoredToken:
    """A token, and how likely it was.

    token    its id
    text     its own text; bytes that are no whole character become U+FFFD
    logprob  natural logarithm of the model's own probability
    top      (token id, logprob) of the most likely tokens in its place, most likely first
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
        starts = [start for start in (text.find(stop) for stop in self._stops) if start >= 0]
        if starts:
            self.ended, self.held = True, ""
            return text[: min(starts)]
        shown = len(text) - max((overlap(text, stop) for stop in self._stops), default=0)
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


def overlap(text: str, stop: str) -> int:
    """Characters at the end of a text with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def scored(tokenizer: Tokenizer, tokens: Iterator[int], sampler: Sampler, stops: list[str]) -> Iterator[ScoredToken]:
    """The tokens whose text lies before the first of the stops, held back as text is; the sampler drew them."""
    reply = Reply(tokenizer, stops)
    for token in tokens:
        more = reply.add(token, sampler.probabilities)
        yield from reply.take()[1]
        if not more:
            return
    reply.close()
    yield from reply.take()[1]


class Reply:
    """The text of tokens that are handed in one by one: whole characters, up to the first of the stops.

    shown  control tokens that are part of the text nevertheless
    """

    def __init__(self, tokenizer: Tokenizer, stops: list[str], shown: Collection[int] = ()):
        self.tokens: list[int] = []  # without the end token
        self._tokenizer, self._control_shown = tokenizer, shown
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = Stopping(stops)
        self._shown: list[str] = []
        self._taken = 0  # of these pieces
        self._length = 0  # of the text that may be shown
        self._read = 0  # the same with what is held back
        self._waiting: deque[tuple[int, ScoredToken]] = deque()  # each with where its text ends

    @property
    def text(self) -> str:
        """What may be shown so far; all of it after `close`."""
        return "".join(self._shown)

    def add(self, token: int, noted: Probabilities | None = None) -> bool:
        """Whether more may come; `noted`: what the sampler knows of the token, for `take` to return."""
        if token in self._tokenizer.stops:
            self.close()
            return False
        self.tokens.append(token)
        bytes_of_token = self._tokenizer.piece(token, token in self._control_shown)
        piece = self._bytes.decode(bytes_of_token)
        self._read += len(piece)
        if noted is not None:
            text = bytes_of_token.decode("utf-8", "replace")
            self._waiting.append((self._read, ScoredToken(token, text, noted.logprob, noted.top)))
        self._show(self._text.add(piece))
        return not self._text.ended

    def close(self) -> None:
        """Nothing follows: what was held back is part of the text."""
        if not self._text.ended:
            self._show(self._text.add(self._bytes.decode(b"", True)))
            self._show(self._text.held)
            self._text.held = ""

    def take(self) -> tuple[str, list[ScoredToken]]:
        """The text that came since the last call, and the tokens noted whose text has come with it."""
        pieces, self._taken = self._shown[self._taken :], len(self._shown)
        tokens = []
        while self._waiting and self._waiting[0][0] <= self._length:
            tokens.append(self._waiting.popleft()[1])
        return "".join(pieces), tokens

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)
            self._length += len(text)
