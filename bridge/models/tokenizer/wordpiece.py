"""WordPiece (BERT): words are cut from the left into the longest tokens; ## begins those that are not a word's first.

GGUF marks the beginnings of words instead, with U+2581. The normalizer's two choices, small letters and no accents,
have keys of their own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFValueType, TokenType
from gguf.gguf_writer import GGUFValue

from bridge.errors import BridgeError
from bridge.models.tokenizer.vocabulary import Added, Vocabulary
from bridge.system.storage.files import read_text

SPACE, CONTINUING = "\u2581", "##"
_NORMALIZER = "tokenizer.ggml.normalizer."
_SPECIAL = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")


def wordpiece_vocabulary(data: Mapping[str, Any], added: Sequence[Added]) -> Vocabulary:
    """The vocabulary of a tokenizer.json; BridgeError where llama.cpp cuts words by other rules."""
    model = data["model"]
    if model.get("continuing_subword_prefix", CONTINUING) != CONTINUING:
        raise BridgeError(
            f"tokenizer.json: parts of words begin with {model['continuing_subword_prefix']!r}; llama.cpp knows "
            f"{CONTINUING!r} alone"
        )
    special = {token.id: token for token in added}
    entries: dict[int, tuple[str, int]] = {}
    for text, token in [*model["vocab"].items(), *((one.content, one.id) for one in added)]:
        if token in special and special[token].special:
            entries[token] = (special[token].content, TokenType.CONTROL)
        else:
            kind = TokenType.USER_DEFINED if token in special else TokenType.NORMAL
            marked = text.removeprefix(CONTINUING) if text.startswith(CONTINUING) else SPACE + text
            entries[token] = (marked, kind)
    keys, notes = _normalizer(data.get("normalizer"))
    unk, padding = model.get("unk_token"), f"{SPACE}[PAD{{}}]"
    return Vocabulary("bert", "bert-bge", entries, unk=unk, notes=notes, keys=keys, padding=padding)


def _normalizer(node: Mapping[str, Any] | None) -> tuple[dict[str, GGUFValue], list[str]]:
    """The keys of a normalizer, and notes on its parts that llama.cpp has no key for."""
    values: dict[str, Any] = {"lowercase": False}
    notes = []
    for part in (node or {}).get("normalizers", [node or {}]):
        kind = part.get("type")
        if kind == "BertNormalizer":
            values |= {name: part[name] for name in ("lowercase", "strip_accents") if part.get(name) is not None}
        elif kind == "Lowercase":
            values["lowercase"] = True
        elif kind == "StripAccents":
            values["strip_accents"] = True
        elif kind not in (None, "NFD", "NFC", "NFKC"):
            notes.append(f"the tokenizer's normalizer {kind} is dropped: llama.cpp has none such")
    return {f"{_NORMALIZER}{name}": GGUFValue(bool(value), GGUFValueType.BOOL) for name, value in values.items()}, notes


def tokenizer_of_vocab_txt(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A vocab.txt, a token in each line, as the tokenizer.json that transformers makes of it."""
    tokens = read_text(file).splitlines()
    vocab = {text: token for token, text in enumerate(tokens)}
    ends = [settings.get("cls_token", "[CLS]"), settings.get("sep_token", "[SEP]")]
    first, last = ({"SpecialToken": {"id": text, "type_id": 0}} for text in ends)
    parts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "model": {"type": "WordPiece", "vocab": vocab, "unk_token": settings.get("unk_token", "[UNK]")},
        "added_tokens": [
            {"id": vocab[text], "content": text, "special": True} for text in _SPECIAL if text in vocab
        ],
        "normalizer": {
            "type": "BertNormalizer", "lowercase": settings.get("do_lower_case", True),
            "strip_accents": settings.get("strip_accents"),
        },
        "post_processor": {
            "type": "TemplateProcessing", "single": [first, parts[0], last],
            "pair": [first, parts[0], last, parts[1], last],
        },
    }  # fmt: skip
