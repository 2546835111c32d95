"""The cases of this folder run twice: on compiled PTX (a plain `pytest`), and in Numba's simulator
(tests/cuda/test_simulator.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Any]:
    """What stands for the GPU; tells of launches where that is the machine of tests/support/gpu, else None."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    from bridge.cuda.toolchain.intrinsics import SIMULATED

    if SIMULATED:
        from tests.support.simulator_threads import one_at_a_time

        with one_at_a_time():
            yield None
        return
    from tests.support.gpu.device import pretended_gpu
    from tests.support.ptx import unavailable

    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    with pretended_gpu(overlapping=True) as launches:
        yield launches
