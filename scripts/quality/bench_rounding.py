"""Measure rounding floats to block types beside ggml's own quantizer: squared error, and weights a second.

    python -m scripts.quality.bench_rounding MODEL                the IQ and TQ types
    python -m scripts.quality.bench_rounding MODEL Q4_K IQ2_XS

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

import bridge
from bridge.blocks import ROUNDED
from bridge.blocks.ggml import GGMLQuantizationType
from bridge.blocks.read import WRITTEN
from bridge.encode.rounding.round_rows import quantize_rows
from scripts.benchlib import Lines, bench, option
from scripts.peers.llama import ggml

OPTIONS = (
    "model", "--rounds", option("types", list(ROUNDED), "TYPE"), option("--rows", 256, "N", "rows of 1024 weights"),
)  # fmt: skip
COLUMNS = "type", "error, normal", "with importance", "error, model", "with importance", "M weights/s", "ggml", "x"


def rows_of(folder: Path, columns: int, count: int) -> np.ndarray:
    """float32 [count, columns] of a model's matrices, as many of each."""
    with bridge.open_checkpoint(folder) as ckpt:
        names = [
            name for name, info in ckpt.tensors.items() if len(info.shape) == 2 and math.prod(info.shape) >= columns
        ]
        share = math.ceil(count / len(names))
        rows = [ckpt.read_float(name).reshape(-1)[: share * columns] for name in names]
    return np.concatenate([r[: r.size // columns * columns].reshape(-1, columns) for r in rows])[:count]


def seconds(work: Callable[[], object], rounds: int) -> float:
    """CPU time of the fastest round."""
    work()
    found = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        found.append(time.thread_time() - start)
    return min(found)


def error(x: np.ndarray, data: np.ndarray, name: str, importance: np.ndarray) -> float:
    """The weighted squared error, relative to the weights'."""
    stored = ggml.dequantize(data, int(GGMLQuantizationType[name])).astype(np.float64)
    return float((np.square(x - stored) * importance).sum() / (np.square(x, dtype=np.float64) * importance).sum())


def measure(options: argparse.Namespace) -> Lines:
    rng = np.random.default_rng(0)
    columns = 1024
    importance = rng.lognormal(size=columns).astype(np.float32)
    ones = np.ones(columns, np.float32)
    random = rng.standard_normal((options.rows, columns)).astype(np.float32)
    model = rows_of(options.model, columns, options.rows)
    for name in options.types:
        cells = []
        for x in (random, model):
            for w in (ones, importance):
                ours = error(x, quantize_rows(x, WRITTEN[name], w).data, name, w)
                theirs = error(x, ggml.quantize(x, name, w), name, w)
                cells.append(f"{ours:.5f}, {ours / theirs:.3f} of ggml's")
        own = random.size / seconds(partial(quantize_rows, random, WRITTEN[name], importance), options.rounds) / 1e6
        peer = random.size / seconds(partial(ggml.quantize, random, name, importance), options.rounds) / 1e6
        yield name, *cells, f"{own:.1f}", f"{peer:.1f}", f"{own / peer:.1f}"


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, COLUMNS)
