"""A tokenizer in two forms: `Vocabulary` as its file has it, `GGUFTokenizer` as GGUF has it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import gguf
from gguf.gguf_writer import GGUFValue


@dataclass(frozen=True)
class Added:
    """A token outside the merges.

    normalized      it is matched after the normalizer has run
    lstrip, rstrip  it takes the white space before or after it
    """

    id: int
    content: str
    special: bool
    normalized: bool
    lstrip: bool = False
    rstrip: bool = False


@dataclass
class Vocabulary:
    """A vocabulary of either kind, before special tokens and padding.

    entries  id -> (text, type)
    scores   id -> score, or None
    keys     further keys of the GGUF
    padding  the text of a row that has no token, with {} for its number
    """

    model: str
    pre: str
    entries: dict[int, tuple[str, int]]
    scores: dict[int, float] | None = None
    merges: list[str] | None = None
    unk: str | None = None
    add_space_prefix: bool | None = None
    notes: list[str] = field(default_factory=list)
    keys: dict[str, GGUFValue] = field(default_factory=dict)
    padding: str = "[PAD{}]"


@dataclass
class GGUFTokenizer:
    """tokens, types, scores: one per row of the embedding; merges: "a b", by rank; ids: by role.

    lstrip, rstrip  ids of the added tokens that take the white space before or after them, which GGUF has no key for
    keys            further keys
    """

    model: str  # tokenizer.ggml.model: "gpt2", "llama", "gemma4", "bert" or "t5"
    pre: str  # tokenizer.ggml.pre
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    ids: dict[str, int] = field(default_factory=dict)
    stop_ids: list[int] = field(default_factory=list)
    add_bos: bool = False
    add_eos: bool = False
    add_sep: bool | None = None  # between two texts, after the first one's EOS
    add_space_prefix: bool | None = None
    chat_templates: dict[str, str] = field(default_factory=dict)
    lstrip: frozenset[int] = frozenset()
    rstrip: frozenset[int] = frozenset()
    notes: list[str] = field(default_factory=list)
    keys: dict[str, GGUFValue] = field(default_factory=dict)

    def text(self, role: str) -> str:
        """The text of a special token, or ""."""
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
            writer.add_uint32(getattr(gguf.Keys.Tokenizer, f"{role.upper()}_ID"), token)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        if self.add_sep is not None:
            writer.add_add_sep_token(self.add_sep)
        writer.kv_data[0].update(self.keys)
        if self.add_space_prefix is not None:
            writer.add_add_space_prefix(self.add_space_prefix)
        if set(self.chat_templates) == {"default"}:
            writer.add_chat_template(self.chat_templates["default"])
        elif self.chat_templates:
            writer.add_chat_template([{"name": n, "template": t} for n, t in self.chat_templates.items()])


def special_text(metadata: Mapping[str, GGUFValue], key: str) -> str:
    """The text of the token whose id a GGUF has under `key`, or ""."""
    tokens, token = (metadata[k].value if k in metadata else None for k in (gguf.Keys.Tokenizer.LIST, key))
    if isinstance(tokens, list) and isinstance(token, int) and 0 <= token < len(tokens):
        return str(tokens[token])
    return ""
