"""Compare the solver with GPTQModel's GPTQ, in turn, on one layer whose Hessian is given; print a markdown table.

    python scripts/bench_layer.py --gptqmodel PYTHON --rounds 3

CPU seconds of the process, with kernels compiled beforehand; GPTQModel (4 bits, groups of 128) in a Python that has it.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from benchlib import head, machine, output_of, parser

from bridge.quantize import Method, superblocks
from bridge.quantize.hessian import Hessian
from bridge.quantize.walk import LayerInput
from scripts.peers import gptqmodel_layer


def main() -> None:
    options = parse()
    print(f"Machine: {machine()}. A layer of {options.rows} x {options.columns}, {options.threads} threads.\n")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])  # the peer's as well
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    seconds(options.type, 1024, 2048)
    print(head(f"{options.type}, CPU s", "error", "GPTQModel, CPU s", "error", "ratio"))
    for _ in range(options.rounds):
        own, lost = seconds(options.type, options.rows, options.columns)
        print(f"| {own:.2f} | {lost:.2e} |", end="", flush=True)
        if options.gptqmodel is None:
            print(" | | |")
            continue
        printed = output_of(options.gptqmodel, gptqmodel_layer.__file__, options.rows, options.columns)
        peer, peer_lost = (float(x) for x in printed.split()[-2:])
        print(f" {peer:.2f} | {peer_lost:.2e} | {own / peer:.2f} |", flush=True)


def seconds(type: str, rows: int, columns: int) -> tuple[float, float]:
    """The CPU seconds that our solver takes, and the error that it leaves."""
    weight, matrix = gptqmodel_layer.layer(rows, columns)
    hessian = Hessian("layer", columns)
    hessian.matrix, hessian.tokens = matrix, 2 * columns
    begun = time.process_time()
    _, done = Method(superblocks(type)).layer(LayerInput("layer", weight, hessian))
    return time.process_time() - begun, done.error


def parse() -> argparse.Namespace:
    options = parser(__doc__, "--threads", "--rounds", threads={"default": 1})
    options.add_argument("--gptqmodel", type=Path, metavar="PYTHON", help="a Python that has GPTQModel")
    options.add_argument("--rows", type=int, default=4096, metavar="N", help="default: %(default)s")
    options.add_argument("--columns", type=int, default=4096, metavar="N", help="default: %(default)s")
    options.add_argument("--type", default="Q4_K", help="default: %(default)s")
    return options.parse_args()


if __name__ == "__main__":
    main()
