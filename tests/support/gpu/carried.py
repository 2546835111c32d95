"""Kernels that scripts/gpu_check.py launches, compiled without a GPU, for a machine whose time is short.

    python -m tests.support.gpu.carried 9.0 build/kernels
    python scripts/gpu_check.py --kernels build/kernels             there

All jobs run here on a GPU of which this folder pretends that it is there, and each kernel is noted instead of launched:
results are anything, weights are zeros, and models have fewer layers, but kernels are those of the check. They fit
wherever the sources are the same; a toolkit no newer than the driver's there is safest. The exit code is 1 if a job
ended early or a kernel could not be compiled.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from bridge.cuda import bench, decoder
from bridge.cuda.forms import matrix
from bridge.cuda.product import matmul
from bridge.cuda.toolchain import compiler
from bridge.cuda.toolchain.compile_pool import compile_all

from bridge.runtime import QuantTensor
from bridge.runtime.bench import random_tensor
from bridge.system.progress import Bar
from tests.support.gpu.device import Launches, pretended_gpu

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))

from gpu_checks import contexts, costs, jobs, linears, model, products, synthetic, timing, tokens, torchs

MULTIPROCESSORS = 132
_WITHOUT = ("correct/mmvq", "time/torch_product", "time/launches", "time/clocks", "time/upload")  # none of their own


def kernels(
    names: Sequence[str], capability: tuple[int, int], multiprocessors: int = MULTIPROCESSORS
) -> tuple[list[Any], list[str]]:
    """Those that jobs of these names launch on a GPU of that capability and size; and why jobs ended early."""
    noted: dict[Any, None] = {}
    early = []

    def zeros(type: str, rows: int, columns: int) -> tuple[Any, np.ndarray]:
        return random_tensor(type, rows, columns), np.zeros((rows, columns))

    def unread(launches: Any, kernel: Any, grid: Any, block: Any, arguments: Any) -> None:
        noted[kernel] = None

    def once(launches: Any, rounds: int = 1) -> float:
        launches[0]()
        return 1.0

    def of_one_copy(make: Any, nbytes: int, launches: int = 1) -> float:
        return once([make(0)])

    with ExitStack() as stack:
        for owner, name, value in (
            *((part, "random_matrix", zeros) for part in (products, tokens, linears, torchs)),
            (Launches, "run", unread), (matrix, "_repack", lambda *given: None),
            (QuantTensor, "dequantize", lambda tensor: np.zeros(tensor.shape, np.float32)),
            (products, "THREADS", 1), (products, "PRODUCTS", 1), (model, "STEPPED", 2), (model, "MADE", 2),
            (bench, "_READ", 1 << 25), (bench, "seconds", once), (bench, "seconds_from_memory", of_one_copy),
            (contexts, "seconds_from_memory", of_one_copy),
            (torch.accelerator, "is_available", lambda: False),
            (bench, "torch_product", lambda *given: 0.0), (contexts, "_torch", lambda *given: 0.0),
            (matmul, "sums", lambda x, weight: torch.zeros((len(x), len(weight)))),
            (contexts, "LENGTHS", contexts.LENGTHS[:1]), (costs, "CALLS", 1), (costs, "QUEUED", 1),
            (timing, "BATCHES", (65,)), (timing, "DECODED", 2), (timing, "PROMPTS", (16, 65)),
            (synthetic.SyntheticFile, "LAYERS", 4), (decoder, "LENGTHS", (65,)),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(np.errstate(all="ignore"))
        # with it, or with its own accelerator, torch's compiler would look for a GPU
        stack.enter_context(_missing("triton"))
        stack.enter_context(pretended_gpu(multiprocessors, graphs=True, capability=capability, overlapping=True))
        for job in names:
            if not job.startswith(_WITHOUT):
                try:
                    jobs.run(job)
                except Exception as problem:
                    early.append(f"{job} ended early: {type(problem).__name__}: {problem}")
    return [kernel for kernel in noted if kernel.recipe is not None], early


@contextmanager
def _missing(name: str) -> Iterator[None]:
    """A package cannot be imported; what is imported meanwhile stays."""
    there = {name: sys.modules[name]} if name in sys.modules else {}
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        sys.modules.update(there)


def compile_into(folder: Path, capability: tuple[int, int], names: Sequence[str]) -> tuple[str, list[str]]:
    """Compile the kernels of jobs into a folder; what was done, in a line, and what went wrong."""
    found, wrong = kernels(names, capability)
    os.environ["BRIDGE_KERNELS"] = str(folder.resolve())
    with Bar("compiling for the GPU", unit=" kernels") as bar:
        wrong += compile_all(found, capability, bar).values()
    made = [kernel for kernel in found if compiler.known(kernel, capability) is not None]
    for kernel in made:
        compiler.keep(kernel, capability, folder)
    size = sum(len(kernel.codes[capability].cubin) for kernel in made)
    line = f"{len(made)} of {len(found)} kernels for {capability[0]}.{capability[1]}, {size / 1e6:.1f} MB, in {folder}"
    return line, wrong


def _capability(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+\.\d", text):
        raise argparse.ArgumentTypeError(f"{text} is no compute capability; one is 9.0")
    major, minor = map(int, text.split("."))
    return major, minor


def main() -> int:
    options = argparse.ArgumentParser(description="Compile the kernels of scripts/gpu_check.py for a GPU.")
    options.add_argument("capability", type=_capability, help="the GPU's compute capability, for instance 9.0")
    options.add_argument("folder", type=Path, help="for the kernels; gpu_check.py takes it as --kernels")
    options.add_argument("--models", type=Path, help="a folder of small models, as small_models.py writes it")
    a = options.parse_args()
    names = list(jobs.EVERY)
    if a.models is not None:
        os.environ["BRIDGE_MODELS"] = str(a.models.resolve())
        names += [f"correct/model/{name}" for name in model.others()]
    line, wrong = compile_into(a.folder, a.capability, names)
    print(line)
    for reason in wrong[:1]:
        print(f"{len(wrong)} failed, the first: {reason}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
