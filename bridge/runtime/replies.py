"""From drawn tokens to what a reader sees: texts that end a reply, and the probabilities of its tokens."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.errors import BridgeError
from bridge.runtime.sampling import Sampler
from bridge.runtime.tokenizer import Tokenizer


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
    """One text or several as a list, without empty ones. Raises BridgeError for what is no text."""
    stops: list[Any] = [stop] if isinstance(stop, str) or not isinstance(stop, Iterable) else list(stop)
    for text in stops:
        if not isinstance(text, str | None):
            raise BridgeError(f"stop {text!r}: texts are wanted")
    return [text for text in stops if text]


class Stopping:
    """Text that comes in pieces and ends before the first of the stops; what may begin one of them is held back."""

    def __init__(self, stops: list[str]):
        self.ended = False
        self.held = ""
        self._stops = stops

    def add(self, piece: str) -> str:
        """What may be shown now."""
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
    for text in until(pieces(), stops):
        shown += len(text)
        while waiting and waiting[0][0] <= shown:
            yield waiting.popleft()[1]
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
