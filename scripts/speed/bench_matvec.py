"""Measure matrix times vector: GB/s of GGUF bytes, their share of the read bandwidth, and the ratio to ggml.

    python -m scripts.speed.bench_matvec                        all types, 1 and 2 threads
    python -m scripts.speed.bench_matvec Q4_K Q6_K --json x.json

The peer is ggml, one mul_mat on its own threads, as npm distributes it, built for this processor. Both sides repack the
weights beforehand, ggml those that llama.cpp repacks on loading: the last column names ggml's layout (CPU: as in the
file). All contenders take turns in one run; ratios are medians over rounds. The large product is on 40960 x 4096
(--rows: another number of rows), the small one on 2048 x 4096. Give so many rows that the machine's largest cache
cannot hold half of them: otherwise the large product is not from memory.
First calls are timed in processes of their own.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time

import numpy as np

from bridge.blocks.read import READ
from bridge.runtime import bench as bench_products
from scripts.benchlib import Lines, bench, head, largest_cache, option, output_of
from scripts.peers.llama import ggml_matvec, tuned

FIRST = """
import sys, time
import numpy as np
from bridge.runtime.bench import random_tensor
w = random_tensor(sys.argv[1], 256, 4096)
x = np.ones(4096, np.float32)
start = time.perf_counter()
w.prepare().matvec(x)
print(time.perf_counter() - start)
"""


def product(type: str, shape: tuple[int, int], threads: int, library: ggml_matvec.Library, rounds: int) -> dict:
    tensor = bench_products.random_tensor(type, *shape)
    raw = tensor.raw.reshape(shape[0], -1)
    matrix = ggml_matvec.Matrix(library, type, raw, shape[1], threads=threads, repack=True)
    matrix.x[:] = 1
    timing = bench_products.measure(tensor, threads, {"ggml": matrix.run}, rounds, matrix.rest)
    matrix.close()
    row = {"type": type, "shape": list(shape), "threads": threads, "kernel": timing.kernel}
    row |= {"gbs": timing.speed("matvec"), "read_gbs": timing.speed("read"), "of_read": timing.ratio("read")}
    return row | {"ggml_gbs": timing.speed("ggml"), "over_ggml": timing.ratio("ggml"), "ggml_layout": matrix.layout}


def call_cost(type: str) -> float:
    """Microseconds of one call on a 256 x 256 tensor: the best of many rounds."""
    w = bench_products.random_tensor(type, 256, 256).prepare()
    x = np.ones(256, np.float32)
    w.matvec(x)
    best = float("inf")
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(200):
            w.matvec(x)
        best = min(best, (time.perf_counter() - start) / 200)
    return 1e6 * best


def first_calls(type: str) -> tuple[float, float]:
    """Seconds of prepare and matvec in a new process: nothing compiled before, then all of it (median of 5)."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONDONTWRITEBYTECODE": ""}  # it is compiled too
        times = [float(output_of(sys.executable, "-c", FIRST, type, env=environment)) for _ in range(6)]
    return times[0], statistics.median(times[1:])


OPTIONS = (
    option("--threads", [1, 2]), option("--rounds", 15), "--packages", "--json", option("types", list(READ), "TYPE"),
    option("--rows", bench_products.LARGE[0], "N", "of the large product"),
    option("--no-first", False, help="leave out the timing of first calls"),
)  # fmt: skip


def measure(options: argparse.Namespace) -> Lines:
    libraries = tuned.download(options.packages)
    library = ggml_matvec.tuned_library(libraries)
    yield f"ggml: {tuned.build(libraries)}, as npm distributes it."
    yield head("type", "shape", "threads", "GB/s", "of read", "read GB/s", "ggml GB/s", "times ggml", "ggml's layout")
    rows, calls = [], []
    for type in options.types:
        for shape in ((options.rows, bench_products.LARGE[1]), bench_products.SMALL):
            for threads in options.threads:
                row = product(type, shape, threads, library, options.rounds)
                rows.append(row)
                peer = [f"{row['ggml_gbs']:.1f}", f"{row['over_ggml']:.2f}", row["ggml_layout"]]
                speeds = f"{row['gbs']:.1f}", f"{row['of_read']:.0%}", f"{row['read_gbs']:.1f}"
                yield type, f"{shape[0]} x {shape[1]}", threads, *speeds, *peer
    yield head("type", "call on 256 x 256 (us)", "first call, cold (s)", "first call, compiled (s)")
    for type in options.types:
        cold, warm = (None, None) if options.no_first else first_calls(type)
        cost = call_cost(type)
        calls.append({"type": type, "call_us": cost, "cold_s": cold, "warm_s": warm})
        yield type, f"{cost:.1f}", *(["", ""] if cold is None else [f"{cold:.1f}", f"{warm:.2f}"])
    return {"cache_bytes": largest_cache(), "products": rows, "calls": calls}


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)
