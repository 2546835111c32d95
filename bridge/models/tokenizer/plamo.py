"""PLaMo's tokenizer.jsonl: a line for each token, [text, score, kind, ...]. GGUF calls it "plamo2".

Of all ways to cut a text into tokens it takes the one whose scores' sum is highest, with bytes as a fallback.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf import TokenType

from bridge.errors import BridgeError
from bridge.models.tokenizer.vocabulary import Added, Vocabulary
from bridge.system.storage.files import read_text

_KINDS = {"UNKNOWN": TokenType.UNKNOWN, "CONTROL": TokenType.CONTROL, "BYTE": TokenType.BYTE}
END_OF_TURN = "<|plamo:op|>"
_UNUSED = -1000.0  # the score of a row without a token


def plamo_vocabulary(file: Path, added: Sequence[Added], vocab: int) -> Vocabulary:
    """The vocabulary of a tokenizer.jsonl, padded to `vocab` rows; BridgeError for a line that is no token."""
    entries: dict[int, tuple[str, int]] = {}
    scores: dict[int, float] = {}
    for number, line in enumerate(filter(str.strip, read_text(file).splitlines())):
        try:
            text, score, kind = _token(json.loads(line))
        except ValueError as problem:
            raise BridgeError(
                f"{file}: line {number + 1} is {line!r:.60}, not [text, score, kind]; {problem}"
            ) from None
        control = text.startswith("<|plamo:") and text.endswith("|>")
        entries[number] = text, _KINDS.get(kind, TokenType.CONTROL if control else TokenType.NORMAL)
        scores[number] = score
    for one in added:
        entries[one.id] = one.content, entries.get(one.id, ("", TokenType.CONTROL))[1]
        scores.setdefault(one.id, _UNUSED)
    for row in range(len(entries), vocab):
        entries.setdefault(row, (f"[PAD{row - len(scores) + 1}]", TokenType.UNUSED))
    return Vocabulary("plamo2", "default", entries, {row: scores.get(row, _UNUSED) for row in entries})


def _token(line: Any) -> tuple[str, float, str]:
    if not isinstance(line, list) or len(line) < 2 or not isinstance(line[0], str):
        raise ValueError("take the file from the original model")
    if isinstance(line[1], bool) or not isinstance(line[1], (int, float)):
        raise ValueError("its score must be a number")
    return line[0], float(line[1]), str(line[2]) if len(line) > 2 else "NORMAL"
