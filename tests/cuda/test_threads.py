"""Products of one tensor in many threads, and the contexts they run in; only the driver is a stand-in."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch

from bridge.blocks import TYPES
from tests.support.cuda_driver import H200, Driver
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


def test_a_product_in_a_new_thread_has_a_context(moved: Any, driver: Driver) -> None:
    """The second one, too, which is checked and bound no more."""
    x = torch.ones(64)
    moved.matvec(x)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            pool.submit(moved.matvec, x).result()
            assert pool.submit(lambda: driver.stack).result() == []
    assert len(driver.launches) == 6
    assert driver.stack == [0]


def test_a_tensor_multiplies_on_its_own_gpu_whichever_is_current(driver: Driver) -> None:
    from bridge.cuda import device as devices
    from bridge.cuda.tensor import CudaTensor

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
