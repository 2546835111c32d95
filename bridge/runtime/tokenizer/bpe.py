"""BPE by merges, by the `tokenizers` library: on bytes, cut by the rules of tokenizer.ggml.pre, or on characters."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.errors import BridgeError
from bridge.gguf_file.pretokenizers import BYTES, DIGIT_RUN, GPT2_BYTES, ONE_DIGIT, Step, byte_of, rules_of
from bridge.runtime.tokenizer.spm import SPACE

_LONG = 1 << 12  # characters that are encoded without Python's lock, which costs more for short texts


class ByteLevel:
    """A Cutter (see `__init__.py`) for tokenizer.ggml.model gpt2; `pre` names its rules for cutting words.

    tokenizer  of the `tokenizers` library, which does it
    """

    add_eos = False

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], pre: Any):
        from tokenizers import Tokenizer, models

        rules = rules_of(pre) if isinstance(pre, str) else None
        if rules is None:
            raise BridgeError(
                f"tokenizer.ggml.pre is {pre!r}, whose rules for cutting words are unknown here; the tokens of a text "
                "cannot be told, logits() of token ids can be computed"
            )
        steps, ignore_merges, self.add_bos = rules
        vocab = {text: token for token, text in enumerate(tokens)}
        self.tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_pairs(merges, vocab), ignore_merges=ignore_merges))
        self.tokenizer.pre_tokenizer = pre_tokenizer(steps)

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
    """A Cutter for tokenizer.ggml.model gemma4: spaces are U+2581, words are lines and what lies between them, and a
    character without a token becomes its bytes' tokens, <0x0A>. A run of newlines that is a token is that token.

    tokenizer  of the `tokenizers` library, which does it
    """

    add_bos, add_eos = True, False

    def __init__(self, tokens: Sequence[str], merges: Sequence[str]):
        from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

        self._vocab = {text: token for token, text in enumerate(tokens)}
        pairs = _pairs(merges, self._vocab)
        self.tokenizer = Tokenizer(models.BPE(vocab=self._vocab, merges=pairs, byte_fallback=True))
        self.tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        self.tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")

    def encode(self, text: str, after_special: bool) -> list[int]:
        ids: list[int] = []
        for part in re.findall("\n+|[^\n]+", text):
            known = self._vocab.get(part) if part[0] == "\n" else None
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
