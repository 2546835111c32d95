"""A GPU of NumPy; a driver that runs nothing, and a tensor whose products go to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.blocks import TYPES
from tests.support import ptx
from tests.support.cuda_driver import H200, Driver, pretended_driver
from tests.support.gpu.device import Launches, pretended_gpu
from tests.support.random_blocks import random_matrix


@pytest.fixture
def gpu() -> Iterator[Launches]:
    """A GPU of NumPy, which tells of launches."""
    with pretended_gpu(overlapping=True) as launches:
        yield launches


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    if (reason := ptx.unavailable()) is not None:
        pytest.skip(reason)
    with pretended_driver(tmp_path) as made:
        yield made


@pytest.fixture
def moved(driver: Driver) -> Any:
    """A tensor on that device; torch's tensors on the CPU pass for those on it."""
    from bridge.cuda import tensor
    from bridge.cuda.toolchain import device as devices

    return tensor.CudaTensor(random_matrix(TYPES["Q4_0"], 6, 64)[0], devices.Device(0, *H200))
