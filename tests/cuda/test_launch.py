"""What numba-cuda itself does with our kernels: compiles, keeps and launches them, and frees memory.

Only the driver is a stand-in: code is made for compute capability 9.0 as on an H200, and goes nowhere.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bridge.errors import BridgeError
from tests.support import ptx
from tests.support.random_blocks import random_matrix

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
    from bridge.cuda import launch
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
    monkeypatch.setattr(dispatcher, "launch", made.launch)  # of numba-cuda, to compare with
    monkeypatch.setattr(dispatcher, "LaunchConfig", lambda **options: options)
    monkeypatch.setattr(dispatcher.driver, "_to_core_stream", lambda stream: stream)
    monkeypatch.setattr(devicearray, "_to_strided_memory_view", as_if_on_the_device)
    core = SimpleNamespace(launch=made.launch, LaunchConfig=lambda **options: options)
    core.Stream = SimpleNamespace(from_handle=lambda handle: handle)
    monkeypatch.setattr(launch, "_core", lambda: core)
    monkeypatch.setattr(launch, "_address", lambda array: array.ctypes.data)
    launch._core_stream.cache_clear()
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
    assert (grid, block, stream) == (300, (32, 4), 0)
    array = (0, 0, 512, 4, x.ctypes.data, 512, 4)  # no owner, items, bytes of an item, address, shape, strides
    assert arguments[:7] == array
    assert arguments[21:28] == (0, 0, 4096, 1, records.ctypes.data, 4096, 1)
    assert isinstance(arguments[28], ctypes.c_float)
    assert arguments[28].value == np.float32(1e-5)


def test_a_dependent_kernel_is_launched_while_the_one_before_it_may_run(driver: Driver) -> None:
    """By the attribute of cuLaunchKernelEx; on a stream that is captured, it makes the edge of a graph."""
    from bridge.cuda import launch
    from bridge.cuda.sampling import greedy_kernel
    from cuda.core import LaunchConfig

    configs: list[Any] = []
    core: Any = launch._core()
    core.LaunchConfig = LaunchConfig
    core.launch = lambda stream, config, kernel, *arguments: configs.append(config)
    for dependent in (False, True):
        kernel = greedy_kernel.__wrapped__(32, dependent)
        (overload,) = kernel.warm().overloads.values()
        arguments = [np.zeros(8, str(kind.dtype)) if hasattr(kind, "ndim") else 3 for kind in overload.argument_types]
        kernel.launch(2, 32, 0, *arguments)
        kernel.bind(2, 32, 0, *arguments)(0)
    assert [config.programmatic_stream_serialization for config in configs] == [False, False, True, True]
    assert [config.grid for config in configs] == [(2, 1, 1)] * 4
    assert kernel.oldest == (9, 0)


@pytest.mark.parametrize(
    ("capability", "driver_version", "switch", "wanted"),
    [
        ((9, 0), (12, 3), None, True),
        ((12, 0), (13, 0), "1", True),
        ((8, 9), (13, 0), None, False),
        ((9, 0), (12, 2), None, False),  # which captures no such launch
        ((9, 0), (13, 0), "0", False),
    ],
)
def test_launches_overlap_where_gpu_and_driver_can_and_nobody_says_no(
    capability: tuple[int, int], driver_version: tuple[int, int], switch: str | None, wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from bridge.cuda import device as devices

    monkeypatch.setattr(devices, "_driver", lambda: SimpleNamespace(get_version=lambda: driver_version))
    monkeypatch.delenv("BRIDGE_PDL", raising=False)
    if switch is not None:
        monkeypatch.setenv("BRIDGE_PDL", switch)
    gpu = devices.Device(0, "NVIDIA H200", capability, 132)
    assert devices.overlaps(gpu) is wanted
    monkeypatch.setattr("cuda.core.LaunchConfig", object)  # an old one
    assert not devices.overlaps(gpu)


def test_arguments_are_packed_as_numba_itself_packs_them(driver: Driver) -> None:
    """All kinds of them: arrays of one and two dimensions, floats, integers of 32 and 64 bits, doubles."""
    from bridge.cuda import matvec, sampling
    from bridge.cuda.activations import quantizer
    from bridge.cuda.norm import norm_kernel
    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    assert isinstance(DeviceNDArray.device_ctypes_pointer, property)  # what an address is taken from
    kernels = [norm_kernel.__wrapped__(96, False), quantizer.__wrapped__("f16", False)]
    kernels.append(matvec.kernel.__wrapped__("Q4_0", 3, matvec.MatvecShape(2, 1, 1, 4), False, ""))
    kernels.append(sampling.draw_kernel.__wrapped__(32))
    for kernel in kernels:
        (overload,) = kernel.warm().overloads.values()
        arguments = [
            np.zeros((3, 5, 7)[: kind.ndim], str(kind.dtype)) if hasattr(kind, "ndim") else 3
            for kind in overload.argument_types
        ]
        kernel.launch(300, 32, 0, *arguments)
        kernel.warm()[300, 32, 0](*arguments)
        (*_, ours), (*_, theirs) = driver.launches[-2:]
        assert [getattr(v, "value", v) for v in ours] == [getattr(v, "value", v) for v in theirs]
        assert [type(v) for v in ours] == [type(v) for v in theirs]


@pytest.mark.parametrize("n", [None, 3])
def test_a_second_product_only_points_its_launches_elsewhere(n: int | None, moved: Any, driver: Driver) -> None:
    tensor, _ = moved
    shape = (64,) if n is None else (n, 64)
    multiply = tensor.matvec if n is None else tensor.matmul
    first, again = torch.randn(shape), torch.randn(shape)
    made = [multiply(first), multiply(first), multiply(again)]
    out = torch.empty_like(made[0])
    assert multiply(again, out=out) is out
    assert len(driver.launches) == 8
    quantized, products = driver.launches[::2], driver.launches[1::2]

    def same_but(launches: list[Any], place: int) -> None:
        for grid, block, stream, arguments in launches[1:]:
            assert (grid, block, stream) == launches[0][:3]
            old, new = ([getattr(v, "value", v) for v in given] for given in (launches[0][3], arguments))
            assert {i for i, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]} <= {place}

    same_but(quantized, 4)  # where x is, the first array
    assert [launch[3][4] for launch in quantized] == [x.data_ptr() for x in (first, first, again, again)]
    y_at = 7 + 1 + 7 + 4  # behind the weights, a number and the records
    same_but(products, y_at)
    assert [launch[3][y_at] for launch in products] == [y.data_ptr() for y in (*made, out)]


def test_what_is_not_as_it_was_is_looked_at_again(moved: Any, driver: Driver) -> None:
    tensor, _ = moved
    x = torch.randn(64)
    tensor.matvec(x)
    for wrong, message in (
        (x.double(), "x has dtype torch.float64"), (x[:32], r"x has shape \[32\]"), (x.to("meta"), "x is on meta"),
    ):  # fmt: skip
        with pytest.raises(BridgeError, match=message):
            tensor.matvec(wrong)
    for out in (torch.empty(7), torch.empty(6, dtype=torch.float16), torch.empty(12)[::2], np.empty(6, np.float32)):
        with pytest.raises(BridgeError, match="out is"):
            tensor.matvec(x, out=out)
    count = len(driver.launches)
    tensor.matvec(torch.randn(128)[::2])  # copied, and multiplied
    tensor.matvec(x.half())
    assert len(driver.launches) == count + 4


def test_a_product_costs_the_host_little(moved: Any) -> None:
    """Everything but the driver: the arguments are made what it takes by NVIDIA's own code."""
    from cuda.core import LaunchConfig
    from cuda.core._kernel_arg_handler import ParamHolder

    tensor, core = moved
    core.LaunchConfig = LaunchConfig
    core.launch = lambda stream, config, kernel, *arguments: ParamHolder(arguments)
    x, out = torch.randn(64), torch.empty(6)

    def cost(call: Callable[[], Any]) -> float:
        """CPU seconds of a call, the least of several rounds."""
        call()
        rounds = []
        for _ in range(20):
            begin = time.thread_time()
            for _ in range(100):
                call()
            rounds.append((time.thread_time() - begin) / 100)
        return min(rounds)

    assert cost(lambda: tensor.matvec(x)) < 20e-6
    assert cost(lambda: tensor.matvec(x, out=out)) < 10e-6


@pytest.fixture
def moved(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A tensor on a device whose memory is the host's; torch's tensors on the CPU pass for those on the device."""
    from bridge.cuda import device as devices
    from bridge.cuda import launch, tensor

    from bridge.blocks import TYPES

    def view(x: Any) -> Any:
        return x if isinstance(x, np.ndarray) else x.view(torch.int16).numpy() if x.itemsize == 2 else x.numpy()

    gpu = devices.Device(0, "NVIDIA H200", (9, 0), 132)
    monkeypatch.setattr(devices, "torch_device", lambda device: "cpu")
    monkeypatch.setattr(devices, "view", view)
    for name, own in (
        ("empty", lambda self, nbytes, what="": np.zeros(nbytes, np.uint8)),
        ("upload", lambda self, host, what="": host),
        ("stream", lambda self: 0),
        ("active", lambda self: nullcontext()),
    ):
        monkeypatch.setattr(devices.Device, name, own)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # as the CPU has no number
    devices._placeholder.cache_clear()
    yield tensor.CudaTensor(random_matrix(TYPES["Q4_0"], 6, 64)[0], gpu), launch._core()
    devices._placeholder.cache_clear()


def test_registers_are_limited_in_what_runs_and_not_only_in_what_was_tried(driver: Driver) -> None:
    from bridge.cuda import matvec
    from bridge.cuda.launch import MAX_REGISTERS
    from bridge.cuda.matvec import MatvecShape

    kernel = matvec.kernel.__wrapped__("Q4_0", 4, MatvecShape(2, 1, 2, 4), False, "")
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
