"""Parameters of a test in combinations that cover every pair of values, instead of in all combinations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def in_pairs(*values: Sequence[Any]) -> list[Any]:
    """All combinations of the parameters' values, for `parametrize`.

    Each value of a parameter meets each of another in every run; combinations that add no pair to those before are
    exhaustive. Of parameters with 4, 3, 2 and 2 values, 12 of 48 combinations are left.
    """
    rows = list(product(*(range(len(own)) for own in values)))
    missing = set().union(*map(_pairs, rows))
    chosen = set()
    while missing:
        best = max(rows, key=lambda row: len(_pairs(row) & missing))  # the first of those with most new pairs
        chosen.add(best)
        missing -= _pairs(best)
    return [
        pytest.param(
            *(own[i] for own, i in zip(values, row, strict=True)),
            marks=[] if row in chosen else [pytest.mark.exhaustive],
        )
        for row in rows
    ]


def _pairs(row: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    """The pairs of (parameter, value) in a combination."""
    return set(combinations(enumerate(row), 2))
