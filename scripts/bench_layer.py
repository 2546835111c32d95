"""Measure the solver on one layer whose Hessian is given, beside GPTQModel's GPTQ in turn; print a markdown table.

    python scripts/bench_layer.py --gptqmodel PYTHON --rounds 3

CPU seconds of the process, kernels compiled before; GPTQModel (4 bits, groups of 128) in a Python that has it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from bench_convert import ROOT, machine

sys.path.insert(0, str(ROOT))

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
    print(f"| {options.type}, CPU s | error | GPTQModel, CPU s | error | ratio |\n|---|---|---|---|---|")
    for _ in range(options.rounds):
        own, lost = seconds(options.type, options.rows, options.columns)
        print(f"| {own:.2f} | {lost:.2e} |", end="", flush=True)
        if options.gptqmodel is None:
            print(" | | |")
            continue
        command = [options.gptqmodel, gptqmodel_layer.__file__, options.rows, options.columns]
        done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{options.gptqmodel}: GPTQModel failed:\n{done.stderr[-2000:]}")
        peer, peer_lost = (float(x) for x in done.stdout.split()[-2:])
        print(f" {peer:.2f} | {peer_lost:.2e} | {own / peer:.2f} |", flush=True)


def seconds(type: str, rows: int, columns: int) -> tuple[float, float]:
    """The CPU seconds of our solver, and the error that it leaves."""
    weight, matrix = gptqmodel_layer.layer(rows, columns)
    hessian = Hessian("layer", columns)
    hessian.matrix, hessian.tokens = matrix, 2 * columns
    begun = time.process_time()
    _, done = Method(superblocks(type)).layer(LayerInput("layer", weight, hessian))
    return time.process_time() - begun, done.error


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--gptqmodel", type=Path, metavar="PYTHON")
    parser.add_argument("--rows", type=int, default=4096, metavar="N", help="default: %(default)s")
    parser.add_argument("--columns", type=int, default=4096, metavar="N", help="default: %(default)s")
    parser.add_argument("--type", default="Q4_K", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main()
