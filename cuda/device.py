"""CUDA devices: whether one can be used and why not, its memory, torch's stream.

Nothing here is imported before a device is asked for, and numba-cuda is imported only inside the functions: a
machine without it, or without a GPU, gets a sentence instead of a traceback.

In the simulator (NUMBA_ENABLE_CUDASIM=1) there is one device, its memory is the host's, and streams mean nothing.
"""

import contextlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.system.operands import is_torch

_OLDEST = (7, 5)  # compute capability: the oldest that CUDA 13 compiles for
OVERLAPPING = (9, 0)  # from here on a launch may begin before the previous one ends


def _simulated() -> bool:
    from numba import config

    return bool(config.ENABLE_CUDASIM)  # type: ignore[attr-defined]


def _missing() -> str | None:
    """What is not installed, and how to install it."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed; pip install numba-cuda[cu13]"
    return None


def _driver() -> Any:
    """numba-cuda's driver, initialized."""
    from numba.cuda.cudadrv.driver import driver

    driver.ensure_initialized()
    if driver.initialization_error:
        raise RuntimeError(driver.initialization_error)
    return driver


def _toolkit() -> tuple[int, int]:
    """The version of the CUDA compiler that numba-cuda found. torch brings all of it but libNVVM."""
    from numba.cuda.cudadrv.nvvm import NVVM
    from numba.cuda.cudadrv.runtime import get_version

    NVVM()
    return tuple(get_version())[:2]  # type: ignore[return-value]


def available() -> str | None:
    """Why CUDA cannot be used, in a line; None if it can. Never raises."""
    reason = _missing()
    if reason or _simulated():
        return reason
    try:
        driver = _driver()
    except Exception as problem:
        words = " ".join(str(problem).split()).removesuffix(":").strip()
        return f"no NVIDIA driver can be used ({words or type(problem).__name__}); install one, or use the CPU"
    try:
        toolkit = _toolkit()
    except Exception as problem:
        words = " ".join(str(problem).split())
        return f"no CUDA compiler was found ({words}); pip install numba-cuda[cu12], or [cu13]"
    version = tuple(driver.get_version())[:2]
    if version[0] < toolkit[0]:
        return (
            f"the NVIDIA driver knows CUDA {version[0]}.{version[1]}, older than the toolkit, "
            f"{toolkit[0]}.{toolkit[1]}; update the driver, or pip install numba-cuda[cu{version[0]}]"
        )
    if driver.get_device_count() == 0:
        return "the NVIDIA driver sees no GPU"
    return None


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
        """A context in which it is the current device of this thread."""
        from numba import cuda

        if _simulated() or cuda.get_current_device().id == self.index:
            return contextlib.nullcontext()
        return cuda.gpus[self.index]

    def free(self) -> int:
        """Bytes of free memory; what torch keeps in reserve counts as taken."""
        from numba import cuda

        if _simulated():
            return 1 << 40
        with self.active():
            return int(cuda.current_context().get_memory_info()[0])

    def check_memory(self, needed: int, what: str) -> None:
        """Raise BridgeError unless `needed` bytes are free; it names both numbers."""
        if needed > self.free():
            self._give_back()
            if needed > self.free():
                raise self.too_little(needed, what)

    def _give_back(self) -> None:
        """Free what numba has not freed yet and what torch keeps in reserve."""
        from numba import cuda

        if _simulated():
            return
        with self.active():
            cuda.current_context().memory_manager.deallocations.clear()
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def too_little(self, needed: int, what: str) -> BridgeError:
        return BridgeError(
            f"{self}: {what} needs {_size(needed)}, {_size(self.free())} are free; stop other programs on the GPU, or "
            f"choose a smaller model"
        )

    def empty(self, nbytes: int, what: str = "a buffer") -> Any:
        """uint8 [nbytes] of device memory.

        Raises BridgeError, with what is needed and free, where it is too much, and while a graph is captured.
        """
        from numba import cuda

        if _simulated():
            return cuda.to_device(np.zeros(nbytes, np.uint8))
        if capturing(self.stream()):
            raise BridgeError(f"{self}: {what} needs memory and the stream is being captured; run the step once first")
        self.check_memory(nbytes, what)
        with self.active():
            try:
                return cuda.device_array(nbytes, np.uint8)
            except Exception as problem:
                if "OUT_OF_MEMORY" not in str(problem) and not isinstance(problem, MemoryError):
                    raise
        raise self.too_little(nbytes, what)

    def upload(self, host: np.ndarray, what: str = "a buffer") -> Any:
        """A copy of uint8 [nbytes] in device memory."""
        from numba import cuda

        if _simulated():
            return cuda.to_device(host)
        memory = self.empty(host.nbytes, what)
        with self.active():
            memory.copy_to_device(host)
            cuda.default_stream().synchronize()  # torch's other streams do not wait for this copy
        return memory

    def placeholder(self) -> Any:
        """float32 [1], for an argument that a kernel ignores."""
        return _placeholder(self)

    def stream(self) -> Any:
        """torch's current stream as one of numba's; the default stream if torch is not in use."""
        from numba import cuda

        if _simulated():
            return 0
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return cuda.default_stream()
        return _wrapped(torch.cuda.current_stream(self.index).cuda_stream)


@cache
def _placeholder(device: Device) -> Any:
    return device.empty(4).view(np.float32)


@cache
def _wrapped(handle: int) -> Any:
    from numba import cuda

    return cuda.external_stream(handle) if handle else cuda.default_stream()


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
    elif torch is not None and not _simulated() and torch.cuda.is_initialized():
        index = torch.cuda.current_device()
    else:
        index = 0
    return _opened(index)


@cache
def _opened(index: int) -> Device:
    if _simulated():
        if index:
            raise BridgeError(f"device 'cuda:{index}': the simulator has one device")
        return Device(0, "simulator", (9, 0), 1)
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


def torch_device(device: Device) -> str:
    """The device as torch names it: in the simulator, torch's tensors are on the CPU."""
    return "cpu" if _simulated() else str(device)


def captures() -> bool:
    """Whether there are streams and graphs of torch: not in the simulator."""
    return not _simulated()


def packs() -> bool:
    """Whether launches can be packed for cuda.core: not in the simulator."""
    return not _simulated()


def overlaps(device: Device) -> bool:
    """Whether a launch may begin before the previous one ends, see launch.py; BRIDGE_PDL=0 turns it off.

    Drivers before CUDA 12.3 cannot capture such launches, and an old cuda.core cannot make them.
    """
    if os.environ.get("BRIDGE_PDL") == "0" or not packs() or device.capability < OVERLAPPING:
        return False
    from cuda.core import LaunchConfig

    return hasattr(LaunchConfig, "programmatic_stream_serialization") and tuple(_driver().get_version())[:2] >= (12, 3)


def capturing(stream: Any) -> bool:
    """Whether a CUDA graph is being captured on the stream."""
    if _simulated():
        return False
    from cuda.bindings import driver as binding

    handle = getattr(stream, "handle", 0)
    error, status = binding.cuStreamIsCapturing(binding.CUstream(int(getattr(handle, "value", handle) or 0)))
    return int(error) == 0 and int(status) != 0


def kind(x: Any) -> str | None:
    """ "f32", "f16" or "bf16", the type of an array's or tensor's elements; None for any other."""
    name = str(getattr(x, "dtype", "")).removeprefix("torch.")
    return {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}.get(name)


def view(x: Any) -> Any:
    """A tensor or an array on the device as a kernel takes it, not copied; halves become int16 with their bits.

    Kernels ignore strides, so a tensor that is not contiguous raises BridgeError.
    """
    if is_torch(x):
        x = x.detach()
        if not x.is_contiguous():
            raise BridgeError(f"a tensor {list(x.shape)} with strides {list(x.stride())}; must be contiguous")
        if kind(x) in ("f16", "bf16"):
            import torch

            x = x.view(torch.int16)
        if _simulated():
            return x.numpy()
    elif kind(x) == "f16":
        x = x.view(np.int16)
    if _simulated():
        return x
    from numba import cuda

    return cuda.as_cuda_array(x, sync=False)


def check_torch(device: Device) -> None:
    """Raises BridgeError where torch is missing, or cannot use the device."""
    try:
        import torch
    except ImportError:
        raise BridgeError(f"device {device}: models need torch; pip install torch") from None
    if torch_device(device) != "cpu" and not torch.cuda.is_available():
        raise BridgeError(f"device {device}: torch {torch.__version__} has no CUDA; install a build with CUDA")


def zeros(device: Device, shape: int | tuple[int, ...], dtype: Any = None) -> Any:
    """A torch tensor of zeros, float32 unless another type is named."""
    import torch

    return torch.zeros(shape, dtype=dtype or torch.float32, device=torch_device(device))


def upload(array: np.ndarray, device: Device) -> Any:
    """A torch tensor of the same values on the device."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(torch_device(device))
