"""BPE by merges, by the `tokenizers` library: on bytes or on characters, cut by the rules of tokenizer.ggml.pre."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.errors import BridgeError
from bridge.gguf_file.pretokenizers import BYTES, DIGIT_RUN, GPT2_BYTES, ONE_DIGIT, RULES, Rules, Step, byte_of
from bridge.runtime.tokenizer.spm import SPACE

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


class ByteLevel:
    """A Cutter (see `__init__.py`) of words of bytes, by the rules that a tokenizer.ggml.pre names.

    tokenizer  of the `tokenizers` library, which does it
    """

    add_eos = False

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], rules: Rules):
        from tokenizers import Tokenizer, models

        self.rules, self.add_bos, self.force_bos = rules, rules.add_bos, rules.force_bos
        vocab = {text: token for token, text in enumerate(tokens)}
        model = models.BPE(vocab=vocab, merges=_pairs(merges, vocab), ignore_merges=rules.ignore_merges)
        self.tokenizer = Tokenizer(model)
        self.tokenizer.pre_tokenizer = pre_tokenizer(rules.steps)

    def encode(self, text: str, after_special: bool) -> list[int]:
        if len(text) < _LONG:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def piece(self, text: str) -> bytes:
        table = byte_of()
        if all(c in table for c in text):
            return bytes(table[c] for c in text)
        return text.encode("utf-8")


class CharacterLevel:
    """A Cutter of words of characters: spaces are U+2581, words are lines and what lies between them, and a character
    without a token becomes its bytes' tokens, <0x0A>.

    tokenizer  of the `tokenizers` library, which does it
    """

    add_eos = False

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], rules: Rules):
        from tokenizers import Tokenizer, models, normalizers

        self.rules, self.add_bos, self.force_bos = rules, rules.add_bos, rules.force_bos
        self._vocab = {text: token for token, text in enumerate(tokens)}
        pairs = _pairs(merges, self._vocab)
        self.tokenizer = Tokenizer(models.BPE(vocab=self._vocab, merges=pairs, byte_fallback=True))
        self.tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        self.tokenizer.pre_tokenizer = pre_tokenizer(rules.steps)

    def encode(self, text: str, after_special: bool) -> list[int]:
        ids: list[int] = []
        for part in re.findall("\n+|[^\n]+", text):
            known = self._vocab.get(part) if self.rules.ignore_merges and part[0] == "\n" else None
            ids += self.tokenizer.encode(part, add_special_tokens=False).ids if known is None else [known]
        return ids

    def piece(self, text: str) -> bytes:
        return text.replace(SPACE, " ").encode("utf-8")


def _pairs(merges: Sequence[str], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges that make a token of two; BridgeError if there is none."""
    pairs = []
    for merge in merges:
        at = merge.find(" ", 1)
        pair = merge[:at], merge[at + 1 :]
        if at > 0 and pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab:
            pairs.append(pair)
    if not pairs:
        raise BridgeError("tokenizer.ggml.merges is missing from the GGUF or empty; convert the model again")
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
    assert step[0] == "split", step
    return pre_tokenizers.Split(Regex(step[1]), "isolated")
