"""The steps of `bridge.encode.carrying.carry` over the blocks of some rows.

What is carried most often is compiled; for affine types, NumPy does what is neither a loop over codes nor a search.

Arguments that all steps share:

    codes, scales, zeros   uint8 [rows, in], float32 [rows, G], float32 [rows, G]
    units                  the `Units` of a row
    sums                   float64 [3], added to: error, signal, noise (see `carry.Fidelity`)
"""

from dataclasses import dataclass

import numpy as np

from bridge.encode.carrying.carry_candidates import BATCH, fit_scaled
from bridge.encode.carrying.carry_fit import fit_affine
from bridge.system.kernels.half import round_half
from bridge.system.kernels.jit import inlined, kernel

_FLOAT32_STEP = 2.0**-23


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


@inlined
def _sums_of(codes, row, start, stop):
    """Sum q and sum q^2 of a run of codes of one row, float64. Vectorized, since all is unsigned."""
    total = squares = np.uint32(0)
    for k in range(np.uintp(start), np.uintp(stop)):
        q = np.uint32(codes[np.uintp(row), k])
        total = np.uint32(total + q)
        squares = np.uint32(squares + np.uint32(q * q))
    return np.float64(total), np.float64(squares)


@kernel
def _code_sums(codes, edges, sums):
    for row in range(sums.shape[1]):
        for unit in range(sums.shape[2]):
            sums[0, row, unit], sums[1, row, unit] = _sums_of(codes, row, edges[unit], edges[unit + 1])


def code_sums(codes: np.ndarray, units: Units) -> np.ndarray:
    """Sum q and sum q^2 of every unit: float64 [2, rows, units]."""
    sums = np.empty((2, len(codes), len(units.group)))
    _code_sums(codes, units.edges, sums)
    return sums


@kernel
def _scaled_fields(codes, scales, zeros, edges, group, scale, weight, sums):
    """What `fit_scaled` takes; adds signal and noise to sums."""
    most = scale.shape[1]
    signal = noise = 0.0
    superblock = 0
    for row in range(codes.shape[0]):
        for first in range(0, group.shape[0], most):
            batch, i = superblock // BATCH, superblock % BATCH
            superblock += 1
            for u in range(most):
                unit = first + u
                n = np.float64(edges[unit + 1] - edges[unit])
                if n > 0:
                    total, squares = _sums_of(codes, row, edges[unit], edges[unit + 1])
                    s = scales[row, group[unit]]
                    z = np.float64(zeros[row, group[unit]])
                    spread = squares - 2.0 * z * total + z * z * n  # sum (q - z)^2
                    scale[batch, u, i] = s
                    weight[batch, u, i] = spread
                    square = np.float64(s) * np.float64(s)
                    signal += square * spread
                    noise += square * n
    sums[1] += signal
    sums[2] += noise / 12.0


@kernel
def _put_scaled(d, code, scale, weight, of_sub, z, sc_out, d_out, dmin_out, sums):
    """Store what `fit_scaled` found; adds the error to sums."""
    most, blocks = code.shape[1], d_out.shape[1]
    subs = of_sub.shape[0] // blocks
    error = 0.0
    superblock = 0
    for row in range(d_out.shape[0]):
        for block in range(blocks):
            batch, i = superblock // BATCH, superblock % BATCH
            superblock += 1
            d_out[row, block] = d[batch, i]
            dmin_out[row, block] = d[batch, i] * z
            for j in range(block * subs, (block + 1) * subs):
                sc_out[row, j] = np.int32(code[batch, of_sub[j] - block * most, i])
            # in float64: what is reported must not carry the search's rounding
            for u in range(most):
                alpha = np.float64(d[batch, i]) * np.float64(code[batch, u, i]) - np.float64(scale[batch, u, i])
                error += alpha * alpha * np.float64(weight[batch, u, i])
    sums[0] += error


def carry_scaled(codes, scales, zeros, units, block, sc_out, mn_out, d_out, dmin_out, sums):
    """Fit every superblock of some rows whose zero points need no fitting.

    That is, of a scaled type, or of an affine one whose zero points are all the same power of two, or 0:
    mn = sc and dmin = d * z hold them exactly.
    """
    scale, weight = np.zeros((2, -(-d_out.size // BATCH), units.most, BATCH), np.float32)
    _scaled_fields(codes, scales, zeros, units.edges, units.group, scale, weight, sums)
    d, code = fit_scaled(scale, weight, block.scale_lo, block.scale_hi)
    z = zeros[0, 0] if block.has_min else np.float32(0.0)
    _put_scaled(d, code, scale, weight, units.of_sub, z, sc_out, d_out, dmin_out, sums)
    mn_out[:] = sc_out if z else 0


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


@kernel
def _carry_plain(codes, scales, zeros, group, size, mins, d_out, dmin_out, sums):
    n = np.float64(size)
    error = signal = noise = 0.0
    for row in range(d_out.shape[0]):
        for block in range(d_out.shape[1]):
            total, squares = _sums_of(codes, row, block * size, (block + 1) * size)
            s = scales[row, group[block]]
            z = np.float64(zeros[row, group[block]])
            d = round_half(s)
            d_out[row, block] = d
            alpha = np.float64(d) - np.float64(s)
            spread = squares - 2.0 * z * total + z * z * n
            square = np.float64(s) * np.float64(s)
            error += alpha * alpha * spread
            signal += square * spread
            noise += square * n
            if mins:
                m = round_half(np.float32(-z * np.float64(s)))
                dmin_out[row, block] = m
                gamma = -np.float64(m) - np.float64(d) * z
                if abs(gamma) >= _FLOAT32_STEP * abs(m):  # else m is the very offset that z was divided out of
                    error += gamma * (gamma * n - 2.0 * alpha * (total - n * z))
    sums[0] += error
    sums[1] += signal
    sums[2] += noise / 12.0


def carry_plain(codes, scales, zeros, units, block, d_out, dmin_out, sums):
    """d (and m) of every block of some rows; sums as in `carry_scaled`."""
    _carry_plain(codes, scales, zeros, units.group, block.size, block.has_min, d_out, dmin_out, sums)


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
