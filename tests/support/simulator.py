"""Device memory of Numba's CUDA simulator, as the tests read it."""

from __future__ import annotations

from typing import Any

import numpy as np


def on_host(memory: Any) -> np.ndarray:
    """The contents of device memory as a plain array: the simulator wraps its arrays."""
    return np.asarray(memory.copy_to_host() if hasattr(memory, "copy_to_host") else memory)
