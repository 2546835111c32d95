"""A layer of a GGUF: its blocks become codes in groups, see `codes_of_blocks`.

All rows are looked at for a plan, of blocks that are packed as they are at their scales alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from bridge.blocks.read import READ
from bridge.checkpoint.formats.fp4 import GROUPS
from bridge.checkpoint.formats.written import Groups, WrittenFormat
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.write.block_words import TYPES_IN_WORDS, ReusedArrays
from bridge.conversion.checkpoints import codes_of_blocks
from bridge.conversion.checkpoints.codes_of_blocks import codes_of, own_noise, packed_of, regrouped
from bridge.conversion.checkpoints.layer_plan import (
    EXACT,
    ROUNDED,
    Coded,
    Layer,
    LayerPlan,
    Rows,
    groups_of,
    joined,
    runs,
)
from bridge.conversion.gguf_input.gguf_source import SourceTensor
from bridge.runtime.cpu.engines.dequantize import UNQUANTIZED

# what is written at once: bytes of words, which stay in a core's cache unless rows are their columns; codes of a byte
_WORDS_AT_ONCE, _TRANSPOSED_AT_ONCE, _CODES_AT_ONCE = 1 << 20, 32 << 20, 4 << 20


@dataclass(frozen=True)
class BlockLayer(Layer):
    """`source` in a checkpoint's format."""

    source: SourceTensor

    @classmethod
    def of(cls, source: SourceTensor, written: WrittenFormat) -> Self:
        return cls(written, source.part.module, source.stored.type, source.matrix_shape, source.stored.file, source)

    def quantizable(self, bits: int | None) -> bool:
        return self.source.part.change is None and (self.type not in UNQUANTIZED or bits is not None)

    def floats(self, rows: slice) -> np.ndarray:
        return self.source.floats(rows)

    def noise(self) -> float | None:
        noises = [own_noise(self.type, self.source.raw(rows, ordered=False)) for rows in runs(self.shape)]
        return None if noises[0] is None else sum(noise for noise in noises if noise is not None)

    def _coded_plan(self, known: tuple[int, ...], bits: int | None) -> LayerPlan | None:
        if (bits is None or bits >= 4) and self._holds_fp4():
            return LayerPlan(EXACT, Groups(4, GROUPS[self.type], True, self.type), packed=True)
        plans = (self._plan_of_codes(known, offsets) for offsets in self._ways_of_offsets())
        return next((plan for plan in plans if plan is not None), None)

    def _holds_fp4(self) -> bool:
        """Whether it is of 4-bit floats that the format holds."""
        return self.written.holds_fp4(self.type, self.source.scale) and not any(
            codes_of_blocks.has_nan_scale(self.type, self.source.raw(rows, ordered=False)) for rows in runs(self.shape)
        )

    def _ways_of_offsets(self) -> tuple[bool, ...]:
        """`LayerPlan.offsets` in the order in which they are tried."""
        if not self.written.any_zeros:
            return (False,)
        block = READ.get(self.type)
        as_they_are = block is not None and block.has_min and not block.is_k  # halves, as the format has them
        return (True,) if as_they_are else (False, True)

    def _plan_of_codes(self, bits: tuple[int, ...], offsets: bool) -> LayerPlan | None:
        """Of a plain type, some rows tell bits and groups mostly; the others are only looked through for scales that
        do not fit."""
        type, shape, written = self.type, self.shape, self.written
        block, width, size, middle = READ.get(type), 0, shape[1], True
        if block is None:
            return None
        plain = offsets or not block.has_min  # whether offsets are whole is for all rows to tell
        type_groups = (block.levels - 1).bit_length(), block.sub
        most = next((n for n in bits if n >= type_groups[0]), 0)
        for rows in runs(shape, first=16):
            raw = self.source.raw(rows, ordered=False)
            plain &= codes_of_blocks.is_plain(type, raw)
            if width and (width, size) == (most, block.sub) and plain:
                continue
            tensor = self._in_bits(raw, bits, offsets)
            if tensor is None:
                return None
            width, size = max(width, tensor.bits), min(size, tensor.group_size)
            middle &= bool((tensor.zeros == 1 << (tensor.bits - 1)).all())
        packed = plain and type in TYPES_IN_WORDS and written.in_words and (width, size) == type_groups
        return LayerPlan(EXACT, groups_of(width, size, middle, shape, written), offsets, packed)

    def _in_bits(self, raw: np.ndarray, bits: tuple[int, ...], offsets: bool) -> GroupedTensor | None:
        """The codes of blocks in groups that the format has; None where it does not hold them."""
        written = self.written
        tensor = codes_of(self.module, self.type, raw, bits, offsets, self.source.scale)
        if tensor is not None and written.any_zeros:
            tensor = regrouped(tensor, written.group_sizes)
            if tensor is not None and not np.isfinite(tensor.half_products()).all():
                return None
        if tensor is None or not np.isfinite(tensor.scales).all():
            return None
        return tensor if written.holds_zero or tensor.zeros.all() else None

    def runs(self, plan: LayerPlan) -> Iterator[Rows]:
        bits, at_once = plan.groups.bits, _CODES_AT_ONCE * (4 if self.written.transposed else 1)
        if plan.packed:
            at_once = (_TRANSPOSED_AT_ONCE if self.written.transposed else _WORDS_AT_ONCE) * 8 // bits
        (out, columns), lanes = self.shape, self.written.lanes(bits)
        if out % lanes:
            return iter([(slice(0, out),)])
        height = out // lanes
        firsts = runs((height, columns), at_once // lanes)
        return (tuple(slice(i * height + run.start, i * height + run.stop) for i in range(lanes)) for run in firsts)

    def codes(self, plan: LayerPlan, rows: Rows, arrays: ReusedArrays) -> Coded:
        if plan.packed:
            (run,), columns, source = rows, self.shape[1], self.source
            blocks, shape = (source.raw(piece) for piece in self._pieces(run)), (run.stop - run.start, columns)
            return packed_of(self.module, self.type, blocks, shape, source.scale, self.written.transposed, arrays)
        return joined([part for run in rows for part in self._codes_of_run(plan, run)])

    def _codes_of_run(self, plan: LayerPlan, run: slice) -> Iterator[GroupedTensor]:
        """The codes of a run of rows, in one piece or several."""
        if plan.how == ROUNDED:
            yield from (self._in_groups(plan, piece) for piece in self._rounded_pieces(plan, run))
            return
        coded = self._in_bits(self.source.raw(run), (plan.groups.bits,), plan.offsets)
        assert coded is not None  # `plan` looked through all rows
        yield self._in_groups(plan, coded)

    def _in_groups(self, plan: LayerPlan, tensor: GroupedTensor) -> GroupedTensor:
        """The tensor in the planned groups: some rows may be more alike than all of a layer are."""
        size = plan.groups.width(tensor.shape[1])
        result = tensor if tensor.group_size == size else regrouped(tensor, (size,))
        assert result is not None
        return result

    def _changes_scales(self) -> bool:
        block = READ[self.type]
        return block.is_k or bool(block.scales) or (block.has_min and self.written.zeros != "products")
