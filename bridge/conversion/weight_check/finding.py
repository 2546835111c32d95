"""What the check reports of a tensor."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge.system.text import percent

# what a Finding may be about, in the order of the report
KINDS = {
    "unreadable": "the reader refuses the tensor",
    "not finite": "NaN or infinite weights",
    "scales": "scales that are NaN, infinite, 0, beyond halves, or of a rare sign",
    "activations": "scales of activations that are NaN, infinite, not positive, or missing for some modules",
    "zeros": "all weights of a matrix are 0",
    "rows": "rows of zeros, or of one value",
    "unwritten": "long runs of zero bytes",
    "codes": "codes as no quantizer makes them",
    "levels": "codes that use few levels, where those of most modules use all",
    "magnitude": "weights far larger or smaller than those of the same kind in other layers",
    "duplicate": "a matrix with the bytes of another",
    "vocabulary": "tokens whose rows are 0",
}


@dataclass(frozen=True)
class Finding:
    """What looks damaged in a tensor.

    tensor   name of the tensor or module in the file; the first one, where several lack the same thing
    kind     "unreadable", "not finite", "scales", "activations", "zeros", "rows", "unwritten", "codes", "levels",
             "magnitude", "duplicate" or "vocabulary"
    text     a sentence with the fact
    numbers  the counts behind it, by name
    """

    tensor: str
    kind: str
    text: str
    numbers: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.tensor}: {self.text}"

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return {"tensor": self.tensor, "kind": self.kind, "text": self.text, "numbers": self.numbers}


def kind_of_name(name: str) -> str:
    """What the names of a tensor in all layers have in common: they differ in numbers alone."""
    return re.sub(r"\d+", "#", name)


def are(count: int) -> str:
    """The verb of so many."""
    return "is" if count == 1 else "are"


def first_of(mask: np.ndarray) -> int:
    """The index of the first True."""
    return int(np.argmax(mask.reshape(-1)))


def longest_run(mask: np.ndarray) -> int:
    """The number of True in a row, at most."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def share(count: int, total: int) -> str:
    """ "3 of 4096", with the percentage where it tells more."""
    return f"{count} of {total}" + (f" ({percent(count / total)})" if total >= 10_000 else "")
