"""Codes of one checkpoint format in another: the same differences of code and zero point, where the format holds them.

bits         as few of the format's as hold the codes around a zero point that it has
zero points  whole ones move with their group's codes, into the format's range, or to the middle where all can be
             there: a format then needs none, and some programs read no others. Formats with any zero points hold
             fractions; others have the nearest
             whole number, if that adds little to the checkpoint's own noise
scales       halves
groups       the largest of the format's sizes that divides the checkpoint's; of any columns where the format has
             act-order
4-bit floats whose kind the format lacks are twice their value, a whole number of 5 bits. 8-bit floats stay, byte for
byte, with scales that are repeated for smaller blocks where the format has no others.
"""

import math
from dataclasses import replace

import numpy as np

from bridge.checkpoint.formats.fp4 import E2M1, Fp4Tensor
from bridge.checkpoint.formats.fp8 import BLOCK
from bridge.checkpoint.formats.written import WrittenFormat, in_dtype
from bridge.checkpoint.grouped import GroupedTensor, PackedTensor
from bridge.encode.limits import REQUANTIZED_LIMIT

_DOUBLED = (16 + 2 * E2M1).astype(np.uint8)  # codes of 5 bits around 16
_DOUBLED_BITS = 5
_MX_GROUP = 32
# what may have a scale of 8-bit floats -> the rows and columns that share it, -1: all
_SHARED = {"tensor": (-1, -1), "channel": (1, -1), "block": BLOCK, "group": (1, _MX_GROUP)}


def in_format(tensor: GroupedTensor, written: WrittenFormat, bits: tuple[int, ...]) -> GroupedTensor | None:
    """The tensor as the format holds it, in the first of these bits, ascending, that do; None where none does."""
    grouped = _in_groups(tensor, written)
    if grouped is None:
        return None
    scales = in_dtype(grouped.scales, written.scale_dtype(grouped.scales))
    if not np.isfinite(scales).all():
        return None
    grouped = replace(grouped, scales=scales)
    if written.any_zeros:
        width = next((n for n in bits if n >= grouped.bits), None)
        if width is None or not np.isfinite(grouped.half_products()).all():
            return None
        return replace(grouped, bits=width, ternary=False)
    zeros = np.rint(grouped.zeros)
    if _added_by(grouped, zeros) > REQUANTIZED_LIMIT:
        return None
    return _in_bits(replace(grouped, zeros=zeros), int(not written.holds_zero), bits, written.zeros == "middle")


def _in_groups(tensor: GroupedTensor, written: WrittenFormat) -> GroupedTensor | None:
    """The tensor in groups that the format has; None where it has none of which these are made."""
    columns = tensor.shape[1]
    if not tensor.sequential:
        return tensor if written.act_order and tensor.scales.shape[1] == -(-columns // tensor.group_size) else None
    size = math.gcd(min(tensor.group_size, columns), columns)
    if written.group_sizes:
        size = next((n for n in sorted(written.group_sizes, reverse=True) if size % n == 0), 0)
    return in_groups_of(tensor, size) if size else None


def in_groups_of(tensor: GroupedTensor, size: int) -> GroupedTensor:
    """The tensor in groups of a size that divides its groups and its columns: scales and zero points are repeated."""
    group_size, columns = min(tensor.group_size, tensor.shape[1]), tensor.shape[1]
    if not tensor.sequential or group_size == size:
        return replace(tensor, group_size=group_size) if tensor.sequential else tensor
    scales, zeros = (np.repeat(x, group_size // size, 1)[:, : columns // size] for x in (tensor.scales, tensor.zeros))
    return replace(tensor, scales=scales, zeros=zeros, group_size=size)


def _added_by(tensor: GroupedTensor, zeros: np.ndarray) -> float:
    """The squared error of other zero points, as a share of the checkpoint's own noise."""
    squares = np.square(tensor.scales * (zeros - tensor.zeros), dtype=np.float64)
    if not squares.any():
        return 0.0
    columns = np.bincount(tensor.groups(), minlength=tensor.scales.shape[1])
    return float((squares @ columns).sum()) / max(tensor.noise(), np.finfo(np.float64).tiny)


def _in_bits(tensor: GroupedTensor, least: int, bits: tuple[int, ...], middle: bool) -> GroupedTensor | None:
    """Codes and whole zero points from `least` on in the first of these bits that hold them.

    Each group moves by itself: to the middle if all groups can be there, which `middle` requires, else as little as
    it can.
    """
    low, high = (codes.astype(np.float32) for codes in tensor.code_ranges())
    low = np.minimum(low, high)  # of a group without columns, where it does not matter
    for width in bits:
        top = (1 << width) - 1
        down = np.maximum(-low, least - tensor.zeros)
        up = np.minimum(top - high, top - tensor.zeros)
        if (down > up).any():
            continue
        to_middle = (1 << (width - 1)) - tensor.zeros
        in_middle = bool(((down <= to_middle) & (to_middle <= up)).all())
        if middle and not in_middle:
            continue
        shifts = to_middle if in_middle else np.clip(0, down, up)
        codes = tensor.codes
        if shifts.any():
            codes = (codes + shifts.astype(np.int16)[:, tensor.groups()]).astype(np.uint8)
        return replace(tensor, bits=width, codes=codes, zeros=tensor.zeros + shifts, ternary=False)
    return None


def as_integers(tensor: Fp4Tensor) -> GroupedTensor:
    """4-bit floats as whole numbers: twice their value, times half their scale."""
    scales = tensor.scale_values() * np.float32(tensor.tensor_scale) * np.float32(0.5)
    return GroupedTensor(
        tensor.name, _DOUBLED_BITS, _DOUBLED[tensor.codes], scales, np.full_like(scales, 16), tensor.group_size,
        tensor.group_of_column, tensor.bias, tensor.notes,
    )  # fmt: skip


def packed_fp4(tensor: Fp4Tensor) -> PackedTensor:
    """4-bit floats as they are stored, in groups of consecutive columns."""
    words = (tensor.codes[:, ::2] | tensor.codes[:, 1::2] << 4).view(np.uint32)
    return PackedTensor(
        tensor.name, 4, words, tensor.scales, tensor.group_size, kind=tensor.kind, tensor_scale=tensor.tensor_scale
    )


def fp8_in_format(tensor: PackedTensor, written: WrittenFormat) -> PackedTensor | None:
    """8-bit floats, whose scales are of any blocks, as the format holds them; None where it does not.

    Its activations' scale is dropped where the format has no place for it.
    """
    for form in written.fp8:
        static = form.startswith("static ")
        if static and tensor.input_scale is None:
            continue
        rows, size = _SHARED[form.removeprefix("static ")]
        scales = _repeated(tensor, rows, size)
        kind = "FP8"
        if scales is not None and size == _MX_GROUP:
            kind, scales = "MXFP8", _exponents(scales)
        if scales is not None:
            input_scale = tensor.input_scale if static else None
            return replace(tensor, kind=kind, scales=scales, rows=rows, group_size=size, input_scale=input_scale)
    return None


def _repeated(tensor: PackedTensor, rows: int, size: int) -> np.ndarray | None:
    """The scales of smaller blocks, each of which lies in one that the tensor has; None where it does not."""
    picked = []
    for side, had, wanted in zip(tensor.shape, (tensor.rows, tensor.group_size), (rows, size), strict=True):
        had, wanted = (side if n < 0 else n for n in (had, wanted))
        if had < side and had % wanted:
            return None
        picked.append(np.arange(0, side, wanted) // had)
    return tensor.scales[np.ix_(*picked)]


def _exponents(scales: np.ndarray) -> np.ndarray | None:
    """Powers of two as F8_E8M0; None for other numbers."""
    mantissas, exponents = np.frexp(scales)
    bits = exponents + 126  # a mantissa is from 0.5 on
    return bits.astype(np.uint8) if ((mantissas == 0.5) & (bits >= 0) & (bits < 255)).all() else None
