"""SentencePiece BPE (Llama 1 and 2, Mistral): tokens with scores, from tokenizer.json or tokenizer.model.

llama.cpp joins the two neighbours whose joint token has the highest score, the leftmost first.
tokenizer.model has these scores. tokenizer.json has merges by rank instead, so a token's score is
minus the rank of the first merge that makes it, which gives the same order of joining.

Gemma 4's tokenizer.json goes to GGUF with its merges: model "gemma4".

Either every text gets a leading space or none does. transformers' newer Metaspace rule omits it before
a text that begins with a space, and after special tokens; llama.cpp cannot.

A tokenizer.model is a protocol buffer. These fields are read:

    ModelProto       1: SentencePiece (repeated)   2: TrainerSpec   3: NormalizerSpec
    SentencePiece    1: piece, text   2: score, float32   3: type; the numbers are GGUF's token types
    TrainerSpec      3: model type, 1 unigram (if absent), 2 BPE
    NormalizerSpec   3: add_dummy_prefix, a truth value (true if absent)
"""

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import TokenType

from bridge.errors import BridgeError
from bridge.models.tokenizer.bpe_vocabulary import merge_pairs
from bridge.models.tokenizer.vocabulary import Added, Vocabulary
from bridge.system.storage.files import read_small

SPACE = "\u2581"  # SentencePiece's spelling of a space
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")
_UNIGRAM, _BPE = 1, 2
# special tokens of Gemma 4 that a reply's reader wants to see
_SEEN = {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<tool_response|>", '<|"|>'}
_UNSCORED = -1000.0  # what gguf's own reader of such files gives every token


def vocabulary_of_json(data: Mapping[str, Any], added: Sequence[Added]) -> Vocabulary:
    """The vocabulary of a tokenizer.json with byte fallback."""
    model = _with_fallback(data)
    rank: dict[str, int] = {}
    for i, (left, right) in enumerate(merge_pairs(model)):
        rank.setdefault(left + right, i)
    unk = model.get("unk_token")
    entries: dict[int, tuple[str, int]] = {}
    scores: dict[int, float] = {}
    for text, token in model["vocab"].items():
        kind = TokenType.UNKNOWN if text == unk else TokenType.BYTE if _BYTE.match(text) else TokenType.NORMAL
        entries[token] = (text, kind)
        # no merge makes a single character; its score is below all others, as in a tokenizer.model
        scores[token] = 0.0 if kind != TokenType.NORMAL else -float(rank.get(text, len(rank)))
    _add(entries, scores, added)
    prefix, notes = _space_prefix(data)
    return Vocabulary("llama", "default", entries, scores, unk=unk, add_space_prefix=prefix, notes=notes)


def vocabulary_by_merges(data: Mapping[str, Any], added: Sequence[Added]) -> Vocabulary:
    """The vocabulary of a tokenizer.json with byte fallback, by its own merges: Gemma 4's."""
    model = _with_fallback(data)
    entries: dict[int, tuple[str, int]] = {
        token: (text, TokenType.BYTE if _BYTE.match(text) else TokenType.NORMAL)
        for text, token in model["vocab"].items()
    }
    for one in added:
        special = one.special and one.content not in _SEEN
        entries[one.id] = (one.content, TokenType.CONTROL if special else TokenType.USER_DEFINED)
    merges = [f"{left} {right}" for left, right in merge_pairs(model)]
    scores = dict.fromkeys(entries, _UNSCORED)
    unk = model.get("unk_token")
    return Vocabulary("gemma4", "gemma4", entries, scores, merges, unk=unk, add_space_prefix=False)


def _with_fallback(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The BPE of a tokenizer.json; BridgeError if it has no byte fallback."""
    model: Mapping[str, Any] = data["model"]
    if not model.get("byte_fallback"):
        raise BridgeError(
            "tokenizer.json: the BPE is neither byte-level nor has byte_fallback; llama.cpp has no such tokenizer"
        )
    return model


def _space_prefix(data: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Whether the normalizer or the pre-tokenizer gives a text a leading space."""
    prefix, notes = False, []
    for part in _parts(data.get("normalizer"), "normalizers"):
        if part.get("type") == "Prepend":
            prefix = True
        elif part.get("type") not in ("Replace", None):
            notes.append(f"the tokenizer's normalizer {part['type']} is dropped: llama.cpp does not normalize text")
    for part in _parts(data.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "Metaspace":
            prefix = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never") != "never"
        else:
            notes.append(f"the tokenizer's pre-tokenizer {part.get('type')} is dropped: llama.cpp has none here")
    return prefix, notes


def _parts(node: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    if not node:
        return []
    return list(node.get(key, [])) if node.get("type") == "Sequence" else [node]


def vocabulary_of_model(path: Path, added: Sequence[Added]) -> Vocabulary:
    """The vocabulary of a tokenizer.model."""
    entries: dict[int, tuple[str, int]] = {}
    scores: dict[int, float] = {}
    kind, prefix, unk = _UNIGRAM, True, None
    try:
        for number, value in _fields(read_small(path)):
            if number == 1:
                piece = dict(_fields(value))
                text, token = piece[1].decode("utf-8"), len(entries)
                entries[token] = (text, TokenType(piece.get(3, TokenType.NORMAL)))
                scores[token] = piece.get(2, 0.0)
                if not math.isfinite(scores[token]) or isinstance(scores[token], int):
                    raise ValueError("a score is not a number")
                if entries[token][1] == TokenType.BYTE and not _BYTE.match(text):
                    raise ValueError("a byte token is not <0xNN>")
                unk = text if entries[token][1] == TokenType.UNKNOWN else unk
            elif number == 2:
                kind = dict(_fields(value)).get(3, _UNIGRAM)
            elif number == 3:
                prefix = bool(dict(_fields(value)).get(3, 1))
    except (ValueError, IndexError, KeyError, AttributeError, TypeError, struct.error):
        entries = {}
    if not entries:
        raise BridgeError(f"{path}: not a SentencePiece model; take the tokenizer.json of the original model")
    if kind != _BPE:
        raise BridgeError(f"{path}: a SentencePiece model of type {kind}; must be BPE (2), which llama.cpp supports")
    _add(entries, scores, added)
    return Vocabulary("llama", "default", entries, scores, unk=unk, add_space_prefix=prefix)


def _add(entries: dict[int, tuple[str, int]], scores: dict[int, float], added: Sequence[Added]) -> None:
    """Add the added tokens: raw text, matched before anything else."""
    for token in added:
        if entries.get(token.id, ("", TokenType.NORMAL))[1] == TokenType.UNKNOWN:
            continue
        text = token.content.replace(SPACE, " ") if token.normalized else token.content
        entries[token.id] = (text, TokenType.CONTROL if token.special else TokenType.USER_DEFINED)
        scores[token.id] = 0.0


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protocol buffer message: varints, fixed 32 bits as float, bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(data):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
        elif wire == 1:
            position += 8
        elif wire == 2:
            length = varint()
            if position + length > len(data):
                raise ValueError("a field extends beyond the end")
            position += length
            yield number, data[position - length : position]
        elif wire == 5:
            position += 4
            yield number, struct.unpack("<f", data[position - 4 : position])[0]
        else:
            raise ValueError(f"wire type {wire}")
