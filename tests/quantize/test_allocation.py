"""The allocation of types to tensors under a limit of bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.quantize.budget.allocation import allocate, hull

OPTION = st.tuples(st.integers(1, 40), st.integers(0, 60))
ITEM = st.lists(OPTION, min_size=1, max_size=4)


def best_loss(items: list[list[tuple[int, int]]], limit: int) -> int | None:
    """By trying all."""
    sums = ((sum(s for s, _ in taken), sum(loss for _, loss in taken)) for taken in itertools.product(*items))
    return min((loss for size, loss in sums if size <= limit), default=None)


@settings(max_examples=300, deadline=None)
@given(st.lists(ITEM, min_size=1, max_size=6), st.integers(1, 200))
def test_no_choice_within_the_limit_loses_less(items: list[list[tuple[int, int]]], limit: int) -> None:
    sizes = [np.array([s for s, _ in item]) for item in items]
    losses = [np.array([loss for _, loss in item], float) for item in items]
    expected = best_loss(items, limit)
    if expected is None:
        with pytest.raises(ValueError, match="smallest"):
            allocate(sizes, losses, limit)
        return
    taken = allocate(sizes, losses, limit)
    assert sum(int(s[t]) for s, t in zip(sizes, taken, strict=True)) <= limit
    assert sum(float(x[t]) for x, t in zip(losses, taken, strict=True)) == expected


def test_the_hull_leaves_out_what_a_mixture_of_others_beats() -> None:
    assert hull(np.array([30, 10, 20, 40]), np.array([1.0, 9.0, 8.0, 1.0])) == [1, 0]


def test_a_large_model_is_allocated_in_a_moment() -> None:
    """400 tensors of six types: at most a thousandth above what no allocation can be better than."""
    rng = np.random.default_rng(0)
    bits = np.array([2.625, 3.4375, 4.5, 5.5, 6.5625, 8.5])
    weights = rng.choice([1 << 20, 1 << 22, 1 << 24, 7 << 21], 400)
    sizes = [(w * bits / 8).astype(np.int64) for w in weights]
    losses = [w * rng.lognormal(0, 1) * 4.0**-bits * rng.uniform(0.8, 1.2, 6) for w in weights]
    limit = int(weights.sum() * 4.3 / 8)
    taken = allocate(sizes, losses, limit)
    used = sum(int(s[t]) for s, t in zip(sizes, taken, strict=True))
    assert 0.9999 * limit < used <= limit
    loss = sum(float(x[t]) for x, t in zip(losses, taken, strict=True))
    prices = np.geomspace(1e-10, 1e-6, 300) * max(float(x.max()) for x in losses)
    bound = max(sum(float((x + p * s).min()) for x, s in zip(losses, sizes, strict=True)) - p * limit for p in prices)
    assert bound <= loss < 1.001 * bound
