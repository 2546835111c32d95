"""Measure the products' kernels alone: their instructions, and their speed on matrices in the cache, on one thread.

    python -m scripts.speed.bench_kernels                                   the K-quants and IQ4_XS
    BRIDGE_CPU=avx2 NUMBA_CPU_NAME=znver3 NUMBA_CPU_FEATURES=+avx2,+fma,+f16c,+bmi2 \\
        python -m scripts.speed.bench_kernels Q4_K

Instructions are those of the kernel's longest straight run, which is a block of all rows of one row group (of two, if
the kernel unpacks them first) times as many values of each column, for 1000 products of a weight and a value.
Prefetches count, unpacking does not. Speeds are those of the fastest of many calls, so that other load on the machine
hardly matters. One column is measured with prefetches, as from memory.
Kernels are compiled once more for their assembly, in a second each.
"""

import argparse
import re
import time

import numpy as np

from scripts.benchlib import Lines, bench, option

OPTIONS = option("--rounds", 100), option("types", ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"), "TYPE")
ROWS, COLUMNS, TURNS = 256, 2048, 8  # of the matrix; the kernel's columns are taken so many times


def instructions(assembly: str) -> int:
    """How many instructions the longest run without a label has."""
    runs = re.split(r"^\S+:", assembly, flags=re.M)
    return max(len(re.findall(r"^\t(?![.#j])\S", run, flags=re.M)) for run in runs)


def counted(type: str, width: int, rounds: int) -> tuple[float, float]:
    """Instructions for 1000 products, and products a nanosecond."""
    from bridge.blocks.read import READ
    from bridge.runtime.bench import random_tensor
    from bridge.runtime.cpu.engines import interleaved, unpacked
    from bridge.runtime.cpu.engines.prepared import Prepared
    from bridge.runtime.cpu.forms import activations
    from bridge.system.cpu import targets
    from bridge.system.cpu.machine import host
    from bridge.system.kernels.compiler import assembly

    block = READ[type]
    engine = Prepared(random_tensor(type, ROWS, COLUMNS), targets.chosen())
    x = np.random.default_rng(0).standard_normal((TURNS * width, COLUMNS)).astype(np.float32)
    records = activations.records(x, block, width, form=engine.form(width, True))
    y = np.zeros((TURNS * width, ROWS), np.float32)
    kernel = interleaved.kernel(type, engine.target, width, True)
    sizes = engine.blocks, engine.stride, TURNS, 4 * ROWS, 0, engine.groups
    times = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        kernel.ctypes(engine.address, records.ctypes.data, y.ctypes.data, *sizes)
        times.append(time.perf_counter_ns() - start)
    count = instructions(assembly(kernel, host()))
    isa = targets.isa(engine.target)
    rows = engine.lanes
    if unpacked.unpacks(isa, block, width):
        rows *= unpacked.row_groups(isa, block)
    return 1000 * count / (rows * block.size * width), y.size * COLUMNS / min(times)


def measure(options: argparse.Namespace) -> Lines:
    from bridge.runtime.cpu.engines import interleaved
    from bridge.system.cpu import targets

    for type in options.types:
        for width in interleaved.widths(type, targets.chosen()):
            count, speed = counted(type, width, options.rounds)
            yield type, width, f"{count:.0f}", f"{speed:.1f}"


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, ("type", "columns", "instructions for 1000 products", "products a nanosecond"))
