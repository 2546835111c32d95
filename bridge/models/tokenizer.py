"""A Hugging Face tokenizer as the tokenizer.* keys of a GGUF.

Two kinds reach GGUF: byte-level BPE ("gpt2": tokens and merges, see `bridge.models.bpe`) and
SentencePiece BPE ("llama": tokens and scores, see `bridge.models.sentencepiece`). This module finds
out which it is and adds what both have: special tokens, added tokens, chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType

from bridge.errors import BridgeError
from bridge.models.config import Config, read_json

_ROLES = ("bos", "eos", "unk", "pad", "sep", "mask")
_END_OF_MESSAGE = ("<|eom_id|>",)


@dataclass
class Tokenizer:
    """tokens, types, scores: one per row of the embedding; merges: "a b", by rank; ids: by role."""

    model: str  # tokenizer.ggml.model: "gpt2" or "llama"
    pre: str  # tokenizer.ggml.pre
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    ids: dict[str, int] = field(default_factory=dict)
    stop_ids: list[int] = field(default_factory=list)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool | None = None
    chat_templates: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default") or next(iter(self.chat_templates.values()), None)

    def text(self, role: str) -> str:
        """The text of a special token, "" where there is none."""
        return self.tokens[self.ids[role]] if role in self.ids else ""

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        writer.add_token_types(self.types)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        for role, token in self.ids.items():
            writer.add_uint32(_ID_KEYS[role], token)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        if self.add_space_prefix is not None:
            writer.add_add_space_prefix(self.add_space_prefix)
        if set(self.chat_templates) == {"default"}:
            writer.add_chat_template(self.chat_templates["default"])
        elif self.chat_templates:
            writer.add_chat_template([{"name": n, "template": t} for n, t in self.chat_templates.items()])


_ID_KEYS = {
    "bos": gguf.Keys.Tokenizer.BOS_ID,
    "eos": gguf.Keys.Tokenizer.EOS_ID,
    "eot": gguf.Keys.Tokenizer.EOT_ID,
    "eom": gguf.Keys.Tokenizer.EOM_ID,
    "unk": gguf.Keys.Tokenizer.UNK_ID,
    "pad": gguf.Keys.Tokenizer.PAD_ID,
    "sep": gguf.Keys.Tokenizer.SEP_ID,
    "mask": gguf.Keys.Tokenizer.MASK_ID,
}


@dataclass(frozen=True)
class Added:
    """A token outside the merges; `normalized`: it is looked for after the normalizer has run."""

    id: int
    content: str
    special: bool
    normalized: bool


@dataclass
class Vocabulary:
    """What the two kinds of tokenizer yield before special tokens and padding are seen to.

    entries  id -> (text, type)
    scores   id -> score, or None
    """

    model: str
    pre: str
    entries: dict[int, tuple[str, int]]
    scores: dict[int, float] | None = None
    merges: list[str] | None = None
    unk: str | None = None
    add_space_prefix: bool | None = None
    notes: list[str] = field(default_factory=list)


def read_tokenizer(config: Config, folder: Path, generation: Mapping[str, Any], pre: str | None) -> Tokenizer:
    """The tokenizer of a Hugging Face directory, with as many tokens as config.json's vocab_size.

    pre  overrides the recognition of the pre-tokenizer

    Raises:
        BridgeError: no tokenizer, or one that GGUF cannot express.
    """
    from bridge.models import bpe, sentencepiece

    settings = read_json(folder / "tokenizer_config.json")
    data = read_json(folder / "tokenizer.json")
    added = _added_tokens(folder, settings, data)
    if data:
        model = data.get("model") or {}
        if model.get("type", "BPE" if "merges" in model else None) != "BPE":
            raise BridgeError(
                f"{folder / 'tokenizer.json'}: the tokenizer is a {model.get('type')}, BPE alone can be converted"
            )
        vocabulary = bpe.read(data, added, pre) if bpe.is_byte_level(data) else sentencepiece.read_json(data, added)
    elif (folder / "tokenizer.model").is_file():
        vocabulary = sentencepiece.read_model(folder / "tokenizer.model", added)
    else:
        raise BridgeError(
            f"{folder}: neither tokenizer.json nor tokenizer.model; take them from the original model, or save them "
            "with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    if pre is not None:
        vocabulary.pre = pre
    if vocabulary.model == "llama" and isinstance(settings.get("add_prefix_space"), bool):
        vocabulary.add_space_prefix = settings["add_prefix_space"]
    tokens, types, scores, notes = _rows(vocabulary, config.integer("vocab_size"))
    tokenizer = Tokenizer(
        vocabulary.model, vocabulary.pre, tokens, types, scores, vocabulary.merges,
        add_space_prefix=vocabulary.add_space_prefix, chat_templates=read_chat_templates(folder, settings),
        notes=vocabulary.notes + notes,
    )  # fmt: skip
    _add_special_tokens(tokenizer, config, folder, settings, generation, vocabulary.unk)
    _add_bos_and_eos(tokenizer, data, settings)
    return tokenizer


def _added_tokens(folder: Path, settings: Mapping[str, Any], data: Mapping[str, Any]) -> list[Added]:
    """From tokenizer.json, tokenizer_config.json and added_tokens.json; the first to name an id wins."""
    found: dict[int, Added] = {}

    def note(token: Any, content: Any, entry: Mapping[str, Any]) -> None:
        if isinstance(content, str) and str(token).isdecimal():
            special, normalized = bool(entry.get("special", False)), bool(entry.get("normalized", False))
            found.setdefault(int(token), Added(int(token), content, special, normalized))

    for entry in data.get("added_tokens") or []:
        note(entry.get("id"), entry.get("content"), entry)
    for token, entry in (settings.get("added_tokens_decoder") or {}).items():
        note(token, entry.get("content"), entry)
    known = {token.content for token in found.values()}
    for content, token in read_json(folder / "added_tokens.json").items():
        if content not in known:
            note(token, content, {})
    return sorted(found.values(), key=lambda token: token.id)


def _rows(vocabulary: Vocabulary, size: int) -> tuple[list[str], list[int], list[float] | None, list[str]]:
    """Lists by id: gaps and the tail are filled with unused tokens, ids beyond the embedding left out."""
    entries, notes = vocabulary.entries, []
    if beyond := sorted(token for token in entries if token >= size):
        shown = ", ".join(entries[token][0] for token in beyond[:3])
        notes.append(f"{len(beyond)} tokens have no row in the embedding of {size} rows and are left out: {shown}")
    tokens, types = [], []
    taken: set[str] = set()
    for token in range(size):
        text, kind = entries.get(token, (f"[PAD{token}]", int(TokenType.UNUSED)))
        while text in taken:  # llama.cpp refuses a vocabulary with a text twice
            text, kind = f"{text}[{token}]", int(TokenType.UNUSED)
        taken.add(text)
        tokens.append(text)
        types.append(int(kind))
    scores = vocabulary.scores
    rows = None if scores is None else [scores.get(token, -10000.0) for token in range(size)]
    return tokens, types, rows, notes


def _content(value: Any) -> str | None:
    """The text of a special token: a string, or an object with `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _add_special_tokens(
    tokenizer: Tokenizer, config: Config, folder: Path, settings: Mapping[str, Any],
    generation: Mapping[str, Any], unk: str | None,
) -> None:  # fmt: skip
    """Ids by role: from the tokenizer's files, else config.json's; and all the tokens that end a reply."""
    index = {text: i for i, text in enumerate(tokenizer.tokens)}
    special_map = read_json(folder / "special_tokens_map.json")
    for role in _ROLES:
        text = _content(settings.get(f"{role}_token")) or _content(special_map.get(f"{role}_token"))
        token = index.get(text) if text else None
        if token is None:
            ids = _id_list(config.get(f"{role}_token_id"))
            token = next((i for i in ids if i < len(tokenizer.tokens)), None)
        if token is None and role == "unk" and unk is not None:
            token = index.get(unk)
        if token is not None:
            tokenizer.ids[role] = token
            if role == "unk" and tokenizer.model == "llama":
                tokenizer.types[token] = int(TokenType.UNKNOWN)
            elif role != "unk" and tokenizer.types[token] in (TokenType.NORMAL, TokenType.USER_DEFINED):
                tokenizer.types[token] = int(TokenType.CONTROL)
    stops = [tokenizer.ids["eos"]] if "eos" in tokenizer.ids else []
    for token in _id_list(generation.get("eos_token_id")) + _id_list(config.get("eos_token_id")):
        if token < len(tokenizer.tokens) and token not in stops:
            stops.append(token)
    tokenizer.stop_ids = stops
    # llama.cpp knows the usual names by itself; what generation_config.json adds may have others
    for token in stops[1:]:
        role = "eom" if tokenizer.tokens[token] in _END_OF_MESSAGE else "eot"
        tokenizer.ids.setdefault(role, token)


def _id_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _add_bos_and_eos(tokenizer: Tokenizer, data: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Whether a prompt is given BOS and EOS: the post-processor's template, overruled by explicit settings."""
    template = _template(data.get("post_processor"))
    # transformers' Llama classes prepend BOS unless told otherwise
    add_bos = template is None and str(settings.get("tokenizer_class", "")).startswith(("LlamaTok", "CodeLlamaTok"))
    add_eos = False
    if template is not None:
        sequence = next((i for i, part in enumerate(template) if "Sequence" in part), 0)
        before, after = _names(template[:sequence]), _names(template[sequence + 1 :])
        add_bos, add_eos = tokenizer.text("bos") in before, tokenizer.text("eos") in after
        if len(before) > int(add_bos) or len(after) > int(add_eos):
            tokenizer.notes.append(
                f"the tokenizer puts {' '.join(before)} before and {' '.join(after)} after a text; "
                "llama.cpp puts no more than BOS and EOS there"
            )
    if isinstance(settings.get("add_bos_token"), bool):
        add_bos = settings["add_bos_token"]
    if isinstance(settings.get("add_eos_token"), bool):
        add_eos = settings["add_eos_token"]
    tokenizer.add_bos = add_bos and "bos" in tokenizer.ids
    tokenizer.add_eos = add_eos and "eos" in tokenizer.ids


def _template(processor: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]] | None:
    """The `single` template of a post-processor, None where it has none."""
    for part in (processor or {}).get("processors", [processor or {}]):
        if part.get("type") == "TemplateProcessing":
            return part.get("single") or []
    return None


def _names(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    return [part["SpecialToken"]["id"] for part in parts if "SpecialToken" in part]


def read_chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Jinja chat templates by name; files beside the tokenizer overrule tokenizer_config.json."""
    templates: dict[str, str] = {}
    value = settings.get("chat_template")
    if value is None:
        value = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, dict):
        templates.update({name: text for name, text in value.items() if isinstance(text, str)})
    elif isinstance(value, list):
        templates.update({entry["name"]: entry["template"] for entry in value if {"name", "template"} <= set(entry)})
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates
