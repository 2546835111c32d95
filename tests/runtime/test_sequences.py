"""Several sequences in one pass over the weights are what they are one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from bridge.runtime.decoder.decoder import Decoder
from bridge.runtime.model import Model
from scripts.peers.predictions import mean_kl
from tests.conftest import CHECKPOINT, repacked

PROMPTS = ["KING", "The history of the city", "ROMEO:\n", "What is that to me? " * 20, "a"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sequences") / "model.gguf"
    bridge.convert(CHECKPOINT, out)
    return out


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return bridge.Model.load(path, context=300).prepare()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each step of several took."""
    seen: list[int] = []
    step = Decoder.step

    def counted(self: Decoder, caches: Any, tokens: Any) -> Any:
        seen.append(len(tokens))
        return step(self, caches, tokens)

    monkeypatch.setattr(Decoder, "step", counted)
    return seen


def test_replies_made_together_are_those_made_one_at_a_time(model: Model, steps: list[int]) -> None:
    """Different lengths of prompts and replies, more of them than a step takes, one that ends at the context's end."""
    prompts = [*PROMPTS, *PROMPTS[::-1]]
    limits = [12, 3, 0, 1, 400, 9, 7, 15, 4, 6]
    alone = [next_to(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    del steps[:]
    assert model.generate_batch(prompts, limits, temperature=0) == alone
    assert max(steps) == 8
    assert sum(steps) == model.timing.tokens
    assert steps.count(1) > 200  # the long one, in the end


def next_to(model: Model, prompt: str, limit: int, **options: Any) -> str:
    return "".join(model.generate(prompt, limit, **{"temperature": 0} | options))


def test_each_ends_at_its_own_stop_text_or_end_token(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [next_to(model, prompt, 20) for prompt in PROMPTS]
    ends = [text[4:8] for text in alone]
    cut = [text[: text.index(end)] for text, end in zip(alone, ends, strict=True)]
    assert model.generate_batch(PROMPTS, 20, stops=[*ends[:2], None, [ends[3]], ""], temperature=0) == [
        *cut[:2], alone[2], cut[3], alone[4]
    ]  # fmt: skip
    alone = [next_to(model, prompt, 20, stop=ends[0]) for prompt in PROMPTS]
    assert model.generate_batch(PROMPTS, 20, stop=ends[0], temperature=0) == alone
    token = list(model.generate_tokens(PROMPTS[1], 5, temperature=0))[2]
    monkeypatch.setattr(model.tokenizer, "stops", frozenset({token}))
    assert model.generate_batch(PROMPTS, 20, temperature=0) == [next_to(model, prompt, 20) for prompt in PROMPTS]


def test_sequences_draw_as_they_would_alone(model: Model) -> None:
    how: dict[str, Any] = {"temperature": 0.7, "seed": 5, "repeat_penalty": 1.2, "logit_bias": {5: 1.0}, "top_k": 3}
    assert model.generate_batch(PROMPTS, 10, **how) == [next_to(model, prompt, 10, **how) for prompt in PROMPTS]


@pytest.mark.parametrize("count", [2, 4, 7])
@pytest.mark.parametrize(
    ("precision", "kv", "prepared"),
    [
        pytest.param("int8", "f16", True, marks=repacked),
        pytest.param("f32", "q8_0", True, marks=repacked),
        ("int8", "f32", False),
    ],
)
def test_logits_are_those_of_one_context(count: int, precision: str, kv: str, prepared: bool, path: Path) -> None:
    model = bridge.Model.load(path, precision=precision, kv=kv, context=64)
    decoder = model._decoder
    if prepared:
        decoder.prepare()
    rng = np.random.default_rng(count)
    prompts = [rng.integers(0, 2048, 3 * i + 1).tolist() for i in range(count)]
    new = rng.integers(0, 2048, (3, count)).tolist()
    caches = [decoder.new_cache() for _ in prompts]
    for prompt, cache in zip(prompts, caches, strict=True):
        decoder.run(prompt, cache=cache)
    together = np.array([decoder.step(caches, tokens).copy() for tokens in new])
    assert decoder._steps[count].program.single or not prepared
    assert [cache.length for cache in caches] == [len(prompt) + 3 for prompt in prompts]
    for i, prompt in enumerate(prompts):
        alone = decoder.scores(prompt + [tokens[i] for tokens in new], 3)
        assert mean_kl(alone, together[:, i]) < (1e-5 if precision == "f32" else 1e-4)


def test_the_models_own_context_stays(model: Model) -> None:
    alone = next_to(model, PROMPTS[1], 12)
    pieces = model.generate(PROMPTS[1], 12, temperature=0)
    begun = next(pieces) + next(pieces)
    model.generate_batch(PROMPTS, 5, temperature=0)
    assert begun + "".join(pieces) == alone
    next_to(model, PROMPTS[1], 12)
    assert model.timing.kept_tokens == model.timing.prompt_tokens - 1
    assert model.generate_batch([], 5, temperature=0) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": "KING"}, "prompts is a str; must be a list of texts or token ids"),
        ({"prompts": ["KING", ""]}, "the prompt is empty"),
        ({"prompts": ["KING", "a " * 400]}, r"the prompt has \d+ tokens, the context holds 300"),
        (
            {"prompts": ["KING", "a"], "max_tokens": [3]},
            "2 prompts, 1 max_tokens, 2 stops: must be one for each",
        ),
        ({"prompts": ["KING", "a"], "stops": ["x"]}, "2 prompts, 2 max_tokens, 1 stops"),
        ({"prompts": ["KING"], "max_tokens": -1}, "max_tokens=-1: must be at least 0"),
        ({"prompts": ["KING"], "max_tokens": 1.5}, "max_tokens is of type float; must be an integer"),
        ({"prompts": ["KING"], "max_tokens": "x"}, "max_tokens is of type str; must be an integer"),
        ({"prompts": ["KING"], "repeat_penalty": -1.0}, "repeat_penalty -1.0"),
        ({"prompts": ["KING"], "logit_bias": {9999: 1.0}}, "logit_bias of token 9999"),
        ({"prompts": ["KING"], "stop": 3}, "stop 3: must be a text or a list of texts"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(options: dict[str, Any], message: str, model: Model) -> None:
    with pytest.raises(BridgeError, match=message) as error:
        model.generate_batch(**options)
    assert "\n" not in str(error.value)


def test_a_device_that_cannot_says_so(model: Model, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        device, vocab = "cuda:0", 1
        begin = staticmethod(lambda: pytest.fail("loaded"))

    monkeypatch.setattr(model._shared, "decoder", Other())
    with pytest.raises(BridgeError, match="device cuda:0: several sequences at once only run on the CPU"):
        model.generate_batch(PROMPTS, temperature=0)
    closed = bridge.Model.load(path)
    closed.close()
    with pytest.raises(BridgeError, match="this model was closed"):
        closed.generate_batch(PROMPTS, temperature=0)


# --- long contexts on many cores ---


@pytest.mark.parametrize("kv", ["f16", "q8_0", "f32"])
def test_attention_over_spans_is_attention_whatever_the_threads(kv: str, path: Path, monkeypatch) -> None:
    """Sequences of different lengths, cut into many spans; the same bits for 1, 2 and 8 threads."""
    from bridge.runtime.cpu.ops import attention
    from bridge.system.threads import pool

    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 2048, n).tolist() for n in (600, 3, 257)]
    before = pool.get_num_threads()
    found = {}
    try:
        for threads in (1, 2, 8):
            pool.set_num_threads(threads)
            decoder = bridge.Model.load(path, precision="f32", kv=kv, context=1000)._decoder
            decoder.prepare()
            caches = [decoder.new_cache() for _ in prompts]
            for prompt, cache in zip(prompts, caches, strict=True):
                decoder.run(prompt, cache=cache)
            rows = [decoder.step(caches[:1], [7]).copy(), decoder.step(caches, [8, 9, 10]).copy()]
            assert decoder._steps[3].spans[0] == 3
            found[threads] = np.concatenate(rows)
    finally:
        pool.set_num_threads(before)
    assert attention.SPAN == 256
    np.testing.assert_array_equal(found[1], found[2])
    np.testing.assert_array_equal(found[1], found[8])
    whole = decoder.scores(prompts[0] + [7, 8], 2)
    assert mean_kl(whole, found[1][:2]) < 1e-7
    for prompt, token, row in zip(prompts[1:], (9, 10), found[1][2:], strict=True):
        assert mean_kl(decoder.scores([*prompt, token], 1), row[None]) < 1e-7
