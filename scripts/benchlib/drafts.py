"""How much faster replies are with guessed tokens, on replies that are given: repeating, nearly so, or not at all."""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import bridge
from bridge.runtime.sampling import Sampler, Sampling

from . import head, line

_TOKENS = 192
_PERIOD = 48  # tokens after which a reply repeats


class Replay(Sampler):
    """Draws the tokens of a given reply, whatever the logits; as `Sampler` it looks for the most likely one first."""

    def __init__(self, reply: list[int]):
        super().__init__(Sampling(temperature=0))
        self._reply = iter(reply)

    def __call__(self, logits: np.ndarray) -> int:
        super().__call__(logits)
        return next(self._reply)


def replies(vocab: int) -> dict[str, tuple[list[int], list[int]]]:
    """What is replied: each case's name, a prompt and the reply."""
    rng = np.random.default_rng(0)
    once = rng.integers(0, vocab, _PERIOD).tolist()
    repeated = (once * (_TOKENS // _PERIOD + 1))[:_TOKENS]
    edited = [int(rng.integers(0, vocab)) if i % 12 == 11 else token for i, token in enumerate(repeated)]
    other = rng.permutation(vocab)[: _PERIOD + _TOKENS].tolist()
    return {
        "repeats every 48 tokens": (once, repeated),
        "repeats, but for every 12th token": (once, edited),
        "does not repeat": (other[:_PERIOD], other[_PERIOD:]),
    }


def print_drafts(path: Path, threads: list[int], rounds: int) -> None:
    """Replies after a prompt that has what they repeat; with guesses and without take turns in one process."""
    print(head("reply of 192 tokens", "threads", "alone", "draft=ngram", "wall", "CPU", "guesses right"))
    for count in threads:
        model = bridge.Model.load(path, threads=count, context=1024).prepare()
        model.tokenizer.stops = frozenset()
        for name, (prompt, reply) in replies(min(model._decoder.vocab, 4000)).items():
            found: dict[Any, list[tuple[float, float]]] = {None: [], "ngram": []}
            for turn in range(rounds + 1):
                for draft, times in found.items():
                    wall, cpu = _timed(model, prompt, reply, draft)
                    if turn:  # the first compiles
                        times.append((wall, cpu))
            speculation = model.timing.speculation
            assert speculation is not None
            ratios = [
                statistics.median(a[i] / b[i] for a, b in zip(found[None], found["ngram"], strict=True)) for i in (0, 1)
            ]
            speeds = [f"{len(reply) / statistics.median(t[0] for t in times):.1f} tokens/s" for times in found.values()]
            right = f"{speculation.accepted} of {speculation.drafted}"
            line(name, count, *speeds, *(f"{ratio:.2f}" for ratio in ratios), right)
        model.close()


def _timed(model: Any, prompt: list[int], reply: list[int], draft: Any) -> tuple[float, float]:
    """Seconds of the wall clock and of the CPU for a reply, its first token and the prompt not counted."""
    tokens = model._tokens(prompt, len(reply), Replay(reply), model._drafter(draft))
    next(tokens)
    wall, cpu = time.perf_counter(), time.process_time()
    assert list(tokens) == reply[1:]
    return time.perf_counter() - wall, time.process_time() - cpu
