"""Device memory for the decoder's own arrays, which torch keeps: it reuses what prompts leave behind."""

from typing import Any

import numpy as np
from bridge.cuda.device import Device, torch_device

from bridge.errors import BridgeError


def check_torch(device: Device) -> None:
    """Raises BridgeError where torch is missing, or cannot use the device."""
    try:
        import torch
    except ImportError:
        raise BridgeError(f"device {device}: models need torch; pip install torch") from None
    if torch_device(device) != "cpu" and not torch.cuda.is_available():
        raise BridgeError(f"device {device}: torch {torch.__version__} has no CUDA; install a build of it that has")


def zeros(device: Device, shape: int | tuple[int, ...], dtype: Any = None) -> Any:
    """A torch tensor of zeros, float32 unless another type is named."""
    import torch

    return torch.zeros(shape, dtype=dtype or torch.float32, device=torch_device(device))


def upload(array: np.ndarray, device: Device) -> Any:
    """A torch tensor of the same values on the device."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(torch_device(device))
