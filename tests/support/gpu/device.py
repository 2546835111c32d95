"""`bridge.cuda` on the machine: its memory is the host's, its kernels are compiled PTX, its one device a stand-in.

with pretended_gpu(): ...           # device="cuda" works; torch tensors on the device are those of the CPU
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch

from bridge.errors import BridgeError
from tests.support.gpu import streams
from tests.support.gpu.machine import program
from tests.support.gpu.memory import GpuError, Memory
from tests.support.ptx import ptx_of

_MOST_BLOCKS = 2**31 - 1, 65535, 65535  # of a grid, in each direction
_NUMBERS = {"int32": np.int32, "float32": np.float32, "int64": int, "float64": float}


class Launches:
    """What has been launched: names of kernels, those that may begin early, and the memory of the last.

    Of those that may begin early, places are kept: of what they stored, and of what they took for constant.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.dependent: list[str] = []
        self.memory: Memory | None = None
        self._stored: list[np.ndarray] = []
        self._constant: list[np.ndarray] = []
        self._kept: list[np.ndarray] = []  # so that a place stays theirs

    def run(self, kernel: Any, grid: Any, block: Any, arguments: Any) -> None:
        """Run a kernel as compiled for the oldest GPU that it runs on."""
        arguments = [_checked(kernel, *pair) for pair in zip(_types(kernel.signature), arguments, strict=True)]
        self.names.append(kernel.name)
        if kernel.dependent:
            self.dependent.append(kernel.name)
        try:
            self.memory = program(ptx_of(kernel, kernel.oldest)).launch(grid, block, arguments, kernel.dependent)
        except GpuError as problem:
            raise GpuError(f"{kernel.name}: {problem}") from problem
        if kernel.dependent:
            for region in self.memory.regions:
                here = region.data.ctypes.data
                self._stored.append(here + np.flatnonzero(region.stored))
                self._constant.append(here + np.flatnonzero(region.frozen))
                self._kept.append(region.data)

    def check_constants(self) -> None:
        """Raises GpuError where one launch stored what another one, which may have run meanwhile, took for constant."""
        if self._kept:
            both = np.intersect1d(np.concatenate(self._stored), np.concatenate(self._constant))
            if len(both):
                raise GpuError(f"{len(both)} bytes that a launch stored are read past the coherent cache by another")


def _types(signature: str) -> list[str]:
    """The types of a signature, void(float32[:,::1], int64, ...)."""
    inside = signature[signature.index("(") + 1 : signature.rindex(")")]
    return [part.strip() for part in re.split(r",(?![^\[]*\])", inside)]


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's memory as a kernel sees it: halves are int16."""
    tensor = tensor.detach()
    return (tensor.view(torch.int16) if tensor.dtype in (torch.float16, torch.bfloat16) else tensor).numpy()


def _checked(kernel: Any, wanted: str, given: Any) -> Any:
    """An argument, as numba would take it: it converts nothing here."""
    element, _, dimensions = wanted.partition("[")
    if not dimensions:
        if type(given) is not _NUMBERS[element]:
            raise GpuError(f"{kernel.name}: {given!r} for {wanted}")
        return given
    given = memory_of(given) if isinstance(given, torch.Tensor) else given
    if not isinstance(given, np.ndarray) or (given.dtype, given.ndim) != (np.dtype(element), dimensions.count(":") - 1):
        raise GpuError(f"{kernel.name}: {type(given).__name__} for {wanted}")
    return given


@contextmanager
def pretended_gpu(
    multiprocessors: int = 132,
    graphs: bool = False,
    capability: tuple[int, int] = (9, 0),
    overlapping: bool = False,
) -> Iterator[Launches]:
    """A GPU of that size and compute capability stands behind bridge.cuda; a decoder's launches may overlap.

    Every launch is one by itself, neither packed nor compiled ahead; with `graphs`, steps are captured.
    """
    from bridge.cuda import decoder
    from bridge.cuda.product import matmul
    from bridge.cuda.toolchain import device as devices
    from bridge.cuda.toolchain import launch

    launches = Launches()

    def forget() -> None:
        devices._placeholder.cache_clear()

    known: set[Any] = set()

    def launched(self: Any, grid: Any, block: Any, stream: Any, *arguments: Any) -> None:
        for size, most in zip(grid if isinstance(grid, tuple) else (grid,), _MOST_BLOCKS, strict=False):
            if not 1 <= size <= most:
                raise GpuError(f"{self.name}: a grid of {grid}; must be 1 to {_MOST_BLOCKS}")
        streams.launched(self, known, lambda: launches.run(self, grid, block, arguments))

    def opened(index: int) -> Any:
        if index:
            raise BridgeError(f"device 'cuda:{index}': there is 1, from cuda:0 on")
        return devices.Device(0, "pretended", capability, multiprocessors)

    def capturing(stream: Any) -> bool:
        return streams.Recorder.current is not None

    forget()
    with (
        mock.patch.multiple(
            devices, _opened=opened, available=lambda: None, capturing=capturing, overlaps=lambda device: overlapping
        ),
        mock.patch.multiple(
            devices.Device, place="cpu", active=lambda self: nullcontext(), free=lambda self: 1 << 40,
            empty=lambda self, nbytes, what="": np.full(nbytes, 0xFF, np.uint8),
            upload=lambda self, host, what="": host.copy(),
        ),
        mock.patch.object(devices.Memory, "stream", return_value=0),
        mock.patch.object(launch.Kernel, "run", launched),
        mock.patch.object(matmul.Multiplier, "bind", return_value=None),
        mock.patch.multiple(decoder.Decoder, graphs=graphs, _compile=lambda self: None),
        streams.pretended_torch(),
    ):  # fmt: skip
        yield launches
        launches.check_constants()
    forget()
