"""What a layer of a GGUF becomes in a checkpoint's format, and its codes: the same in the format's groups, or others.

    plan = plan_layer(source, FORMATS["mlx"])     None: it stays in floats
    layer = LayerCodes(source, FORMATS["mlx"], plan)
    for rows in layer.runs():
        tensor = layer.codes(rows, arrays)
        error, signal = layer.squared_errors(tensor, rows)

Bits and groups are those of the blocks if the format holds them (`codes_of_blocks`), else of rounding to nearest. All
rows are looked at, of blocks that are packed as they are at their scales alone: the plan is final.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bridge.blocks.read import READ
from bridge.checkpoint.files.dtypes import not_finite
from bridge.checkpoint.formats.fp4 import GROUPS
from bridge.checkpoint.formats.written import Groups, WrittenFormat
from bridge.checkpoint.grouped import GroupedTensor, PackedTensor
from bridge.checkpoint.write.block_words import TILE, TYPES_IN_WORDS, ReusedArrays
from bridge.conversion.checkpoints import codes_of_blocks
from bridge.conversion.checkpoints.codes_of_blocks import codes_of, own_noise, packed_of, regrouped
from bridge.conversion.gguf_input.gguf_source import SourceTensor
from bridge.encode.limits import REQUANTIZED_LIMIT
from bridge.encode.rounding.round_groups import round_to_groups
from bridge.runtime.cpu.engines.dequantize import UNQUANTIZED

EXACT, ALL_CODES, ROUNDED, CALIBRATED, AS_FLOATS = "exact", "all codes", "rounded", "calibrated", "floats"
_AT_ONCE = 1 << 20  # values of a layer that are rounded or compared
_SIZE = 32  # of groups that are rounded
Rows = tuple[slice, ...]  # a run of a layer's rows, or one of each part that a word has codes of
# what is written at once: bytes of words, which stay in a core's cache unless rows are their columns; codes of a byte
_WORDS_AT_ONCE, _TRANSPOSED_AT_ONCE, _CODES_AT_ONCE = 1 << 20, 32 << 20, 4 << 20


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
        codes_of_blocks.has_nan_scale(type, source.raw(rows, ordered=False)) for rows in runs(source.matrix_shape)
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
        plain &= codes_of_blocks.is_plain(type, raw)
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


@dataclass(frozen=True)
class LayerCodes:
    """A layer of a GGUF as a format has it."""

    source: SourceTensor
    written: WrittenFormat
    plan: LayerPlan

    def runs(self) -> Iterator[Rows]:
        """The rows that are packed at once, one run after another."""
        bits, at_once = self.plan.groups.bits, _CODES_AT_ONCE * (4 if self.written.transposed else 1)
        if self.plan.packed:
            at_once = (_TRANSPOSED_AT_ONCE if self.written.transposed else _WORDS_AT_ONCE) * 8 // bits
        (out, columns), lanes = self.source.matrix_shape, self.written.lanes(bits)
        if out % lanes:
            return iter([(slice(0, out),)])
        height = out // lanes
        firsts = runs((height, columns), at_once // lanes)
        return (tuple(slice(i * height + run.start, i * height + run.stop) for i in range(lanes)) for run in firsts)

    def codes(self, rows: Rows, arrays: ReusedArrays) -> GroupedTensor | PackedTensor:
        """Some rows, as they were planned."""
        name, type = self.source.part.module, self.source.stored.type
        if self.plan.packed:
            (run,), columns = rows, self.source.matrix_shape[1]
            blocks, shape = (self.source.raw(piece) for piece in self._pieces(run)), (run.stop - run.start, columns)
            return packed_of(name, type, blocks, shape, self.source.scale, self.written.transposed, arrays)
        parts = [part for run in rows for part in self._codes_of_run(run)]
        if len(parts) == 1:
            return parts[0]
        codes, scales, zeros = map(np.concatenate, zip(*((p.codes, p.scales, p.zeros) for p in parts), strict=True))
        return replace(parts[0], codes=codes, scales=scales, zeros=zeros)

    def _codes_of_run(self, run: slice) -> Iterator[GroupedTensor]:
        """The codes of a run of rows, in one piece or several."""
        groups = self.plan.groups
        if self.plan.how == ROUNDED:
            for piece in self._pieces(run):
                weights = self.source.floats(piece)
                yield self._in_groups(rounded(self.source.part.module, weights, groups.bits, self.written))
            return
        coded = codes_in_groups(self.source, self.source.raw(run), self.written, (groups.bits,), self.plan.offsets)
        assert coded is not None  # `plan_layer` looked through all rows
        yield self._in_groups(coded)

    def _in_groups(self, tensor: GroupedTensor) -> GroupedTensor:
        """The tensor in the planned groups: some rows may be more alike than all of a layer are."""
        size = self.plan.groups.group_size
        size = size if size > 0 else tensor.shape[1]
        result = tensor if tensor.group_size == size else regrouped(tensor, (size,))
        assert result is not None
        return result

    def squared_errors(self, tensor: GroupedTensor | PackedTensor, rows: Rows) -> tuple[float, float]:
        """The squared error of rows as the format has them, and their squared weights; 0 where they are the blocks'."""
        error, signal, row = 0.0, 0.0, 0
        moved = self.plan.how in (ROUNDED, CALIBRATED) or self._changes_scales()
        if isinstance(tensor, GroupedTensor) and moved:
            for piece in (piece for run in rows for piece in self._pieces(run)):
                weights = self.source.floats(piece)
                values = self._values(tensor, slice(row, row := row + len(weights)))
                error += float(np.square(values - weights, dtype=np.float64).sum())
                signal += float(np.square(weights, dtype=np.float64).sum())
        return error, signal

    def _changes_scales(self) -> bool:
        """Whether the format may round the scales or offsets of a type whose codes it holds."""
        block = READ[self.source.stored.type]
        return block.is_k or bool(block.scales) or (block.has_min and self.written.zeros != "products")

    def _values(self, tensor: GroupedTensor, rows: slice) -> np.ndarray:
        """float32 of some rows as the checkpoint has them."""
        if not self.written.any_zeros:
            return tensor.dequantize(rows)
        size, codes = tensor.group_size, tensor.codes[rows]
        scales = np.repeat(tensor.scales[rows].astype(np.float32), size, 1)
        if self.written.zeros == "products":
            return codes * scales + np.repeat(tensor.half_products()[rows].astype(np.float32), size, 1)
        return (codes - np.repeat(tensor.zeros[rows].astype(np.float16).astype(np.float32), size, 1)) * scales

    def _pieces(self, rows: slice) -> Iterator[slice]:
        """Some rows in runs of which floats take little memory."""
        return runs((rows.stop - rows.start, self.source.matrix_shape[1]), start=rows.start)
