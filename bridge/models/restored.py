"""A checkpoint's tensors, put together again from what tensors of a GGUF hold of them."""

from collections.abc import Sequence

import numpy as np

from bridge.models.outline import Part, without_added


def restored(pieces: Sequence[tuple[Part, np.ndarray]], shape: tuple[int, ...]) -> np.ndarray:
    """float32 of a tensor's shape: rows, columns and values as they were before the conversion.

    pieces  the parts that are taken from it, and what the GGUF has of each, float32 in the part's shape
    """
    out = np.empty(shape, np.float32)
    for part, values in pieces:
        if part.factor is not None:
            values = values / part.factor[rows_of(part)].reshape(-1, *(1,) * (values.ndim - 1))
        values = without_added(values, part.change)
        if part.change == "exp":
            values = np.log(values)
        elif part.change == "-exp":
            values = np.log(-values)
        frame = out if part.matrix is None else out[part.matrix]
        if part.rows is None and part.columns is None and values.shape == part.shape and values.size == out.size:
            frame = out.reshape(part.shape)  # of one shape more
        if part.change in ("transposed", "conv1d"):
            frame = frame.T
        elif part.change == "squeezed" or frame.ndim != values.ndim:
            frame = out.reshape(part.stored or (-1, *part.shape[1:]))
        picked = [rows_of(part)] + [np.arange(n) if part.columns is None else part.columns for n in part.shape[1:]]
        frame[np.ix_(*picked)] = values
    return out


def shape_of(parts: Sequence[Part]) -> tuple[int, ...]:
    """The shape of the tensor that these parts are all of."""
    first = parts[0]
    rows = 1 + max(int(rows_of(part).max()) for part in parts)
    picked = [int(part.columns.max()) for part in parts if part.columns is not None]
    columns = (1 + max(picked), *first.shape[2:]) if picked else first.shape[1:]
    shape: tuple[int, ...] = first.stored or (rows, *columns)
    if first.change in ("transposed", "conv1d"):
        shape = shape[::-1]
    if first.change == "squeezed":
        shape = (shape[0], 1, *shape[1:]) if len(shape) > 1 else (1, *shape)
    if first.matrix is None:
        return shape
    return (1 + max(part.matrix for part in parts if part.matrix is not None), *shape)


def rows_of(part: Part) -> np.ndarray:
    """The rows of its source that a part has, int64 [out]."""
    return np.arange(part.shape[0]) if part.rows is None else part.rows
