"""Byte-level BPE from a tiktoken.model (Kimi K2): each line is a token's bytes in base64 and its rank, which is its id.

The merges are implied: a token is the merge of the two parts that remain when only lower ranks are joined. The rules
for splitting text into words are not in the file but in the repository's code.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from gguf import TokenType

from bridge.errors import BridgeError, parameter
from bridge.gguf_file.pretokenizers import byte_of
from bridge.models.tokenizer.vocabulary import Added, Vocabulary
from bridge.system.storage.files import read_small

_RULES = {"TikTokenTokenizer": "kimi-k2"}  # tokenizer_class -> tokenizer.ggml.pre


def vocabulary_of_tiktoken(
    path: Path, added: Sequence[Added], settings: Mapping[str, Any], pre: str | None
) -> Vocabulary:
    """The vocabulary of a tiktoken.model; BridgeError if it is not one, or its splitting rules are unknown."""
    pre = pre or _RULES.get(str(settings.get("tokenizer_class")))
    if pre is None:
        raise BridgeError(
            f"{path}: its splitting rules are unknown; give {parameter('pre', 'NAME')}, llama.cpp's name for them"
        )
    try:
        pairs = (line.split() for line in read_small(path).splitlines() if line.strip())
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        ranks = {}
    if not ranks:
        raise BridgeError(f"{path}: is not a list of tokens and ranks; take it from the original model")
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
    """The parts from which a token is joined using lower ranks only."""
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
