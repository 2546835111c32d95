"""Byte-level BPE from tokenizer.json: GPT-2's scheme, which Llama 3, Qwen and most others use.

Tokens are written in 256 printable characters, one for each byte; merges are pairs of tokens by
rank. Added tokens are raw text, matched before any cutting: control tokens if they are special,
user-defined tokens otherwise.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gguf import TokenType

from bridge.errors import BridgeError
from bridge.models.tokenizer.pretokenizer import recognize
from bridge.models.tokenizer.vocabulary import Added, Vocabulary


def is_byte_level(data: Mapping[str, Any]) -> bool:
    """Whether any part of a tokenizer.json maps bytes to characters."""

    def mentions(node: Any) -> bool:
        if isinstance(node, Mapping):
            return node.get("type") == "ByteLevel" or any(mentions(value) for value in node.values())
        return isinstance(node, list) and any(mentions(value) for value in node)

    return mentions(data.get("pre_tokenizer")) or mentions(data.get("decoder"))


def byte_level_vocabulary(data: Mapping[str, Any], added: Sequence[Added], pre: str | None) -> Vocabulary:
    """The vocabulary of a byte-level tokenizer.json; `pre` overrides the recognition of its rules."""
    model = data["model"]
    vocab: Mapping[str, int] = model["vocab"]
    notes: list[str] = []
    if pre is None:
        pre, notes = recognize(data.get("pre_tokenizer"), bool(model.get("ignore_merges")), vocab)
    entries: dict[int, tuple[str, int]] = {token: (text, TokenType.NORMAL) for text, token in vocab.items()}
    for token in added:
        entries[token.id] = (token.content, TokenType.CONTROL if token.special else TokenType.USER_DEFINED)
    normalizer = data.get("normalizer") or {}
    for part in normalizer.get("normalizers", [normalizer]):
        if part.get("type") not in (None, "NFC"):  # text nearly always is NFC already
            notes.append(f"the tokenizer's normalizer {part['type']} is dropped: llama.cpp does not normalize text")
    if any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")):
        notes.append("the tokenizer marks parts of words, which llama.cpp's byte-level BPE does not")
    space = "\u0120"  # a space within a token, which is not byte-level text, as the character of its byte
    merges = [f"{left.replace(' ', space)} {right.replace(' ', space)}" for left, right in merge_pairs(model)]
    return Vocabulary("gpt2", pre, entries, merges=merges, unk=model.get("unk_token"), notes=notes)


def merge_pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Merges by rank, from either spelling: "a b" or ["a", "b"]."""
    pairs = []
    for merge in model.get("merges") or []:
        left, space, right = merge.partition(" ") if isinstance(merge, str) else (merge[0], " ", merge[1])
        if not space or not left or not right:
            raise BridgeError(f"tokenizer.json: the merge {merge!r} is not a pair of tokens; the file is damaged")
        pairs.append((left, right))
    if not pairs:
        raise BridgeError("tokenizer.json: the BPE model has no merges; the file is damaged")
    return pairs
