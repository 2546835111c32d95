"""Kernels, compiled when they are first needed and launched without waiting.

Compiling (compiler.py) takes seconds, and loading talks to the driver, which may not happen while a stream is being
captured into a CUDA graph: `warm` does both beforehand.

Numba only compiles: its work for every launch takes 0.2 ms, so launches go through cuda.core, which takes one. A kernel
takes the address of an array, and of one with two dimensions how many rows it has and how far they are apart. `bind`
packs arguments once: a `Launch` never changes, arrays that have moved are named in each call, so that threads can share
it.

A chain of short kernels waits at each end: the last blocks run alone, and a launch takes the GPU a microsecond or two.
From compute capability 9.0 on a `dependent` kernel may be launched while the one before it runs (programmatic dependent
launch). Such a kernel says at once that the next one may begin (launch_dependents), so several may be in flight, and

    every thread waits (launches_wait) before it loads or stores anything in global memory: it may only prefetch
    so a kernel ends after all those before it, and after a wait everything before it is visible
    what others write is never loaded through the non-coherent cache (ld.global.nc): it changes while the kernel runs

So it need not know what is launched before or after it, be it a copy or somebody else's kernel.

A step of a decoder is captured once in a CUDA graph and replayed (`captured`): 160 launches cost the host as one.
What changes between steps (token, position, uniform numbers) lies in device memory, so the graph is the same for
every step. A step runs once before it is captured, as cuBLAS, too, takes its workspace on first use.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

from bridge.cuda.toolchain import compiler
from bridge.cuda.toolchain import device as devices

from bridge.errors import BridgeError

MAX_REGISTERS = 64  # so that 32 warps find room on a multiprocessor


class Launch:
    """A kernel on one device with its grid and its arguments, queued as often as wanted; it holds no memory."""

    __slots__ = ("_addresses", "_arguments", "_config", "_device", "_kernel", "_queue")

    def __init__(self, kernel: Kernel, loaded: Any, device: int, grid: Any, block: Any, arguments: Sequence[Any]):
        self._device = device
        self._kernel = loaded
        self._config = _config(grid, block, kernel.dependent)
        self._queue = _core().launch
        self._arguments, self._addresses = packed(kernel.parameters, arguments)

    def __call__(self, stream: int, *moved: tuple[int, int]) -> None:
        """Queue it on the stream of this handle, in the current context, which must be the device's.

        `moved`: (number, address) of arrays that are elsewhere than those it was made with, in the same shape.
        """
        arguments = self._arguments
        if moved:
            arguments = arguments.copy()
            for number, address in moved:
                arguments[self._addresses[number]] = address
        self._queue(_core_stream(self._device, stream), self._config, self._kernel, *arguments)


class Kernel(compiler.Source):
    """A kernel of one signature, limited in registers, for compute capability `oldest` and newer.

    `dependent`: it may be launched while the one before it runs, and waits for that itself; see above.
    """

    def __init__(
        self, function: Callable[..., None], signature: str, registers: int = MAX_REGISTERS,
        oldest: tuple[int, int] = (7, 5), dependent: bool = False,
    ):  # fmt: skip
        super().__init__(function, signature, registers)
        self.parameters = [
            (compiler.scalar(element), dimensions) for element, dimensions in compiler.parameters(signature)
        ]
        self.oldest = devices.OVERLAPPING if dependent else oldest
        self.dependent = dependent
        self._loaded: dict[int, tuple[int, Any]] = {}  # by the context
        self._lock = threading.Lock()

    def warm(self, stream: int = 0) -> tuple[int, Any]:
        """The current device's number, and the kernel compiled and loaded for it.

        Raises BridgeError while a graph is captured on the stream, and where compiler or driver refuse.
        """
        context = devices.context()
        if context not in self._loaded:
            device = devices.current()
            with self._lock:  # of several threads, one compiles
                if context not in self._loaded:
                    self._loaded[context] = device.index, self._load(device, stream)
        return self._loaded[context]

    def _load(self, device: devices.Device, stream: int) -> Any:
        if devices.capturing(stream):
            raise BridgeError(
                f"{self.name} is not compiled yet and the stream is being captured; run the product once first"
            )
        stored, target = compiler.known(self, device.capability), "{}.{}".format(*device.capability)
        loading = step = f"loading {self.name}, compiled for {target}"
        try:
            if stored is not None:
                try:
                    return _loaded(stored)
                except Exception as problem:
                    if not compiler.of_versions(problem):
                        raise
            step = f"compiling {self.name} for {target}"  # also what another toolkit has made and the driver refuses
            compiled = compiler.compiled(self, device.capability)
            step = loading
            return _loaded(compiled)
        except BridgeError:
            raise
        except Exception as problem:
            raise BridgeError(compiler.failure(problem, step)) from problem

    def bind(self, grid: Any, block: Any, stream: int, *arguments: Any) -> Launch:
        """Pack the arguments for the current device; raises as `warm` does."""
        device, loaded = self.warm(stream)
        return Launch(self, loaded, device, grid, block, arguments)

    def launch(self, grid: Any, block: Any, stream: int, *arguments: Any) -> None:
        """Queue it on a stream, or note it where that is all that is wanted."""
        noted = getattr(_noting, "kernels", None)
        if noted is None:
            self.run(grid, block, stream, *arguments)
        else:
            noted.append(self)

    def run(self, grid: Any, block: Any, stream: int, *arguments: Any) -> None:
        """Queue it on a stream."""
        device, loaded = self.warm(stream)
        config = _config(grid, block, self.dependent)
        _core().launch(_core_stream(device, stream), config, loaded, *packed(self.parameters, arguments)[0])


_noting = threading.local()


@contextmanager
def noted() -> Iterator[list[Kernel]]:
    """Kernels that this thread would launch meanwhile; none runs, so results are anything."""
    _noting.kernels = []
    try:
        yield _noting.kernels
    finally:
        _noting.kernels = None


def packed(parameters: Sequence[tuple[Any, int]], arguments: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """The numbers that a kernel takes for arguments, and which of them are addresses of arrays.

    `parameters`: (type in ctypes, dimensions). Arrays are torch's, with contiguous rows.
    """
    numbers: list[Any] = []
    addresses = []
    for (kind, dimensions), argument in zip(parameters, arguments, strict=True):
        if not dimensions:
            numbers.append(kind(argument))
            continue
        addresses.append(len(numbers))
        numbers.append(argument.data_ptr())
        if dimensions > 1:
            numbers += argument.size(0), argument.stride(0)
    return numbers, addresses


@cache
def _core() -> Any:
    """NVIDIA's cuda.core."""
    return importlib.import_module("cuda.core")


def _loaded(code: compiler.Code) -> Any:
    """Machine code as a kernel in the current context: now, as a capture cannot wait for it."""
    from cuda.bindings import driver

    kernel = _core().ObjectCode.from_cubin(code.cubin).get_kernel(code.entry)
    devices.checked(driver.cuKernelGetFunction(kernel.handle))
    return kernel


@cache
def _core_stream(device: int, number: int) -> Any:
    return _core().Stream.from_handle(number)


@lru_cache(1 << 12)
def _config(grid: Any, block: Any, dependent: bool) -> Any:
    more = {"programmatic_stream_serialization": True} if dependent else {}
    return _core().LaunchConfig(grid=grid, block=block, **more)


def captured(step: Callable[[], object], state: Any = None) -> Any:
    """A torch.cuda.CUDAGraph of what step() launches, which replay() launches on torch's current stream.

    state  the tensor with a step's position; it is restored after the first run, made for its side effects
    """
    import torch

    saved, device = (None, None) if state is None else (state.clone(), state.device)
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()
        if state is not None:
            state.copy_(saved)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph
