"""How much faster replies are with guessed tokens.

On replies that are given: repeating, nearly so, or not at all. Or on what the model itself replies to pieces of a text,
as the guesses of a layer that predicts (MTP) need it.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import bridge
from bridge.runtime.sampling import Sampler, Sampling
from bridge.runtime.speculation import drafter_for

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


def own_replies(model: Any, text: Path, count: int = 4, length: int = 48) -> dict[str, tuple[list[int], list[int]]]:
    """The same for what a model replies to `count` pieces of a text, spread over it."""
    tokens = model.tokenizer.encode(text.read_text(encoding="utf-8"), add_special=False)
    prompts = [tokens[at : at + length] for at in range(0, count * (len(tokens) // count), len(tokens) // count)]
    made = [(prompt, list(model.generate_tokens(prompt, _TOKENS, temperature=0))) for prompt in prompts]
    return {f"{text.name}, piece {i + 1}": pair for i, pair in enumerate(made)}


def print_drafts(path: Path, draft: str, text: Path | None, threads: list[int], rounds: int) -> None:
    """Replies after their prompts; with guesses and without take turns in one process."""
    print(head("reply of 192 tokens", "threads", "alone", f"draft={draft}", "wall", "CPU", "guesses right"))
    for count in threads:
        model = bridge.Model.load(path, threads=count, context=1024)
        model.tokenizer.stops = frozenset()
        if draft == "mtp":
            model.prediction_head()
        model.prepare()
        cases = replies(min(model._decoder.vocab, 4000)) if text is None else own_replies(model, text)
        for name, (prompt, reply) in cases.items():
            found: dict[Any, list[tuple[float, float]]] = {None: [], draft: []}
            for turn in range(rounds + 1):
                for by, times in found.items():
                    wall, cpu = _timed(model, prompt, reply, by)
                    if turn:  # the first compiles
                        times.append((wall, cpu))
            speculation = model.timing.speculation
            assert speculation is not None
            ratios = [
                statistics.median(a[i] / b[i] for a, b in zip(found[None], found[draft], strict=True)) for i in (0, 1)
            ]
            speeds = [f"{len(reply) / statistics.median(t[0] for t in times):.1f} tokens/s" for times in found.values()]
            right = f"{speculation.accepted} of {speculation.drafted}"
            line(name, count, *speeds, *(f"{ratio:.2f}" for ratio in ratios), right)
        model.close()


def _timed(model: Any, prompt: list[int], reply: list[int], draft: Any) -> tuple[float, float]:
    """Seconds of the wall clock and of the CPU for a reply, its first token and the prompt not counted."""
    drafter = None if draft is None else drafter_for(model, draft)
    tokens = model._tokens(prompt, len(reply), Replay(reply), drafter)
    next(tokens)
    wall, cpu = time.perf_counter(), time.process_time()
    assert list(tokens) == reply[1:]
    return time.perf_counter() - wall, time.process_time() - cpu
