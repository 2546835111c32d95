"""Calibration sequences of several sources (`sources`), and which of them are held back to choose settings on.

`default` is half the model's own samples (`own_samples`), half the shipped texts, all kinds alike (`default_text`).

Files and shipped texts are kinds of text. Where there are two or more, the smallest kinds, together at least a quarter
of the sequences, are held back: what is chosen on them has to serve texts of another kind than those it was fitted to.
The model's own samples are never held back. With one kind, spans of it are held back instead (`hessian.held_back`).
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bridge.errors import BridgeError, BridgeWarning
from bridge.quantize.text.default_text import shipped_windows
from bridge.quantize.text.sources import Source, divided
from bridge.quantize.text.texts import check_vocabulary, read_tokens

MOST_SAMPLED = 1 << 16  # tokens
_HELD_BACK = 0.25  # of all sequences, at least

# (sequences, tokens in each) -> the model's own samples int64 [sequences, tokens]; None: it cannot give any
Sampler = Callable[[int, int], torch.Tensor | None]


@dataclass(frozen=True)
class CalibrationSet:
    """What a model is calibrated on.

    tokens  int64 [sequences, length]: the model's own samples, then the kinds of text, those held back last
    drawn   how many of the first sequences are the model's own samples
    held    how many of the last are held back; 0: spans of all of them
    """

    tokens: torch.Tensor
    drawn: int = 0
    held: int = 0

    def held_tokens(self) -> torch.Tensor | None:
        """Which of the tokens are held back, bool [tokens]; None: spans of all of them."""
        sequences = torch.arange(len(self.tokens)) >= len(self.tokens) - self.held
        return sequences.repeat_interleave(self.tokens.shape[1]) if self.held else None

    @property
    def read(self) -> torch.Tensor:
        """The sequences that are the same in every run: all but the model's own samples."""
        return self.tokens[self.drawn :]


def calibration_sequences(
    sources: Sequence[Source],
    tokenizer: Any,
    samples: int,
    length: int,
    seed: int | None = None,
    vocabulary: int | None = None,
    sampler: Sampler = lambda count, length: None,
) -> CalibrationSet:
    """At most `samples` sequences of `length` tokens, divided among the sources.

    tokenizer, seed, vocabulary   see `read_tokens`
    sampler                       makes the model's own samples

    A source that is shorter than its share gives what it has, and a BridgeWarning says so if there are several. Raises
    BridgeError as `read_tokens` does, and where a source's share is not one sequence.
    """
    drawn = torch.empty(0, length, dtype=torch.int64)
    kinds: list[tuple[str, torch.Tensor]] = []
    for source, count in zip(sources, divided(samples, [source.share for source in sources]), strict=True):
        if not count:
            raise BridgeError(
                f"{source}: its share of {samples} calibration sequences is less than one; give it a larger weight, or "
                "take more and shorter sequences"
            )
        if source.file is None:
            drawn, shipped = _default(tokenizer, count, length, vocabulary, sampler)
            kinds += shipped
            supplied = len(drawn) + sum(len(part) for _, part in shipped)
        else:
            part = read_tokens(source.file, tokenizer, count, length, seed, vocabulary)
            kinds.append((str(source.file), part))
            supplied = len(part)
        if supplied < count and len(sources) > 1:
            short = f"gives {supplied} of the {count} calibration sequences of its share; it is too short"
            warnings.warn(f"{source}: {short}", BridgeWarning, stacklevel=2)
    kinds, held = _held_last(kinds, len(drawn))
    return CalibrationSet(torch.cat([drawn, *(part for _, part in kinds)]), len(drawn), held)


def _default(
    tokenizer: Any, count: int, length: int, vocabulary: int | None, sampler: Sampler
) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """The model's own samples, and the shipped texts by kind."""
    windows = shipped_windows(tokenizer, length)
    for kind, tokens in windows.items():
        check_vocabulary(f"default text {kind}", tokens, vocabulary)
    wanted = min(-(-count // 2), max(1, MOST_SAMPLED // length))
    drawn = sampler(wanted, length)
    if drawn is None:
        drawn = torch.empty(0, length, dtype=torch.int64)
    left = _evenly(count - len(drawn), {kind: len(tokens) for kind, tokens in windows.items()})
    if not len(drawn) and not any(left.values()):
        raise BridgeError(
            f"the shipped calibration texts have no sequence of {length} tokens; give shorter sequences, or a text"
        )
    return drawn, [(kind, torch.from_numpy(windows[kind][:n].astype(np.int64))) for kind, n in left.items() if n]


def _evenly(count: int, available: dict[str, int]) -> dict[str, int]:
    """`count` things taken from kinds in turn, as many as are there."""
    counts = dict.fromkeys(available, 0)
    while count and (open_ := [kind for kind in available if counts[kind] < available[kind]]):
        for kind in open_[:count]:
            counts[kind] += 1
        count -= min(count, len(open_))
    return counts


def _held_last(kinds: list[tuple[str, torch.Tensor]], others: int) -> tuple[list[tuple[str, torch.Tensor]], int]:
    """The kinds, those held back last, and how many sequences these have."""
    names = [name for name, _ in kinds]
    if len(names) + bool(others) < 2 or not names:
        return kinds, 0
    sizes = {i: len(part) for i, (_, part) in enumerate(kinds)}
    total = others + sum(sizes.values())
    held: list[int] = []
    for i in sorted(sizes, key=lambda i: (sizes[i], -i)):
        if sum(sizes[j] for j in held) >= _HELD_BACK * total or len(held) + 1 == len(kinds) + bool(others):
            break
        held.append(i)
    count = sum(sizes[i] for i in held)
    return [kinds[i] for i in sizes if i not in held] + [kinds[i] for i in held], count
