"""The tokenizers of encoders, by the `tokenizers` library: WordPiece ("bert") and unigrams ("t5")."""

from collections.abc import Sequence
from typing import Any

from bridge.gguf_file.special_tokens import NORMAL, USER_DEFINED
from bridge.runtime.tokenizer.spm import SPACE


class _ByLibrary:
    """What both kinds of Cutter (see `__init__.py`) have in common."""

    tokenizer: Any  # of the library

    def encode(self, text: str, after_special: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def piece(self, text: str) -> bytes:
        return text.replace(SPACE, " ").encode("utf-8")


class WordPiece(_ByLibrary):
    """Words cut from the left into the longest tokens; U+2581 marks a word's first, and a word of more than 100
    characters is unknown, as in BERT."""

    add_bos, add_eos, force_bos, force_sep = True, False, True, True

    def __init__(self, tokens: Sequence[str], types: Sequence[int], unknown: int, lowercase: bool, strip_accents: bool):
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        words = (NORMAL, USER_DEFINED)
        vocab = {_unmarked(text) if types[id] in words else text: id for id, text in enumerate(tokens)}
        self.tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token=tokens[unknown]))
        self.tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
        self.tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


def _unmarked(text: str) -> str:
    """A token as BERT's vocabularies have it."""
    return text.removeprefix(SPACE) if text.startswith(SPACE) else f"##{text}"


class Unigram(_ByLibrary):
    """The tokens of a text whose scores' sum is highest, where other than normal tokens are no part of it."""

    add_bos, add_eos, force_bos, force_sep = False, True, False, False

    def __init__(
        self, tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], unknown: int, charsmap: bytes,
        prefix: bool, joins_spaces: bool,
    ):  # fmt: skip
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        known = zip(tokens, types, scores, strict=True)
        vocab = [(text, score) if kind == NORMAL else (f"\0{id}", 0.0) for id, (text, kind, score) in enumerate(known)]
        self.tokenizer = Tokenizer(models.Unigram(vocab, unk_id=unknown))
        if charsmap:
            self.tokenizer.normalizer = normalizers.Precompiled(charsmap)
        marks = pre_tokenizers.Metaspace(SPACE, "always" if prefix or joins_spaces else "never", split=joins_spaces)
        spaces = [pre_tokenizers.WhitespaceSplit()] if joins_spaces else []
        self.tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*spaces, marks])
