"""Token ids by text, and BPE on them. A program that reads one prompt needs no dictionary of the whole vocabulary.

A dictionary of 262,144 tokens takes 0.1 s, and the model of the `tokenizers` library 3 us for each token and merge. The
first short texts use only the tokens that they contain, which a scan of the vocabulary finds in a tenth of that time.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property
from heapq import heappop, heappush
from itertools import compress, count

_SHORT = 512  # characters of a text that is scanned for
_FIRST = 8  # such texts: a chat template makes about as many of a prompt
_MOST = 1 << 16  # characters of the tokens of such a text, which is some 10,000 in real vocabularies


class Vocabulary:
    """The tokens of a file, by id."""

    def __init__(self, tokens: Sequence[str]):
        self._tokens = tokens
        self._left = _FIRST

    @cached_property
    def ids(self) -> dict[str, int]:
        """The ids of all tokens; the last one of equal texts."""
        return dict(zip(self._tokens, count()))

    def scans(self, text: str) -> bool:
        """Whether a text is short, and one of the first."""
        return self._left > 0 and len(text) <= _SHORT and "ids" not in self.__dict__

    def ids_within(self, words: Sequence[str]) -> dict[str, int] | None:
        """The ids of the tokens that words contain; None where they are too long together."""
        self._left -= 1
        parts: Container[str] = " ".join(words)
        if sum(len(word) ** 2 for word in words) < len(self._tokens):  # looking up is faster than searching
            parts = {word[i:j] for word in words for i in range(len(word)) for j in range(i + 1, len(word) + 1)}
        ids = {self._tokens[token]: token for token in compress(count(), map(parts.__contains__, self._tokens))}
        return ids if sum(map(len, ids)) <= _MOST else None


def ranks_of(ids: Mapping[str, int], merges: Sequence[str]) -> dict[str, int]:
    """The ranks of those merges, "left right", whose tokens are all in `ids`; the last one of equal merges."""
    halves = ((text[:cut], text[cut:]) for text in ids for cut in range(1, len(text)))
    pairs = {f"{left} {right}" for left, right in halves if left in ids and right in ids}
    return {merges[rank]: rank for rank in compress(count(), map(pairs.__contains__, merges))}


def joined(text: str, rank_of: Callable[[str, str], float | None]) -> list[str]:
    """The symbols of a text: its characters, of which two neighbours that have a rank are joined to one.

    The pair of the lowest rank is joined first, and the leftmost of equal ones. Symbols are linked both ways; a
    candidate is dead when a side of it has changed.
    """
    symbols = list(text)
    n = len(symbols)
    after, before = [*range(1, n), -1], list(range(-1, n - 1))
    heap: list[tuple[float, int, int, int]] = []

    def add(left: int, right: int) -> None:
        if left >= 0 and right >= 0 and (rank := rank_of(symbols[left], symbols[right])) is not None:
            heappush(heap, (rank, left, right, len(symbols[left]) + len(symbols[right])))

    for left in range(n - 1):
        add(left, left + 1)
    while heap:
        _, left, right, size = heappop(heap)
        if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != size:
            continue
        symbols[left] += symbols[right]
        symbols[right] = ""
        after[left] = after[right]
        if after[left] >= 0:
            before[after[left]] = left
        add(left, after[left])
        add(before[left], left)
    return [symbol for symbol in symbols if symbol]


def merged(word: str, ids: Mapping[str, int], ranks: Mapping[str, int]) -> list[int]:
    """The ids of a word whose characters are tokens, as by the BPE of the `tokenizers` library."""
    return [ids[symbol] for symbol in joined(word, lambda left, right: ranks.get(f"{left} {right}"))]
