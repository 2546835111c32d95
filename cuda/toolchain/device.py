"""CUDA devices: whether one can be used and why not, its memory, torch's stream.

Nothing here is imported before a device is asked for, and numba-cuda is imported only inside the functions: a
machine without it, or without a GPU, gets a sentence instead of a traceback.
"""

import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from bridge.errors import BridgeError, needs_torch
from bridge.system.operands import is_torch

_OLDEST = (7, 5)  # compute capability: the oldest that CUDA 13 compiles for
OVERLAPPING = (9, 0)  # from here on a launch may begin before the previous one ends


def _missing() -> str | None:
    """What is not installed, and how to install it."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed; pip install numba-cuda[cu13]"
    return None


def _driver() -> Any:
    """numba-cuda's driver, initialized."""
    from numba.cuda.cudadrv.driver import driver
    from numba.cuda.cudadrv.error import CudaSupportError

    driver.ensure_initialized()
    if driver.initialization_error:
        raise CudaSupportError(driver.initialization_error)
    return driver


def available() -> str | None:
    """Why CUDA cannot be used, in a line; None if it can. Never raises."""
    if (reason := _missing()) is not None:
        return reason
    try:
        driver = _driver()
    except Exception as problem:
        return _without_driver(problem)
    from bridge.cuda.toolchain import compiler

    try:
        toolkit = compiler.toolkit()
    except Exception as problem:
        if not compiler.any_kept():
            return compiler.failure(problem, "looking for the CUDA compiler")
    else:
        version = tuple(driver.get_version())[:2]
        if version[0] < toolkit[0]:
            return (
                f"the NVIDIA driver knows CUDA {version[0]}.{version[1]}, older than the toolkit, "
                f"{toolkit[0]}.{toolkit[1]}; update the driver, or pip install numba-cuda[cu{version[0]}]"
            )
    if driver.get_device_count() == 0:
        return "the NVIDIA driver sees no GPU"
    return None


def _without_driver(problem: Exception) -> str:
    """Why the driver cannot be used, in a line."""
    words = " ".join(str(problem).split()).removesuffix(":").strip()
    if "driver library cannot be found" in words:  # numba-cuda's words where no file has its name
        return "no NVIDIA driver was found; install one, or use the CPU"
    if "CUDA_ERROR_NO_DEVICE" in words:
        return "the NVIDIA driver sees no GPU"
    return f"{type(problem).__name__}: {words or 'no reason given'} (starting the NVIDIA driver)"


@dataclass(frozen=True)
class Device:
    """One GPU."""

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int

    def __str__(self) -> str:
        return f"cuda:{self.index}"

    def active(self) -> Any:
        """A context in which it is the current device of this thread, for kernels and for the driver."""
        return _Active(self.index)

    @property
    def place(self) -> str:
        """The device as torch names it: where its memory is. In tests without a GPU that is "cpu"."""
        return str(self)

    def free(self) -> int:
        """Bytes of free memory; what torch keeps in reserve counts as taken."""
        import torch

        return int(torch.cuda.mem_get_info(self.index)[0])

    def check_memory(self, needed: int, what: str) -> None:
        """Raise BridgeError unless `needed` bytes are free; it names both numbers."""
        if needed > self.free():
            import torch

            torch.cuda.empty_cache()  # what torch keeps in reserve
        if needed > self.free():
            raise self.too_little(needed, what)

    def too_little(self, needed: int, what: str) -> BridgeError:
        return BridgeError(
            f"{self}: {what} needs {_size(needed)}, {_size(self.free())} are free; stop other programs on the GPU, or "
            f"choose a smaller model"
        )

    def empty(self, nbytes: int, what: str = "a buffer") -> Any:
        """uint8 [nbytes] of device memory, with anything in it: torch's, which it reuses once nobody holds it.

        Raises BridgeError, with what is needed and free, where it is too much.
        """
        check_torch(self)
        import torch

        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.place)
        except torch.cuda.OutOfMemoryError as problem:
            raise self.too_little(nbytes, what) from problem

    def upload(self, host: np.ndarray, what: str = "a buffer") -> Any:
        """A copy of an array in device memory.

        Raises BridgeError as `empty` does, and while a graph is captured.
        """
        if capturing(self.stream()):
            raise BridgeError(f"{self}: {what} is uploaded and the stream is being captured; run the step once first")
        import torch

        memory = self.empty(host.nbytes, what)
        source = torch.from_numpy(np.require(host, requirements=("C", "W")))
        memory = memory.view(source.dtype).view(source.shape)
        return memory.copy_(source)

    def placeholder(self, dtype: str = "float32") -> Any:
        """An array of one element, for an argument that a kernel ignores."""
        return _placeholder(self, dtype)

    def stream(self) -> int:
        """The handle of torch's current stream."""
        import torch

        return int(torch.cuda.current_stream(self.index).cuda_stream)


class Memory:
    """Tensors in device memory that work on any stream reads, and that may be freed while it is queued.

    torch gives freed memory to the next tensor of the stream on which it was allocated. It waits for other streams that
    it knows to use the memory, and remembers them until then: so each is told to it once.
    """

    def __init__(self, device: Device, *tensors: Any):
        self._device, self.tensors = device, tensors
        self._streams: set[int] = set()  # told, by their handles

    def stream(self) -> int:
        """The handle of torch's current stream, which is going to read the memory.

        torch forgets streams that it is told while a graph is captured. So none is then: as for all that a graph reads,
        the memory must be kept until its last replay has ended.
        """
        import torch

        current = torch.cuda.current_stream(self._device.index)
        handle = int(current.cuda_stream)
        if handle not in self._streams and not capturing(handle):
            for tensor in self.tensors:
                tensor.record_stream(current)
            self._streams.add(handle)
        return handle


class _Active:
    """Makes a device's own context, that of torch and of the CUDA runtime, the thread's current one."""

    __slots__ = ("_index", "_pushed")

    def __init__(self, index: int):
        self._index = index

    def __enter__(self) -> None:
        driver, primary = _bindings(), _context(self._index)
        self._pushed = int(checked(driver.cuCtxGetCurrent())) != int(primary)  # none is current in a new thread
        if self._pushed:
            checked(driver.cuCtxPushCurrent(primary))

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            checked(_bindings().cuCtxPopCurrent())


@cache
def _bindings() -> Any:
    """The driver's functions; importing them takes as long as a launch."""
    from cuda.bindings import driver

    return driver


@cache
def _context(index: int) -> Any:
    """A device's primary context; made here if there is none yet, and kept."""
    driver = _bindings()
    return checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(index))))


def checked(answer: Any) -> Any:
    """What the driver answers besides its error code. Raises RuntimeError where that is one."""
    error, *values = answer
    if int(error):
        raise RuntimeError(f"the NVIDIA driver says {getattr(error, 'name', error)}")
    return values[0] if values else None


@cache
def _placeholder(device: Device, dtype: str) -> Any:
    return device.upload(np.zeros(1, dtype))


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes / 1024:.1f} KiB"


def require(device: Any = None) -> Device:
    """The device meant by "cuda", "cuda:1", 1, a torch.device, a Device; None is torch's current one, or the first.

    Raises BridgeError with the reason where it cannot be used.
    """
    if isinstance(device, Device):
        return device
    text = "cuda" if device is None else str(device)
    kind, _, number = text.partition(":")
    if text.isdigit():
        kind, number = "cuda", text
    if kind != "cuda" or (number and not number.isdigit()):
        raise BridgeError(f"unknown device {text!r}: choose cuda, cuda:0, cuda:1 ...")
    reason = available()
    if reason:
        raise BridgeError(f"device {text!r}: {reason}")
    torch = sys.modules.get("torch")
    if number:
        index = int(number)
    elif torch is not None and torch.cuda.is_initialized():
        index = torch.cuda.current_device()
    else:
        index = 0
    return _opened(index)


@cache
def _opened(index: int) -> Device:
    from numba import cuda

    count = _driver().get_device_count()
    if index >= count:
        raise BridgeError(f"device 'cuda:{index}': there {'is' if count == 1 else 'are'} {count}, from cuda:0 on")
    gpu = cuda.gpus[index]  # makes no context, which numba refuses to on a GPU that is too old
    capability = tuple(gpu.compute_capability)[:2]
    name = gpu.name.decode() if isinstance(gpu.name, bytes) else gpu.name
    if capability < _OLDEST:
        raise BridgeError(
            f"device 'cuda:{index}': {name} has compute capability {capability[0]}.{capability[1]}; "
            f"must be {_OLDEST[0]}.{_OLDEST[1]} or newer"
        )
    return Device(index, name, capability, gpu.MULTIPROCESSOR_COUNT)  # type: ignore[arg-type]


class Moved:
    """What make(source, device) has made, as long as it is referenced: it must refer to its source.

    So all that share a tensor share the one on a GPU.
    """

    def __init__(self, make: Callable[[Any, Device], Any]):
        self._make = make
        self._known: WeakValueDictionary[tuple[int, Device], Any] = WeakValueDictionary()  # by the id of the source
        self._lock = threading.RLock()

    def get(self, source: Any, device: Any) -> Any:
        """The one for a device, by name or as torch's; made now if there is none. Raises as `require` does."""
        gpu = require(device)
        with self._lock:
            moved = self._known.get((id(source), gpu))
            if moved is None:
                moved = self._known[id(source), gpu] = self._make(source, gpu)
            return moved


def overlaps(device: Device) -> bool:
    """Whether a launch may begin before the previous one ends, see launch.py; BRIDGE_PDL=0 turns it off.

    Drivers before CUDA 12.3 cannot capture such launches, and an old cuda.core cannot make them.
    """
    if os.environ.get("BRIDGE_PDL") == "0" or device.capability < OVERLAPPING:
        return False
    from cuda.core import LaunchConfig

    return hasattr(LaunchConfig, "programmatic_stream_serialization") and tuple(_driver().get_version())[:2] >= (12, 3)


def current() -> Device:
    """The device whose context is current in this thread; the first one where none is."""
    return _opened(int(checked(_bindings().cuCtxGetDevice()))) if context() else require()


def context() -> int:
    """The handle of the context that is current in this thread; 0 where none is."""
    return int(checked(_bindings().cuCtxGetCurrent()))


def capturing(stream: int) -> bool:
    """Whether a CUDA graph is being captured on the stream."""
    driver = _bindings()
    error, status, *_ = driver.cuStreamIsCapturing(driver.CUstream(stream))
    return int(error) == 0 and int(status) != 0


def kind(x: Any) -> str | None:
    """ "f32", "f16" or "bf16", the type of an array's or tensor's elements; None for any other."""
    return _kind(getattr(x, "dtype", None))


@cache
def _kind(dtype: Any) -> str | None:
    return {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}.get(str(dtype).removeprefix("torch."))


def view(x: Any, apart: bool = False) -> Any:
    """A tensor or an array on the device as a kernel takes it, not copied.

    A tensor that is not contiguous raises BridgeError; `apart`: rows may be further apart than they are long, for
    kernels that see x as an array of two dimensions.
    """
    if is_torch(x) and not (x.is_contiguous() or (apart and x.dim() == 2 and x.stride(1) == 1)):
        raise BridgeError(f"a tensor {list(x.shape)} with strides {list(x.stride())}; must be contiguous")
    return x


@cache
def check_torch(device: Device) -> None:
    """Raises BridgeError where torch is missing, or cannot use the device."""
    try:
        import torch
    except ImportError:
        raise needs_torch(f"device {device}: a model", gpu=True) from None
    if not torch.cuda.is_available():
        raise BridgeError(f"device {device}: torch {torch.__version__} has no CUDA; install a build with CUDA")


def zeros(device: Device, shape: int | tuple[int, ...], dtype: Any = None) -> Any:
    """A torch tensor of zeros, float32 unless another type is named."""
    import torch

    return torch.zeros(shape, dtype=dtype or torch.float32, device=device.place)


def upload(array: np.ndarray, device: Device) -> Any:
    """A torch tensor of the same values on the device."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(device.place)
