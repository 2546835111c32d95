"""Carrying a checkpoint's integer codes onto GGUF blocks: only scales and zero points are re-encoded.

Four families (see `bridge.blocks.base`):

    affine   codes as they are; d, sc, dmin, mn are fitted           Q2_K, Q4_K, Q5_K
    scaled   codes shifted by zero - z; d, sc are fitted             Q3_K, Q6_K
    plain    codes shifted by zero - z, d = s                        Q2_0, Q4_0, Q5_0, Q8_0; ternary codes: TQ1_0, TQ2_0
             codes as they are, d = s, m = -s * z                    Q4_1, Q5_1
    floats   4-bit floats and their scales as they are               MXFP4, NVFP4

If codes are shifted, fractional zero points are rounded, and the cost is counted. The affine types' scale codes have no
sign, but d has one: groups whose scale has the other sign are mirrored (q -> 2^bits - 1 - q), which changes no weight.
The fit tries both signs of d and takes the closer one.

A type can carry a tensor if its sub-blocks do not straddle groups, its codes are wide enough and the shifted codes fit.
Q8_0 also accepts tensors of which some blocks do not fit (8-bit asymmetric): there the few codes beyond its range are
clipped, or all are requantized to 127 steps, whichever is closer; codes that are not kept are counted.
"""

import operator
from dataclasses import astuple, dataclass, replace
from typing import Self

import numpy as np

from bridge.blocks import ROUNDED, BlockType
from bridge.blocks.integers.q2_0 import Q2_0
from bridge.checkpoint.formats.fp4 import Fp4Tensor
from bridge.checkpoint.grouped import CodedTensor, GroupedTensor
from bridge.encode.block_bytes import packer, row_bytes
from bridge.encode.carrying import carry_kernels
from bridge.encode.rounding.round_plain import plain_quantizer
from bridge.errors import BridgeError

_CHUNK_WEIGHTS = 1 << 20  # rows are taken in chunks that stay in cache
_MAX_SHIFT = 1 << 15  # of codes by zero points


class CannotCarryError(BridgeError):
    """The type cannot hold the tensor's codes; `reason` says why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Fidelity:
    """How far the weights w' of a GGUF tensor are from the checkpoint's dequantized weights w.

    weights  number of weights
    error    sum of (w' - w)^2
    signal   sum of w^2
    noise    sum of s^2 / 12, s the scale: the expected cost of the checkpoint's own rounding; 0 for floats
    kept     number of weights whose integer code is the checkpoint's
    """

    weights: int
    error: float  # sum (w' - w)^2
    signal: float  # sum w^2, w the checkpoint's dequantized weights
    noise: float  # sum s^2 / 12: what the checkpoint's own rounding is expected to cost
    kept: int  # weights whose integer code is the checkpoint's

    @property
    def nmse(self) -> float:
        """error / signal: the normalized mean squared error."""
        return self.error / self.signal if self.signal else float(self.error > 0)

    @property
    def share(self) -> float:
        """error / noise: the added error as a share of the checkpoint's own rounding error."""
        return self.error / self.noise if self.noise else (float("inf") if self.error else 0.0)

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Mapped:
    """A tensor as GGUF blocks: `data` uint8 [out, row bytes]; `reason`: why codes were lost, if some were."""

    block: BlockType
    data: np.ndarray
    fidelity: Fidelity
    reason: str = ""


def sub_block_groups(t: CodedTensor, sub: int) -> np.ndarray | None:
    """int32 [in / sub]: the group of each run of `sub` columns, or None where a run straddles groups."""
    columns = t.shape[1]
    if columns % sub:
        return None
    if t.sequential:
        straddle = t.group_size % sub and t.group_size < columns
        return None if straddle else np.arange(0, columns, sub, dtype=np.int32) // np.int32(t.group_size)
    runs = t.groups().reshape(-1, sub)
    return np.ascontiguousarray(runs[:, 0]) if (runs == runs[:, :1]).all() else None


def obstacle(t: CodedTensor, block: BlockType) -> str | None:
    """Why `block` cannot carry the codes of `t`, judged by shapes; None if they show no reason."""
    if t.obstacle:
        return t.obstacle
    columns = t.shape[1]
    if columns % block.size:
        return f"rows of {columns} are not a multiple of {block.name}'s {block.size}"
    if sub_block_groups(t, block.sub) is None:
        if not t.sequential:
            return "act-order groups are scattered over the columns"
        return f"groups of {t.group_size} do not hold whole sub-blocks of {block.sub}"
    if isinstance(t, Fp4Tensor):
        return None if t.kind == block.name else f"{t.kind}'s 4-bit floats are not {block.name}'s"
    if not isinstance(t, GroupedTensor) or block.scales:
        return f"integer codes are not {block.name}'s floats"
    if block.name in ROUNDED and (block.values or not t.ternary):
        return f"integer codes are not {block.name}'s values"
    if block.zero == 0 and t.levels > block.levels:
        return f"{t.bits}-bit codes do not fit in {block.name}'s 0..{block.levels - 1}"
    if block.zero:
        low, high = float(np.rint(t.zeros.min())), float(np.rint(t.zeros.max()))
        if max(-low, high) > _MAX_SHIFT:
            return f"zero points of {low:g} to {high:g} cannot be shifted into {block.name}'s codes"
        if not block.clips and (high - low > block.levels or t.levels > block.levels):
            return f"{t.bits}-bit codes less their zero points do not fit in {block.name}'s {block.levels} codes"
    return None


def fractional(zeros: np.ndarray) -> bool:
    """Whether any zero point is not an integer."""
    return not np.array_equal(zeros, np.rint(zeros))


def _one_power_of_two(zeros: np.ndarray, block: BlockType) -> bool:
    """Whether mn = sc and dmin = d * z hold all zero points exactly: one z, whose product with a half is a half."""
    z = float(zeros.flat[0])
    return block.scale_hi <= block.min_hi and z in (0, 1, 2, 4, 8, 16, 32, 64, 128) and bool((zeros == z).all())


def mirrored_to_fit(t: GroupedTensor, block: BlockType) -> GroupedTensor:
    """The tensor with codes mirrored if the block needs that: Q2_0 holds -1 to 2, symmetric 2 bits are -2 to 1.

    Mirrored codes (q -> 3 - q, with -s) are the same weights.
    """
    if block is not Q2_0 or t.bits != 2 or t.zeros.min(initial=3) < 1.5:
        return t
    return replace(t, codes=3 - t.codes, scales=-t.scales, zeros=3 - t.zeros)


def stored_codes(t: CodedTensor, block: BlockType, raw: np.ndarray, rows: slice = slice(None)) -> np.ndarray:
    """int16 [rows, in]: the codes of some rows of `t` as blocks uint8 [rows, row bytes] would hold them.

    That is, mirrored if d's sign says so, or less their zero points.
    """
    if not isinstance(t, GroupedTensor):
        return t.codes[rows].astype(np.int16)
    t = mirrored_to_fit(t, block)
    codes = t.codes[rows].astype(np.int16)
    if block.zero:
        return codes + block.zero - np.rint(t.zeros[rows]).astype(np.int16)[:, t.groups()]
    group = sub_block_groups(t, block.sub)
    if block.is_k and group is not None:
        signs = raw.reshape(len(raw), -1, block.nbytes)[:, :, block.d_at + 1] >> 7
        mirrored = (t.scales[rows] < 0)[:, group] != np.repeat(signs == 1, block.subs, axis=1)
        codes ^= np.repeat(np.where(mirrored, np.int16(2**t.bits - 1), np.int16(0)), block.sub, axis=1)
    return codes


def _mixes_signs(t: GroupedTensor, block: BlockType) -> bool:
    """Whether a superblock of an affine K-quant would have scales of both signs."""
    if not (block.is_k and block.has_min) or not (t.scales < 0).any() or obstacle(t, block):
        return False
    negative = (t.scales < 0)[:, sub_block_groups(t, block.sub)].reshape(-1, block.subs)
    return bool((negative != negative[:, :1]).any())


def carry(t: CodedTensor, block: BlockType, rows: slice = slice(None)) -> Mapped:
    """Put the codes of `t` (or of some of its rows) into blocks of a type.

    Raises CannotCarryError where the type cannot hold them.
    """
    reason = obstacle(t, block)
    if reason:
        raise CannotCarryError(t.name, reason)
    if not isinstance(t, GroupedTensor):
        assert isinstance(t, Fp4Tensor)
        return _carry_floats(t, block, rows)
    t = mirrored_to_fit(t, block)
    group = sub_block_groups(t, block.sub)
    assert group is not None
    # contiguous, so that kernels are compiled for one layout only
    codes, scales, zeros = (np.ascontiguousarray(x[rows]) for x in (t.codes, t.scales, t.zeros))
    out, columns = codes.shape
    n = columns // block.size
    data = np.empty((out, row_bytes(block, columns)), np.uint8)
    sums = np.zeros(3)
    lost = 0
    step = max(1, _CHUNK_WEIGHTS // columns)
    keeps_zeros = not block.has_min or (_one_power_of_two(t.zeros, block) and not _mixes_signs(t, block))
    fits_mins = block.is_k and not keeps_zeros
    units = carry_kernels.Units.of(group, block.sub, block.subs)
    stored = np.empty((min(step, out), columns), np.uint8) if block.zero else codes
    sc = np.zeros((min(step, out), n * block.subs), np.int8)
    mn = np.zeros((min(step, out), n * block.subs), np.uint8)
    d = np.zeros((min(step, out), n), np.float32)
    dmin = np.zeros((min(step, out), n), np.float32)
    pack = packer(block.name)
    for start in range(0, out, step):
        stop = min(start + step, out)
        m = stop - start
        part = (codes[start:stop], scales[start:stop], zeros[start:stop])
        fields = (sc[:m], mn[:m], d[:m], dmin[:m])
        q = part[0]
        if fits_mins:
            q = carry_kernels.carry_affine(*part, units, 2**t.bits - 1, block, *fields, sums)
        elif block.is_k:
            carry_kernels.carry_scaled(*part, units, block, *fields, sums)
        else:
            carry_kernels.carry_plain(*part, units, block, d[:m], dmin[:m], sums)
        if block.zero and fractional(zeros[start:stop]):
            carry_kernels.add_shift_error(*part, group, block, sc[:m], d[:m], sums)
        if block.zero and not (zeros[start:stop] == block.zero).all():
            q = stored[:m]
            bad = carry_kernels.shift_codes(part[0], part[2], group, block.sub, block.zero, block.levels, q)
            if bad and block.clips:
                lost += _requantize_q8_0((*part, group), q, d[:m], sums)
            elif bad:
                reason = f"codes less their zero points do not fit in {block.name}'s {block.levels} codes"
                raise CannotCarryError(t.name, reason)
        pack(q, *fields, data[start:stop])
    fidelity = Fidelity(out * columns, max(float(sums[0]), 0.0), float(sums[1]), float(sums[2]), out * columns - lost)
    return Mapped(block, data, fidelity, "some codes less their zero points leave Q8_0's -128..127" if lost else "")


def _carry_floats(t: Fp4Tensor, block: BlockType, rows: slice) -> Mapped:
    """4-bit floats and their scales, bit for bit; the scale of the whole tensor is a tensor of its own."""
    codes, scales = (np.ascontiguousarray(x[rows]) for x in (t.codes, t.scales))
    out, columns = codes.shape
    data = np.empty((out, row_bytes(block, columns)), np.uint8)
    none = np.zeros((out, columns // block.size), np.float32)
    packer(block.name)(codes, scales.view(np.int8), scales, none, none, data)
    part = replace(t, codes=codes, scales=scales)
    signal, step = 0.0, max(1, _CHUNK_WEIGHTS // columns)
    for start in range(0, out, step):
        signal += float(np.square(part.dequantize(slice(start, start + step)), dtype=np.float64).sum())
    return Mapped(block, data, Fidelity(out * columns, 0.0, signal, part.noise(), out * columns))


def _requantize_q8_0(part: tuple[np.ndarray, ...], q: np.ndarray, d: np.ndarray, sums: np.ndarray) -> int:
    """Correct the blocks whose codes less their zero points leave -128..127, as the module's head says.

    part  codes, scales, zeros and group of some rows

    q uint8 [rows, in], d float32 [rows, blocks] and sums [3] are changed in place. Returns how many codes are not kept.
    """
    codes, scales, zeros, group = part
    runs = codes.reshape(*d.shape, 32)
    whole_zeros = np.rint(zeros)[:, group]
    beyond = np.nonzero((runs.min(-1) - whole_zeros < -128) | (runs.max(-1) - whole_zeros > 127))
    p = runs[beyond] - whole_zeros[beyond][:, None].astype(np.float64)
    x = scales[:, group][beyond][:, None].astype(np.float64) * (
        runs[beyond] - zeros[:, group][beyond][:, None].astype(np.float64)
    )
    n = len(x)
    new, new_d = np.empty((1, n, 32), np.uint8), np.empty((1, n), np.float32)
    fields = new, np.empty((1, n), np.int8), np.empty((1, n), np.uint8), new_d, new_d.copy(), np.zeros((1, 3))
    plain_quantizer("Q8_0")(x.astype(np.float32)[None], np.ones((n, 32), np.float32), *fields)

    def errors(d: np.ndarray, p: np.ndarray) -> np.ndarray:
        return np.square(d[:, None].astype(np.float64) * p - x).sum(-1)

    clipped = np.clip(p, -128, 127)
    clip_error, new_error = errors(d[beyond], clipped), errors(new_d[0], new[0] - 128.0)
    clip = clip_error <= new_error
    sums[0] += (np.minimum(clip_error, new_error) - errors(d[beyond], p)).sum()
    q.reshape(runs.shape)[beyond] = np.where(clip[:, None], clipped + 128, new[0]).astype(np.uint8)
    d[beyond] = np.where(clip, d[beyond], new_d[0])
    return int(32 * (~clip).sum() + (clipped != p)[clip].sum())
