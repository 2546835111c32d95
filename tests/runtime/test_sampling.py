"""Draws, and the probabilities of tokens, against the formulas over sorted logits, written plainly."""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from bridge.errors import BridgeError
from bridge.runtime.cpu.ops import sampling_ops
from bridge.runtime.sampling import Sampler, Sampling, draws_ahead, probabilities
from bridge.system.threads import pool

SIZES = 1, 2, 31, 63, 64, 65, 100, 1000, 4097, 20011
TOP_K, TOP_P, MIN_P, TEMPERATURE = (
    (0, 1, 5, 40, 1000),
    (1.0, 0.95, 0.5, 0.01),
    (0.0, 0.05, 0.5, 1.0),
    (0.8, 1.0, 3, 0.01),
)


def ordered(logits: np.ndarray) -> np.ndarray:
    """Token ids, most likely first, the lower id first among equals."""
    return np.argsort(-logits.astype(np.float64), kind="stable")


def drawn(logits: np.ndarray, how: Sampling, number: float) -> int:
    """The token for a number in [0, 1): of the top_k those that make up top_p, of these those of min_p."""
    tokens = ordered(logits)[: how.top_k or None]
    if how.temperature == 0:
        return int(tokens[0])
    scores = logits[tokens].astype(np.float64)
    scores -= scores[0]
    weights = np.exp(scores)
    count = len(tokens)
    if how.top_p < 1:
        count = int(np.searchsorted(np.cumsum(weights), how.top_p * weights.sum())) + 1
    if how.min_p > 0:
        count = min(count, int((weights >= how.min_p).sum()))
    with np.errstate(over="ignore"):
        sums = np.cumsum(np.exp(scores[:count] / how.temperature))
    return int(tokens[min(np.searchsorted(sums, number * sums[-1], "right"), len(sums) - 1)])


def rows(size: int) -> dict[str, np.ndarray]:
    """Logits float32 [size] of many shapes."""
    rng = np.random.default_rng(size)
    some = rng.standard_normal(size)
    forbidden = np.where(rng.random(size) < 0.7, -np.inf, some)
    one = np.full(size, -np.inf)
    forbidden[size // 2] = one[size // 3] = 1.0
    shapes = {
        "normal": 3 * some,
        "narrow": 0.2 * some,
        "equal": np.full(size, -3.5),
        "few values": rng.integers(-3, 3, size),
        "a grid": 0.25 * rng.integers(-300, 3, size),
        "some of -inf": forbidden,
        "one finite": one,
        "huge": 1e37 * some,
        "tiny": 1e-42 * some,
        "two zeros": np.where(some > 0, 0.0, -0.0),
        "a heavy tail": some**9,
    }
    return {name: values.astype(np.float32) for name, values in shapes.items()}


def cases() -> Iterator[tuple[np.ndarray, Sampling]]:
    """Logits of all shapes, each with some of all combinations of settings."""
    settings = list(product(TOP_K, TOP_P, MIN_P, TEMPERATURE))
    rng = np.random.default_rng(0)
    for size in SIZES:
        for logits in rows(size).values():
            for number in rng.permutation(len(settings))[:40]:
                top_k, top_p, min_p, temperature = settings[number]
                yield logits, Sampling(temperature, top_k, top_p, min_p, seed=int(rng.integers(1 << 30)))


def test_draws_are_those_from_sorted_logits() -> None:
    for logits, how in cases():
        sampler = Sampler(how)
        numbers = np.random.default_rng(how.seed).random(3)
        assert [sampler(logits) for _ in numbers] == [drawn(logits, how, number) for number in numbers], how


@pytest.mark.parametrize("edge", [0.0, 1 - 1e-9])
def test_numbers_near_both_ends_draw_the_most_and_the_least_likely(edge: float) -> None:
    for name, logits in rows(1000).items():
        for how in (Sampling(), Sampling(top_k=0), Sampling(1.0, 0, 1.0, 0.0), Sampling(1.0, 0, 0.9, 0.0)):
            sampler = Sampler(how)
            sampler._ahead = [edge]
            assert sampler(logits) == drawn(logits, how, edge), (name, how)


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e300, np.inf])
def test_temperatures_may_be_extreme(temperature: float) -> None:
    rng = np.random.default_rng(0)
    for name in ("normal", "few values", "equal"):
        logits = rows(500)[name]
        for top_k in (0, 7):
            how = Sampling(temperature, top_k, 1.0, 0.0, seed=int(rng.integers(1 << 30)))
            sampler, number = Sampler(how), np.random.default_rng(how.seed).random()
            assert sampler(logits) == drawn(logits, how, number), name


def test_the_most_likely_token_is_the_first_of_equals() -> None:
    for size in SIZES:
        for name, logits in rows(size).items():
            assert Sampler(Sampling(0))(logits) == ordered(logits)[0] == logits.argmax(), name


@pytest.mark.parametrize("size", SIZES)
def test_probabilities_are_those_from_sorted_logits(size: int) -> None:
    for name, logits in rows(size).items():
        for count in {0, 1, min(5, size), min(40, size), size, size + 9}:
            token = size // 3
            (found,) = probabilities(logits[None], [token], count)
            exact = logits.astype(np.float64) - float(logits.max())
            exact -= np.log(np.exp(exact).sum())
            np.testing.assert_allclose(found.logprob, exact[token], rtol=1e-14, atol=1e-12, err_msg=name)
            best = ordered(logits)[:count]
            best = best[logits[best] > -np.inf]
            assert [token for token, _ in found.top] == best.tolist(), name
            np.testing.assert_allclose([p for _, p in found.top], exact[best], rtol=1e-14, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("place", [0, 63, 64, 99])
@pytest.mark.parametrize("wrong", [np.nan, -np.nan, np.inf])
def test_one_wrong_logit_is_found_wherever_it_is(place: int, wrong: float) -> None:
    logits = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    logits[place] = wrong
    for sampler in (Sampler(Sampling()), Sampler(Sampling(0)), Sampler(Sampling(logit_bias={place: -np.inf}))):
        with pytest.raises(BridgeError, match=r"the model computes (nan|inf) for the next token"):
            sampler(logits)
    with pytest.raises(BridgeError, match=r"the model computes (nan|inf)"):
        probabilities(logits[None], [3], 0)


def adjusted(
    logits: np.ndarray, seen: list[int], penalty: float, bias: dict[int, float], reply: list[int] | None = None,
    frequency: float = 0.0, presence: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """Logits float32 with biases, then with the penalty of each token that was seen, then with those of the reply's."""
    out = logits.copy()
    for token, added in bias.items():
        out[token] += np.float32(added)
    for token in set(seen):
        out[token] = out[token] / np.float32(penalty) if out[token] > 0 else out[token] * np.float32(penalty)
    for token, count in Counter(reply or []).items():
        out[token] -= np.float32(count) * np.float32(frequency) + np.float32(presence)
    return out


@pytest.mark.parametrize("last", [3, 64, -1])
def test_biases_and_penalties_come_before_the_draw(last: int) -> None:
    rng = np.random.default_rng(last + 1)
    bias = {4: 2.5, 9: -np.inf, 700: 3.0}
    how = Sampling(1.0, 50, 0.9, 0.01, 5, repeat_penalty=1.7, repeat_last_n=last, logit_bias=bias)
    sampler, numbers, seen = Sampler(how), np.random.default_rng(5).random(40), [1, 5, 4, 2, 5]
    sampler.see(seen)
    for number in numbers:
        logits = (2 * rng.standard_normal(1001)).astype(np.float32)
        before = logits.copy()
        recent = seen if last < 0 else seen[-last:]
        token = sampler(logits)
        assert token == drawn(adjusted(logits, recent, 1.7, bias), how, number)
        np.testing.assert_array_equal(logits, before)
        seen.append(token)


@pytest.mark.parametrize(("frequency", "presence"), [(0.7, 0.0), (0.0, 1.5), (0.4, -0.3), (-0.2, 2.0)])
@pytest.mark.parametrize("repeat", [1.0, 1.3])
def test_tokens_of_the_reply_are_penalized_by_how_often_they_are_in_it(
    frequency: float, presence: float, repeat: float
) -> None:
    """Those of the prompt are not, but by repeat_penalty."""
    rng = np.random.default_rng(1)
    how = Sampling(
        1.0, 0, 1.0, 0.0, 5, repeat_penalty=repeat, repeat_last_n=4, frequency_penalty=frequency,
        presence_penalty=presence, logit_bias={3: 1.0},
    )  # fmt: skip
    sampler, numbers, prompt, reply = Sampler(how), np.random.default_rng(5).random(60), [1, 5, 4, 2, 5], list[int]()
    sampler.see(prompt)
    for number in numbers:
        logits = rng.standard_normal(12).astype(np.float32)
        token = sampler(logits)
        recent = [*prompt, *reply][-4:]
        penalized = adjusted(logits, recent, repeat, {3: 1.0}, reply, frequency, presence)
        assert token == drawn(penalized, how, number)
        reply.append(token)
    assert max(Counter(reply).values()) > 2


def test_a_copy_of_a_sampler_penalizes_its_own_reply() -> None:
    sampler = Sampler(Sampling(0, presence_penalty=5.0))
    sampler.see([0, 1])
    logits = np.array([2.0, 1.5, 1.0], np.float32)
    other = sampler.copy(None)
    assert [sampler(logits) for _ in range(3)] == [other(logits) for _ in range(3)] == [0, 1, 2]


class Allows:
    """A constraint, of the tokens that are given alone."""

    complete = False

    def __init__(self, tokens: list[int], vocab: int):
        self.vocab = vocab
        marks = np.zeros(-(-vocab // 32) * 32, np.uint8)
        marks[tokens] = 1
        self._bits = np.packbits(marks, bitorder="little")

    def allowed(self) -> np.ndarray:
        return self._bits

    def accept(self, token: int) -> None:
        pass


@pytest.mark.parametrize("vocab", [1, 31, 64, 97])
def test_only_what_a_constraint_allows_is_drawn(vocab: int) -> None:
    logits = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    allowed = sorted({0, vocab // 2, vocab - 1})
    masked = np.full(100, -np.inf, np.float32)
    masked[allowed] = logits[allowed]
    constraint: Any = Allows(allowed, vocab)
    how = Sampling(2.0, 0, 1.0, 0.0, seed=1)
    sampler, numbers = Sampler(how, constraint=constraint), np.random.default_rng(1).random(20)
    assert [sampler(logits) for _ in numbers] == [drawn(masked, how, number) for number in numbers]
    logits[99] = np.nan
    with pytest.raises(BridgeError, match="the model computes nan"):
        sampler(logits)


def test_a_bias_that_forbids_what_a_constraint_allows_says_so() -> None:
    constraint: Any = Allows([2, 5], 10)
    sampler = Sampler(Sampling(logit_bias={2: -np.inf, 5: -np.inf}), constraint=constraint)
    with pytest.raises(BridgeError, match="logit_bias forbids all tokens that the schema allows"):
        sampler(np.zeros(12, np.float32))


SAMPLERS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0}, {"top_k": 0}, {"repeat_penalty": 1.4}, {"logit_bias": {3: 4.0}}, {"min_p": 0.0, "top_k": 0},
    {"presence_penalty": 1.0}, {"frequency_penalty": 0.5},
)  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_draws_ahead_are_those_of_one_row_after_another(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of threads, and however many of the rows are used."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(pool, "MIN_VALUES_TO_SHARE", 1)
    before = pool.get_num_threads()
    pool.set_num_threads(threads)
    try:
        alone = [Sampler(Sampling(seed=i, **how), i % 3 or None) for i, how in enumerate(SAMPLERS)]
        together = [Sampler(Sampling(seed=i, **how), i % 3 or None) for i, how in enumerate(SAMPLERS)]
        for _ in range(12):
            counts = rng.integers(1, 4, len(together)).tolist()
            logits = rng.standard_normal((sum(counts), 3001)).astype(np.float32) * 2
            draws = iter(zip(logits, draws_ahead(list(zip(together, counts, strict=True)), logits), strict=True))
            for one, other, count in zip(alone, together, counts, strict=True):
                used = int(rng.integers(1, count + 1))
                for number in range(count):
                    row, draw = next(draws)
                    assert (draw is None) == (number > 0 and other.how.penalizes)
                    if number < used:
                        assert other(row, draw) == one(row)
                        assert other.probabilities == one.probabilities
    finally:
        pool.set_num_threads(before)


def test_numbers_for_a_device_are_those_of_the_next_draws() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    sampler, other = Sampler(Sampling(seed=3)), Sampler(Sampling(seed=3))
    numbers = np.random.default_rng(3).random(6)
    draws_ahead([(sampler, 3)], logits)  # none is used
    np.testing.assert_array_equal(sampler.uniform(2), numbers[:2])
    other.uniform(2)
    assert [sampler(row) for row in logits] == [other(row) for row in logits]
    np.testing.assert_array_equal(sampler.uniform(1), numbers[5:])
    copied = sampler.copy(3)
    np.testing.assert_array_equal(copied.uniform(2), numbers[:2])


def test_weights_are_exponentials_to_the_last_digits() -> None:
    x = np.concatenate([[0.0, 708.0], np.random.default_rng(0).uniform(0, 708, 5000), np.linspace(0, 3, 5000)])
    found = sampling_ops._exp_minus.py_func(x)
    assert found[0] == 1
    assert (np.abs(found / np.exp(-x) - 1) < 3e-16 + 2e-16 * x).all()
