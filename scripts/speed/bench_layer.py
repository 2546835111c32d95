"""Quantize one layer whose Hessian is given to several types; print a markdown table of CPU time and error.

    python -m scripts.speed.bench_layer --types Q4_K IQ4_XS IQ1_S --gptqmodel PYTHON --rounds 3

CPU seconds of the process, with kernels compiled beforehand, also as a multiple of the first type's. The error is
tr(E H E^T) over tr(W H W^T), also as a share of what the nearest codes leave, with scales in the metric of H's diagonal
(4-bit floats: as ggml and ModelOpt round). The second line is the first type with gptaq's target: with the products of
the float outputs, as a layer has them that shares its inputs with no other, and an eighth of the tokens held back.
GPTQModel (4 bits, groups of 128) runs in a Python that has it.
"""

import argparse
import os
import time
from pathlib import Path

import torch

from bridge.blocks.read import WRITTEN
from bridge.encode.rounding.round_rows import quantize_rows
from bridge.quantize import Method, superblocks
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.solve.gptq_solver import error
from bridge.quantize.solve.hessian import Hessian
from scripts.benchlib import Lines, bench, head, option, output_of
from scripts.peers import gptqmodel_layer, nvfp4
from scripts.peers.gguf_file import Blocks
from scripts.peers.llama import ggml

OPTIONS = (
    option("--threads", 1), "--rounds", option("--gptqmodel", Path, "PYTHON", "a Python that has GPTQModel"),
    option("--rows", 4096, "N"), option("--columns", 4096, "N"), option("--types", ["Q4_K"], "TYPE"),
)  # fmt: skip


def measure(options: argparse.Namespace) -> Lines:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])  # the peer's as well
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    layer = gptqmodel_layer.layer(options.rows, options.columns)
    small = gptqmodel_layer.layer(64, 1024)
    yield f"A layer of {options.rows} x {options.columns}."
    yield head("type", "CPU s", f"over {options.types[0]}", "error", "nearest codes", "ratio")
    for _ in range(options.rounds):
        first = None
        for type in options.types:
            seconds(type, *small, cross=first is None)  # compiles
            cpu, lost = seconds(type, *layer)
            nearest = nearest_error(type, *layer)
            first = first or cpu
            yield type, *cells(cpu, first, lost), f"{nearest:.2e}", f"{lost / nearest:.3f}"
            if type == options.types[0]:
                cpu, lost = seconds(type, *layer, cross=True)
                yield f"{type}, gptaq", *cells(cpu, first, lost), "", ""
        if options.gptqmodel:
            printed = output_of(options.gptqmodel, gptqmodel_layer.__file__, options.rows, options.columns)
            peer, lost = (float(x) for x in printed.split()[-2:])
            yield "GPTQModel", *cells(peer, first or peer, lost), "", ""


def cells(seconds: float, first: float, lost: float) -> tuple[str, str, str]:
    """CPU seconds, also as a multiple of the first type's, and the error."""
    return f"{seconds:.2f}", f"{seconds / first:.2f}", f"{lost:.2e}"


def seconds(type: str, weight: torch.Tensor, matrix: torch.Tensor, cross: bool = False) -> tuple[float, float]:
    """The CPU seconds that our solver takes, and the error that it leaves; `cross`: with gptaq's target."""
    columns = len(matrix)
    hessian = Hessian("layer", columns)
    if cross:
        random = torch.Generator().manual_seed(0)
        x = gptqmodel_layer.inputs(columns, random)
        x_float = x + 0.1 * torch.randn(len(x), 64, generator=random) @ torch.randn(64, columns, generator=random)
        hessian.add(x, outputs={"layer": x_float @ weight.T})
        _ = hessian.matrix
    else:
        hessian.matrix, hessian.tokens = matrix.clone(), 2 * columns
    begun = time.process_time()
    method = Method(superblocks(type, nvfp4.OWN_SCALE if type == "NVFP4" else 1.0))
    _, done = method.layer(LayerInput("layer", weight, hessian, last=True))
    return time.process_time() - begun, done.error


def nearest_error(type: str, weight: torch.Tensor, matrix: torch.Tensor) -> float:
    """The error of the nearest codes."""
    values = weight.numpy()
    if type == "NVFP4":
        rounded = nvfp4.quantize(values)
    elif type == "MXFP4":
        rounded = Blocks(type, ggml.quantize(values, type))
    else:
        rounded = Blocks(type, quantize_rows(values, WRITTEN[type], matrix.diagonal().numpy()).data)
    return error(weight, rounded.values(), matrix) / error(weight, torch.zeros_like(weight), matrix)


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)
