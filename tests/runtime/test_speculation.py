"""Guessed tokens: the reply is the one without guesses, in every setting, from fewer steps of the decoder."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.errors import BridgeError
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.decoder.decoder import WIDEST, Decoder
from bridge.runtime.model import Model
from bridge.runtime.reader import open_gguf
from bridge.runtime.replies.speculation import Drafter, NgramDrafter, Speculation, check_decoder
from tests.conftest import CHECKPOINT, repacked
from tests.support.tiny_gguf import write_decoder

TEXT = "KING RICHARD:\nWhat is that to me? What is that to thee?\nKING RICHARD:\nWhat is"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("speculation") / "model.gguf"
    bridge.convert(CHECKPOINT, out)
    return out


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return bridge.Model.load(path, context=400)


def both(model: Model, draft: Any, limit: int = 60, **options: Any) -> tuple[list[int], list[int], Speculation]:
    """The tokens of a reply without guesses and with them, and how far the guesses were right."""
    options = {"temperature": 0} | options
    plain = list(model.generate_tokens(TEXT, limit, **options))
    guessed = list(model.generate_tokens(TEXT, limit, draft=draft, **options))
    assert model.timing.speculation is not None
    return plain, guessed, model.timing.speculation


# --- guesses ---


@pytest.mark.parametrize(
    ("tokens", "most", "guessed"),
    [
        ([5, 1, 2, 3, 8, 9, 1, 2, 3], 3, [8, 9, 1]),
        ([1, 2, 8, 1, 2, 9, 7, 1, 2], 2, [9, 7]),  # the last time counts
        ([4, 1, 2, 3, 8, 0, 1, 2, 6, 4, 1, 2], 2, [3, 8]),  # three tokens before two
        ([1, 2, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),  # beyond the end of the text
        ([1, 2, 3, 4], 3, []),
        ([1], 3, []),
    ],
)
def test_what_followed_the_last_tokens_before_is_guessed(tokens: list[int], most: int, guessed: list[int]) -> None:
    assert NgramDrafter().propose(tokens, most) == guessed
    drafter = NgramDrafter()
    for n in range(1, len(tokens)):
        drafter.propose(tokens[:n], most)
    assert drafter.propose(tokens, most) == guessed


class Always(Drafter):
    """Guesses one token for ever."""

    def propose(self, tokens: Any, most: int) -> list[int]:
        return [7] * most


def test_more_is_guessed_after_right_guesses_and_less_often_after_wrong_ones() -> None:
    speculation = Speculation(Always(), [1])
    assert speculation.guesses(7) == [7, 7, 7]
    assert [speculation.drew(token) for token in (7, 7, 7, 2)] == [True, True, True, False]
    assert speculation.guesses(7) == [7] * 7
    assert [speculation.drew(token) for token in (7, 2)] == [True, False]
    lengths = []
    for _ in range(9):
        lengths.append(len(speculation.guesses(7)))
        speculation.drew(2)
    assert lengths == [3, 0, 3, 0, 0, 3, 0, 0, 0]
    assert (speculation.drafted, speculation.accepted) == (19, 4)
    assert speculation.tokens == [1, 7, 7, 7, 2, 7, 2, *[2] * 9]
    assert Speculation(Always(), [1]).guesses(0) == []


# --- the same reply ---


@repacked
@pytest.mark.parametrize("kv", ["f16", "q8_0", "f32"])
@pytest.mark.parametrize("precision", ["int8", "f32"])
def test_several_tokens_are_computed_as_each_alone_is(kv: str, precision: str, path: Path) -> None:
    """To the last bit, logits and what the cache holds, at the start, around the end of the first span and after it."""
    decoder = bridge.Model.load(path, context=300, kv=kv, precision=precision)._decoder
    own, other = decoder.cache, decoder.new_cache()
    tokens = np.random.default_rng(0).integers(0, 2048, 290).tolist()
    for start in (3, 249, 270):
        for cache in (own, other):
            cache.length = 0
            decoder.run(tokens[:start], cache=cache)
        at = start
        while at < start + 12:
            part = tokens[at : at + decoder.room()]
            alone = [decoder.step([other], [token])[0].copy() for token in part]
            np.testing.assert_array_equal(decoder.follow(part), alone)
            at += len(part)
        assert own.tokens[: own.length] == other.tokens[: other.length] == tokens[:at]
        for values, expected in zip(own.values, other.values, strict=True):
            np.testing.assert_array_equal(values[:, :, :at], expected[:, :, :at])


@repacked
def test_layers_with_a_window_compute_each_alone_too(path: Path) -> None:
    with open_gguf(path) as file:
        plain = bridge.Model.load(path).config
        config = replace(plain, window=5, windows=(True, False) * plain.layers)
        decoder = Decoder(file, config, 64, "f16", "int8")
        other = decoder.new_cache()
        rows = decoder.follow(list(range(8)))
        np.testing.assert_array_equal(rows, [decoder.step([other], [t])[0].copy() for t in range(8)])
        everywhere = Decoder(file, plain, 64, "f16", "int8").follow(list(range(8)))
        assert (everywhere[:5] == rows[:5]).all()
        assert (everywhere[6] != rows[6]).any()


@repacked
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repeat_penalty": 1.3, "repeat_last_n": 8},
        {"frequency_penalty": 0.3},
        {"logit_bias": {11: -3.0}},
        {"temperature": 0.7, "seed": 3},
        {"regex": "( is| that| to| me|\\?){1,30}"},
        {"schema": {"type": "array", "items": {"enum": ["to be", "not to be"]}, "minItems": 4, "maxItems": 6}},
    ],
    ids=lambda options: next(iter(options), "greedy"),
)
def test_the_reply_is_the_one_without_guesses(options: dict[str, Any], model: Model) -> None:
    if "regex" in options or "schema" in options:
        pytest.importorskip("llguidance")
    plain, guessed, speculation = both(model, "ngram", **options)
    assert guessed == plain
    assert speculation.drafted > 0


@repacked
def test_a_text_that_repeats_takes_fewer_steps(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    follow = Decoder.follow
    monkeypatch.setattr(Decoder, "follow", lambda self, tokens: (steps.append(len(tokens)), follow(self, tokens))[1])
    plain, guessed, speculation = both(
        model, "ngram", 100, logit_bias={t: 9.0 for t in model.tokenizer.encode(" to be")}
    )
    assert guessed == plain
    assert len(steps) < 40
    assert max(steps) == WIDEST
    assert speculation.accepted > 60


@repacked
def test_probabilities_and_stop_texts_are_those_without_guesses(model: Model) -> None:
    found = [list(model.generate_scored(TEXT, 40, 2, stop="\n", temperature=0, draft=d)) for d in (None, "ngram")]
    assert found[0] == found[1]
    texts = ["".join(model.generate(TEXT, 40, stop="?", temperature=0, draft=d)) for d in (None, "ngram")]
    assert texts[0] == texts[1]


@repacked
def test_a_reply_ends_where_the_context_does(path: Path) -> None:
    model = bridge.Model.load(path, context=60)
    plain, guessed, _ = both(model, "ngram", 100)
    assert guessed == plain
    assert len(model.tokenizer.encode(TEXT)) + len(plain) == 61  # the last is not read


@repacked
def test_what_was_dropped_is_not_in_the_context(model: Model) -> None:
    """Neither the next prompt nor an abandoned reply sees guesses that were not drawn."""
    reply = model.generate_tokens(TEXT, 60, temperature=0, draft="ngram")
    drawn = [next(reply) for _ in range(9)]
    assert model._decoder.read == model.tokenizer.encode(TEXT) + drawn[:-1]
    again = list(model.generate_tokens(TEXT, 60, temperature=0))
    assert again[:9] == drawn
    with pytest.raises(BridgeError, match="another call on this model has taken its context"):
        next(reply)


@repacked
def test_a_batch_between_two_tokens_changes_nothing(model: Model) -> None:
    plain = list(model.generate_tokens(TEXT, 40, temperature=0))
    reply = model.generate_tokens(TEXT, 40, temperature=0, draft="ngram")
    found = []
    for token in reply:
        found.append(token)
        model.generate_batch(["BAPTISTA", "GREMIO"], 2, temperature=0)
    assert found == plain


@repacked
def test_sequences_made_together_use_what_columns_they_leave_free(model: Model) -> None:
    """The replies and what their contexts hold are the same; a step makes more tokens than there are sequences."""
    prompts = [TEXT, "GREMIO: to be, to be, to be,", "BAPTISTA"]
    plain = [list(model.generate_tokens(prompt, 30, temperature=0)) for prompt in prompts]
    with model.batch(2, draft="ngram") as batch:
        generations = [batch.add(prompt, 30, temperature=0) for prompt in prompts]
        for _ in batch:
            pass
        assert [generation.tokens for generation in generations] == plain
        assert [generation.finish for generation in generations] == ["length"] * 3
        assert batch.step_tokens == 3 * 29
        assert any(generation.speculation.accepted for generation in generations)
        held = batch._slots[0].cache.tokens[: batch._slots[0].cache.length]
        assert held in [generation.prompt + generation.tokens[:-1] for generation in generations]
    with pytest.raises(BridgeError, match="unknown draft 'mine'"):
        model.batch(draft="mine")


# --- another model guesses ---


@repacked
def test_another_model_guesses_what_it_finds_most_likely(model: Model, path: Path) -> None:
    other = bridge.Model.load(path, context=100, precision="f32")
    pending = other.generate("KING", 5)
    next(pending)
    plain, guessed, speculation = both(model, other, 90)
    assert guessed == plain
    assert speculation.accepted > 0.8 * speculation.drafted > 20  # the same weights
    with pytest.raises(BridgeError, match="has taken its context"):
        list(pending)
    sampled = both(model, other, 20, temperature=1.0, seed=0)
    assert sampled[0] == sampled[1]


def test_a_model_that_cannot_guess_for_another_is_refused(model: Model, path: Path) -> None:
    with pytest.raises(BridgeError, match="draft: a model cannot guess for itself"):
        model.generate("a", draft=model)
    other = bridge.Model.load(path)
    other.tokenizer.tokens = [*other.tokenizer.tokens[:7], "x", *other.tokenizer.tokens[8:]]
    with pytest.raises(
        BridgeError, match=r"draft: the model has another vocabulary \(token 7 is .* here and 'x' there\)"
    ):
        model.generate("a", draft=other)
    other.tokenizer.tokens = model.tokenizer.tokens[:9]
    with pytest.raises(BridgeError, match=r"another vocabulary .* tokens here, 9 there"):
        model.generate("a", draft=other)
    other.close()
    with pytest.raises(BridgeError, match="was closed"):
        model.generate("a", draft=other)


# --- what is refused ---


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("guess", r"unknown draft .*: choose ngram"),
        (3, "draft is of type int; must be a path or Model or None"),
        (["ngram"], "draft is of type list; must be"),
    ],
)
def test_an_unknown_draft_is_refused(draft: Any, said: str, model: Model) -> None:
    with pytest.raises(BridgeError, match=said):
        model.generate("a", draft=draft)


@repacked
def test_a_draft_on_the_command_line(path: Path, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    plain = "".join(model.generate(TEXT, 40, temperature=0))
    for draft in ("ngram", str(path)):
        assert main(["run", str(path), "-p", TEXT, "-n", "40", "--temp", "0", "--draft", draft]) == 0
        printed = capsys.readouterr()
        assert printed.out == f"{TEXT}{plain}\n"
        assert re.search(r"tokens/s; \d+ of \d+ guesses right", printed.err)
    assert main(["run", str(path), "-p", "a", "--draft", "guess"]) == 2
    assert "guess" in capsys.readouterr().err


def test_matrices_that_are_multiplied_one_token_at_a_time_are_refused(tmp_path: Path) -> None:
    """Floats: several tokens have other sums than one."""
    path = write_decoder(tmp_path / "tiny.gguf", types={"ffn_down": "F16"})
    with open_gguf(path) as file:
        decoder = Decoder(file, read_config(file.metadata, path), 16, "f16", "int8")
        with pytest.raises(BridgeError, match=r"blk.0.ffn_down.weight: F16 \[32, 32\] has no kernel .* leave it out"):
            check_decoder(decoder)
