"""What surrounds kernels: what a launch costs the host, how fast weights are uploaded, and the GPU's clocks."""

import shutil
import subprocess
import time
from typing import Any

import torch
from bridge.cuda.bench import LARGE
from bridge.cuda.toolchain.device import require

from bridge.runtime.bench import random_tensor

CALLS = 2000
QUEUED = 200  # of them, before the queue is emptied
SMALL = (64, 256)  # a product that takes the GPU less than the host
_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")


def launches() -> dict[str, Any]:
    """Seconds of host time for a product of one tensor, and for one of torch's."""
    device = require("cuda").place
    moved = random_tensor("Q4_K", *SMALL).to("cuda")
    x, out = torch.randn(SMALL[1], device=device), torch.empty(SMALL[0], device=device)
    weight = torch.randn(SMALL, device=device)
    return {
        "product": host_seconds(lambda: moved.matvec(x, out=out)),
        "torch": host_seconds(lambda: torch.mv(weight, x, out=out)),
    }


def host_seconds(call: Any) -> float:
    """Seconds of host time for a call that only queues work; the queue is emptied before it is full."""
    for _ in range(3):
        call()
    total = 0.0
    for _ in range(max(1, CALLS // QUEUED)):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(QUEUED):
            call()
        total += time.perf_counter() - begun
    torch.cuda.synchronize()
    return total / (QUEUED * max(1, CALLS // QUEUED))


def upload(type: str) -> dict[str, Any]:
    """Bytes of a matrix, and seconds until it is on the device: repacked and copied; and of the copy alone."""
    tensor = random_tensor(type, *LARGE)
    random_tensor(type, *SMALL).to("cuda")  # compiles what repacks it
    torch.cuda.synchronize()
    begun = time.perf_counter()
    moved = tensor.to("cuda")
    torch.cuda.synchronize()
    total = time.perf_counter() - begun
    host = torch.empty(moved.nbytes, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(host, device=require("cuda").place)
    begun = time.perf_counter()
    target.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return {"nbytes": moved.nbytes, "seconds": total, "copy": time.perf_counter() - begun}


def clocks() -> dict[str, Any]:
    """The GPU's clocks in MHz, power in W and temperature, as nvidia-smi reads them while torch multiplies."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return {"read": "nvidia-smi is not installed"}
    x = torch.randn((4096, 4096), dtype=torch.float16, device=require("cuda").place)
    for _ in range(500):
        x @ x
    command = [tool, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    torch.cuda.synchronize()
    values = done.stdout.strip().split(", ")
    return dict(zip(_FIELDS, values, strict=True)) if len(values) == len(_FIELDS) else {"read": done.stderr.strip()}
