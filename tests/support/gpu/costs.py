"""What steps and prompts on a GPU cost by count, without one: instructions, launches, bytes.

For docs/measurements/cuda.md:

    python -m tests.support.gpu.costs

Instructions are those of a loop in machine code for 9.0, of a warp. Launches and bytes are those of a decoder that runs
here with kernels that do nothing; bytes are what torch's operations and our kernels are given and return, each array
once for each of them, weights left out.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bridge
from bridge.blocks import TYPES
from bridge.runtime.config.config_reader import read_config
from tests.support.cuda_driver import H200, pretended_driver
from tests.support.gpu.device import pretended_gpu
from tests.support.ptx import machine_code, ptx_of
from tests.support.random_blocks import random_matrix
from tests.support.sass import mma_loop
from tests.support.tiny_gguf import write_decoder

KINDS, GROUPS = ("f16", "q8_0"), (4, 8)
LENGTHS = (32, 160)  # of prompts, in tokens: as halves, and by torch
PROMPTS = 512, 2048
_LAYERS, _MATRICES = 32, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # of Llama 3 8B
_MULTIPROCESSORS, _FLOPS, _MEMORY = 132, 989e12, 3.35e12  # of an H100; f16, bytes a second
_WIDTH = 4  # times as wide as the model that runs here is one of 8B
_NO_WORK = ("aten::zeros", "aten::empty", "aten::empty.memory_format", "aten::scalar_tensor")


def attention_loop(kind: str, group: int) -> int:
    """Instructions for a tile of 64 positions, heads of 128: `group` query heads share a key."""
    from bridge.cuda.attention import attention
    from bridge.cuda.attention.attention_kind import AttentionKind

    kernel = attention.kernel(AttentionKind(128, group, 128, True), False, kind, False, (9, 0))
    return mma_loop(machine_code(ptx_of(kernel, (9, 0)), (9, 0), kernel.registers))


def _nbytes(x: torch.Tensor) -> int:
    """Of what differs in memory: a tensor that is expanded has the same for all."""
    return x.itemsize * math.prod(size for size, step in zip(x.shape, x.stride(), strict=True) if step)


class Work(TorchDispatchMode):
    """Operations that take a launch on a GPU, neither views nor new memory, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        schema = function._schema
        changes = any(a.alias_info and a.alias_info.is_write for a in schema.arguments)
        if (changes or not any(r.alias_info for r in schema.returns)) and schema.name not in _NO_WORK:
            self.count += 1
            parts = torch.utils._pytree.tree_flatten((args, kwargs, result))[0]
            self.nbytes += sum(_nbytes(part) for part in parts if isinstance(part, torch.Tensor))
        return result


def prompt(n: int, layers: int, folder: Path) -> tuple[int, int, int]:
    """Launches of ours, operations of torch, and bytes for a prompt of n tokens."""
    from bridge.cuda.decoder import Decoder
    from bridge.cuda.toolchain.launch import Kernel

    sizes = {"hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8}
    shape: dict[str, Any] = {name: size // _WIDTH for name, size in sizes.items()}
    path = write_decoder(folder / f"{layers}.gguf", layers=layers, types={"": "Q4_0"}, head_dim=128, **shape)
    file = bridge.open_gguf(path)
    ours: list[int] = []

    def noted(kernel: Any, grid: Any, block: Any, stream: Any, *arguments: Any) -> None:
        ours.append(sum(argument.nbytes for argument in arguments if hasattr(argument, "shape")))

    with (
        pretended_gpu(), mock.patch.object(torch, "empty", torch.zeros),  # numbers must still be finite
        mock.patch.object(Kernel, "run" if hasattr(Kernel, "run") else "launch", noted),
    ):  # fmt: skip
        decoder = Decoder(file, read_config(file.metadata, file.path), 256, "f16", "int8", "cuda")
        decoder.prepare()
        ours.clear()
        with Work() as work:
            decoder._prompt(list(range(n)), 1)
    return len(ours), work.count, sum(ours) + work.nbytes


def prompt_layer(n: int) -> tuple[int, int, int]:
    """Of a layer of a model of 8B: launches, operations, and bytes of a token, by the difference to 32 tokens more."""
    with tempfile.TemporaryDirectory() as folder:
        (a, b, one), (c, d, two) = (prompt(n, layers, Path(folder)) for layers in (1, 2))
        more, most = (prompt(n + 32, layers, Path(folder))[2] for layers in (1, 2))
    return c - a, d - b, _WIDTH * ((most - more) - (two - one)) // 32


def prompt_products(n: int, batch: int) -> tuple[int, int, float]:
    """Of a prompt of n tokens in batches, for torch's products of a model of 8B in Q4_K on an H100: dequantized tiles,
    the percentage of multiprocessors that the products keep busy, and milliseconds. **A model**: a multiprocessor
    computes 256 x 128 sums at a time, at its peak; memory is written and read at its peak. Attention and what is made
    of activations are left out.
    """
    from bridge.cuda.product.matmul import tile_rows

    tiles, used, waves, seconds = 0, 0, 0, 0.0
    for first in range(0, n, batch):
        for rows, columns in _MATRICES:
            step = tile_rows(rows, columns)
            for begin in range(0, rows, step):
                count = min(step, rows - begin)
                blocks = -(-count // 256) * -(-min(batch, n - first) // 128)
                turns = -(-blocks // _MULTIPROCESSORS)
                tiles, used, waves = tiles + 1, used + blocks * columns, waves + turns * columns
                seconds += turns * 2 * 256 * 128 * columns / (_FLOPS / _MULTIPROCESSORS)
                seconds += count * columns * (4.5 / 8 + 2 + 2) / _MEMORY
    return _LAYERS * tiles, round(100 * used / (waves * _MULTIPROCESSORS)), 1000 * _LAYERS * seconds


def prompt_rows() -> list[str]:
    """The rows of docs/measurements/cuda.md."""
    from bridge.cuda.decoder import BATCHES

    found = []
    for n in PROMPTS:
        tiles, busy, ms = prompt_products(n, BATCHES[0])
        what = f"a prompt of {n:,} tokens, modelled: dequantized tiles, busy multiprocessors, torch's products"
        found.append(f"| {what} | {tiles:,}, {busy}%, {ms:.1f} ms |")
    return found


def experts_layer(at_once: bool) -> tuple[int, int]:
    """Launches of ours and operations of torch for a token in a layer of experts of bridge.nn, of which it chose 8."""
    from bridge.cuda.toolchain.launch import Kernel

    from bridge.nn.quant_experts import ExpertStack, Gated

    networks = [tuple(random_matrix(TYPES["Q4_0"], 32, 32, 3 * e + i)[0] for i in range(3)) for e in range(8)]
    ours: list[str] = []
    with (
        pretended_gpu(), mock.patch.object(Kernel, "run", lambda kernel, *given: ours.append(kernel.name)),
    ):  # fmt: skip
        swiglu = Gated(torch.nn.functional.silu)
        stack = ExpertStack(networks, swiglu)
        moved = stack.to("cuda") if at_once else ExpertStack([tuple(m.to("cuda") for m in n) for n in networks], swiglu)
        given = torch.zeros(1, 32), torch.arange(8)[None], torch.ones(1, 8)
        with Work() as work:
            moved.mix(*given, "int8")
    return len(ours), work.count


def host_seconds() -> tuple[float, float]:
    """CPU time of a launch, and of a product with one token that has run before: two launches. The driver and what
    cuda.core does itself are stand-ins that do nothing."""
    from bridge.cuda.norm import activation_kernel
    from bridge.cuda.tensor import CudaTensor
    from bridge.cuda.toolchain.device import Device

    def least(call: Callable[[], object]) -> float:
        call()
        times = []
        for _ in range(9):
            begun = time.process_time()
            for _ in range(1000):
                call()
            times.append((time.process_time() - begun) / 1000)
        return min(times)

    with tempfile.TemporaryDirectory() as folder, pretended_driver(Path(folder)) as driver:
        tensor = CudaTensor(random_matrix(TYPES["Q4_0"], 6, 64)[0], Device(0, *H200))
        x, records, kernel = torch.zeros(64), torch.zeros(2048, dtype=torch.uint8), activation_kernel.__wrapped__(False)
        y = tensor.matvec(x)
        driver.queue = lambda *given: None
        launch = least(lambda: kernel.launch(1, 32, 0, x, y, records, 32))
        return launch, least(lambda: tensor.matvec(x, out=y))


def main() -> None:
    launch, product = host_seconds()
    print(f"a launch takes the host {1e6 * launch:.1f} us, a product of two {1e6 * product:.1f} us")
    for kind in KINDS:
        for group in GROUPS:
            print(f"attention, {kind}, {group} query heads a key: {attention_loop(kind, group)} instructions a tile")
    for at_once in (False, True):
        ours, torchs = experts_layer(at_once)
        print(f"a token in a layer of 8 experts, {at_once=}: {ours} launches, {torchs} operations of torch")
    for n in LENGTHS:
        ours, torchs, nbytes = prompt_layer(n)
        print(f"prompt of {n} tokens: {ours} launches, {torchs} operations of torch, {nbytes / 1e6:.2f} MB a token")
    print(*prompt_rows(), sep="\n")


if __name__ == "__main__":
    main()
