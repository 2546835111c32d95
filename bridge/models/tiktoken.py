"""Byte-level BPE from a tiktoken.model (Kimi K2): a token a line, its bytes in base64 and its rank, which is its id.

The merges are implied: a token is made of the two parts that it falls into when only lower ranks are joined. How text
is cut into words is not in the file but in the code beside it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from gguf import TokenType

from bridge.errors import BridgeError
from bridge.gguf_file.pretokenizers import byte_of
from bridge.models.vocabulary import Added, Vocabulary
from bridge.system.files import read_small

_RULES = {"TikTokenTokenizer": "kimi-k2"}  # tokenizer_class -> tokenizer.ggml.pre


def vocabulary_of_tiktoken(
    path: Path, added: Sequence[Added], settings: Mapping[str, Any], pre: str | None
) -> Vocabulary:
    """The vocabulary of a tiktoken.model; BridgeError where it is none, or its rules for cutting are not known."""
    pre = pre or _RULES.get(str(settings.get("tokenizer_class")))
    if pre is None:
        raise BridgeError(
            f"{path}: how it cuts words is in code beside it; give --pre NAME as llama.cpp calls its rules"
        )
    try:
        pairs = (line.split() for line in read_small(path).splitlines() if line.strip())
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        ranks = {}
    if not ranks:
        raise BridgeError(f"{path}: is no list of tokens and ranks; take it from the original model")
    character = {byte: text for text, byte in byte_of().items()}

    def text(token: bytes) -> str:
        return "".join(map(character.__getitem__, token))

    entries: dict[int, tuple[str, int]] = {rank: (text(token), TokenType.NORMAL) for token, rank in ranks.items()}
    for token in added:
        entries[token.id] = (token.content, TokenType.CONTROL if token.special else TokenType.USER_DEFINED)
    merges = []
    for token_bytes in sorted(ranks, key=ranks.__getitem__):
        parts = _parts(token_bytes, ranks)
        if len(parts) == 2:
            merges.append(" ".join(map(text, parts)))
    return Vocabulary("gpt2", pre, entries, merges=merges)


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """What a token is joined of by lower ranks than its own."""
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, limit) for a, b in pairwise(parts)]
        lowest = min(joined)
        if lowest >= limit:
            break
        i = joined.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts
