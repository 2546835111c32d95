"""SentencePiece's BPE as llama.cpp does it: of all neighbours that join to a token, those of the highest score first.

Spaces become U+2581, and one is put before a text where the file asks for it. Characters that are no token
become their bytes' tokens. A heap of candidate pairs makes a text of n characters cost n log n; it is first
cut into words, and words are remembered, where no token has a space after its first other character.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain, compress, count, repeat
from operator import eq

from bridge.errors import BridgeError
from bridge.gguf_file.special_tokens import BYTE
from bridge.runtime.tokenizer.vocabulary import Vocabulary, joined

SPACE = "\u2581"
_REMEMBERED = 1 << 16  # words


class SentencePiece:
    """A Cutter (see `__init__.py`) for tokenizer.ggml.model llama."""

    add_bos, add_eos, force_bos, force_sep = True, False, False, False

    def __init__(
        self, tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], unknown: int, prefix: bool
    ):
        self._tokens, self._scores = tokens, scores
        self._vocabulary = Vocabulary(tokens)
        self._bytes = byte_tokens(tokens, types)
        self._unknown = unknown
        self._prefix = prefix
        self._known = lru_cache(_REMEMBERED)(lambda word: self._join(word, self._vocabulary.ids))

    @cached_property
    def _words(self) -> bool:
        """Whether no token has a space after its first other character."""
        return SPACE not in "".join(map(str.lstrip, self._tokens, repeat(SPACE)))

    def encode(self, text: str, after_special: bool) -> list[int]:
        text = text.replace(" ", SPACE)
        if self._prefix and after_special:
            text = SPACE + text
        if self._vocabulary.scans(text) and (ids := self._vocabulary.ids_within([text])) is not None:
            return self._join(text, ids)
        if not self._words:
            return self._join(text, self._vocabulary.ids)
        words = re.finditer(f"{SPACE}+[^{SPACE}]*|[^{SPACE}]+", text)  # cut before every run of spaces
        return list(chain.from_iterable(self._known(word[0]) for word in words))

    def piece(self, text: str) -> bytes:
        return text.replace(SPACE, " ").encode("utf-8")

    def _join(self, text: str, ids: Mapping[str, int]) -> list[int]:
        """The ids of a text whose tokens are in `ids`."""

        def rank_of(left: str, right: str) -> float | None:
            token = ids.get(left + right)
            return None if token is None else -self._scores[token]

        return list(chain.from_iterable(self._ids_of(symbol, ids) for symbol in joined(text, rank_of)))

    def _ids_of(self, symbol: str, ids: Mapping[str, int]) -> list[int]:
        if symbol in ids:
            return [ids[symbol]]
        return [self._bytes.get(byte, self._unknown) for byte in symbol.encode("utf-8")]


def byte_tokens(tokens: Sequence[str], types: Sequence[int]) -> dict[int, int]:
    """The id of each byte's token; BridgeError where a token of type BYTE has another spelling."""
    of_bytes = {}
    for token in compress(count(), map(eq, types, repeat(BYTE))):
        if (byte := byte_of_token(tokens[token])) is None:
            raise BridgeError(f"token {token} is a byte's, but is spelled {tokens[token]!r}; convert the model again")
        of_bytes[byte] = token
    return of_bytes


def byte_of_token(text: str) -> int | None:
    """The byte that a token of type BYTE stands for: 10 for <0x0A>; None for other spellings."""
    return int(text[3:5], 16) if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text) else None
