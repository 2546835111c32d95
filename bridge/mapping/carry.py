"""Carrying a checkpoint's integer codes onto GGUF blocks: only scales and zero points are re-encoded.

Three families (see `bridge.blocks.base`):

    affine   codes as they are; d, sc, dmin, mn are fitted           Q2_K, Q4_K, Q5_K
    scaled   codes shifted by zero - z; d, sc are fitted             Q3_K, Q6_K
    plain    codes shifted by zero - z, d = s                        Q4_0, Q5_0, Q8_0
             codes as they are, d = s, m = -s * z                    Q4_1, Q5_1

Where codes are shifted, a fractional zero point is rounded, and what that costs is counted. The affine types'
scale codes have no sign: where scales of both signs meet in a superblock, groups of negative ones are mirrored
first (q -> 2^bits - 1 - q), which changes no weight.

A type can carry a tensor when its sub-blocks do not straddle groups, its codes are wide enough and the
shifted codes fit. Q8_0 alone makes do where a few blocks do not fit (8-bit asymmetric): those are rounded
anew to 127 steps and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bridge.blocks import BlockType
from bridge.checkpoint.grouped import GroupedTensor
from bridge.errors import BridgeError
from bridge.jit import inlined, inner, kernel
from bridge.mapping.candidates import BATCH, CANDIDATES, fit_scaled
from bridge.mapping.fit import fit_affine
from bridge.mapping.half import round_half
from bridge.mapping.pack import packer, row_bytes

_CHUNK_WEIGHTS = 1 << 20  # rows are taken in chunks that stay in cache
_FLOAT32_STEP = 2.0**-23
_MAX_SHIFT = 1 << 15  # of codes by zero points


class CannotCarryError(BridgeError):
    """The type cannot hold the tensor's codes; the message says why."""


@dataclass(frozen=True)
class Fidelity:
    """How far a GGUF tensor is from the checkpoint's. Sums over all weights."""

    weights: int
    error: float  # sum (w' - w)^2
    signal: float  # sum w^2, w the checkpoint's dequantized weights
    noise: float  # sum s^2 / 12: what the checkpoint's own rounding is expected to cost
    kept: int  # weights whose integer code is the checkpoint's

    @property
    def nmse(self) -> float:
        """Squared error over squared weights."""
        return self.error / self.signal if self.signal else float(self.error > 0)

    @property
    def share(self) -> float:
        """Squared error over the checkpoint's own expected quantization noise."""
        return self.error / self.noise if self.noise else (float("inf") if self.error else 0.0)

    def __add__(self, other: Fidelity) -> Fidelity:
        return Fidelity(
            self.weights + other.weights,
            self.error + other.error,
            self.signal + other.signal,
            self.noise + other.noise,
            self.kept + other.kept,
        )


@dataclass(frozen=True)
class Mapped:
    """A tensor as GGUF blocks: `data` uint8 [out, row bytes]."""

    block: BlockType
    data: np.ndarray
    fidelity: Fidelity


@inlined
def _sums(codes, row, start, stop):
    """sum q and sum q^2 of a run of codes of one row.

    32-bit unsigned arithmetic and indices, and no view of the row: so that it vectorizes and touches no
    reference count.
    """
    total = np.uint32(0)
    squares = np.uint32(0)
    for k in range(np.uintp(start), np.uintp(stop)):
        q = np.uint32(codes[np.uintp(row), k])
        total = np.uint32(total + q)
        squares = np.uint32(squares + np.uint32(q * q))
    return float(total), float(squares)


@inner
def _units(group, subs, blocks):
    """Of each superblock of a row: how many units it has, the first sub-block of each (and the end), and the
    unit of each sub-block."""
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
def _next(row, block, blocks):
    """The superblock after (row, block)."""
    return (row, block + 1) if block + 1 < blocks else (row + 1, 0)


@inlined
def _moments(codes, row, start, stop, zero):
    """sum (q - z)^2 and sum (q - z) of a run of codes of one row, float64."""
    total, squares = _sums(codes, row, start, stop)
    z = float(zero)
    n = float(stop - start)
    return squares - 2.0 * z * total + z * z * n, total - z * n


@kernel
def _carry_scaled(codes, scales, zeros, group, sub, subs, lo, hi, min_hi, sc_out, mn_out, d_out, dmin_out, sums):
    """Fit every superblock of some rows whose zero points keep by themselves.

    That is, of a scaled type (min_hi 0), or of an affine one whose zero points are all one power of two, or 0:
    then mn = sc and dmin = d * z hold them exactly. `group` int32 [in / sub]. sums float64 [3], added to:
    error, signal, noise.
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
            row, block = _next(row, block, blocks)
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
            row, block = _next(row, block, blocks)
    sums[0] += error
    sums[1] += signal
    sums[2] += noise / 12.0


@kernel
def _carry_affine(codes, scales, zeros, group, sub, subs, lo, hi, min_hi, sc_out, mn_out, d_out, dmin_out, sums):
    """As `_carry_scaled`, for affine types and zero points of any kind."""
    s = np.empty(subs, np.float32)
    z = np.empty(subs, np.float32)
    n = np.empty(subs, np.float32)
    a = np.empty(subs, np.float32)
    b = np.empty(subs, np.float32)
    sc = np.zeros(subs, np.int32)
    mn = np.zeros(subs, np.int32)
    cand_d = np.empty(CANDIDATES, np.float32)
    cand_e = np.empty(CANDIDATES, np.float32)
    num = np.empty(CANDIDATES, np.float32)
    den = np.empty(CANDIDATES, np.float32)
    spread = np.empty(subs, np.float32)
    target = np.empty(subs, np.float32)
    kept_d = np.empty(CANDIDATES, np.float32)
    kept_e = np.empty(CANDIDATES, np.float32)
    try_sc = np.empty(subs, np.int32)
    try_mn = np.empty(subs, np.int32)
    blocks = d_out.shape[1]
    count, first, unit = _units(group, subs, blocks)
    error = 0.0
    signal = 0.0
    noise = 0.0
    for row in range(codes.shape[0]):
        for block in range(blocks):
            units = count[block]
            top = np.float32(0.0)
            for u in range(units):
                g = group[block * subs + first[block, u]]
                s[u] = scales[row, g]
                z[u] = zeros[row, g]
                if abs(s[u]) > abs(top):
                    top = s[u]
                start = (block * subs + first[block, u]) * sub
                stop = (block * subs + first[block, u + 1]) * sub
                deviation, balance = _moments(codes, row, start, stop, zeros[row, g])
                n[u] = stop - start
                a[u] = deviation
                b[u] = balance
                square = float(s[u]) * float(s[u])
                signal += square * deviation
                noise += square * float(stop - start)
            sign = np.float32(-1.0) if top < 0 else np.float32(1.0)
            for u in range(units):
                s[u] *= sign
            d, dmin = fit_affine(
                units, s, z, n, a, b, hi, min_hi, sc, mn,
                cand_d, cand_e, num, den, spread, target, kept_d, kept_e, try_sc, try_mn,
            )  # fmt: skip
            d_out[row, block] = sign * d
            dmin_out[row, block] = sign * dmin
            for j in range(subs):
                sc_out[row, block * subs + j] = sc[unit[block, j]]
                mn_out[row, block * subs + j] = mn[unit[block, j]]
            for u in range(units):
                # the error again, in float64: what is reported must not carry the search's rounding
                alpha = float(d) * sc[u] - float(s[u])
                gamma = float(dmin) * mn[u] - float(d) * sc[u] * z[u]
                error += alpha * alpha * a[u] - 2.0 * alpha * gamma * b[u] + gamma * gamma * n[u]
    sums[0] += error
    sums[1] += signal
    sums[2] += noise / 12.0


@kernel
def _carry_plain(codes, scales, zeros, group, with_min, d_out, dmin_out, sums):
    """d (and m) of every block of 32 of some rows; sums as in `_carry_scaled`."""
    for row in range(codes.shape[0]):
        for block in range(d_out.shape[1]):
            g = group[block]
            s = scales[row, g]
            z = float(zeros[row, g])
            d = round_half(s)
            d_out[row, block] = d
            total, squares = _sums(codes, row, 32 * block, 32 * block + 32)
            alpha = float(d) - float(s)
            spread = squares - 2.0 * z * total + z * z * 32
            gamma = 0.0
            if with_min:
                m = round_half(np.float32(-float(s) * z))
                dmin_out[row, block] = m
                gamma = -float(m) - float(d) * z
                if abs(gamma) < _FLOAT32_STEP * abs(m):
                    gamma = 0.0  # m is the very offset that z was divided out of
            sums[0] += alpha * alpha * spread - 2.0 * alpha * gamma * (total - 32 * z) + gamma * gamma * 32
            sums[1] += float(s) * float(s) * spread
            sums[2] += float(s) * float(s) * 32 / 12.0


@kernel
def _shift_codes(codes, zeros, group, sub, zero, levels, out):
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
def _add_shift_error(codes, scales, zeros, group, sub, sc, d, sums):
    """What rounding the zero points of a type without a min adds: to sums[0], in place.

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


@kernel
def _reround_q8_0(codes, scales, zeros, group, out, d_out, sums):
    """The blocks whose q - z leaves -128..127: d = the largest / 127 and codes rounded anew; returns how many."""
    changed = 0
    for row in range(codes.shape[0]):
        for block in range(group.shape[0]):
            z = zeros[row, group[block]]
            whole = np.int32(np.rint(z))
            low = np.int32(0)
            high = np.int32(0)
            for k in range(32 * block, 32 * block + 32):
                p = np.int32(np.int32(codes[row, k]) - whole)
                low = min(low, p)
                high = max(high, p)
            if low >= -128 and high <= 127:
                continue
            changed += 1
            s = scales[row, group[block]]
            d = round_half(s * np.float32(max(high, -low)) / np.float32(127.0))
            alpha = float(d_out[row, block]) - float(s)
            gamma = float(d_out[row, block]) * (float(whole) - float(z))
            d_out[row, block] = d
            for k in range(32 * block, 32 * block + 32):
                w = np.float32(codes[row, k]) - z
                code = (
                    min(max(np.rint(s * w / d), np.float32(-128.0)), np.float32(127.0)) if d != 0 else np.float32(0.0)
                )
                out[row, k] = np.uint8(np.int32(code) + 128)
                miss = float(d) * code - float(s) * w
                old = alpha * w - gamma
                sums[0] += miss * miss - old * old
    return changed


def sub_block_groups(t: GroupedTensor, sub: int) -> np.ndarray | None:
    """int32 [in / sub]: the group of each run of `sub` columns, or None where a run straddles groups."""
    columns = t.shape[1]
    if columns % sub:
        return None
    runs = t.groups().reshape(-1, sub)
    return np.ascontiguousarray(runs[:, 0]) if (runs == runs[:, :1]).all() else None


def why_not(t: GroupedTensor, block: BlockType) -> str | None:
    """Why `block` cannot carry the codes of `t`, as far as shapes tell; None where nothing speaks against it."""
    columns = t.shape[1]
    if columns % block.size:
        return f"rows of {columns} are not a multiple of {block.name}'s {block.size}"
    if sub_block_groups(t, block.sub) is None:
        if not t.sequential:
            return "act-order groups are scattered over the columns"
        return f"groups of {t.group_size} do not hold whole sub-blocks of {block.sub}"
    if block.zero == 0 and 2**t.bits > block.levels:
        return f"{t.bits}-bit codes do not fit in {block.name}'s 0..{block.levels - 1}"
    if block.zero:
        low, high = float(np.rint(t.zeros.min())), float(np.rint(t.zeros.max()))
        if max(-low, high) > _MAX_SHIFT:
            return f"zero points of {low:g} to {high:g} cannot be shifted into {block.name}'s codes"
        if block.name != "Q8_0" and (high - low > block.levels or 2**t.bits > block.levels):
            return f"{t.bits}-bit codes less their zero points do not fit in {block.name}'s {block.levels} codes"
    return None


def fractional(zeros: np.ndarray) -> bool:
    """Whether a zero point is no integer."""
    return not np.array_equal(zeros, np.rint(zeros))


def _one_power_of_two(zeros: np.ndarray, block: BlockType) -> bool:
    """Whether mn = sc and dmin = d * z hold all zero points exactly: a z that no half is rounded by."""
    z = float(zeros.flat[0])
    return block.scale_hi <= block.min_hi and z in (0, 1, 2, 4, 8, 16, 32, 64, 128) and bool((zeros == z).all())


def as_stored(t: GroupedTensor, block: BlockType) -> GroupedTensor:
    """The tensor whose codes, or codes less zero points, are those in the blocks: `t`, mirrored where it must be."""
    return t.mirrored() if _mixes_signs(t, block) else t


def _mixes_signs(t: GroupedTensor, block: BlockType) -> bool:
    """Whether scales of both signs meet in a superblock of an affine K-quant."""
    if not (block.is_k and block.has_min) or not (t.scales < 0).any() or why_not(t, block):
        return False
    negative = (t.scales < 0)[:, sub_block_groups(t, block.sub)].reshape(-1, block.subs)
    return bool((negative != negative[:, :1]).any())


def carry(t: GroupedTensor, block: BlockType, rows: slice = slice(None)) -> Mapped:
    """Put the codes of `t` (or of some of its rows) into blocks of a type.

    Raises CannotCarryError where the type cannot hold them.
    """
    reason = why_not(t, block)
    if reason:
        raise CannotCarryError(f"{t.name}: {reason}")
    group = sub_block_groups(t, block.sub)
    mirror = _mixes_signs(t, block)
    # contiguous, so that kernels are compiled for one layout only
    codes, scales, zeros = (np.ascontiguousarray(x[rows]) for x in (t.codes, t.scales, t.zeros))
    out, columns = codes.shape
    n = columns // block.size
    data = np.empty((out, row_bytes(block, columns)), np.uint8)
    sums = np.zeros(3)
    lost = 0
    step = max(1, _CHUNK_WEIGHTS // columns)
    shifted = np.empty((min(step, out), columns), np.uint8) if block.zero else codes
    sc = np.zeros((min(step, out), n * block.subs), np.int8)
    mn = np.zeros((min(step, out), n * block.subs), np.uint8)
    d = np.zeros((min(step, out), n), np.float32)
    dmin = np.zeros((min(step, out), n), np.float32)
    pack = packer(block.name)
    keeps_zeros = not block.has_min or (_one_power_of_two(t.zeros, block) and not mirror)
    fit = _carry_scaled if keeps_zeros else _carry_affine
    for start in range(0, out, step):
        stop = min(start + step, out)
        m = stop - start
        part = (codes[start:stop], scales[start:stop], zeros[start:stop], group)
        if mirror:  # here, where the rows stay in cache
            turned = replace(t, codes=part[0], scales=part[1], zeros=part[2]).mirrored()
            part = (turned.codes, turned.scales, turned.zeros, group)
        if block.is_k:
            limits = (block.scale_lo, block.scale_hi, block.min_hi)
            fit(*part, block.sub, block.subs, *limits, sc[:m], mn[:m], d[:m], dmin[:m], sums)
        else:
            _carry_plain(*part, block.has_min, d[:m], dmin[:m], sums)
        if block.zero and fractional(zeros[start:stop]):
            _add_shift_error(*part, block.sub, sc[:m] if block.is_k else sc[:m, :0], d[:m], sums)
        q = part[0]
        if block.zero and not (zeros[start:stop] == block.zero).all():
            q = shifted[:m]
            bad = _shift_codes(part[0], part[2], group, block.sub, block.zero, block.levels, q)
            if bad and block.name == "Q8_0":
                lost += 32 * _reround_q8_0(*part, q, d[:m], sums)
            elif bad:
                raise CannotCarryError(
                    f"{t.name}: codes less their zero points do not fit in {block.name}'s {block.levels} codes"
                )
        pack(q, sc[:m], mn[:m], d[:m], dmin[:m], data[start:stop])
    fidelity = Fidelity(out * columns, max(float(sums[0]), 0.0), float(sums[1]), float(sums[2]), out * columns - lost)
    return Mapped(block, data, fidelity)
