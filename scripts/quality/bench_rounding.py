"""Measure rounding floats to block types beside ggml's own quantizer: squared error, and weights a second.

    python -m scripts.quality.bench_rounding MODEL                the IQ and TQ types
    python -m scripts.quality.bench_rounding MODEL Q4_K IQ2_XS
    python -m scripts.quality.bench_rounding Q8_0.gguf Q4_K       what requantizing costs

Random rows are normal; the model's are the first of each matrix, as many of each. Errors are weighted with the
importance that both sides get: 1 for all columns, or a lognormal one. Speeds are those of one thread in the fastest
round, in CPU time, with kernels and tables made beforehand.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from bridge.blocks import ROUNDED
from bridge.blocks.ggml import GGMLQuantizationType
from bridge.blocks.read import WRITTEN
from bridge.encode.rounding.round_rows import quantize_rows
from scripts.benchlib import Lines, bench, option
from scripts.peers import reference
from scripts.peers.gguf_file import gguf_weights
from scripts.peers.llama import ggml

OPTIONS = (
    option("model", Path, help="a float model's folder, or a GGUF of a Llama or Qwen"), "--rounds",
    option("types", list(ROUNDED), "TYPE"), option("--rows", 256, "N", "rows of 1024 weights"),
)  # fmt: skip
HEAD = "type", "error, normal", "with importance", "error, model", "with importance", "M weights/s", "ggml", "x"
COLUMNS = 1024


def rows_of(model: Path, count: int) -> np.ndarray:
    """float32 [count, COLUMNS] of the matrices of a float model or of a GGUF, as many of each."""
    weights = gguf_weights(model) if model.suffix == ".gguf" else reference.float_weights(model)
    matrices = [w.reshape(-1) for w in weights.values() if w.ndim == 2 and w.size >= COLUMNS]
    share = math.ceil(count / len(matrices))
    rows = [w[: min(share, w.size // COLUMNS) * COLUMNS].reshape(-1, COLUMNS) for w in matrices]
    return np.concatenate(rows)[:count]


def seconds(work: Callable[[], object], rounds: int) -> float:
    """CPU time of the fastest round."""
    work()
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)


def error(x: np.ndarray, data: np.ndarray, name: str, importance: np.ndarray) -> float:
    """The weighted squared error, relative to the weights'."""
    stored = ggml.dequantize(data, int(GGMLQuantizationType[name])).astype(np.float64)
    return float((np.square(x - stored) * importance).sum() / (np.square(x, dtype=np.float64) * importance).sum())


def measure(options: argparse.Namespace) -> Lines:
    rng = np.random.default_rng(0)
    importance = rng.lognormal(size=COLUMNS).astype(np.float32)
    ones = np.ones(COLUMNS, np.float32)
    random = rng.standard_normal((options.rows, COLUMNS)).astype(np.float32)
    model = rows_of(options.model, options.rows)
    for name in options.types:
        cells = []
        for x in (random, model):
            for w in (ones, importance):
                ours = error(x, quantize_rows(x, WRITTEN[name], w).data, name, w)
                theirs = error(x, ggml.quantize(x, name, w), name, w)
                cells.append(f"{ours:.2e}, {ours / theirs:.3f} of ggml's")
        ours = random.size / seconds(partial(quantize_rows, random, WRITTEN[name], importance), options.rounds) / 1e6
        theirs = random.size / seconds(partial(ggml.quantize, random, name, importance), options.rounds) / 1e6
        yield name, *cells, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.1f}"


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, HEAD)
