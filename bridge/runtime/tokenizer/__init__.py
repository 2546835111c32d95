"""Text to token ids and back, from a GGUF's metadata alone, as llama.cpp does it.

    tokenizer.ggml.model  "gpt2": BPE by merges; "gemma4": the same, cut as tokenizer.ggml.pre gemma4 (both `bpe.py`)
                          "llama": SentencePiece's joining by score (`spm.py`)
                          "bert": WordPiece, "t5": unigrams (`by_library.py`)
                          "plamo2": the tokens of the highest sum of scores (`plamo.py`)

All are wrapped in the same way: control and user-defined tokens are matched in the raw text first, the
longest before all others, and only what lies between them is cut and merged; BOS and EOS go around a text where
the file asks for them, BERT's own two always.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, compress, takewhile
from typing import Any, Protocol

from bridge.errors import BridgeError
from bridge.gguf_file.special_tokens import (
    BYTE,
    CONTROL,
    NORMAL,
    ROLES,
    SPECIAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    special_tokens,
    stripping,
)
from bridge.runtime.tokenizer.spm import SentencePiece, byte_of_token

# by tokenizer.ggml.model, where no key names a token
_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0}, "bert": {"bos": 101, "sep": 102, "unknown": 100},
    "t5": {"eos": 1, "unknown": 2}, "plamo2": {"bos": 1, "eos": 2, "unknown": 0},
}  # fmt: skip
_OTHER_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle", "sep": "seperator"}  # of roles, in keys
_WHITE_SPACE = " \t\n\v\f\r"
_SURROGATE = re.compile("[\ud800-\udfff]")


class Cutter(Protocol):
    """The part that differs: ordinary text to ids, an ordinary token to bytes."""

    add_bos: bool  # the default, for a file that does not say
    add_eos: bool
    force_bos: bool  # BOS whatever the file says
    force_sep: bool  # SEP after a text, whatever the file says

    def encode(self, text: str, after_special: bool) -> list[int]:
        """ids of text without special tokens; `after_special`: it stands first, or after one."""

    def piece(self, text: str) -> bytes:
        """The bytes of a normal token."""


class Tokenizer:
    """
    tokens, types   by id; the types are those that llama.cpp takes them for, see `special_tokens`
    bos, eos, sep   ids, None where there is none
    last            the id that is put after a text, None where there is none
    add_sep         whether SEP is between two texts, see `around_pair`
    stops           the ids that end a reply
    lstrip, rstrip  the ids that take the white space before or after them in a text
    cutter          what cuts ordinary text
    """

    def __init__(self, metadata: Mapping[str, Any]):
        self.tokens: list[str] = _tokens(metadata)
        count = len(self.tokens)
        self.types, self.stops = _types_and_ends(metadata, self.tokens)
        self.cutter = self._cutter(metadata)
        self.bos = role_token(metadata, "bos", count)
        self.eos = role_token(metadata, "eos", count)
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", self.cutter.add_bos)
        add_bos = add_bos or self.cutter.force_bos
        self.add_bos = bool(add_bos) and self.bos is not None
        add_eos = metadata.get("tokenizer.ggml.add_eos_token", self.cutter.add_eos)
        self.add_eos = bool(add_eos) and self.eos is not None
        self.sep = role_token(metadata, "sep", count)
        add_sep = metadata.get("tokenizer.ggml.add_sep_token", self.cutter.force_sep)
        self.add_sep = bool(add_sep) and self.sep is not None
        self.last = self.sep if self.cutter.force_sep else self.eos if self.add_eos else None
        special = [
            token for token in compress(range(count), map(SPECIAL.__contains__, self.types)) if self.tokens[token]
        ]
        self.lstrip, self.rstrip = stripping(self.tokens, special, metadata)
        special.sort(key=lambda token: len(self.tokens[token].encode("utf-8", "surrogatepass")), reverse=True)
        self._special = {
            parse: [(self.tokens[token], token) for token in special if parse or self.types[token] == USER_DEFINED]
            for parse in (False, True)
        }  # longest first
        self._pieces: dict[int, bytes] = {}

    def __repr__(self) -> str:
        return f"Tokenizer({len(self)} tokens)"

    def __len__(self) -> int:
        return len(self.tokens)

    def text(self, token: int | None) -> str:
        """A token as the vocabulary spells it, "" for None."""
        return "" if token is None else self.tokens[token]

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special    BOS before and EOS after it, where the file asks for them
        parse_special  control tokens spelled out in the text become those tokens

        Raises BridgeError if the text has lone surrogates, which stand for bytes that are not UTF-8.
        """
        if not text.isascii() and (surrogate := _SURROGATE.search(text)):
            raise BridgeError(f"the text is not UTF-8 at character {surrogate.start()}; convert it first")
        ids = [self.bos] if add_special and self.add_bos and self.bos is not None else []
        after_special = True
        for part in self._parts(text, parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self.cutter.encode(part, after_special)
            after_special = isinstance(part, int)
        if add_special and self.last is not None:
            ids.append(self.last)
        return ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts for a model that compares them, see `around_pair`."""
        before, between, after = self.around_pair()
        texts = [self.encode(text, add_special=False, parse_special=False) for text in (first, second)]
        return [*before, *texts[0], *between, *texts[1], *after]

    def around_pair(self) -> tuple[list[int], list[int], list[int]]:
        """The ids before, between and after two texts, as llama-server has them: BOS first EOS SEP second EOS, as far
        as the file asks for them, with SEP where there is no EOS."""
        end = [self.sep if self.eos is None else self.eos] if self.add_eos else []
        between = [*end, self.sep] if self.add_sep else end
        before = [self.bos] if self.add_bos else []
        parts = ([token for token in part if token is not None] for part in (before, between, end))
        return next(parts), next(parts), next(parts)

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes that a token adds to a text; those of control tokens only with `special`."""
        if not 0 <= token < len(self.tokens):
            raise BridgeError(f"token {token}: the vocabulary has {len(self.tokens)} tokens")
        kind = self.types[token]
        if kind in (CONTROL, UNKNOWN) and not special:
            return b""
        if token not in self._pieces:
            self._pieces[token] = self._piece(token, kind)
        return self._pieces[token]

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.piece(token, special) for token in tokens).decode("utf-8", "replace")

    def spelled_as(self, tokens: Sequence[int], earlier: Sequence[int]) -> list[int]:
        """Token ids of the same text, with the tokens of `earlier` as far as its text is the same.

        A model may choose other tokens for a text than the tokenizer cuts it into; its keys and values are of those.
        """
        alike = common_prefix(tokens, earlier)
        texts, ends = [], []
        for rest in (tokens[alike:], earlier[alike:]):
            pieces = [self.piece(t, special=True) for t in takewhile(lambda token: token < len(self.tokens), rest)]
            texts.append(b"".join(pieces))
            ends.append({end: n + 1 for n, end in enumerate(accumulate(map(len, pieces)))})
        same = common_prefix(*texts)
        if not (both := [end for end in ends[0] if end in ends[1] and end <= same]):
            return list(tokens)
        end = max(both)
        return [*earlier[: alike + ends[1][end]], *tokens[alike + ends[0][end] :]]

    def encode_within(self, text: str, most: int, add_special: bool = True) -> list[int]:
        """`encode`; of a text that has far more than `most` tokens, the ids of a beginning that is longer than that.

        So a text of any length takes time and memory for a multiple of `most` tokens. A beginning counts only from
        twice as many tokens: the word that it ends in may have more than in the whole text.
        """
        size = max(8 * most, 1 << 14)  # characters: few texts have more in a token
        while size < len(text):
            if len(ids := self.encode(text[:size], add_special)) > 2 * most:
                return ids
            size *= 2
        return self.encode(text, add_special)

    def stream(self, tokens: Iterable[int], special: bool = False) -> Iterator[str]:
        """The text of token ids as they come, whole characters only: one string, perhaps empty, for each token."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            yield decoder.decode(self.piece(token, special))
        if rest := decoder.decode(b"", True):
            yield rest

    def _piece(self, token: int, kind: int) -> bytes:
        text = self.tokens[token]
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            return text.encode("utf-8")
        if kind == BYTE:
            byte = byte_of_token(text)
            return text.encode("utf-8") if byte is None else bytes([byte])
        return self.cutter.piece(text) if kind == NORMAL else b""

    def _cutter(self, metadata: Mapping[str, Any]) -> Cutter:
        model = metadata.get("tokenizer.ggml.model")
        if model in ("gpt2", "gemma4"):
            from bridge.runtime.tokenizer.bpe import cutter_of

            pre = "gemma4" if model == "gemma4" else metadata.get("tokenizer.ggml.pre") or "default"
            return cutter_of(self.tokens, _items(metadata, "merges", str), pre)
        if model == "llama":
            prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
            unknown = role_token(metadata, "unknown", len(self.tokens)) or 0
            return SentencePiece(self.tokens, self.types, self._scores(metadata), unknown, prefix)
        if model == "plamo2":
            from bridge.runtime.tokenizer.plamo import Plamo

            return Plamo(self.tokens, self.types, self._scores(metadata))
        if model in ("bert", "t5"):
            return self._cutter_of_encoder(metadata, model)
        raise BridgeError(
            f"tokenizer.ggml.model is {model!r}; must be gpt2 (BPE by merges), llama, gemma4, plamo2, bert or t5"
        )

    def _cutter_of_encoder(self, metadata: Mapping[str, Any], model: str) -> Cutter:
        from bridge.runtime.tokenizer.by_library import Unigram, WordPiece

        unknown = role_token(metadata, "unknown", len(self.tokens)) or 0
        if model == "bert":
            lowercase = bool(metadata.get("tokenizer.ggml.normalizer.lowercase", True))
            strips = bool(metadata.get("tokenizer.ggml.normalizer.strip_accents", lowercase))
            return WordPiece(self.tokens, self.types, unknown, lowercase, strips)
        charsmap = bytes(byte & 255 for byte in _items(metadata, "precompiled_charsmap", int))
        flags = (
            bool(metadata.get(f"tokenizer.ggml.{key}")) for key in ("add_space_prefix", "remove_extra_whitespaces")
        )
        return Unigram(self.tokens, self.types, self._scores(metadata), unknown, charsmap, *flags)

    def _scores(self, metadata: Mapping[str, Any]) -> list[float]:
        return _items(metadata, "scores", float, len(self.tokens)) or [0.0] * len(self.tokens)

    def _parts(self, text: str, parse_special: bool) -> list[str | int]:
        """Ordinary texts and special tokens in turn: the longest token is searched in all of the text first."""
        parts: list[str | int] = [text] if text else []
        for spelling, token in [pair for pair in self._special[parse_special] if pair[0] in text]:
            cut = [[part] if isinstance(part, int) else self._cut(part, spelling, token) for part in parts]
            parts = list(chain.from_iterable(cut))
        return parts

    def _cut(self, text: str, spelling: str, token: int) -> Iterator[str | int]:
        """A text in parts, at a special token."""
        pieces = text.split(spelling)
        for number, piece in enumerate(pieces):
            if number:
                yield token
                piece = piece.lstrip(_WHITE_SPACE) if token in self.rstrip else piece
            if number + 1 < len(pieces) and token in self.lstrip:
                piece = piece.rstrip(_WHITE_SPACE)
            if piece:
                yield piece


def stop_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """The ids that end a reply, that of the role eos first. Raises BridgeError if there are no tokens."""
    tokens = _tokens(metadata)
    eos = role_token(metadata, "eos", len(tokens))
    return sorted(_types_and_ends(metadata, tokens)[1], key=lambda token: (token != eos, token))


def _types_and_ends(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[list[int], frozenset[int]]:
    types = _items(metadata, "token_type", int, len(tokens)) or [NORMAL] * len(tokens)
    if metadata.get("tokenizer.ggml.model") == "plamo2":  # where padding is a token like others
        types = [NORMAL if kind == UNUSED else kind for kind in types]
    return special_tokens(tokens, types, {role: role_token(metadata, role, len(tokens)) for role in ROLES})


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = _items(metadata, "tokens", str)
    if not tokens:
        raise BridgeError("tokenizer.ggml.tokens is missing from the GGUF; it has no tokenizer that can be used")
    return tokens


def role_token(metadata: Mapping[str, Any], role: str, tokens: int) -> int | None:
    """The id of a role, where it is one of so many tokens."""
    default = _DEFAULT_IDS.get(str(metadata.get("tokenizer.ggml.model")), {}).get(role)
    for name in (_OTHER_NAMES.get(role, role), role):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token, int) and 0 <= token < tokens:
            return token
    return default if default is not None and default < tokens else None


def _items(metadata: Mapping[str, Any], key: str, kind: type, count: int | None = None) -> list[Any]:
    """An array of the vocabulary's, [] where there is none; BridgeError where it is of another kind or length."""
    items = metadata.get(f"tokenizer.ggml.{key}") or []
    # an array in a GGUF has items of one type
    if not isinstance(items, list) or not all(isinstance(item, kind) for item in items[:1]):
        raise BridgeError(f"tokenizer.ggml.{key} is not an array of {kind.__name__}; convert the model again")
    if items and count is not None and len(items) != count:
        raise BridgeError(f"tokenizer.ggml.{key} has {len(items)} values for {count} tokens; convert the model again")
    return items


def common_prefix(read: Sequence[object], tokens: Sequence[object]) -> int:
    """The number of leading tokens, as ids or texts, that two sequences share."""
    alike = (a == b for a, b in zip(read, tokens, strict=False))
    return next((n for n, same in enumerate(alike) if not same), min(len(read), len(tokens)))
