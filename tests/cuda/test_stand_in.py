"""A machine without a GPU on which CUDA's driver is the stand-in: kernels are compiled, loaded and launched for real.

A child process does it, and says what it has seen; the driver's log says what has arrived there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support import ptx
from tests.support.gpu import stand_in
from tests.support.places import ROOT

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

_REASON = stand_in.unavailable() or ptx.unavailable()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))

_SERIALIZATION = 6  # the number of the launch attribute with which a launch may begin before the previous one ends

CHILD = """
import json, threading
import numpy as np, torch
from bridge.cuda import norm; from bridge.cuda.toolchain import device
from bridge.cuda.toolchain.device import checked
from bridge.errors import BridgeError
from cuda.bindings import driver

seen = {"available": device.available()}
gpu = device.require("cuda")
seen |= {"name": gpu.name, "capability": gpu.capability, "multiprocessors": gpu.multiprocessors}
kernel = norm.norm_kernel(512, False, True)
x, weight, out = (torch.zeros(512) for _ in range(3))
records, numbers = torch.zeros(6000, dtype=torch.uint8), 3 * [np.float32(1e-5)]
seen["addresses"] = [array.data_ptr() for array in (x, weight, out, records)]

def refused(call):
    try:
        call()
    except Exception as problem:
        return str(problem)

def elsewhere():
    seen["context of a new thread"] = device.context()
    with gpu.active():
        bound(seen["stream"])
    seen["context afterwards"] = device.context()

with gpu.active():
    seen["stream"] = stream = int(checked(driver.cuStreamCreate(1)))
    kernel.launch(3, (512, 1, 1), 0, x, x, x, weight, weight, out, records, *numbers)
    bound = kernel.bind(1, 512, stream, x, x, x, weight, weight, out, records, *numbers)
    bound(stream, (5, 0xBEEF00))
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    seen["large block"] = refused(lambda: kernel.launch(1, 2048, 0, x, x, x, weight, weight, out, records, *numbers))
    seen["no stream"] = refused(lambda: kernel.launch(1, 512, 0x77, x, x, x, weight, weight, out, records, *numbers))

    before = driver.cuMemGetInfo()[1]
    memory = checked(driver.cuMemAlloc(3 << 20))
    seen["taken"] = before - driver.cuMemGetInfo()[1]
    driver.cuMemcpyHtoD(memory, np.arange(4, dtype=np.int32), 16)
    handle, copy = driver.CUstream(stream), np.zeros(4, np.int32)
    other = norm.norm_kernel(256, False)
    checked(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    seen["capturing"] = device.capturing(stream)
    bound(stream)
    checked(driver.cuMemcpyDtoHAsync(copy, memory, 16, handle))
    seen["not loaded"] = refused(lambda: other.launch(1, 256, stream, x, x, x, weight, weight, out, records, *numbers))
    seen["allocation"] = driver.cuMemAlloc(1 << 20)[0].name
    graph = checked(driver.cuStreamEndCapture(handle))
    seen["captured"] = copy.tolist()
    for _ in range(2):
        checked(driver.cuGraphLaunch(checked(driver.cuGraphInstantiate(graph, 0)), handle))
    seen["replayed"] = copy.tolist()
print(json.dumps(seen))
"""


class Launch(NamedTuple):
    """A launch in the driver's log."""

    name: str
    grid: list[int]
    block: list[int]
    stream: int
    attributes: list[str]
    arguments: list[int]


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Launch], list[str]]:
    """What the process has seen, the launches in the driver's log, and that log."""
    folder = tmp_path_factory.mktemp("driver")
    variables = stand_in.environment(folder) | {"STAND_IN_LOG": "1", "NUMBA_CACHE_DIR": str(folder / "kernels")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=ROOT, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("stand-in: ") for line in done.stderr.splitlines() if line.startswith("stand-in: ")]
    launches = [_launch(line) for line in lines if line.startswith("launch ")]
    return json.loads(done.stdout), launches, lines


def _launch(line: str) -> Launch:
    pattern = r"launch (\S+) grid ([\d ]+) block ([\d ]+) shared \d+ stream (\S+)((?: attribute \S+)*) arguments (.*)"
    name, grid, block, stream, attributes, arguments = re.fullmatch(pattern, line).groups()  # type: ignore[union-attr]
    return Launch(
        name, [int(n) for n in grid.split()], [int(n) for n in block.split()],
        0 if stream == "(nil)" else int(stream, 16), re.findall(r"attribute (\S+)", attributes),
        [int(n, 16) for n in arguments.split()],
    )  # fmt: skip


def test_the_device_is_found(child: Any) -> None:
    seen, _, _ = child
    assert seen["available"] is None
    assert seen["name"] == "NVIDIA H100 80GB HBM3"
    assert seen["capability"] == [9, 0]
    assert seen["multiprocessors"] == 132


def test_a_launch_arrives_with_its_grid_its_stream_its_attribute_and_its_arguments(child: Any) -> None:
    seen, launches, _ = child
    first, bound, from_thread, *_ = launches
    eps = int(np.float32(1e-5).view(np.int32))
    x, weight, out, records = seen["addresses"]
    assert "norm" in first.name
    assert (first.grid, first.block, first.stream) == ([3, 1, 1], [512, 1, 1], 0)
    assert first.attributes == [f"{_SERIALIZATION}=1"]
    assert first.arguments == [x, x, x, weight, weight, out, records, eps, eps, eps]
    assert (bound.grid, bound.block, bound.stream) == ([1, 1, 1], [512, 1, 1], seen["stream"])
    assert bound.arguments == [x, x, x, weight, weight, 0xBEEF00, records, eps, eps, eps]
    assert (from_thread.stream, from_thread.arguments) == (seen["stream"], first.arguments)


def test_each_thread_gets_the_context_and_gives_it_back(child: Any) -> None:
    seen, _, lines = child
    assert seen["context of a new thread"] == seen["context afterwards"] == 0
    pushes, pops = (sum(line.startswith(f"cuCtx{what}Current") for line in lines) for what in ("Push", "Pop"))
    assert pushes == pops >= 2


def test_a_cubin_is_loaded_once_however_often_its_kernel_is_launched(child: Any) -> None:
    _, launches, lines = child
    assert lines.count("load a cubin") == 1
    assert len(launches) > 3


def test_launches_that_a_gpu_would_refuse_are_refused(child: Any) -> None:
    seen, _, _ = child
    assert "INVALID_VALUE" in seen["large block"]
    assert "INVALID_HANDLE" in seen["no stream"]


def test_memory_is_taken_from_that_of_the_device(child: Any) -> None:
    assert child[0]["taken"] == 4 << 20  # in units of 2 MiB


def test_a_capture_is_seen_and_its_copies_are_made_by_replays(child: Any) -> None:
    seen, _, _ = child
    assert seen["capturing"] is True
    assert "the stream is being captured" in seen["not loaded"]
    assert seen["allocation"] == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert seen["captured"] == [0, 0, 0, 0]
    assert seen["replayed"] == [0, 1, 2, 3]
