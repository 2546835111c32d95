"""Checks of a module's tensors, which raise BridgeError for damaged ones."""

import numpy as np

from bridge.checkpoint.files.dtypes import as_float32
from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.errors import BridgeError


def check_shapes(fit: bool, name: str, tensors: dict[str, TensorInfo]) -> None:
    """Raises BridgeError, which lists a module's shapes, unless they fit together."""
    if not fit:
        raise contradiction(name, tensors)


def contradiction(name: str, tensors: dict[str, TensorInfo]) -> BridgeError:
    """The error for a module whose tensors' shapes do not fit together."""
    shapes = ", ".join(f"{part} {i.dtype} {list(i.shape)}" for part, i in sorted(tensors.items()))
    file = next(iter(tensors.values())).file
    return BridgeError(
        f"{file}: {name}: the shapes contradict each other ({shapes}); the checkpoint is damaged, or its config names "
        "the wrong method"
    )


def check_permutation(order: np.ndarray, columns: int, info: TensorInfo) -> None:
    """Raises BridgeError unless the values of a stored tensor are 0 .. columns - 1 in some order."""
    if not np.array_equal(np.sort(order), np.arange(columns)):
        raise BridgeError(f"{info.file}: {info.name} is not a permutation; the checkpoint is damaged")


def finite_scales(store: Store, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
    """A stored tensor, or its rows start..stop, as float32. Raises BridgeError if a value is NaN or infinite.

    Bytes are exponents, F8_E8M0, as microscaling formats have them.
    """
    exponents = store.tensors[name].dtype == "U8"
    scales = as_float32(store.read(name, rows), "F8_E8M0") if exponents else store.read_float(name, rows)
    if not np.isfinite(scales).all():
        bad = np.count_nonzero(~np.isfinite(scales))
        raise BridgeError(
            f"{store.tensors[name].file}: {bad} of {scales.size} values of {name} are NaN or infinite; "
            "quantize the model again"
        )
    return scales


def positive_scale(store: Store, info: TensorInfo) -> np.float32:
    """A stored scale of one value. Raises BridgeError unless it is positive and finite."""
    value = store.read_float(info.name).reshape(-1)[0]
    if not (np.isfinite(value) and value > 0):
        raise BridgeError(f"{info.file}: {info.name} is {value:g}, not a scale; quantize the model again")
    return np.float32(value)
