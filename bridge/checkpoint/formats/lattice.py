"""Floats that lie on a hidden grid: models trained for it, and models published after dequantization.

W[o, k] = scale[o, g] * integer,   groups of 32, 64, 128 columns or a row, rounded to the floats they are stored in

The grid of a group is found from its largest magnitude, which is some multiple of the scale: the first multiple that
makes all other weights integers too, within the rounding of floats with p bits, 2 * 2^-p of themselves. The probability
of chance is summed up: an ordinary weight is that close to the integer m with a probability of 4 * 2^-p * m. So in
BF16 (p = 8) grids of 4 and 5 bits are found, in F16 (p = 11) those of 8. The scale is then a number, if possible a
half, whose rounded multiples are exactly the stored floats.
"""

from dataclasses import dataclass

import numpy as np

from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.grouped import GroupedTensor

_SIZES = (128, 64, 32)  # of groups, after whole rows
_SLACK = 1.05  # of what rounding allows
_TWICE = 1.25  # for floats that were rounded to halves first
_EVIDENCE = -4.0  # the most of log10(probability), an average group
_PROVEN = -30.0  # and all groups together
_ROWS, _COLUMNS = 8, 2048  # of a sample
_CHUNK = 1 << 20  # weights looked at together
_FEW = 16  # groups looked at first


@dataclass(frozen=True)
class Lattice:
    """The grid that a matrix of floats lies on."""

    weight: TensorInfo
    bits: int
    group_size: int
    sym: bool
    precision: int  # significant bits of the floats

    def __str__(self) -> str:
        groups = "one group a row" if self.group_size >= self.weight.shape[1] else f"groups of {self.group_size}"
        return f"{self.bits} bits, {groups}, {'symmetric' if self.sym else 'asymmetric'}"

    def read(self, store: Store, name: str, rows: np.ndarray | None = None) -> GroupedTensor | None:
        """The matrix, or some of its rows, as codes; None unless all of it lies on such a grid."""
        x = store.read_float(self.weight.name)
        fitted = _fit(x if rows is None else x[rows], self.group_size, self.precision, proven=True)
        if fitted is None:
            return None
        scales, integers = fitted
        codes = _codes(scales, integers, self.group_size, self.bits, self.sym)
        return None if codes is None else GroupedTensor(name, self.bits, *codes, self.group_size)


def find_lattice(store: Store, weight: TensorInfo) -> Lattice | None:
    """The grid that some rows of a matrix lie on; None for ordinary weights."""
    if not weight.floating or len(weight.shape) != 2 or min(weight.shape) < 2 or weight.shape[1] < 32:
        return None
    out, columns = weight.shape
    first = sorted({0, max(0, out // 2 - _ROWS // 2), max(0, out - _ROWS)})
    x = np.concatenate([store.read_float(weight.name, (start, min(start + _ROWS, out))) for start in first])
    precision = _precision(x)
    for size in (columns, *_SIZES):
        if columns % size:
            continue
        part = x if size > _COLUMNS else x[:, : _COLUMNS // size * size]
        fitted = _fit(part, size, precision)
        if fitted is None:
            continue
        scales, integers = fitted
        for bits in range(2, 9):
            for sym in (True, False):
                if _codes(scales, integers, size, bits, sym) is not None:
                    return Lattice(weight, bits, size, sym, precision)
    return None


def _precision(x: np.ndarray) -> int:
    """How many significant bits the floats have: 8 as BF16, 11 as F16, else 24."""
    if not (x.view(np.uint32) & 0xFFFF).any():
        return 8
    with np.errstate(over="ignore"):
        return 11 if np.array_equal(x.astype(np.float16), x) else 24


def _fit(x: np.ndarray, size: int, bits: int, proven: bool = False) -> tuple[np.ndarray, np.ndarray] | None:
    """float32 [rows, in] -> scales float32 [rows, G] and the integers int16 [rows, in]; None for ordinary weights."""
    x = np.ascontiguousarray(x, np.float32)
    if not np.isfinite(x).all() or not (x.any() or proven):
        return None
    groups = x.reshape(-1, size)
    scales = np.empty(len(groups), np.float32)
    integers = np.empty(groups.shape, np.int16)
    evidence, step = 0.0, max(1, _CHUNK // size)
    for start in (0, *range(_FEW, len(groups), step)):  # a few groups rule out nearly all ordinary weights
        part = slice(start, start + step if start else _FEW)
        grids = _grids(groups[part].astype(np.float64), bits)
        if grids is None:
            return None
        scales[part], integers[part], likely = grids
        evidence += likely
    if not proven and (evidence > _PROVEN or evidence > _EVIDENCE * np.count_nonzero(scales)):
        return None
    return scales.reshape(len(x), -1), integers.reshape(x.shape)


def _grids(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Of groups float64 [n, size]: scales, integers, and log10 of the probability that ordinary weights lie on them."""
    unit = 2.0**-bits
    largest = np.abs(x).max(1)
    scales = np.zeros(len(x))
    integers = np.zeros(x.shape)
    evidence = 0.0
    open_ = np.flatnonzero(largest)
    for multiple in range(1, min(255, 1 << max(bits - 3, 5)) + 1):
        step = largest[open_] / multiple
        ratio = x[open_] / step[:, None]
        rounded = np.rint(ratio)
        near = (np.abs(ratio - rounded) <= 2 * unit * _SLACK * np.abs(rounded)).all(1)
        solved = open_[near]
        scales[solved], integers[solved] = step[near], rounded[near]
        chance = np.minimum(1, 4 * unit * np.maximum(np.abs(rounded[near]), 1))
        evidence += float(np.log10(chance).sum() + len(solved) * np.log10(multiple))
        open_ = open_[~near]
        if not len(open_):
            break
    if len(open_):
        return None
    exact = _simplest(x, integers, bits)
    return None if exact is None else (exact, integers.astype(np.int16), evidence)


def _simplest(x: np.ndarray, integers: np.ndarray, bits: int) -> np.ndarray | None:
    """float32 [n]: scales whose multiples round to x, preferably halves or BF16; None if there are none.

    Floats that were rounded twice may be a little further from them.
    """
    size, times = np.abs(x), np.abs(integers)
    mantissa, exponent = np.frexp(size)
    up = np.ldexp(0.5, np.maximum(exponent - bits, -24 if bits == 11 else -149))  # half the way to the next float
    down = np.where(mantissa == 0.5, up / 2, up)
    reach = np.where(np.mod(size / up, 4) == 0, 1, 1 - 2.0**-20)  # what lies half-way goes to the even one
    used = times != 0
    low, high = np.ones(len(x)), np.zeros(len(x))
    for wider in (1, _TWICE):
        left = np.flatnonzero(low > high)
        with np.errstate(divide="ignore", invalid="ignore"):
            least = (size - wider * reach * down)[left] / times[left]
            most = (size + wider * reach * up)[left] / times[left]
        low[left] = np.where(used[left], least, -np.inf).max(1)
        high[left] = np.where(used[left], most, np.inf).min(1)
    if (low > high).any():
        return None
    empty = ~used.any(1)
    low[empty] = high[empty] = 0
    middle = (low + high) / 2
    scales = middle.astype(np.float32)
    with np.errstate(over="ignore"):
        halves = middle.astype(np.float16)
    for nearest in ((scales.view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32), halves.astype(np.float32)):
        scales = np.where((nearest >= low) & (nearest <= high), nearest, scales)
    return scales


def _codes(
    scales: np.ndarray, integers: np.ndarray, size: int, bits: int, sym: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(codes, scales, zero points) of a GroupedTensor; None where the integers do not fit."""
    grouped = integers.reshape(-1, size)
    low, high = grouped.min(1), grouped.max(1)
    flat = scales.reshape(-1)
    if sym:
        half = 1 << (bits - 1)
        flip = high >= half  # then from -half on, with the scale negated
        low, high = np.where(flip, -high, low), np.where(flip, -low, high)
        if (low < -half).any() or (high >= half).any():
            return None
        grouped = np.where(flip[:, None], -grouped, grouped)
        flat, zeros = np.where(flip, -flat, flat), np.full(len(flat), half)
    else:
        zeros = np.maximum(-low, 0)
        if (high + zeros >= 1 << bits).any():
            return None
    codes = (grouped + zeros[:, None]).astype(np.uint8).reshape(integers.shape)
    return codes, flat.reshape(scales.shape).astype(np.float32), zeros.reshape(scales.shape).astype(np.float32)
