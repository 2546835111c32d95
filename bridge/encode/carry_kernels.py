"""The loops of `bridge.encode.carry`: over the blocks of some rows, compiled.

Arguments that all kernels share:

    codes, scales, zeros   uint8 [rows, in], float32 [rows, G], float32 [rows, G]
    group                  int32 [in / sub]: the group of each sub-block
    sums                   float64 [3], added to: error, signal, noise (see `carry.Fidelity`)
"""

import numpy as np

from bridge.encode.carry_candidates import BATCH, STARTS, fit_scaled
from bridge.encode.carry_fit import fit_affine
from bridge.system.half import round_half
from bridge.system.jit import inlined, inner, kernel

_FLOAT32_STEP = 2.0**-23


@inlined
def _code_sums(codes, row, start, stop):
    """sum q and sum q^2 of a run of codes of one row: vectorized by 32-bit unsigned arithmetic, without a view."""
    total = np.uint32(0)
    squares = np.uint32(0)
    for k in range(np.uintp(start), np.uintp(stop)):
        q = np.uint32(codes[np.uintp(row), k])
        total = np.uint32(total + q)
        squares = np.uint32(squares + np.uint32(q * q))
    return float(total), float(squares)


@inner
def _units(group, subs, blocks):
    """Each superblock of a row: its number of units, their first sub-blocks and the end, and each sub-block's unit."""
    count = np.zeros(blocks, np.int64)
    first = np.zeros((blocks, subs + 1), np.int64)
    unit = np.zeros((blocks, subs), np.int64)
    for block in range(blocks):
        for j in range(subs):
            if j == 0 or group[block * subs + j] != group[block * subs + j - 1]:
                first[block, count[block]] = j
                count[block] += 1
            unit[block, j] = count[block] - 1
        first[block, count[block]] = subs
    return count, first, unit


@inlined
def _next_block(row, block, blocks):
    """The superblock after (row, block)."""
    return (row, block + 1) if block + 1 < blocks else (row + 1, 0)


@inlined
def _moments_about(total, squares, n, z):
    """sum (q - z)^2 and sum (q - z) from the sums of n codes q, float64."""
    return squares - 2.0 * z * total + z * z * n, total - z * n


@inlined
def _moments(codes, row, start, stop, zero):
    """sum (q - z)^2 and sum (q - z) of a run of codes of one row, float64."""
    total, squares = _code_sums(codes, row, start, stop)
    return _moments_about(total, squares, float(stop - start), float(zero))


@kernel
def carry_scaled(codes, scales, zeros, group, sub, subs, lo, hi, min_hi, sc_out, mn_out, d_out, dmin_out, sums):
    """Fit every superblock of some rows whose zero points need no fitting.

    That is, of a scaled type (min_hi 0), or of an affine one whose zero points are all the same power of two, or 0:
    mn = sc and dmin = d * z hold them exactly.
    """
    blocks = d_out.shape[1]
    count, first, unit = _units(group, subs, blocks)
    most = count.max()
    s = np.zeros((most, BATCH), np.float32)  # 0 beyond a superblock's last unit
    a = np.zeros((most, BATCH), np.float32)
    d = np.empty(BATCH, np.float32)
    code = np.empty((most, BATCH), np.float32)
    ratio = np.empty((most, BATCH), np.float32)
    num = np.empty(BATCH, np.float32)
    den = np.empty(BATCH, np.float32)
    skipped = np.empty(BATCH, np.float32)
    best = np.empty(BATCH, np.float32)
    least = np.empty(BATCH, np.float32)
    error = 0.0
    signal = 0.0
    noise = 0.0
    z = np.float32(0.0) if min_hi == 0 else zeros[0, 0]
    row, block = 0, 0
    while row < d_out.shape[0]:
        size = min(BATCH, (d_out.shape[0] - row) * blocks - block)
        begin = row, block
        for i in range(size):
            for u in range(most):
                s[u, i] = np.float32(0.0)
                a[u, i] = np.float32(0.0)
            for u in range(count[block]):
                start = (block * subs + first[block, u]) * sub
                stop = (block * subs + first[block, u + 1]) * sub
                g = group[block * subs + first[block, u]]
                spread, _ = _moments(codes, row, start, stop, zeros[row, g])
                s[u, i] = scales[row, g]
                a[u, i] = spread
                square = float(scales[row, g]) * float(scales[row, g])
                signal += square * spread
                noise += square * float(stop - start)
            row, block = _next_block(row, block, blocks)
        for i in range(size, BATCH):
            s[0, i] = np.float32(0.0)
        fit_scaled(most, s, a, lo, hi, d, code, ratio, num, den, skipped, best, least)
        row, block = begin
        for i in range(size):
            d_out[row, block] = d[i]
            dmin_out[row, block] = d[i] * z
            for j in range(subs):
                q = np.int32(code[unit[block, j], i])
                sc_out[row, block * subs + j] = q
                mn_out[row, block * subs + j] = q if z != 0 else 0
            for u in range(count[block]):
                # the error again, in float64: what is reported must not carry the search's rounding
                alpha = float(d[i]) * float(code[u, i]) - float(s[u, i])
                error += alpha * alpha * float(a[u, i])
            row, block = _next_block(row, block, blocks)
    sums[0] += error
    sums[1] += signal
    sums[2] += noise / 12.0


@kernel
def carry_affine(
    codes, scales, zeros, group, top, sub, subs, hi, min_hi, q_out, sc_out, mn_out, d_out, dmin_out, sums
):  # fmt: skip
    """Like `carry_scaled`, for affine types and any zero points. top: the largest code, 2^bits - 1.

    q_out uint8 [rows, in]: the codes, mirrored (top - q) in groups whose scale does not have d's sign.
    """
    s = np.empty(subs, np.float32)
    z = np.empty(subs, np.float32)
    n = np.empty(subs, np.float32)
    a = np.empty(subs, np.float32)
    b = np.empty(subs, np.float32)
    sc = np.zeros(subs, np.int32)
    mn = np.zeros(subs, np.int32)
    scale_d = np.empty(STARTS, np.float32)
    scale_e = np.empty(STARTS, np.float32)
    min_d = np.empty(STARTS, np.float32)
    min_e = np.empty(STARTS, np.float32)
    num = np.empty(STARTS, np.float32)
    den = np.empty(STARTS, np.float32)
    spread = np.empty(subs, np.float32)
    target = np.empty(subs, np.float32)
    try_sc = np.empty(subs, np.int32)
    try_mn = np.empty(subs, np.int32)
    total = np.empty(subs, np.float64)  # sum q and sum q^2 of a unit
    squares = np.empty(subs, np.float64)
    blocks = d_out.shape[1]
    count, first, unit = _units(group, subs, blocks)
    error = 0.0
    signal = 0.0
    noise = 0.0
    for row in range(codes.shape[0]):
        for block in range(blocks):
            units = count[block]
            for u in range(units):
                g = group[block * subs + first[block, u]]
                negative = scales[row, g] < 0
                start = (block * subs + first[block, u]) * sub
                stop = (block * subs + first[block, u + 1]) * sub
                total[u], squares[u] = _code_sums(codes, row, start, stop)
                deviation, balance = _moments_about(total[u], squares[u], float(stop - start), float(zeros[row, g]))
                s[u] = abs(scales[row, g])
                z[u] = top - zeros[row, g] if negative else zeros[row, g]
                n[u] = stop - start
                a[u] = deviation
                b[u] = -balance if negative else balance
                square = float(s[u]) * float(s[u])
                signal += square * deviation
                noise += square * float(stop - start)
            d, dmin, mirror = fit_affine(
                units, s, z, n, a, b, np.float32(top), hi, min_hi, sc, mn,
                scale_d, scale_e, min_d, min_e, num, den, spread, target, try_sc, try_mn,
            )  # fmt: skip
            d_out[row, block] = -d if mirror else d
            dmin_out[row, block] = -dmin if mirror else dmin
            for j in range(subs):
                sc_out[row, block * subs + j] = sc[unit[block, j]]
                mn_out[row, block * subs + j] = mn[unit[block, j]]
            for u in range(units):
                g = group[block * subs + first[block, u]]
                flip = np.uint8(top) if (scales[row, g] < 0) != mirror else np.uint8(0)
                start = (block * subs + first[block, u]) * sub
                stop = (block * subs + first[block, u + 1]) * sub
                # the error again, in float64 and by the codes as they came: w' - w = alpha q - beta. The sums about
                # a zero point far outside the codes nearly cancel, and in float32 they lose the error altogether
                slope = float(d_out[row, block]) * sc[u]
                offset = float(dmin_out[row, block]) * mn[u]
                if flip:
                    offset -= slope * top
                    slope = -slope
                alpha = slope - float(scales[row, g])
                beta = offset - float(scales[row, g]) * float(zeros[row, g])
                error += alpha * alpha * squares[u] - 2.0 * alpha * beta * total[u] + beta * beta * float(stop - start)
                for k in range(start, stop):
                    q_out[row, k] = codes[row, k] ^ flip
    sums[0] += error
    sums[1] += signal
    sums[2] += noise / 12.0


@kernel
def carry_plain(codes, scales, zeros, group, with_min, d_out, dmin_out, sums):
    """d (and m) of every block of some rows; sums as in `carry_scaled`."""
    size = codes.shape[1] // d_out.shape[1]
    for row in range(codes.shape[0]):
        for block in range(d_out.shape[1]):
            g = group[block]
            s = scales[row, g]
            z = float(zeros[row, g])
            d = round_half(s)
            d_out[row, block] = d
            total, squares = _code_sums(codes, row, size * block, size * block + size)
            alpha = float(d) - float(s)
            spread = squares - 2.0 * z * total + z * z * size
            gamma = 0.0
            if with_min:
                m = round_half(np.float32(-float(s) * z))
                dmin_out[row, block] = m
                gamma = -float(m) - float(d) * z
                if abs(gamma) < _FLOAT32_STEP * abs(m):
                    gamma = 0.0  # m is the very offset that z was divided out of
            sums[0] += alpha * alpha * spread - 2.0 * alpha * gamma * (total - size * z) + gamma * gamma * size
            sums[1] += float(s) * float(s) * spread
            sums[2] += float(s) * float(s) * size / 12.0


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


@kernel
def add_shift_error(codes, scales, zeros, group, sub, sc, d, sums):
    """Add the error due to rounding the zero points of a type without a min to sums[0], in place.

    sc int8 [rows, in / sub], or [rows, 0] for plain types; d float32 [rows, blocks].
    """
    per_block = group.shape[0] // d.shape[1]
    for row in range(codes.shape[0]):
        for j in range(group.shape[0]):
            z = zeros[row, group[j]]
            scale = float(d[row, j // per_block])
            if sc.shape[1]:
                scale *= sc[row, j]
            alpha = scale - float(scales[row, group[j]])
            gamma = scale * (float(np.rint(z)) - float(z))
            _, balance = _moments(codes, row, j * sub, (j + 1) * sub, z)
            sums[0] += gamma * gamma * sub - 2.0 * alpha * gamma * balance
