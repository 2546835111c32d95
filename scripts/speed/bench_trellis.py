"""Measure how fast trellis codes decode, and how fast a layer multiplies without being decoded.

    python -m scripts.speed.bench_trellis        1mad, 3inst, EXL3's mul1, quantlut and hyb, 4096 x 4096, 2 bits
    python -m scripts.speed.bench_trellis 1mad --bits 4 --shape 11008 4096 --threads 1

decode    millions of weights a second from codes to floats in allocated memory, without transforms
fused     one product with the packed layer, transforms on x and y included; GB/s of trellis bytes
times (a) how many times as fast as decoding the whole layer (transforms included), then multiplying
times (b) how many times as fast as the same layer as Q2_K with this project's own kernel, x in 8 bits

Contenders take turns; figures are medians over rounds, for decode and fused with the best round in parentheses.
"""

import argparse
import statistics

import numpy as np

from bridge.runtime.bench import random_tensor, taking_turns
from bridge.system.threads import pool
from bridge.trellis import BitshiftCodebook, TrellisLayer
from bridge.trellis.decode import decode
from bridge.trellis.packed import exl3_layer, qtip_layer
from scripts.benchlib import Lines, bench, head, option, ratio

OPTIONS = (
    "--threads", option("--rounds", 9), option("modes", ("1mad", "3inst", "mul1", "quantlut", "quantlut_sym"), "MODE"),
    option("--bits", 2, "K"), option("--shape", (4096, 4096), ("OUT", "IN"), nargs=2), option("--batch", (1, 4), "N"),
)  # fmt: skip
COLUMNS = "mode", "tokens", "decode, M weights/s (best)", "fused, ms", "fused, GB/s (best)", "times (a)", "times (b)"


def random_layer(mode: str, bits: int, out: int, columns: int, scale: float = 1) -> TrellisLayer:
    """A layer of random codes, times a scale; mcg and mul1 in EXL3's layout, hyb swizzled as QTIP has it.

    Every sequence of bits is a path through the trellis.
    """
    rng = np.random.default_rng(0)
    words = rng.integers(-(2**15), 2**15, out * columns * bits // 16).astype(np.int16)
    su, sv = (rng.choice([-1, 1], n).astype(np.float32) for n in (columns, out))
    sv *= np.float32(scale)
    if mode in ("mcg", "mul1"):
        stored = words.reshape(columns // 16, out // 16, 16 * bits)
        return exl3_layer(mode, stored, BitshiftCodebook(16, bits, decode_mode=mode), su, sv)
    looks_up = mode.startswith("quantlut")
    table = rng.normal(size=(512, 2)).astype(np.float16).astype(np.float32) if looks_up else None
    book = BitshiftCodebook(16, bits, 2 if looks_up else 1, 9 if looks_up else 0, mode, table)
    return qtip_layer(mode, words, book, (16, 16), su, sv)


def row(mode: str, bits: int, shape: tuple[int, int], batch: int, rounds: int) -> tuple[object, ...]:
    """The cells of a mode and a number of tokens."""
    layer = random_layer(mode, bits, *shape).prepare()
    x = np.random.default_rng(1).normal(size=(batch, shape[1])).astype(np.float32)
    held = np.empty(shape, np.float32)
    q2_k = random_tensor("Q2_K", *shape).prepare()
    seconds = taking_turns(
        {
            "fused": lambda: layer.matmul(x),
            "decode": lambda: decode(layer.words, layer.step, layer.book, layer.positions, layer.tile, held),
            "decode, then multiply": lambda: x @ layer.dequantize().T,
            "Q2_K": lambda: q2_k.matmul(x),
        },
        rounds,
    )
    weights = shape[0] * shape[1]
    rate, best_rate = (f(weights / s / 1e6 for s in seconds["decode"]) for f in (statistics.median, max))
    speed, best_speed = (f(layer.nbytes / s / 1e9 for s in seconds["fused"]) for f in (statistics.median, max))
    fused = f"{1e3 * statistics.median(seconds['fused']):.2f}", f"{speed:.2f} ({best_speed:.2f})"
    ratios = [ratio(seconds[other], seconds["fused"]) for other in ("decode, then multiply", "Q2_K")]
    return mode, batch, f"{rate:.0f} ({best_rate:.0f})", *fused, f"{ratios[0]:.0f}", f"{ratios[1]:.2f}"


def measure(options: argparse.Namespace) -> Lines:
    pool.set_num_threads(options.threads)
    yield "{} x {}, {} bits".format(*options.shape, options.bits)
    yield head(*COLUMNS)
    for mode in options.modes:
        for batch in options.batch:
            yield row(mode, options.bits, options.shape, batch, options.rounds)


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)
