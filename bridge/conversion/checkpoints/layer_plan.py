"""What a layer of a GGUF becomes in a checkpoint's format: the same codes in the format's groups, or others.

    plan = plan_layer(source, FORMATS["mlx"])     None: it stays in floats

Bits and groups are those of the blocks if the format holds them (`codes_of_blocks`), else of rounding to nearest. All
rows are looked at, of blocks that are packed as they are at their scales alone: the plan is final.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bridge.blocks.read import READ
from bridge.checkpoint.files.dtypes import not_finite
from bridge.checkpoint.formats.fp4 import GROUPS
from bridge.checkpoint.formats.written import Groups, WrittenFormat
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.write.block_words import TILE, TYPES_IN_WORDS
from bridge.conversion.checkpoints.codes_of_blocks import codes_of, has_nan_scale, is_plain, own_noise, regrouped
from bridge.conversion.gguf_input.gguf_source import SourceTensor
from bridge.encode.limits import REQUANTIZED_LIMIT
from bridge.encode.rounding.round_groups import round_to_groups
from bridge.runtime.cpu.engines.dequantize import UNQUANTIZED

EXACT, ALL_CODES, ROUNDED, CALIBRATED, AS_FLOATS = "exact", "all codes", "rounded", "calibrated", "floats"
_AT_ONCE = 1 << 20  # values of a layer that are rounded or compared
_SIZE = 32  # of groups that are rounded


@dataclass(frozen=True)
class LayerPlan:
    """How a layer is written.

    how      EXACT, CALIBRATED, ROUNDED, or ALL_CODES, which only its error tells from EXACT
    groups   how the format describes it
    offsets  zero points are not whole numbers
    packed   codes and scales of the blocks are the format's, see `packed_of`
    """

    how: str
    groups: Groups
    offsets: bool = False
    packed: bool = False


def plan_layer(source: SourceTensor, written: WrittenFormat, bits: int | None = None) -> LayerPlan | None:
    """What a layer becomes in a format; None if it stays in floats.

    bits  that it has at most: it is rounded to them if its codes take more, or if it is of floats; None: those that its
          codes take, or that add little noise
    """
    type, shape = source.stored.type, source.matrix_shape
    if source.part.change is not None or (type in UNQUANTIZED and bits is None):
        return None
    if (bits is None or bits >= 4) and _holds_fp4(source, written):
        return LayerPlan(EXACT, Groups(4, GROUPS[type], True, type), packed=True)
    known = tuple(n for n in written.bits if bits is None or n <= bits)
    for offsets in _ways_of_offsets(type, written):
        plan = _coded_plan(source, written, known, offsets)
        if plan is not None:
            break
    else:
        plan = _rounded_plan(source, written, bits)
    return None if plan is None or written.obstacle(plan.groups, shape) else plan


def _holds_fp4(source: SourceTensor, written: WrittenFormat) -> bool:
    """Whether a layer is of 4-bit floats that a format holds."""
    type = source.stored.type
    return written.holds_fp4(type, source.scale) and not any(
        has_nan_scale(type, source.raw(rows, ordered=False)) for rows in runs(source.matrix_shape)
    )


def _ways_of_offsets(type: str, written: WrittenFormat) -> tuple[bool, ...]:
    """`LayerPlan.offsets` in the order in which they are tried."""
    if not written.any_zeros:
        return (False,)
    block = READ.get(type)
    as_they_are = block is not None and block.has_min and not block.is_k  # halves, as the format has them
    return (True,) if as_they_are else (False, True)


def _coded_plan(source: SourceTensor, written: WrittenFormat, bits: tuple[int, ...], offsets: bool) -> LayerPlan | None:
    """Bits and groups of a layer that keeps its codes; None where the format does not hold them in any of `bits`.

    Of a plain type, some rows tell both mostly; the others are only looked through for scales that do not fit.
    """
    type, shape = source.stored.type, source.matrix_shape
    block, width, size, middle = READ.get(type), 0, shape[1], True
    if block is None:
        return None
    plain = offsets or not block.has_min  # whether offsets are whole is for all rows to tell
    type_groups = (block.levels - 1).bit_length(), block.sub
    most = next((n for n in bits if n >= type_groups[0]), 0)
    for rows in runs(shape, first=16):
        raw = source.raw(rows, ordered=False)
        plain &= is_plain(type, raw)
        if width and (width, size) == (most, block.sub) and plain:
            continue
        tensor = codes_in_groups(source, raw, written, bits, offsets)
        if tensor is None:
            return None
        width, size = max(width, tensor.bits), min(size, tensor.group_size)
        middle &= bool((tensor.zeros == 1 << (tensor.bits - 1)).all())
    packed = plain and type in TYPES_IN_WORDS and written.in_words and (width, size) == type_groups
    return LayerPlan(EXACT, _groups(width, size, middle, shape, written), offsets, packed)


def codes_in_groups(
    source: SourceTensor, raw: np.ndarray, written: WrittenFormat, bits: tuple[int, ...], offsets: bool
) -> GroupedTensor | None:
    """The codes of blocks of a layer in groups that a format has; None where it does not hold them."""
    tensor = codes_of(source.part.module, source.stored.type, raw, bits, offsets, source.scale)
    if tensor is not None and written.any_zeros:
        tensor = regrouped(tensor, written.group_sizes)
        if tensor is not None and not np.isfinite(tensor.half_products()).all():
            return None
    if tensor is None or not np.isfinite(tensor.scales).all():
        return None
    return tensor if written.holds_zero or tensor.zeros.all() else None


def _rounded_plan(source: SourceTensor, written: WrittenFormat, bits: int | None) -> LayerPlan | None:
    """Bits of a layer that is rounded to nearest; None where the format has too few, or groups of 32 do not fit."""
    shape = source.matrix_shape
    if shape[1] % _SIZE:
        return None
    noise = noise_of(source)
    limit = REQUANTIZED_LIMIT * noise if noise is not None and bits is None else np.inf
    for width in written.bits if bits is None else (bits,):
        if bits is None and width < 8 and noise is None:
            continue
        error, finite = 0.0, False
        for rows in runs(shape):
            weights = source.floats(rows)
            if not np.isfinite(weights).all():
                raise not_finite(source.stored.file, source.part.source)
            tensor = rounded(source.part.module, weights, width, written)
            finite = bool(np.isfinite(tensor.scales).all())
            if not finite:
                break
            error += float(np.square(tensor.dequantize() - weights, dtype=np.float64).sum())
            if width < 8 and not error <= limit:
                break
        if finite and (width == 8 or error <= limit):
            return LayerPlan(ROUNDED, _groups(width, _SIZE, is_symmetric(width, written), shape, written))
    return None


def is_symmetric(bits: int, written: WrittenFormat) -> bool:
    """Whether layers are rounded around the middle of the codes: below 8 bits, zero points are worth it."""
    return bits == 8 or written.rounding == "symmetric"


def rounded(name: str, weights: np.ndarray, bits: int, written: WrittenFormat) -> GroupedTensor:
    """Weights rounded to nearest, in groups of 32."""
    return round_to_groups(name, weights, bits, is_symmetric(bits, written), least=not written.holds_zero)


def _groups(bits: int, size: int, middle: bool, shape: tuple[int, int], written: WrittenFormat) -> Groups:
    """How a format describes a layer; `middle`: all zero points are the middle of the codes."""
    by_row = _SIZE < size == shape[1] and not written.any_zeros  # rows of 32 are groups as other layers have
    return Groups(bits, -1 if by_row else size, bool(written.zeros_part) and middle)


def noise_of(source: SourceTensor) -> float | None:
    """The noise of a layer's type by itself, see `own_noise`."""
    noises = [own_noise(source.stored.type, source.raw(rows, ordered=False)) for rows in runs(source.matrix_shape)]
    return None if noises[0] is None else sum(noise for noise in noises if noise is not None)


def runs(shape: tuple[int, int], at_once: int = _AT_ONCE, first: int | None = None, start: int = 0) -> Iterator[slice]:
    """Slices of rows of about `at_once` values that cover a matrix, whole tiles.

    first  rows of the first slice
    start  the number of the matrix's first row
    """
    step, row = max(TILE, at_once // shape[1] // TILE * TILE), 0
    while row < shape[0]:
        stop = min(row + (min(first, step) if first and row == 0 else step), shape[0])
        yield slice(start + row, start + stop)
        row = stop
