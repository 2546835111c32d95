"""Which device is meant by a name: "cpu", "cuda", "cuda:1" ..., or "auto", the GPU where there is one."""

from __future__ import annotations

from bridge.errors import BridgeError


def choose(device: str) -> tuple[str, str | None]:
    """The device, and for "auto" a note where it is the CPU and why.

    Raises BridgeError where the name means nothing, or the GPU cannot be used. Nothing of CUDA is imported that
    needs numba-cuda before it is known to be there.
    """
    if device == "cpu":
        return device, None
    if device != "auto" and device.partition(":")[0] != "cuda":
        raise BridgeError(f"device {device!r}: cpu, cuda, cuda:1 and so on, and auto are known")
    from bridge.cuda import device as devices

    if device != "auto":
        return str(devices.require(device)), None
    try:
        return str(devices.require("cuda")), None
    except BridgeError as problem:  # nothing of CUDA, or a GPU that is too old
        return "cpu", on_cpu(str(problem).removeprefix("device 'cuda': "))


def on_cpu(reason: object) -> str:
    """What "auto" says of a machine or a model that cannot use CUDA."""
    return f"running on the CPU: {reason}"
