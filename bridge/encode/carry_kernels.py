"""The steps of `bridge.encode.carry` over the blocks of some rows.

Only what runs over codes or tries candidates is compiled; NumPy does the rest, a few operations per unit.

Arguments that all steps share:

    codes, scales, zeros   uint8 [rows, in], float32 [rows, G], float32 [rows, G]
    units                  the `Units` of a row
    sums                   float64 [3], added to: error, signal, noise (see `carry.Fidelity`)
"""

from dataclasses import dataclass

import numpy as np

from bridge.encode.carry_candidates import BATCH, fit_scaled
from bridge.encode.carry_fit import fit_affine
from bridge.system.jit import kernel

_FLOAT32_STEP = 2.0**-23
_LARGEST_HALF = np.float32(65504.0)


@dataclass(frozen=True)
class Units:
    """The units of a row: runs of sub-blocks of one superblock that are in the same group.

    Every superblock has as many as the one that has most: further ones are empty, and come last.
    """

    most: int  # units of a superblock
    edges: np.ndarray  # int64 [units + 1]: the first column of each, and the end
    group: np.ndarray  # int64 [units]: the group of each; any for empty ones
    of_sub: np.ndarray  # int64 [in / sub]: the unit of each sub-block

    @classmethod
    def of(cls, group: np.ndarray, sub: int, subs: int) -> "Units":
        """group int32 [in / sub]: the group of each sub-block of `sub` columns, `subs` of them in a superblock."""
        starts = np.diff(group, prepend=-1) != 0
        starts[::subs] = True
        ordinal = starts.reshape(-1, subs).cumsum(axis=1) - 1
        most = int(ordinal.max()) + 1
        of_sub = (ordinal + most * np.arange(len(ordinal))[:, None]).ravel()
        first = np.searchsorted(of_sub, np.arange(most * len(ordinal) + 1))
        return cls(most, first * sub, group[np.minimum(first[:-1], len(group) - 1)].astype(np.int64), of_sub)

    @property
    def widths(self) -> np.ndarray:
        """int64 [units]: columns of each."""
        return np.diff(self.edges)


@kernel
def _code_sums(codes, edges, sums):
    """Sum q and sum q^2 of every unit: float64 [2, rows, units]. Vectorized, since all is unsigned."""
    for row in range(sums.shape[1]):
        for unit in range(sums.shape[2]):
            total = np.uint32(0)
            squares = np.uint32(0)
            for k in range(np.uintp(edges[unit]), np.uintp(edges[unit + 1])):
                q = np.uint32(codes[np.uintp(row), k])
                total = np.uint32(total + q)
                squares = np.uint32(squares + np.uint32(q * q))
            sums[0, row, unit] = total
            sums[1, row, unit] = squares


def code_sums(codes: np.ndarray, units: Units) -> np.ndarray:
    """Sum q and sum q^2 of every unit: float64 [2, rows, units]."""
    sums = np.empty((2, len(codes), len(units.group)))
    _code_sums(codes, units.edges, sums)
    return sums


def _halves(x: np.ndarray) -> np.ndarray:
    """The nearest halves, as float32; see `bridge.system.half.round_half`."""
    return np.clip(x, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16).astype(np.float32)


def carry_scaled(codes, scales, zeros, units, block, sc_out, mn_out, d_out, dmin_out, sums):
    """Fit every superblock of some rows whose zero points need no fitting.

    That is, of a scaled type, or of an affine one whose zero points are all the same power of two, or 0:
    mn = sc and dmin = d * z hold them exactly.
    """
    total, squares = code_sums(codes, units)
    z = zeros.take(units.group, axis=1)
    s = scales.take(units.group, axis=1)
    spread = squares - 2.0 * z * total + np.square(z, dtype=np.float64) * units.widths  # sum (q - z)^2
    s[:, np.flatnonzero(units.widths == 0)] = 0
    n = d_out.size
    scale, weight = np.zeros((2, units.most, -(-n // BATCH) * BATCH), np.float32)
    scale[:, :n] = s.reshape(n, -1).T
    weight[:, :n] = spread.reshape(n, -1).T
    d, code = fit_scaled(scale, weight, block.scale_lo, block.scale_hi)
    d_out[:] = d[:n].reshape(d_out.shape)
    sc_out[:] = code[:, :n].T.astype(np.int8).reshape(s.shape).take(units.of_sub, axis=1)
    if block.has_min:
        dmin_out[:] = d_out * zeros[0, 0]
        mn_out[:] = sc_out if zeros[0, 0] else 0
    # the error again, in float64: what is reported must not carry the search's rounding
    alpha = d.astype(np.float64) * code - scale
    square = np.square(s, dtype=np.float64)
    sums[0] += (alpha * alpha * weight).sum()
    sums[1] += (square * spread).sum()
    sums[2] += (square * units.widths).sum() / 12.0


def carry_affine(codes, scales, zeros, units, top, block, sc_out, mn_out, d_out, dmin_out, sums):
    """Like `carry_scaled`, for affine types and any zero points. top: the largest code, 2^bits - 1.

    Returns the codes, mirrored (top - q) in groups whose scale does not have d's sign.
    """
    total, squares = code_sums(codes, units)
    n = units.widths
    s = scales.take(units.group, axis=1).astype(np.float64)
    z = zeros.take(units.group, axis=1).astype(np.float64)
    negative = s < 0
    spread = squares - 2.0 * z * total + z * z * n  # sum (q - z)^2
    balance = total - z * n  # sum (q - z)
    fields = np.empty((5, *s.shape), np.float32)
    values = np.abs(s), np.where(negative, top - z, z), n, spread, np.where(negative, -balance, balance)
    for field, value in zip(fields, values, strict=True):
        field[:] = value
    fields = fields.reshape(5, -1, units.most)
    counts = np.count_nonzero(n.reshape(-1, units.most), axis=1)
    (sc, mn), (d, dmin), mirrored = fit_affine(fields, counts, top, block.scale_hi, block.min_hi)
    shape = d_out.shape
    d_out[:] = np.where(mirrored, -d, d).reshape(shape)
    dmin_out[:] = np.where(mirrored, -dmin, dmin).reshape(shape)
    sc_out[:] = sc.reshape(s.shape).take(units.of_sub, axis=1)
    mn_out[:] = mn.reshape(s.shape).take(units.of_sub, axis=1)
    # the error again, in float64 and by the codes as they came: w' - w = alpha q - beta. The sums about
    # a zero point far outside the codes nearly cancel, and in float32 they lose the error altogether
    flip = negative != mirrored.reshape(*shape, 1).repeat(units.most, axis=2).reshape(s.shape)
    slope = (d_out[..., None].astype(np.float64) * sc.reshape(*shape, -1)).reshape(s.shape)
    offset = (dmin_out[..., None].astype(np.float64) * mn.reshape(*shape, -1)).reshape(s.shape)
    alpha = np.where(flip, -slope, slope) - s
    beta = np.where(flip, offset - slope * top, offset) - s * z
    sums[0] += (alpha * alpha * squares - 2.0 * alpha * beta * total + beta * beta * n).sum()
    sums[1] += (s * s * spread).sum()
    sums[2] += (s * s * n).sum() / 12.0
    return codes ^ (flip * np.uint8(top)).repeat(n, axis=1) if flip.any() else codes


def carry_plain(codes, scales, zeros, units, block, d_out, dmin_out, sums):
    """d (and m) of every block of some rows; sums as in `carry_scaled`."""
    total, squares = code_sums(codes, units)
    s = scales.take(units.group, axis=1)
    z = zeros.take(units.group, axis=1).astype(np.float64)
    d_out[:] = _halves(s)
    square = np.square(s, dtype=np.float64)
    alpha = d_out.astype(np.float64) - s
    spread = squares - 2.0 * z * total + z * z * block.size
    error = alpha * alpha * spread
    if block.has_min:
        m = _halves((-z * s).astype(np.float32))
        dmin_out[:] = m
        gamma = -m.astype(np.float64) - d_out * z
        gamma[np.abs(gamma) < _FLOAT32_STEP * np.abs(m)] = 0.0  # m is the very offset that z was divided out of
        error += gamma * (gamma * block.size - 2.0 * alpha * (total - block.size * z))
    sums += error.sum(), (square * spread).sum(), square.sum() * block.size / 12.0


@kernel
def shift_codes(codes, zeros, group, sub, zero, levels, out):
    """out = codes - z + zero; returns how many sub-blocks do not fit in 0..levels-1."""
    bad = 0
    for row in range(codes.shape[0]):
        for j in range(group.shape[0]):
            shift = np.int32(zero) - np.int32(np.rint(zeros[row, group[j]]))
            low = np.int32(levels)
            high = np.int32(-1)
            for k in range(j * sub, (j + 1) * sub):
                q = np.int32(np.int32(codes[row, k]) + shift)
                low = min(low, q)
                high = max(high, q)
                out[row, k] = np.uint8(q)
            if low < 0 or high >= levels:
                bad += 1
    return bad


def add_shift_error(codes, scales, zeros, group, block, sc, d, sums):
    """Add the error due to rounding the zero points of a type without a min to sums[0], in place.

    group int32 [in / sub]; sc int8 [rows, in / sub], ignored by plain types; d float32 [rows, blocks].
    """
    units = Units.of(group, block.sub, 1)  # of one sub-block each
    total, _ = code_sums(codes, units)
    z = zeros.take(units.group, axis=1).astype(np.float64)
    scale = d.repeat(block.subs, axis=1).astype(np.float64)
    if block.is_k:
        scale *= sc
    alpha = scale - scales.take(units.group, axis=1)
    gamma = scale * (np.rint(z) - z)
    sums[0] += (gamma * (gamma * block.sub - 2.0 * alpha * (total - z * block.sub))).sum()
