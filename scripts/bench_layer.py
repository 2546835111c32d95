"""Compare the methods, and GPTQModel's GPTQ, in turn, on one layer whose Hessian is given; print a markdown table.

    python scripts/bench_layer.py --gptqmodel PYTHON --rounds 3

CPU seconds of the process, with kernels compiled beforehand; GPTQModel (4 bits, groups of 128) in a Python that has it.
`gptaq` also has the cross term of the inputs and an eighth of the tokens held back, as in a model.
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

METHODS = ("gptq", "gptaq")


def main() -> None:
    options = parse()
    print(f"Machine: {machine()}. A layer of {options.rows} x {options.columns}, {options.threads} threads.\n")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])  # the peer's as well
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    for method in METHODS:
        seconds(method, options.type, 1024, 2048)
    print(head("", f"{options.type}, CPU s", "error", "GPTQModel, CPU s", "error", "ratio", "over gptq"))
    for _ in range(options.rounds):
        peer = ["", ""]
        if options.gptqmodel is not None:
            printed = output_of(options.gptqmodel, gptqmodel_layer.__file__, options.rows, options.columns)
            peer = printed.split()[-2:]
        plain = 0.0
        for method in METHODS:
            own, lost = seconds(method, options.type, options.rows, options.columns)
            plain = plain or own
            ratio = f"{own / float(peer[0]):.2f}" if peer[0] else ""
            row = (method, f"{own:.2f}", f"{lost:.2e}", *peer, ratio, f"{own / plain:.2f}")
            print(f"| {' | '.join(row)} |", flush=True)


def seconds(method: str, type: str, rows: int, columns: int) -> tuple[float, float]:
    """The CPU seconds that our solver takes, and the error that it leaves."""
    weight, matrix = gptqmodel_layer.layer(rows, columns)
    hessian = Hessian("layer", columns)
    if method == "gptaq":
        random = torch.Generator().manual_seed(0)
        x = gptqmodel_layer.inputs(columns, random)
        hessian.add(x, x + 0.1 * torch.randn(len(x), 64, generator=random) @ torch.randn(64, columns, generator=random))
        _ = hessian.matrix
    else:
        hessian.matrix, hessian.tokens = matrix, 2 * columns
    begun = time.process_time()
    _, done = Method(superblocks(type)).layer(LayerInput("layer", weight, hessian, last=True))
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
