"""How a decoder takes many tokens: in batches, of which only the last states are wanted; and none that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any


def last_states(layers: Callable[[Sequence[int]], Any], tokens: Sequence[int], size: int, keep: int) -> Iterator[Any]:
    """Tokens through `layers`, `size` at a time; batch by batch the states [n, hidden] of the last `keep` tokens.

    What `layers` returns may be overwritten by its next call, which comes before the next states do.
    """
    for at in range(0, len(tokens), size):
        batch = tokens[at : at + size]
        states = layers(batch)
        first = max(0, len(tokens) - keep - at)
        if first < len(batch):
            yield states[first:]


def common_prefix(read: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    alike = (a == b for a, b in zip(read, tokens, strict=False))
    return next((n for n, same in enumerate(alike) if not same), min(len(read), len(tokens)))
