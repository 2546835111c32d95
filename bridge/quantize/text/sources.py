"""What to calibrate on: files and the program's own mixture, and the share of the tokens that each gives.

    text.txt                          one file
    a.txt b.jsonl:0.3 default:0.2     several; those without a weight share what is left, here 0.5 for a.txt

`default` is the model's own samples and the texts that the program ships (`default_text`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import BridgeError

DEFAULT = "default"


@dataclass(frozen=True)
class Source:
    """A file, or None for the default mixture, and its share of the tokens, above 0 and at most 1."""

    file: Path | None
    share: float

    def __str__(self) -> str:
        return DEFAULT if self.file is None else str(self.file)


def sources_of(texts: Iterable[str | Path]) -> list[Source]:
    """The sources that were named, FILE or FILE:WEIGHT; their shares add up to 1.

    Raises BridgeError where weights are not above 0, do not add up to 1, or leave nothing for those without one.
    """
    named = [_named(str(name)) for name in texts]
    if not named:
        raise BridgeError("no calibration text is given; name a file, or default")
    weights = [weight for _, weight in named if weight is not None]
    for name, weight in named:
        if weight is not None and not 0 < weight <= 1:
            raise BridgeError(f"{name}:{weight:g}: a calibration text's weight must be above 0 and at most 1")
    left, without = 1 - sum(weights), len(named) - len(weights)
    if not without and abs(left) > 1e-6:
        raise BridgeError(
            f"the weights of the calibration texts add up to {sum(weights):g}; they must add up to 1, or leave out one"
        )
    if without and left < 1e-6:
        raise BridgeError(
            f"the weights of the calibration texts add up to {sum(weights):g}, which leaves nothing for "
            f"{next(name for name, weight in named if weight is None)}; make them smaller"
        )
    return [
        Source(None if name == DEFAULT else Path(name), left / without if weight is None else weight)
        for name, weight in named
    ]


def _named(text: str) -> tuple[str, float | None]:
    """(name, weight) of "name:0.3"; a file that is there by the whole name has no weight."""
    name, sign, number = text.rpartition(":")
    if not sign or not name or os.path.exists(text):
        return text, None
    try:
        weight = float(number)
    except ValueError:
        return text, None
    return name, weight if math.isfinite(weight) else -1.0


def divided(count: int, shares: Sequence[float]) -> list[int]:
    """How many of `count` things go to each share; the shares add up to 1, and so do the numbers to `count`."""
    exact = [count * share for share in shares]
    counts = [math.floor(x + 1e-9) for x in exact]
    by_rest = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_rest[: count - sum(counts)]:
        counts[i] += 1
    return counts
