"""Unigram (SentencePiece's, XLM-RoBERTa): of all ways to cut a text into tokens, the one whose scores' sum is highest.

GGUF calls it "t5". Texts are normalized by a table of replacements first, the precompiled charsmap.
"""

from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gguf import GGUFValueType, TokenType
from gguf.gguf_writer import GGUFValue

from bridge.errors import BridgeError
from bridge.models.tokenizer.vocabulary import Added, Vocabulary


def unigram_vocabulary(data: Mapping[str, Any], added: Sequence[Added]) -> Vocabulary:
    """The vocabulary of a tokenizer.json; BridgeError where it has byte fallback, which llama.cpp has not here."""
    model = data["model"]
    if model.get("byte_fallback"):
        raise BridgeError("tokenizer.json: the unigram model has byte_fallback; llama.cpp's has none")
    entries: dict[int, tuple[str, int]] = {}
    scores: dict[int, float] = {}
    for token, (text, score) in enumerate(model["vocab"]):
        entries[token] = (text, TokenType.UNKNOWN if token == model.get("unk_id") else TokenType.NORMAL)
        scores[token] = float(score)
    for one in added:
        if entries.get(one.id, ("", TokenType.NORMAL))[1] != TokenType.UNKNOWN:
            entries[one.id] = (one.content, TokenType.CONTROL if one.special else TokenType.USER_DEFINED)
        scores.setdefault(one.id, 0.0)
    unk = entries.get(model.get("unk_id"), (None, 0))[0]
    prefix = next((_prefixes(part) for part in _parts(data.get("pre_tokenizer")) if part["type"] == "Metaspace"), True)
    splits = any(part["type"] in ("WhitespaceSplit", "Whitespace") for part in _parts(data.get("pre_tokenizer")))
    keys = {"tokenizer.ggml.remove_extra_whitespaces": GGUFValue(splits, GGUFValueType.BOOL)}
    notes = []
    for part in _parts(data.get("normalizer")):
        if part["type"] == "Precompiled":
            table = list(b64decode(part["precompiled_charsmap"]))
            value = GGUFValue(table, GGUFValueType.ARRAY, GGUFValueType.UINT8)
            keys["tokenizer.ggml.precompiled_charsmap"] = value
        elif not _joins_spaces(part):
            notes.append(f"the tokenizer's normalizer {part['type']} is dropped: llama.cpp has none such")
    return Vocabulary("t5", "default", entries, scores, unk=unk, add_space_prefix=prefix, notes=notes, keys=keys)


def _parts(node: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if node is not None and node.get("type") == "Sequence":
        for part in node.get("normalizers") or node.get("pretokenizers") or []:
            yield from _parts(part)
    elif node is not None:
        yield node


def _prefixes(metaspace: Mapping[str, Any]) -> bool:
    scheme = metaspace.get("prepend_scheme", "always" if metaspace.get("add_prefix_space", True) else "never")
    return bool(scheme != "never")


def _joins_spaces(part: Mapping[str, Any]) -> bool:
    """Whether a normalizer makes one space of several, as llama.cpp does, or strips those at the ends."""
    return part["type"] == "Strip" or (part["type"] == "Replace" and part.get("pattern", {}).get("Regex") == " {2,}")
