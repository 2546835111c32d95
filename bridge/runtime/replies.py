"""From drawn tokens to what a reader sees: texts that end a reply, and the probabilities of its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    for text in stops:
        if not isinstance(text, str):
            raise BridgeError(f"stop {text!r}: texts are wanted")
    return [text for text in stops if text]


def until(pieces: Iterator[str], stops: list[str]) -> Iterator[str]:
    """Pieces up to the first of the stops; what may be the beginning of one is held back."""
    held = ""
    for piece in pieces:
        held += piece
        found = [at for at in (held.find(stop) for stop in stops) if at >= 0]
        if found:
            if held[: min(found)]:
                yield held[: min(found)]
            return
        keep = max((_overlap(held, stop) for stop in stops), default=0)
        if len(held) > keep:
            yield held[: len(held) - keep]
            held = held[len(held) - keep :]
    if held:
        yield held


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
