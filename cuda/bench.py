"""Times products on a GPU as replays of CUDA graphs, and compares them with its memory's read bandwidth.

A graph holds LAUNCHES launches that read from several copies in turn. Together these are several times as large as
the L2 cache, so every launch reads from memory. The time of a launch is that of a replay over LAUNCHES, gaps included,
as the median of ROUNDS replays. The bytes of a product are those of its matrix on the device.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bridge.cuda.forms.matrix import DeviceMatrix
from bridge.cuda.product import matmul, matvec, mma, mma_int8
from bridge.cuda.product.activations import Records
from bridge.cuda.product.token_records import recorded
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.device import Device, check_torch, require, view, zeros
from bridge.cuda.toolchain.intrinsics import stream_16, xor
from bridge.cuda.toolchain.launch import Kernel, captured
from bridge.cuda.toolchain.unroll import expand, registers, unroll
from numba import cuda

from bridge.blocks.read import WRITTEN
from bridge.runtime.bench import ProductSpeed, tensors_to_time
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.progress import Progress

LAUNCHES = 16
ROUNDS = 11
LARGE = (8192, 28672)
SMALL = (4096, 14336)
_CACHES = 4  # size of all copies together, in L2 caches
_READ = 1 << 30  # bytes that are read to measure the bandwidth
_WARM = 0.03  # seconds of untimed replays: an idle GPU's clock is low at first

# set by `expand`
LOADS = 8

int32 = np.int32


def seconds(launches: Sequence[Callable[[], object]]) -> float:
    """Seconds of one launch: `launches` are captured in a graph, one after the other, and replayed."""
    import torch

    def step() -> None:
        for launch in launches:
            launch()

    graph = captured(step)
    warm = time.monotonic() + _WARM
    while time.monotonic() < warm:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / len(launches))
    return statistics.median(times)


def seconds_from_memory(make: Callable[[int], Callable[[], object]], nbytes: int) -> float:
    """Seconds of a launch that reads `nbytes`: make(i) is the launch on copy i."""
    import torch

    cache = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 64 << 20)
    copies = max(2, -(-_CACHES * cache // nbytes))
    each = [make(i) for i in range(copies)]
    return seconds([each[i % copies] for i in range(max(LAUNCHES, copies))])


# reading


def _read(source, count, out):
    """Read `count` times 16 bytes; the result is stored only if it is -1, so that no load is optimized away."""
    start = cuda.grid(1)
    step = cuda.gridsize(1)
    total = int32(0)
    held = registers()
    for index in range(start, count - (LOADS - 1) * step, LOADS * step):
        for k in unroll(LOADS):
            held[k] = stream_16(source, index + k * step)
        for k in unroll(LOADS):
            for word in unroll(4):
                total = xor(total, held[k][word])
    if total == int32(-1):
        out[start] = total


@recipe
def _reader() -> Kernel:
    return Kernel(expand(_read, "16"), "void(uint8[::1], int64, int32[::1])")


def read_bandwidth(device: Device) -> float:
    """Bytes a second of a kernel that only reads, the best of several grids."""
    import torch

    block = 512
    buffers = [torch.randint(0, 256, (_READ,), dtype=torch.uint8, device=device.place) for _ in range(2)]
    sources = [view(buffer) for buffer in buffers]
    best = 0.0
    for per in (2, 4, 8, 16):
        grid = per * device.multiprocessors
        out = view(zeros(device, grid * block, torch.int32))
        steps = _READ // 16 // (LOADS * grid * block)
        count = steps * LOADS * grid * block  # what is read: whole rounds of all threads

        def launch(i: int, grid: int = grid, count: int = count, out: Any = out) -> Callable[[], None]:
            return lambda: _reader().launch(grid, block, device.stream(), sources[i % 2], count, out)

        best = max(best, 16 * count / seconds([launch(i) for i in range(6)]))
    return best


# products


class Bench:
    """One matrix with as many copies as rotation needs."""

    def __init__(self, tensor: QuantTensor, device: Device):
        self.device = device
        self.matrix = DeviceMatrix.upload(tensor, device)
        self._copies = [self.matrix]

    def copy(self, number: int) -> DeviceMatrix:
        """The matrix itself first, then copies of it."""
        import torch

        while len(self._copies) <= number:
            m = self.matrix
            buffer = view(torch.as_tensor(m.buffer, device=self.device.place).clone())
            self._copies.append(DeviceMatrix(m.names, m.type, m.rows, m.columns, buffer, m.device))
        return self._copies[number]

    def product(self, n: int = 1, precision: str = "int8", shape: Any = None) -> float:
        """Seconds of a product with n columns; `shape`: another MatvecShape than the table's."""
        import torch

        m = self.matrix
        x = torch.randn((n, m.columns), device=self.device.place)
        records = Records(m.columns, n, self.device, precision).quantize(x, n, self.device.stream())
        torch.cuda.synchronize()
        y = view(zeros(self.device, (n, m.rows)))

        def make(number: int) -> Callable[[], None]:
            copy = self.copy(number)
            return lambda: matvec.launch(copy, records, y, n, self.device.stream(), shape=shape)

        return seconds_from_memory(make, m.nbytes)

    def tokens(self, n: int, way: str) -> float:
        """Seconds of a product with n tokens of halves: on tensor cores as halves ("cores") or, rounded by a launch of
        its own, as int8 ("int8"); or with the weights dequantized for torch ("torch")."""
        import torch

        m, device = self.matrix, self.device
        x = torch.randn((n, m.columns), dtype=torch.float16, device=device.place)
        y = zeros(device, (n, m.rows))

        def make(number: int) -> Callable[[], None]:
            copy = self.copy(number)
            if way == "torch":
                return lambda: matmul.by_torch(copy, x, y, torch.float16, device.stream())
            if way == "int8":
                tiles = mma_int8.tiles_of(n)
                return lambda: mma_int8.launch(copy, recorded(x, tiles, device), y, device.stream())
            return lambda: mma.launch(copy, x, y, device.stream())

        return seconds_from_memory(make, m.nbytes)


def torch_product(shape: tuple[int, int], device: Device, n: int = 1, dtype: str = "float16") -> float:
    """Seconds of torch's product of weights of a type with n vectors."""
    import torch

    rows, columns = shape
    weights: list[Any] = []
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device.place}
    x, y = torch.randn((n, columns), **options), torch.empty((n, rows), **options)

    def make(number: int) -> Callable[[], object]:
        while len(weights) <= number:
            weights.append(torch.randn((rows, columns), **options))
        return lambda: torch.mm(x, weights[number].T, out=y)

    return seconds_from_memory(make, 2 * rows * columns)


def bench(
    what: str | Path, shape: tuple[int, int] | None = None, device: str = "cuda", progress: Progress | None = None
) -> list[str | ProductSpeed]:
    """Lines to print for a type of block or the matrices of a GGUF; see runtime.bench."""
    gpu = require(device)
    check_torch(gpu)
    import torch

    tensors = tensors_to_time(what, [shape] if shape else [LARGE, SMALL], WRITTEN)
    if progress:
        progress(0, len(tensors), "")
    with gpu.active(), torch.cuda.device(gpu.index):
        bandwidth = read_bandwidth(gpu)
        lines: list[str | ProductSpeed] = [f"{gpu.name}, {gpu}"]
        for done, tensor in enumerate(tensors, 1):
            timed = Bench(tensor, gpu)
            nbytes, taken = timed.matrix.nbytes, timed.product()
            share = nbytes / taken / bandwidth
            lines.append(ProductSpeed(tensor.type, tensor.shape, str(gpu), "", nbytes, taken, bandwidth, share))
            if progress:
                progress(done, len(tensors), f"{tensor.type} {'x'.join(map(str, tensor.shape))}")
    return lines
