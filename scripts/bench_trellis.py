"""Measure how fast trellis codes decode, and how fast a layer multiplies without being decoded.

    python scripts/bench_trellis.py                      1mad, 3inst, EXL3's mul1, quantlut and hyb, 4096 x 4096, 2 bits
    python scripts/bench_trellis.py 1mad --bits 4 --shape 11008 4096 --threads 1

decode    millions of weights a second from codes to floats in allocated memory, without transforms
fused     one product with the packed layer, transforms on x and y included; GB/s of trellis bytes
times (a) how many times as fast as decoding the whole layer (transforms included), then multiplying
times (b) how many times as fast as the same layer as Q2_K with this project's own kernel, x in 8 bits

Contenders take turns; figures are medians over rounds, for decode and fused with the best round in parentheses.
"""

import statistics

import numpy as np
from benchlib import head, line, machine, parser

from bridge.runtime.bench import random_tensor, taking_turns
from bridge.system import pool
from bridge.trellis import BitshiftCodebook, TrellisLayer
from bridge.trellis.decode import decode
from bridge.trellis.packed import exl3_layer, qtip_layer

MODES = ("1mad", "3inst", "mul1", "quantlut", "quantlut_sym")


def random_layer(mode: str, bits: int, out: int, columns: int) -> TrellisLayer:
    """A layer of random codes; mul1 in EXL3's layout, hyb swizzled as QTIP has it."""
    rng = np.random.default_rng(0)
    words = rng.integers(-(2**15), 2**15, out * columns * bits // 16).astype(np.int16)
    su, sv = (rng.choice([-1, 1], n).astype(np.float32) for n in (columns, out))
    if mode == "mul1":
        stored = words.reshape(columns // 16, out // 16, 16 * bits)
        return exl3_layer(mode, stored, BitshiftCodebook(16, bits, decode_mode=mode), su, sv)
    looks_up = mode.startswith("quantlut")
    table = rng.normal(size=(512, 2)).astype(np.float16) if looks_up else None
    book = BitshiftCodebook(16, bits, 2 if looks_up else 1, 9 if looks_up else 0, mode, table)
    return qtip_layer(mode, words, book, (16, 16), su, sv)


def times(seconds: dict[str, list[float]], name: str) -> float:
    """How many times as fast as a contender the fused product is."""
    return statistics.median(b / a for a, b in zip(seconds["fused"], seconds[name], strict=True))


def measure(mode: str, bits: int, shape: tuple[int, int], batch: int, rounds: int) -> None:
    """Print a line of the table."""
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
    ratios = f"{times(seconds, 'decode, then multiply'):.0f}", f"{times(seconds, 'Q2_K'):.2f}"
    line(mode, batch, f"{rate:.0f} ({best_rate:.0f})", *fused, *ratios)


def main() -> None:
    options = parser(__doc__, "--threads", "--rounds", rounds={"default": 9})
    options.add_argument("modes", nargs="*", default=list(MODES), metavar="MODE", help="default: %(default)s")
    options.add_argument("--bits", type=int, default=2, metavar="K", help="default: %(default)s")
    options.add_argument("--shape", type=int, nargs=2, default=(4096, 4096), metavar=("OUT", "IN"))
    options.add_argument("--batch", type=int, nargs="+", default=[1, 4], metavar="N", help="default: 1 4")
    arguments = options.parse_args()
    pool.set_num_threads(arguments.threads)
    out, columns = arguments.shape
    print(f"{machine()}, {arguments.threads} threads; {out} x {columns}, {arguments.bits} bits\n")
    rates = "decode, M weights/s (best)", "fused, ms", "fused, GB/s (best)"
    print(head("mode", "tokens", *rates, "times (a)", "times (b)"))
    for mode in arguments.modes:
        for batch in arguments.batch:
            measure(mode, arguments.bits, arguments.shape, batch, arguments.rounds)


if __name__ == "__main__":
    main()
