"""Measure what the draw of a token costs, by settings and size of the vocabulary, and as a share of a batch's step.

    python -m scripts.speed.bench_sampling                               Gemma 3 270M's steps, see benchlib
    python -m scripts.speed.bench_sampling model.gguf --threads 2        those of another model

First the CPU time of a draw in one thread, in microseconds, the median of many: of random logits, whose spread is that
of a language model's. Then tokens per second of one sequence and of eight with the default settings, and how much of
the time of a step is not the model's: the draws, and the text that they make.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchlib import Lines, bench, head, option
from scripts.benchlib.real_models import PACKAGED, packaged_gguf

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "temperature 0": {"temperature": 0},
    "top_k 0": {"top_k": 0},
    "top_k 0, min_p 0": {"top_k": 0, "min_p": 0.0},
    "top_k 0, top_p 1": {"top_k": 0, "top_p": 1.0},
    "top_k 0, top_p 1, min_p 0": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "top_k 1000": {"top_k": 1000},
    "default, with the 5 most likely": {"logprobs": 5},
    "repeat_penalty 1.1": {"repeat_penalty": 1.1},
    "logit_bias of a token": {"logit_bias": {3: 1.0}},
}
SIZES = 1024, 49152, 151936, 262144  # tokens: the last three are SmolLM2's, Qwen 3's and Gemma 3's
SPREAD, ROWS = 5.0, 8  # standard deviation of logits, as Gemma 3's; rows that are drawn from in turn
SEQUENCES = 1, 8
OPTIONS = (
    option("--threads", [1, 2], help="numbers of threads to measure steps with"), option("--rounds", 5),
    option("--tokens", 64, "N", "tokens of each sequence"),
    option("model", "gemma3-270m", "MODEL", "a GGUF, or smollm2 ...", nargs="?"),
    option("--packages", Path("packages"), "DIR", "for what is downloaded"),
)  # fmt: skip


def microseconds(size: int, settings: dict[str, Any], draws: int) -> float:
    """CPU time of a draw in this thread, the median."""
    from bridge.runtime.sampling import Sampler, Sampling

    how = dict(settings)
    sampler = Sampler(Sampling(seed=0, **{k: v for k, v in how.items() if k != "logprobs"}), how.get("logprobs"))
    sampler.see(range(64))
    rows = (SPREAD * np.random.default_rng(0).standard_normal((ROWS, size))).astype(np.float32)
    times = []
    for number in range(draws):
        start = time.thread_time_ns()
        sampler(rows[number % ROWS])
        times.append(time.thread_time_ns() - start)
    return statistics.median(times) / 1000


class Clock:
    """The seconds that a function takes, in all."""

    def __init__(self, function: Callable[..., Any]):
        self.seconds, self._function = 0.0, function

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._function(*arguments)
        finally:
            self.seconds += time.perf_counter() - start


def steps(model: Any, sequences: int, tokens: int) -> tuple[float, float]:
    """Tokens per second of a batch's steps, and the share of their time that is not the model's."""
    clock, seconds = Clock(type(model._decoder).step.__get__(model._decoder)), 0.0
    model._decoder.step = clock
    with model.batch(sequences) as batch:
        for number in range(sequences):
            batch.add(list(range(10 + number, 18 + number)), tokens, seed=number)
        while batch.busy():
            start, made = time.perf_counter(), batch.steps
            batch.advance()
            seconds += (batch.steps > made) * (time.perf_counter() - start)
        return batch.step_tokens / seconds, 1 - clock.seconds / seconds


def measure(options: argparse.Namespace) -> Lines:
    import bridge
    from bridge.system.threads import pool

    for name, settings in SETTINGS.items():
        yield name, *(f"{microseconds(size, settings, 20 * options.rounds):.0f}" for size in SIZES)
    options.packages.mkdir(parents=True, exist_ok=True)
    named = options.model in PACKAGED
    model = bridge.Model.load(packaged_gguf(options.model, options.packages) if named else options.model, context=512)
    model.tokenizer.stops = frozenset()
    model.prepare()
    cases = [(threads, sequences) for threads in options.threads for sequences in SEQUENCES]
    figures: dict[tuple[int, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for turn in range(options.rounds + 1):
        for threads, sequences in cases:
            pool.set_num_threads(threads)
            figure = steps(model, sequences, options.tokens)
            if turn:  # the first one compiles
                figures[threads, sequences].append(figure)
    yield head("threads", "sequences", "tokens/s", "of one sequence's", "not the model's")
    for threads, sequences in cases:
        rates, shares = zip(*figures[threads, sequences], strict=True)
        alone = [rate for rate, _ in figures[threads, 1]]
        gain = statistics.median(a / b for a, b in zip(rates, alone, strict=True))
        yield threads, sequences, f"{statistics.median(rates):.0f}", f"{gain:.2f}", f"{statistics.median(shares):.1%}"


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, ("settings", *(f"{size:,} tokens" for size in SIZES)))
