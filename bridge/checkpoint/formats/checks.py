"""Checks on a checkpoint's tensors that all formats share."""

from __future__ import annotations

import numpy as np

from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.errors import BridgeError


def finite_scales(store: Store, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
    """float32 as it is stored, or its rows start..stop; BridgeError where a value is infinite or no number."""
    scales = store.read_float(name, rows)
    if not np.isfinite(scales).all():
        bad = np.count_nonzero(~np.isfinite(scales))
        raise BridgeError(
            f"{store.tensors[name].file}: {bad} of {scales.size} values of {name} are NaN or infinite; "
            "quantize the model again"
        )
    return scales


def contradiction(name: str, tensors: dict[str, TensorInfo]) -> BridgeError:
    """The shapes of a module's tensors do not fit together."""
    shapes = ", ".join(f"{part} {i.dtype} {list(i.shape)}" for part, i in sorted(tensors.items()))
    file = next(iter(tensors.values())).file
    return BridgeError(
        f"{file}: {name}: the shapes contradict each other ({shapes}); the checkpoint is damaged, or its config names "
        "another method than it was quantized with"
    )
