"""Which rows and columns of a weight share a scale: blocks, groups, rows or all of it, of codes and 8-bit floats alike.

scale   [] or [1]; [out] or [out, 1]; [out/r, in/c]   one, one a row, one a block of r rows and c columns
"""

from __future__ import annotations

import math
import re

import numpy as np


def fit_group_size(columns: int, groups: int, claimed: int) -> int | None:
    """The group size that makes `groups` of `columns`: the claimed one, else a power of two, else None."""
    for size in (claimed, columns if groups == 1 else 0, *(1 << n for n in range(3, 15))):
        if size > 0 and -(-columns // size) == groups:
            return min(size, columns)
    return None


def block_of(shape: tuple[int, int], scale: tuple[int, ...], claimed: tuple[int, int]) -> tuple[int, int] | None:
    """(rows, columns) that share a scale, from the scale's shape; the claimed ones where they fit; else None."""
    out, columns = shape
    if math.prod(scale) == 1:
        return out, columns
    if scale == (out,):
        return 1, columns
    if len(scale) != 2:
        return None
    rows = 1 if scale[0] == out else fit_group_size(out, scale[0], claimed[0])
    width = fit_group_size(columns, scale[1], claimed[1])
    return (rows, width) if rows and width else None


def spread(scale: np.ndarray, out: int, rows: int) -> np.ndarray:
    """A scale or zero point as stored, `rows` rows of the weight sharing one -> one a row and group, [out, G]."""
    grid = scale if scale.ndim == 2 else scale.reshape(-1, 1)
    return grid[np.arange(out) // rows]


def read_block(value: object) -> tuple[int, int] | None:
    """A config's [rows, columns] of a block, "128x128" in old files; None for anything else."""
    if isinstance(value, str) and (sides := re.fullmatch(r"(\d+)x(\d+)", value)):
        value = [int(n) for n in sides.groups()]
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    return None
