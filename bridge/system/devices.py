"""Devices by name: "cpu", "cuda", "cuda:1" ..., or "auto", which is the GPU if there is one.

This is also the only way from here to bridge.cuda, which imports the runtime's tensors, weights and samplers: a direct
import would be circular.
"""

import importlib
from typing import Any

from bridge.errors import BridgeError


def choose(device: str) -> tuple[str, str | None]:
    """The device, and for "auto" a note why it is the CPU, if so.

    Raises BridgeError if the name is unknown or the GPU cannot be used. bridge.cuda.toolchain.device
    can be imported without numba-cuda, and tells whether it is installed.
    """
    if device == "cpu":
        return device, None
    if device != "auto" and device.partition(":")[0] != "cuda":
        raise BridgeError(f"unknown device {device!r}: choose cpu, cuda, cuda:1 ..., or auto")
    try:
        return str(cuda("toolchain.device").require("cuda" if device == "auto" else device)), None
    except BridgeError as problem:  # nothing of CUDA, or a GPU that is too old
        if device != "auto":
            raise
        return "cpu", cpu_note(str(problem).removeprefix("device 'cuda': "))


def cuda(module: str) -> Any:
    """A module of bridge.cuda by its name there, imported when a GPU has been asked for: numba-cuda is an extra."""
    return importlib.import_module(f"bridge.cuda.{module}")


def cpu_note(reason: object) -> str:
    """The note of "auto" for a machine or a model that cannot use CUDA."""
    return f"running on the CPU: {reason}"
