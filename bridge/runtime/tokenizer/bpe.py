"""BPE by merges, by the `tokenizers` library: on bytes or on characters, cut by the rules of tokenizer.ggml.pre."""

import re
from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from typing import Any

from bridge.errors import BridgeError
from bridge.gguf_file.pretokenizers import BYTES, DIGIT_RUN, GPT2_BYTES, ONE_DIGIT, RULES, Rules, Step, byte_of
from bridge.runtime.tokenizer.ascii_words import words_of
from bridge.runtime.tokenizer.spm import SPACE
from bridge.runtime.tokenizer.vocabulary import Vocabulary, merged, ranks_of

_LONG = 1 << 12  # characters that are encoded without Python's lock, which costs more for short texts


def cutter_of(tokens: Sequence[str], merges: Sequence[str], pre: Any) -> "ByteLevel | CharacterLevel":
    """What cuts by a tokenizer.ggml.pre; BridgeError if the name is unknown."""
    rules = RULES.get(pre) if isinstance(pre, str) else None
    if rules is None:
        raise BridgeError(
            f"tokenizer.ggml.pre is {pre!r}, whose rules for cutting words are unknown here; the tokens of a text "
            "cannot be told, logits() of token ids can be computed"
        )
    return (ByteLevel if rules.byte_level else CharacterLevel)(tokens, merges, rules)


class _ByMerges:
    """What both kinds of Cutter (see `__init__.py`) have in common.

    tokenizer  of the `tokenizers` library, which does it; but the first short texts do without, see `vocabulary.py`
    """

    add_eos = force_sep = False
    _unmerged: str  # words that start with it, and are tokens, are not merged where the rules say so

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], rules: Rules):
        self.rules, self.add_bos, self.force_bos = rules, rules.add_bos, rules.force_bos
        self._vocabulary, self._merges = Vocabulary(tokens), merges
        if not _pairs(merges[:1], tokens):
            _ = self.tokenizer  # raises where no other merge makes a token, either

    @cached_property
    def tokenizer(self) -> Any:
        from tokenizers import Tokenizer, models, normalizers

        vocab, pairs = self._vocabulary.ids, _pairs(self._merges, self._vocabulary.ids)
        if not pairs:
            raise BridgeError("tokenizer.ggml.merges is missing from the GGUF or empty; convert the model again")
        if self.rules.byte_level:
            tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=self.rules.ignore_merges))
        else:
            tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, byte_fallback=True))
            tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.pre_tokenizer = pre_tokenizer(self.rules.steps)
        return tokenizer

    def _unmerged_token(self, word: str, ids: Mapping[str, int]) -> int | None:
        """The token that a word is without merges."""
        return ids.get(word) if self.rules.ignore_merges and word.startswith(self._unmerged) else None

    def _ids_of_first(self, words: Sequence[str]) -> list[int] | None:
        """The ids of the words of a text that the vocabulary is scanned for; None: the library has to do it.

        It leaves out a character that is no token, or takes its bytes' tokens, and merges what is next to them: then
        the text does not contain all of its tokens.
        """
        ids = self._vocabulary.ids_within(words)
        if ids is None or not all(character in ids for word in words for character in word):
            return None
        ranks = ranks_of(ids, self._merges)
        tokens: list[int] = []
        for word in words:
            token = self._unmerged_token(word, ids)
            tokens += merged(word, ids, ranks) if token is None else [token]
        return tokens


class ByteLevel(_ByMerges):
    """A Cutter of words of bytes, by the rules that a tokenizer.ggml.pre names."""

    _unmerged = ""

    def encode(self, text: str, after_special: bool) -> list[int]:
        if self._vocabulary.scans(text):
            words = words_of(self.rules.steps, text)
            if words is None:
                words = [word for word, _ in self._pre_tokenizer.pre_tokenize_str(text)]
            if (ids := self._ids_of_first(words)) is not None:
                return ids
        if len(text) < _LONG:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @cached_property
    def _pre_tokenizer(self) -> Any:
        return pre_tokenizer(self.rules.steps)

    def piece(self, text: str) -> bytes:
        table = byte_of()
        if all(c in table for c in text):
            return bytes(table[c] for c in text)
        return text.encode("utf-8")


class CharacterLevel(_ByMerges):
    """A Cutter of words of characters: spaces are U+2581, words are lines and what lies between them, and a character
    without a token becomes its bytes' tokens, <0x0A>."""

    _unmerged = "\n"

    def encode(self, text: str, after_special: bool) -> list[int]:
        words = re.findall("\n+|[^\n]+", text.replace(" ", SPACE))
        if self._vocabulary.scans(text) and (ids := self._ids_of_first(words)) is not None:
            return ids
        tokens: list[int] = []
        for word in words:
            token = self._unmerged_token(word, self._vocabulary.ids)
            tokens += self.tokenizer.encode(word, add_special_tokens=False).ids if token is None else [token]
        return tokens

    def piece(self, text: str) -> bytes:
        return text.replace(SPACE, " ").encode("utf-8")


def _pairs(merges: Sequence[str], vocab: Container[str]) -> list[tuple[str, str]]:
    """The merges that make a token of two."""
    pairs = []
    for merge in merges:
        space = merge.find(" ", 1)
        pair = merge[:space], merge[space + 1 :]
        if space > 0 and pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab:
            pairs.append(pair)
    return pairs


def pre_tokenizer(steps: Sequence[Step]) -> Any:
    """The pre-tokenizer of `tokenizers` that cuts by these steps."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([_pre_tokenizer(step) for step in steps])


def _pre_tokenizer(step: Step) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if step in (BYTES, GPT2_BYTES):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=step == GPT2_BYTES)
    if step in (ONE_DIGIT, DIGIT_RUN):
        return pre_tokenizers.Digits(individual_digits=step == ONE_DIGIT)
    if step[0] == "punctuation":
        return pre_tokenizers.Punctuation(step[1])
    return pre_tokenizers.Split(Regex(step[1]), {"split": "isolated", "next": "merged_with_next"}[step[0]])
