"""Sequences that come and go while others are made: what they take over, how long they wait, how they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from bridge.runtime.decoder.decoder import Decoder
from bridge.runtime.layers.kv_cache import KINDS
from bridge.runtime.model import Model
from bridge.runtime.replies.batch import PART
from bridge.system.threads import pool
from tests.conftest import CHECKPOINT

LONG = "What is that to me? " * 60
GREEDY: dict[str, Any] = {"temperature": 0}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("batch") / "model.gguf"
    bridge.convert(CHECKPOINT, out)
    return out


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return bridge.Model.load(path, context=1000).prepare()


def alone(model: Model, prompt: str, limit: int, **options: Any) -> str:
    return "".join(model.generate(prompt, limit, **GREEDY | options))


def test_a_sequence_that_joins_others_gets_the_reply_that_it_gets_alone(model: Model) -> None:
    with model.batch() as batch:
        first = batch.add("KING", 30, **GREEDY)
        for _ in range(10):
            batch.advance()
        late = batch.add(LONG, 12, logprobs=2, **GREEDY)
        texts: dict[Any, str] = {first: "", late: ""}
        for generation, text in batch:
            texts[generation] += text
        assert not batch.busy()
    assert texts == {first: alone(model, "KING", 30), late: alone(model, LONG, 12)}
    assert [first.finish, late.finish, len(first.tokens)] == ["length", "length", 30]
    alone(model, "KING", 1)  # the whole prompt is read again: a step sums attention in another order than a prompt
    scored = list(model.generate_scored(LONG, 12, logprobs=2, **GREEDY))
    assert late.tokens == [token.token for token in scored]


HOWS: tuple[dict[str, Any], ...] = (
    {"seed": 1}, {"seed": 2, "repeat_penalty": 1.5}, {"seed": 3, "top_k": 0, "logit_bias": {5: 3.0}},
    {"seed": 4, "temperature": 1.5, "min_p": 0.0}, {"temperature": 0}, {"seed": 5, "regex": "[a-z ]{30,40}"},
)  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_each_draws_as_it_does_alone_whoever_else_there_is(draft: str | None, threads: int, model: Model) -> None:
    pytest.importorskip("llguidance")
    prompt, before = "to be or not to be or not to be or", pool.get_num_threads()
    replies = [list(model.generate_tokens(prompt, 24, **how)) for how in HOWS]
    pool.set_num_threads(threads)
    try:
        with model.batch(3, draft=draft) as batch:
            generations = [batch.add(prompt, 24, logprobs=i % 2 or None, **how) for i, how in enumerate(HOWS)]
            for _ in batch:
                pass
    finally:
        pool.set_num_threads(before)
    assert [generation.tokens for generation in generations] == replies


def test_a_long_prompt_delays_others_by_a_part_at_a_time(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tokens of a running sequence, at most PART tokens of prompts are read; prompts take turns."""
    calls: list[int] = []
    through = Decoder._through
    monkeypatch.setattr(
        Decoder,
        "_through",
        lambda self, buffers, tokens: (calls.append(len(tokens)), through(self, buffers, tokens))[1],
    )
    with model.batch() as batch:
        running = batch.add("KING", 100, **GREEDY)
        batch.advance()
        del calls[:]
        long, short = batch.add(LONG, 2, **GREEDY), batch.add("GREMIO: no", 1, **GREEDY)
        while not short.finish:
            batch.advance()
        assert not long.tokens
        assert not running.finish
        while not long.finish:
            batch.advance()
    assert len(long.prompt) > 2 * PART
    between = " ".join("step" if n == 1 else str(n) for n in calls).split("step")
    read = [sum(map(int, part.split())) for part in between]
    assert max(read) <= PART
    assert sum(read) >= len(long.prompt)


@pytest.mark.parametrize("kv", KINDS)
def test_sequences_take_over_the_longest_prefix_that_any_context_holds(kv: str, path: Path) -> None:
    model = bridge.Model.load(path, context=700, kv=kv)
    with model.batch(4) as batch:
        shared = LONG[:400]
        first = batch.add(shared + "Then speak", 3, **GREEDY)
        others = [batch.add(shared + end, 8, **GREEDY) for end in ("no more.", "of love", "Then speak again")]
        for _ in batch:
            pass
        read = batch.prompt_tokens
        again = batch.add(shared + "of love", 8, **GREEDY)
        for _ in batch:
            pass
    common = len(model.tokenizer.encode(shared)) - 2  # a word may be cut otherwise where it goes on
    assert first.kept == 0
    assert all(other.kept >= common for other in others)
    assert read < len(first.prompt) + 60
    assert batch.prompt_tokens == read + 1
    assert again.kept == len(again.prompt) - 1
    assert again.text == others[1].text
    assert [o.text for o in others] == [
        alone(model, shared + e, 8) for e in ("no more.", "of love", "Then speak again")
    ]


def test_a_copied_prefix_is_that_of_the_original(path: Path) -> None:
    for kv in KINDS:
        decoder = bridge.Model.load(path, context=64, kv=kv, precision="f32")._decoder
        one, two = decoder.new_cache(), decoder.new_cache()
        decoder.run(list(range(40)), cache=one)
        decoder.run(list(range(99, 50, -1)), cache=two)
        two.copy_prefix(one, 19)
        expected = decoder.logits(decoder.run([5, 6, 7], cache=_rewound(one, 19)))
        np.testing.assert_array_equal(decoder.logits(decoder.run([5, 6, 7], cache=two)), expected)
        assert two.tokens[: two.length] == [*range(19), 5, 6, 7]


def _rewound(cache: Any, length: int) -> Any:
    cache.length = length
    return cache


def test_a_cancelled_sequence_leaves_its_context_to_the_next(model: Model) -> None:
    with model.batch(1) as batch:
        first = batch.add("KING", 500, **GREEDY)
        other = batch.add("GREMIO:", 5, **GREEDY)
        never = batch.add("ROMEO:", 5, **GREEDY)
        for _ in range(4):
            batch.advance()
        assert (batch.active, batch.waiting) == (1, 2)
        batch.cancel(first)
        batch.cancel(never)
        for _ in batch:
            pass
    assert (first.finish, never.finish, other.finish) == ("cancelled", "cancelled", "length")
    assert len(first.tokens) == 4
    assert never.tokens == []
    assert other.text == alone(model, "GREMIO:", 5)


def test_one_that_fails_ends_alone(model: Model) -> None:
    with model.batch() as batch:
        fine = batch.add("KING", 5, **GREEDY)
        wrong = batch.add("KING", 5, logit_bias=dict.fromkeys(range(2048), float("-inf")))
        for _ in batch:
            pass
    assert wrong.finish == "error"
    assert "forbids every possible next token" in str(wrong.error)
    assert fine.text == alone(model, "KING", 5)
    with pytest.raises(BridgeError, match="forbids every possible"):
        model.generate_batch(["KING"], 5, logit_bias=dict.fromkeys(range(2048), float("-inf")))


def test_a_reader_sees_the_states_of_the_whole_prompt(model: Model) -> None:
    parts: list[tuple[int, np.ndarray]] = []
    with model.batch() as batch:
        batch.add(LONG, 3, **GREEDY)
        for _ in batch:
            pass
        read = batch.add(LONG, 0, reader=lambda at, states: parts.append((at, states)))
        for _ in batch:
            pass
    assert read.finish == "length"
    states = np.concatenate([states for _, states in parts])
    assert len(states) == len(read.prompt)
    assert [at for at, _ in parts] == np.cumsum([0, *(len(states) for _, states in parts[:-1])]).tolist()
    np.testing.assert_allclose(states, model._decoder.states(read.prompt, len(read.prompt)), atol=1e-4)


def test_a_batch_ends_with_its_model(path: Path) -> None:
    model = bridge.Model.load(path, context=50)
    batch = model.batch()
    batch.add("KING", 20)
    batch.advance()
    model.close()
    with pytest.raises(BridgeError, match="this model was closed"):
        batch.advance()
    with pytest.raises(BridgeError, match="this model was closed"):
        model.batch()
    with pytest.raises(BridgeError, match="sequences=9: must be between 1 and 8"):
        bridge.Model.load(path).batch(9)
