"""A driver that does nothing but note what it is given; numba-cuda, nvJitLink and cuda.core are the real ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

H200 = "NVIDIA H200", (9, 0), 132


class Driver:
    """Machine code that was loaded, launches as (grid, block, stream, arguments), and each thread's contexts.

    `queue(stream, config, entry, *arguments)` is what a launch does. It needs a context: the main thread's first one is
    that of GPU 0, other threads have none.
    """

    def __init__(self) -> None:
        self.codes: list[bytes] = []
        self.launches: list[tuple[Any, ...]] = []
        self.queue: Any = self.note
        self.made: set[int] = set()  # contexts, by the number of the GPU
        self.recorded: list[tuple[int, int]] = []  # (address, stream) of record_stream
        self._stacks = threading.local()
        self.stack.append(0)

    @property
    def stack(self) -> list[int]:
        """This thread's contexts, by the numbers of their GPUs; the last one is current."""
        if not hasattr(self._stacks, "own"):
            self._stacks.own = []
        own: list[int] = self._stacks.own
        return own

    def note(self, stream: Any, config: Any, entry: str, *arguments: Any) -> None:
        self.launches.append((config["grid"], config["block"], stream, arguments))

    def loaded(self, code: Any) -> str:
        self.codes.append(code.cubin)
        return code.entry

    def _launch(self, *given: Any) -> None:
        assert self.stack, "CUDA_ERROR_INVALID_CONTEXT"
        self.queue(*given)

    def functions(self) -> dict[str, Any]:
        """Those of cuda.bindings.driver: a context is the number of its GPU and 100, 0 is none."""

        def retain(gpu: int) -> tuple[int, int]:
            self.made.add(gpu)
            return 0, 100 + gpu

        def push(context: int) -> tuple[int]:
            self.stack.append(context - 100)
            return (0,)

        return {
            "cuDeviceGet": lambda index: (0, index),
            "cuDevicePrimaryCtxRetain": retain,
            "cuCtxGetCurrent": lambda: (0, 100 + self.stack[-1] if self.stack else 0),
            "cuCtxGetDevice": lambda: (0, self.stack[-1]),
            "cuCtxPushCurrent": push,
            "cuCtxPopCurrent": lambda: (0, 100 + self.stack.pop()),
        }

    def core(self) -> Any:
        """What stands for cuda.core."""
        made = SimpleNamespace(LaunchConfig=lambda **options: options)
        made.launch = self._launch
        made.Stream = SimpleNamespace(from_handle=lambda handle: handle)
        return made


@contextmanager
def pretended_driver(cache: Path) -> Iterator[Driver]:
    """H200s for `launch`, on which nothing runs; torch's tensors on the CPU pass for those on them."""
    from bridge.cuda.toolchain import device as devices
    from bridge.cuda.toolchain import launch
    from cuda.bindings import driver

    made = Driver()
    core = made.core()
    fakes = [
        mock.patch.object(launch, "_core", return_value=core),
        mock.patch.object(launch, "_loaded", made.loaded),
        mock.patch.object(devices, "_opened", lambda index: devices.Device(index, *H200)),
        mock.patch.multiple(driver, **made.functions()),
        mock.patch.object(devices, "capturing", return_value=False),
        mock.patch.object(devices, "check_torch"),
        mock.patch.object(devices.Device, "place", "cpu"),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(1 << 40, 1 << 40)),
        mock.patch.object(
            torch.Tensor, "record_stream", lambda x, stream: made.recorded.append((x.data_ptr(), stream.cuda_stream))
        ),
        mock.patch.object(torch.cuda, "current_stream", return_value=SimpleNamespace(cuda_stream=0)),
        mock.patch.dict("os.environ", {"NUMBA_CACHE_DIR": str(cache)}),
    ]
    for fake in fakes:
        fake.start()
    for kept in (launch._core_stream, launch._config, devices._placeholder, devices._context):
        kept.cache_clear()
    try:
        yield made
    finally:
        for fake in reversed(fakes):
            fake.stop()
        for kept in (launch._core_stream, launch._config, devices._placeholder, devices._context):
            kept.cache_clear()
