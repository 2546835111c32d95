"""The first short texts, whose tokens are looked for in the vocabulary, have the ids of all later ones."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import BridgeError
from bridge.runtime.tokenizer import Tokenizer
from bridge.runtime.tokenizer import vocabulary as module
from bridge.runtime.tokenizer.vocabulary import Vocabulary, merged, ranks_of

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = "aab\n▁é"
ALPHABET = "ab\n▁é日ĠĊÃ©"  # nearly all characters that the cutters make of texts
words = st.text(LETTERS, max_size=12)
pieces = st.text("abé▁", min_size=1, max_size=4)
# of few letters, so that most are tokens: some are not, some come twice, some have a space
merge_lists = st.lists(
    st.one_of(
        st.tuples(pieces, pieces).map(" ".join), st.sampled_from(["a a", "aa a", "a aa", "", " ", "a", "a b c", " a b"])
    ),
    max_size=12,
)


@st.composite
def vocabularies(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Tokens and merges: the tokens of most merges, and texts of no merge; some are empty, some come twice."""
    merges = draw(merge_lists)
    tokens = [merge.replace(" ", "", 1) for merge in merges if draw(st.integers(0, 9))]
    tokens += draw(st.lists(st.one_of(pieces, st.sampled_from(["", "<0xC3>", "<0xA9>", *LETTERS])), max_size=8))
    return ["a", "b", *draw(st.permutations(tokens)), "ab"], [*merges, "a b"]


@settings(max_examples=300, deadline=None)
@given(vocabulary=vocabularies(), word=words)
def test_words_are_merged_as_by_the_tokenizers_library(vocabulary: tuple[list[str], list[str]], word: str) -> None:
    tokens, merges = vocabulary
    tokens = [*LETTERS, *tokens]
    ids = Vocabulary(tokens).ids
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids and "".join(pair) in ids]
    model = tokenizers.models.BPE(vocab=ids, merges=known)
    within = Vocabulary(tokens).ids_within([word])
    assert within is not None
    assert merged(word, within, ranks_of(within, merges)) == [token.id for token in model.tokenize(word)]


def first_and_later(metadata: dict[str, Any], text: str) -> tuple[list[int], list[int]]:
    """The ids of a text as the first of a tokenizer, and as one after many."""
    first, later = Tokenizer(metadata), Tokenizer(metadata)
    cutter: Any = later.cutter
    cutter._vocabulary._left = 0
    return first.encode(text), later.encode(text)


def keys(model: str, **values: Any) -> dict[str, Any]:
    return {"tokenizer.ggml.model": model, **{f"tokenizer.ggml.{key}": value for key, value in values.items()}}


@settings(max_examples=200, deadline=None)
@given(vocabulary=vocabularies(), text=st.text(LETTERS + " Ġ日", max_size=30))
@pytest.mark.parametrize(
    ("model", "pre"), [("gpt2", "gpt-2"), ("gpt2", "llama-bpe"), ("gemma4", ""), ("gpt2", "sarvam-moe")]
)
def test_the_first_texts_are_merged_as_later_ones(
    model: str, pre: str, vocabulary: tuple[list[str], list[str]], text: str
) -> None:
    tokens, merges = vocabulary
    tokens = [*tokens, *(BYTES if len(text) % 2 else []), *(ALPHABET if len(text) % 3 else [])]
    first, later = first_and_later(keys(model, tokens=tokens, merges=merges, pre=pre), text)
    assert first == later


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.one_of(pieces, st.sampled_from(["", "a▁", "▁▁", *LETTERS])), min_size=1, max_size=20),
    text=st.text(LETTERS + " 日", max_size=30),
    data=st.data(),
)
def test_the_first_texts_are_joined_as_later_ones(tokens: list[str], text: str, data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.integers(-3, 3).map(float), min_size=len(tokens), max_size=len(tokens)))
    names = data.draw(st.sampled_from([BYTES, []]))
    types = [1] * len(tokens) + [6] * len(names)
    metadata = keys("llama", tokens=[*tokens, *names], scores=[*scores, *(0.0 for _ in names)], token_type=types)
    first, later = first_and_later(metadata, text)
    assert first == later


def test_texts_are_scanned_for_until_there_were_a_few_or_a_long_one() -> None:
    vocabulary = Vocabulary(["a", "b", "ab", "a"])
    assert vocabulary.ids_within(["abc"]) == {"a": 3, "b": 1, "ab": 2}
    assert [vocabulary.scans("a"), vocabulary.scans("a" * 513)] == [True, False]
    for _ in range(7):
        vocabulary.ids_within(["b"])
    assert not vocabulary.scans("a")
    vocabulary = Vocabulary(["a"])
    assert vocabulary.ids == {"a": 0}
    assert not vocabulary.scans("a")


def test_a_vocabulary_of_all_parts_of_a_text_is_not_scanned_for_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 500)))
    tokens = [text[start:end] for start in range(500) for end in range(start + 1, 501)]
    assert Vocabulary(tokens).ids_within([text]) is None
    monkeypatch.setattr(module, "_MOST", 2)
    merges, tokens = ["a b"], ["a", "b", "ab", "Ġ"]
    for pre in ("gpt-2", "sarvam-moe"):
        assert Tokenizer(keys("gpt2", tokens=tokens, merges=merges, pre=pre)).encode("abb") == [2, 1]
    assert Tokenizer(keys("llama", tokens=tokens, add_space_prefix=False)).encode("abb") == [1, 2, 1]


def test_merges_of_which_none_makes_a_token_are_refused() -> None:
    for merges in ([], ["a c"], ["", "a", " ", "c c"]):
        with pytest.raises(BridgeError, match="merges is missing from the GGUF or empty"):
            Tokenizer(keys("gpt2", tokens=["a", "b", "ab"], merges=merges, pre="gpt-2"))
    assert Tokenizer(keys("gpt2", tokens=["a", "b", "ab"], merges=["a c", "a b"], pre="gpt-2")).encode("ab") == [2]
