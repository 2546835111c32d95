"""What numba-cuda itself does with our kernels: compiles, keeps and launches them, and frees memory.

Only the driver is a stand-in: code is made for compute capability 9.0 as on an H200, and goes nowhere.
"""

from __future__ import annotations

import ctypes
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge.errors import BridgeError
from tests.support import ptx

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
pytestmark = pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))


class Driver:
    """What it was given: machine code, and launches as (grid, block, stream, arguments)."""

    def __init__(self) -> None:
        self.codes: list[bytes] = []
        self.launches: list[tuple[Any, ...]] = []

    def load(self, code: Any, setup: Any, teardown: Any) -> Any:
        self.codes.append(code.code)
        module = SimpleNamespace(initialized=False, setup=lambda: None)
        module.get_function = lambda name: SimpleNamespace(name=name, module=module, kernel=name)
        return module

    def launch(self, stream: Any, config: Any, kernel: str, *arguments: Any) -> None:
        self.launches.append((config["grid"], config["block"], stream, arguments))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Driver]:
    import numba
    import numba.cuda.dispatcher as dispatcher
    from bridge.cuda import device as devices
    from numba import cuda
    from numba.cuda.cudadrv import devicearray
    from numba.cuda.cudadrv import devices as contexts

    made = Driver()
    gpu = SimpleNamespace(id=0, compute_capability=(9, 0))
    context = SimpleNamespace(device=gpu, create_module_image=made.load)
    for place in (cuda, dispatcher):
        monkeypatch.setattr(place, "get_current_device", lambda: gpu)
    monkeypatch.setattr(contexts, "get_context", lambda number=None: context)
    monkeypatch.setattr(devices, "capturing", lambda stream: False)
    monkeypatch.setattr(dispatcher, "launch", made.launch)
    monkeypatch.setattr(dispatcher, "LaunchConfig", lambda **options: options)
    monkeypatch.setattr(dispatcher.driver, "_to_core_stream", lambda stream: stream)
    monkeypatch.setattr(devicearray, "_to_strided_memory_view", as_if_on_the_device)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return made


def as_if_on_the_device(array: np.ndarray, **_: Any) -> Any:
    """What numba-cuda makes of a contiguous array in device memory."""
    layout = SimpleNamespace(strides_in_bytes=None, is_contiguous_c=True, is_contiguous_f=False)
    where = {"ptr": array.ctypes.data, "shape": array.shape, "dtype": array.dtype, "size": array.size}
    return SimpleNamespace(**where, _layout=layout), False


def test_a_kernel_is_compiled_once_for_all_processes_and_launched_with_the_numbers_it_takes(
    driver: Driver, tmp_path: Path
) -> None:
    from bridge.cuda.launch import Kernel
    from bridge.cuda.norm import norm_kernel

    first = norm_kernel.__wrapped__(512, False)
    dispatcher = first.warm()
    assert dispatcher.specialized  # so arguments go unchecked, and none is converted
    assert sum(dispatcher._cache_misses.values()) == 1
    assert (code := driver.codes[0]).startswith(b"\x7fELF")
    assert list(tmp_path.rglob("*_norm_512*.nbc"))

    again = Kernel(first.function, first.signature)  # as another process has it
    assert sum(again.warm()._cache_hits.values()) == 1
    assert driver.codes == [code, code]
    assert again.warm() is again.warm()
    assert len(driver.codes) == 2

    x, weight, out = (np.ones(512, np.float32) for _ in range(3))
    records = np.zeros(4096, np.uint8)
    again.launch(300, (32, 4), 0, x, weight, out, records, np.float32(1e-5))
    ((grid, block, stream, arguments),) = driver.launches
    assert (grid, block, stream) == ((300, 1, 1), (32, 4, 1), 0)
    array = (0, 0, 512, 4, x.ctypes.data, 512, 4)  # no owner, items, bytes of an item, address, shape, strides
    assert arguments[:7] == array
    assert arguments[21:28] == (0, 0, 4096, 1, records.ctypes.data, 4096, 1)
    assert isinstance(arguments[28], ctypes.c_float)
    assert arguments[28].value == np.float32(1e-5)


def test_only_our_own_small_grids_go_without_numbas_warning(driver: Driver) -> None:
    from bridge.cuda import launch
    from bridge.cuda.norm import silu_kernel
    from numba.cuda.core.errors import NumbaPerformanceWarning

    before = list(warnings.filters)
    runpy.run_path(str(launch.__file__))
    assert warnings.filters == before
    kernel = silu_kernel.__wrapped__(False)
    x = np.ones(64, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.launch(1, 128, 0, x, x[:32], np.zeros(10240, np.uint8), np.int32(32))
    assert len(driver.launches) == 1
    with pytest.warns(NumbaPerformanceWarning, match="Grid size 1 will likely result in GPU under-utilization"):
        kernel.warm().configure(1, 64)


def test_registers_are_limited_in_what_runs_and_not_only_in_what_was_tried(driver: Driver) -> None:
    from bridge.cuda import matvec
    from bridge.cuda.launch import MAX_REGISTERS
    from bridge.cuda.matvec import Configuration

    kernel = matvec.kernel.__wrapped__("Q4_0", 4, Configuration(2, 1, 2, 4), False, "")
    (made,) = kernel.warm().overloads.values()
    assert made._codelibrary._max_registers == MAX_REGISTERS
    assert not made._codelibrary._lto
    assert not made.launch_config_sensitive
    assert not made.cooperative


def test_memory_that_nobody_uses_any_more_is_freed_before_there_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from bridge.cuda.device import Device
    from numba import cuda

    gpu = Device(0, "NVIDIA H200", (9, 0), 132)
    free = [1000]
    kept = [500, 300]  # what numba and torch have yet to free

    def freed(by: int) -> None:
        free[0] += kept[by]
        kept[by] = 0

    pending = SimpleNamespace(clear=lambda: freed(0))
    context = SimpleNamespace(memory_manager=SimpleNamespace(deallocations=pending))
    monkeypatch.setattr(cuda, "current_context", lambda: context)
    monkeypatch.setattr(cuda, "get_current_device", lambda: SimpleNamespace(id=0))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed(1))
    monkeypatch.setattr(Device, "free", lambda self: free[0])
    gpu.check_memory(1000, "w")
    assert kept == [500, 300]
    gpu.check_memory(1800, "w")
    assert kept == [0, 0]
    with pytest.raises(BridgeError, match=r"w needs 1.8 KiB, 1.8 KiB are free"):
        gpu.check_memory(1801, "w")
