"""Kernels, compiled when they are first needed and launched without waiting.

Compiling takes a second, allocates and talks to the driver, none of which may happen while a stream is being
captured into a CUDA graph: `warm` does it beforehand. In the simulator a kernel runs as it is.

Numba compiles and loads, but its work for every launch (checking and wrapping arguments) takes 0.2 ms, so launches go
through cuda.core. Numba passes an array to a kernel as seven or more numbers: `bind` packs them once, and
`Launch.point` changes the address of an array that has moved.

A chain of short kernels waits at each end: the last blocks run alone, and a launch takes the GPU a microsecond or two.
From compute capability 9.0 on a `dependent` kernel may be launched while the one before it runs (programmatic dependent
launch). Such a kernel says at once that the next one may begin (launch_dependents), so several may be in flight, and

    every thread waits (launches_wait) before it loads or stores anything in global memory: it may only prefetch
    so a kernel ends after all those before it, and after a wait everything before it is visible
    what others write is never loaded through the non-coherent cache (ld.global.nc): it changes while the kernel runs

So it need not know what is launched before or after it, be it a copy or somebody else's kernel.

A step of a decoder is captured once in a CUDA graph (`Graph`) and replayed: 160 launches cost the host as much as one.
What changes between steps (token, position, uniform numbers) lies in device memory, so the graph is the same for
every step. A step runs once before it is captured, as cuBLAS, too, takes its workspace on first use.
"""

import ctypes
import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from bridge.cuda import device as devices
from bridge.cuda.intrinsics import SIMULATED
from numba import cuda

from bridge.errors import BridgeError

MAX_REGISTERS = 64  # so that 32 warps find room on a multiprocessor


class Launch:
    """A kernel of the current device with its grid and its arguments, queued as often as wanted; it holds no memory."""

    __slots__ = ("_addresses", "_arguments", "_config", "_device", "_kernel", "_start")

    def __init__(self, overload: Any, grid: Any, block: Any, arguments: Sequence[Any], dependent: bool = False):
        core = _core()
        self._device = cuda.get_current_device().id
        self._kernel = overload._codelibrary.get_cufunc().kernel
        more = {"programmatic_stream_serialization": True} if dependent else {}
        self._config = core.LaunchConfig(grid=grid, block=block, **more)
        self._start = core.launch
        self._arguments, self._addresses = _packed(overload.argument_types, arguments)

    def point(self, array: int, address: int) -> None:
        """Change the address of the array with this number, whose shape stays the same."""
        self._arguments[self._addresses[array]] = address

    def __call__(self, stream: int) -> None:
        """Queue it on the stream of this handle."""
        self._start(_core_stream(self._device, stream), self._config, self._kernel, *self._arguments)


class Kernel:
    """A kernel of one signature, limited in registers, for compute capability `oldest` and newer.

    `dependent`: it may be launched while the one before it runs, and waits for that itself; see above.
    """

    def __init__(
        self, function: Callable[..., None], signature: str, registers: int = MAX_REGISTERS,
        oldest: tuple[int, int] = (7, 5), dependent: bool = False,
    ):  # fmt: skip
        self.function = function
        self.signature = signature
        self.registers = registers
        self.oldest = devices.OVERLAPPING if dependent else oldest
        self.dependent = dependent
        self.name = function.__name__
        self._compiled: Any = None
        self._loaded: set[int] = set()

    def warm(self, stream: Any = 0) -> Any:
        """Compile for the current device, or take it from the cache, and load it.

        Raises BridgeError while a graph is captured on the stream, and where compiler or driver refuse.
        """
        if SIMULATED:
            self._compiled = self._compiled or cuda.jit(self.function)
            return self._compiled
        number = cuda.get_current_device().id
        if number not in self._loaded:
            if devices.capturing(stream):
                raise BridgeError(
                    f"{self.name} is not compiled yet and the stream is being captured; run the product once first"
                )
            try:
                if self._compiled is None:
                    # without link-time optimization, what ptxas reports for the PTX is what runs
                    options = {"max_registers": self.registers, "lto": False, "cache": True}
                    self._compiled = cuda.jit(self.signature, **options)(self.function)
                for overload in self._compiled.overloads.values():
                    overload.bind()
            except Exception as problem:
                words = " ".join(str(problem).split())[:400]
                raise BridgeError(
                    f"{self.name} cannot be compiled and loaded: {type(problem).__name__}: {words}; the CUDA packages "
                    "must be of one version, no newer than the driver's: pip install numba-cuda[cu13], or [cu12]"
                ) from problem
            self._loaded.add(number)
        return self._compiled

    def bind(self, grid: Any, block: Any, stream: Any, *arguments: Any) -> Launch:
        """Pack the arguments for the current device, not the simulator's; raises as `warm` does."""
        (overload,) = self.warm(stream).overloads.values()
        return Launch(overload, grid, block, arguments, self.dependent)

    def launch(self, grid: Any, block: Any, stream: Any, *arguments: Any) -> None:
        """Queue it on a stream."""
        if SIMULATED:
            self.warm()[grid, block](*arguments)
        else:
            self.bind(grid, block, stream, *arguments)(handle(stream))


def handle(stream: Any) -> int:
    """The number by which the driver knows a stream of Numba's, 0 for the default one."""
    found = getattr(stream, "handle", stream)
    return int(getattr(found, "value", found) or 0)


def _packed(kinds: Sequence[Any], arguments: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """The words that a kernel takes for arguments of Numba's types, and which of them are addresses of arrays.

    An array, contiguous: no owner, no parent, elements, bytes of an element, address, shape, strides.
    """
    packed: list[Any] = []
    addresses = []
    for kind, given in zip(kinds, arguments, strict=True):
        if not hasattr(kind, "ndim"):
            packed.append(getattr(ctypes, f"c_{_C_NAMES.get(str(kind), kind)}")(given))
            continue
        addresses.append(len(packed) + 4)
        strides = [given.dtype.itemsize]
        for length in given.shape[:0:-1]:
            strides.insert(0, strides[0] * length)
        packed += [0, 0, given.size, given.dtype.itemsize, _address(given), *given.shape, *strides]
    return packed, addresses


_C_NAMES = {"float32": "float", "float64": "double"}


def _address(array: Any) -> int:
    """Where an array of Numba's on the device begins."""
    return array.device_ctypes_pointer.value or 0


def _core() -> Any:
    """NVIDIA's cuda.core."""
    return importlib.import_module("cuda.core")


@cache
def _core_stream(device: int, number: int) -> Any:
    return _core().Stream.from_handle(number)


def captured(step: Callable[[], None], stream: Any) -> Any:
    """A torch.cuda.CUDAGraph of what step() launches; it must have run on the stream before."""
    import torch

    graph = torch.cuda.CUDAGraph()
    # numba must not free memory during the capture
    with cuda.defer_cleanup(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph


class Graph:
    """`replay()` launches what `step()` launched, on torch's current stream."""

    def __init__(self, step: Callable[[], None], state: Any):
        """`state`: the tensor with a step's position; it is restored after the first run, made for its side effects."""
        import torch

        kept = state.clone()
        stream = torch.cuda.Stream(state.device)
        stream.wait_stream(torch.cuda.current_stream(state.device))
        with torch.cuda.stream(stream):
            step()
            state.copy_(kept)
        stream.synchronize()
        self._graph = captured(step, stream)
        torch.cuda.current_stream(state.device).wait_stream(stream)

    def replay(self) -> None:
        """Launch the step."""
        self._graph.replay()
