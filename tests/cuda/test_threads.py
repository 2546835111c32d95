"""Products of one tensor in many threads, and the contexts they run in; only the driver is a stand-in."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from bridge.blocks import TYPES
from bridge.trellis import BitshiftCodebook
from bridge.trellis.gemm import layer_of
from tests.support.cuda_driver import H200, Driver
from tests.support.encode_trellis import Coding, plain_tensors
from tests.support.random_blocks import random_matrix

THREADS = 4


def test_threads_that_multiply_with_one_tensor_at_once_get_their_own_products(moved: Any, driver: Driver) -> None:
    """Every launch waits for those of the other threads, as the driver gives the lock of the interpreter away."""
    tensor = moved
    xs = [torch.full((64,), float(i)) for i in range(THREADS)]
    tensor.matvec(xs[0])
    memory: dict[int, int] = {}  # what stands at an address: the address of the x that it was made from
    meeting = threading.Barrier(THREADS)

    def launch(stream: Any, config: Any, kernel: str, *arguments: Any) -> None:
        meeting.wait(10)
        if "quantize" in kernel:
            x, records = arguments[0], arguments[-1]
            memory[records] = x
        else:
            records, y = arguments[2], arguments[3]
            memory[y] = memory[records]

    driver.queue = launch
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(3):
            ys = list(pool.map(tensor.matvec, xs))
            assert [memory[y.data_ptr()] for y in ys] == [x.data_ptr() for x in xs]


@pytest.mark.parametrize("n", [1, 3])
def test_products_are_queued_on_the_stream_that_is_current_in_their_call(n: int, moved: Any, driver: Driver) -> None:
    """Of threads with a stream each: the first product of a shape, and those after it."""
    own = threading.local()
    x, records, ys = torch.ones(n, 64), dict[int, set[int]](), dict[int, set[int]]()

    def launch(stream: int, config: Any, kernel: str, *arguments: Any) -> None:
        if "quantize" in kernel:
            records.setdefault(stream, set()).add(arguments[-1])
        else:
            ys.setdefault(stream, set()).add(arguments[3])
            assert arguments[2] in records[stream]

    def multiply(stream: int) -> list[int]:
        own.stream = stream
        return [moved.matmul(x).data_ptr() for _ in range(3)]

    def current(device: Any) -> Any:
        return SimpleNamespace(cuda_stream=own.stream)

    driver.queue = launch
    with mock.patch.object(torch.cuda, "current_stream", current), ThreadPoolExecutor(THREADS) as pool:
        found = {7: set(multiply(7))}
        streams = range(11, 11 + THREADS)
        found |= dict(zip(streams, map(set, pool.map(multiply, streams)), strict=True))
    assert ys == found


def trellis(device: Any) -> Any:
    from bridge.cuda.trellis_layer import CudaTrellisLayer

    tensors, _ = plain_tensors("m", (32, 64), Coding("1mad"))
    words, su, sv = (tensors[f"m.{part}"] for part in ("trellis", "SU", "SV"))
    return CudaTrellisLayer(layer_of(words, BitshiftCodebook(), 16, 16, 32.0, su, sv), device)


def quantized(device: Any) -> Any:
    from bridge.cuda.tensor import CudaTensor

    return CudaTensor(random_matrix(TYPES["Q4_0"], 6, 64)[0], device)


@pytest.mark.parametrize(("make", "launches"), [(quantized, 2), (trellis, 1)])
def test_a_product_in_a_new_thread_has_a_context(make: Any, launches: int, driver: Driver) -> None:
    """The second one, too, which is checked and bound no more."""
    from bridge.cuda.toolchain import device as devices

    x, there = torch.ones(64), make(devices.Device(0, *H200))
    there.matvec(x)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            pool.submit(there.matvec, x).result()
            assert pool.submit(lambda: driver.stack).result() == []
    assert len(driver.launches) == 3 * launches
    assert driver.stack == [0]


def test_trellis_codes_are_multiplied_on_their_own_gpu_whichever_is_current(driver: Driver) -> None:
    from bridge.cuda.toolchain import device as devices

    there, contexts = trellis(devices.Device(1, *H200)), list[int]()
    driver.queue = lambda *given: contexts.append(driver.stack[-1])
    for current in ([], [0], [1]):
        driver.stack[:] = current
        there.matvec(torch.ones(64))
        assert driver.stack == current
    assert contexts == [1] * 3
    assert driver.made == {1}


def test_a_tensor_multiplies_on_its_own_gpu_whichever_is_current(driver: Driver) -> None:
    from bridge.cuda.tensor import CudaTensor
    from bridge.cuda.toolchain import device as devices

    x, tensor = torch.ones(64), CudaTensor(random_matrix(TYPES["Q4_0"], 6, 64)[0], devices.Device(1, *H200))
    contexts: list[int] = []
    driver.queue = lambda *given: contexts.append(driver.stack[-1])
    for current in ([], [0], [1]):
        driver.stack[:] = current
        tensor.matvec(x)
        assert driver.stack == current
    assert contexts == [1] * 6
    assert driver.made == {1}
    with mock.patch.object(CudaTensor, "_input", side_effect=AssertionError):  # bound once for all of them
        driver.stack[:] = [0]
        tensor.matvec(x)
