"""A checkpoint's tensor, made again of what a GGUF has of it: the changes and orders of `outline.Part`, undone.

undone(part, values)       the values of a part, as the checkpoint had them
restored(pieces, shape)    a tensor of such parts, with rows, columns and matrices in their places
original_shape(parts)      its shape
"""

from collections.abc import Iterable, Sequence

import numpy as np

from bridge.models.outline import Part


def undone(part: Part, values: np.ndarray) -> np.ndarray:
    """float32 in the part's shape, before the change of its values."""
    if part.change == "+1":
        return values - 1
    return np.log(-values) if part.change == "-exp" else values


def restored(pieces: Iterable[tuple[Part, np.ndarray]], shape: tuple[int, ...]) -> np.ndarray:
    """float32 of the checkpoint's shape.

    pieces  of one tensor: parts, and their values in the part's shape
    """
    whole = np.empty(shape, np.float32)
    for part, values in pieces:
        frame = whole if part.matrix is None else whole[part.matrix]
        if part.change in ("transposed", "conv1d"):
            frame = frame.T
        elif part.change == "squeezed" or frame.ndim != values.ndim:
            frame = whole.reshape(part.stored or part.shape)
        picked = [rows_of(part)] + [np.arange(n) if part.columns is None else part.columns for n in part.shape[1:]]
        frame[np.ix_(*picked)] = values
    return whole


def rows_of(part: Part) -> np.ndarray:
    """int64: the rows of the source that a part has."""
    return np.arange(part.shape[0]) if part.rows is None else part.rows


def original_shape(parts: Sequence[Part]) -> tuple[int, ...]:
    """The shape in the checkpoint of the tensor that has these parts."""
    shape = parts[0].stored or parts[0].shape
    if parts[0].change in ("transposed", "conv1d"):
        shape = shape[::-1]
    elif parts[0].change == "squeezed":
        shape = (1, *shape) if len(shape) == 1 else (shape[0], 1, *shape[1:])
    count = max((part.matrix + 1 for part in parts if part.matrix is not None), default=0)
    return (count, *shape) if count else shape
