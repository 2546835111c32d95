"""How much faster replies are with guessed tokens.

On replies that are given: repeating, nearly so, or not at all. Or on what the model itself replies to pieces of a text,
as the guesses of a layer that predicts (MTP) need it.
"""

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import bridge
from bridge.runtime.replies.speculation import drafter_for
from bridge.runtime.sampling import Sampler, Sampling

from . import Lines, head, ratio, take_turns

_TOKENS = 192
_PERIOD = 48  # tokens after which a reply repeats; of a prompt
_PIECES = 4  # of a text


class Replay(Sampler):
    """Draws the tokens of a given reply, whatever the logits; as `Sampler` it looks for the most likely one first."""

    def __init__(self, reply: list[int]):
        super().__init__(Sampling(temperature=0))
        self._reply = iter(reply)

    def __call__(self, logits: np.ndarray, draw: Any = None) -> int:
        super().__call__(logits, draw)
        return next(self._reply)


def replies(vocab: int) -> dict[str, tuple[list[int], list[int]]]:
    """Name of a case -> a prompt and the reply to it, as token ids."""
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


def own_replies(model: Any, text: Path) -> dict[str, tuple[list[int], list[int]]]:
    """Name of a piece of a text -> the piece as a prompt, and what the model replies."""
    tokens = model.tokenizer.encode(text.read_text(encoding="utf-8"), add_special=False)
    starts = [i * (len(tokens) // _PIECES) for i in range(_PIECES)]
    prompts = [tokens[start : start + _PERIOD] for start in starts]
    pairs = [(prompt, list(model.generate_tokens(prompt, _TOKENS, temperature=0))) for prompt in prompts]
    return {f"{text.name}, piece {i + 1}": pair for i, pair in enumerate(pairs)}


def drafts(path: Path, draft: str, text: Path | None, threads: list[int], rounds: int) -> Lines:
    """A table of replies after their prompts; with guesses and without take turns in one process."""
    yield head("reply of 192 tokens", "threads", "alone", f"draft={draft}", "wall", "CPU", "guesses right")
    for count in threads:
        model = bridge.Model.load(path, threads=count, context=1024)
        model.tokenizer.stops = frozenset()
        if draft == "mtp":
            model.prediction_head()
        model.prepare()
        cases = replies(min(model._decoder.vocab, 4000)) if text is None else own_replies(model, text)
        for name, (prompt, reply) in cases.items():
            ways = {by: partial(_timed, model, prompt, reply, by) for by in (None, draft)}
            take_turns(ways, 1)  # compiles
            alone, guessed = take_turns(ways, rounds).values()
            speculation = model.timing.speculation
            assert speculation is not None
            speeds = [f"{len(reply) / statistics.median(way['wall']):.1f} tokens/s" for way in (alone, guessed)]
            gains = [f"{ratio(alone[clock], guessed[clock]):.2f}" for clock in ("wall", "CPU")]
            yield name, count, *speeds, *gains, f"{speculation.accepted} of {speculation.drafted}"
        model.close()


def _timed(model: Any, prompt: list[int], reply: list[int], draft: Any) -> dict[str, float]:
    """Seconds of the wall clock and of the CPU for a reply, its first token and the prompt not counted."""
    drafter = None if draft is None else drafter_for(model, draft)
    tokens = model._tokens(prompt, len(reply), Replay(reply), drafter)
    next(tokens)
    wall, cpu = time.perf_counter(), time.process_time()
    assert list(tokens) == reply[1:]
    return {"wall": time.perf_counter() - wall, "CPU": time.process_time() - cpu}
