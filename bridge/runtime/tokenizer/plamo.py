"""PLaMo's tokenizer as llama.cpp does it: of all ways to cut a text, the one whose tokens' scores sum to the most.

Costs are whole numbers, found from the end of the text to its beginning. A character that is no token becomes the
tokens of its bytes, at a cost above that of any trained token. Control tokens and padding are tokens like others.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import count

from bridge.errors import BridgeError
from bridge.gguf_file.special_tokens import BYTE
from bridge.runtime.tokenizer.spm import byte_tokens

_UNKNOWN = -10_000_000  # the score of a character by its bytes, and of padding: behind it no shorter token is tried
_NEVER = -20_000_000  # of what is no token
_MOST = 1 << 60


class Plamo:
    """A Cutter (see `__init__.py`) for tokenizer.ggml.model plamo2."""

    add_bos, add_eos, force_bos, force_sep = False, False, False, False

    def __init__(self, tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]):
        self._tokens, self._types, self._scores = tokens, types, scores
        self._bytes = byte_tokens(tokens, types)
        if missing := sorted({*range(256)} - {*self._bytes}):
            raise BridgeError(f"no token is of the byte {missing[0]}, as one must be of each; convert the model again")

    @cached_property
    def _ids(self) -> dict[str, int]:
        """The ids of all tokens; the last one of equal texts."""
        return dict(zip(self._tokens, count()))

    @cached_property
    def _score_of(self) -> dict[str, int]:
        """The scores of tokens, in ten thousandths; of other ends of tokens, `_NEVER`."""
        score_of: dict[str, int] = {}
        for text, kind, score in zip(self._tokens, self._types, self._scores, strict=True):
            if kind != BYTE:
                score_of[text] = _rounded(score)
                for first in range(1, len(text)):
                    score_of.setdefault(text[first:], _NEVER)
        return score_of

    def encode(self, text: str, after_special: bool) -> list[int]:
        text = text.removeprefix("\ufeff")
        costs, lengths = [0] * (len(text) + 1), [0] * len(text)  # from each character on; of its token, 0: its bytes
        known = 0  # characters of the longest text from there on that a token ends with
        for start in reversed(range(len(text))):
            known = self._known(text, start, known + 1)
            costs[start], lengths[start] = self._cheapest(text, start, known, costs)
        ids: list[int] = []
        start = 0
        while start < len(text):
            if length := lengths[start]:
                ids.append(self._ids[text[start : start + length]])
            else:
                ids += (self._bytes[byte] for byte in text[start].encode("utf-8"))
            start += length or 1
        return ids

    def _known(self, text: str, start: int, most: int) -> int:
        """The length, at most so many, of the longest end of a token that text[start:] begins with; 0 for none."""
        for length in range(most, 0, -1):
            if text[start : start + length] in self._score_of:
                return length
            if self._score_of.get(text[start + 1 : start + length]) == _UNKNOWN:
                break
        return 0

    def _cheapest(self, text: str, start: int, known: int, costs: Sequence[int]) -> tuple[int, int]:
        """The lowest sum of negated scores of text[start:], and the length of its first token, 0 for bytes."""
        cost, first = _MOST, 0
        for length in range(known, 0, -1):
            score = self._score_of.get(text[start : start + length], _NEVER)
            if score > _NEVER and costs[start + length] - score < cost:
                cost, first = costs[start + length] - score, length
            if score == _UNKNOWN:
                return cost, first
        by_bytes = costs[start + 1] - _UNKNOWN
        return (by_bytes, 0) if by_bytes < cost else (cost, first)

    def piece(self, text: str) -> bytes:
        return text.encode("utf-8")


def _rounded(score: float) -> int:
    """Ten thousandths, halves away from zero; `_NEVER` for infinity and NaN."""
    return int(score * 1e4 + math.copysign(0.5, score)) if math.isfinite(score) else _NEVER
