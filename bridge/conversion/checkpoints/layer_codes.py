"""The codes of a planned layer of a GGUF, some rows at a time, and what they lose.

layer = LayerCodes(source, FORMATS["mlx"], plan)
for rows in layer.runs():
    tensor = layer.codes(rows, arrays)
    error, signal = layer.squared_errors(tensor, rows)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bridge.blocks.read import READ
from bridge.checkpoint.formats.written import WrittenFormat
from bridge.checkpoint.grouped import GroupedTensor, PackedTensor
from bridge.checkpoint.write.block_words import ReusedArrays
from bridge.conversion.checkpoints.codes_of_blocks import packed_of, regrouped
from bridge.conversion.checkpoints.layer_plan import CALIBRATED, ROUNDED, LayerPlan, codes_in_groups, rounded, runs
from bridge.conversion.gguf_input.gguf_source import SourceTensor

Rows = tuple[slice, ...]  # a run of a layer's rows, or one of each part that a word has codes of
# what is written at once: bytes of words, which stay in a core's cache unless rows are their columns; codes of a byte
_WORDS_AT_ONCE, _TRANSPOSED_AT_ONCE, _CODES_AT_ONCE = 1 << 20, 32 << 20, 4 << 20


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
