"""What a linear layer becomes in a checkpoint's format, and its codes: the same in the format's groups, or others.

    plan = layer.plan()           None: it stays in floats
    for rows in layer.runs(plan):
        tensor = layer.codes(plan, rows, arrays)
        error, signal = layer.squared_errors(plan, tensor, rows)

`BlockLayer` is a layer of a GGUF, `CodedLayer` one of a checkpoint. Bits and groups are those that it has if the format
holds them, else of rounding to nearest: the least bits that add under 15% of the layer's own noise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bridge.checkpoint.files.dtypes import not_finite
from bridge.checkpoint.formats.written import Groups, WrittenFormat, raised
from bridge.checkpoint.grouped import GroupedTensor, PackedTensor
from bridge.checkpoint.write.block_words import TILE, ReusedArrays
from bridge.encode.limits import REQUANTIZED_LIMIT
from bridge.encode.rounding.round_groups import round_to_groups

EXACT, ALL_CODES, ROUNDED, CALIBRATED, AS_FLOATS = "exact", "all codes", "rounded", "calibrated", "floats"
AT_ONCE = 1 << 20  # values of a layer that are rounded or compared
SIZE = 32  # of groups that are rounded
Rows = tuple[slice, ...]  # a run of a layer's rows, or one of each part that a word has codes of
Coded = GroupedTensor | PackedTensor


@dataclass(frozen=True)
class LayerPlan:
    """How a layer is written.

    how      EXACT, CALIBRATED, ROUNDED, or ALL_CODES, which only its error tells from EXACT
    groups   how the format describes it
    offsets  zero points are not whole numbers
    packed   codes and scales are the format's as they are stored: no code becomes a byte
    order    a checksum of the groups of its columns; 0: these are consecutive
    """

    how: str
    groups: Groups
    offsets: bool = False
    packed: bool = False
    order: int = 0


@dataclass(frozen=True)
class Layer:
    """A linear layer, and the format in which it is to be written.

    written  the format
    module   its name in the new checkpoint
    type     what it is now, for the report
    shape    (out, in)
    file     where it is, for messages
    """

    written: WrittenFormat
    module: str
    type: str
    shape: tuple[int, int]
    file: Path

    def plan(self, bits: int | None = None) -> LayerPlan | None:
        """What it becomes; None if it stays in floats.

        bits  that it has at most: it is rounded to them if its codes take more; None: those that its codes take, or
              that add little noise

        All its rows are looked at: the plan is final.
        """
        if not self.quantizable(bits):
            return None
        plan = self._coded_plan(tuple(n for n in self.written.bits if bits is None or n <= bits), bits)
        if plan is None:
            plan = self._rounded_plan(bits)
        return None if plan is None or self.written.obstacle(plan.groups, self.shape) else plan

    def quantizable(self, bits: int | None) -> bool:
        """Whether it can have codes at all."""
        return True

    def _coded_plan(self, known: tuple[int, ...], bits: int | None) -> LayerPlan | None:
        """Bits and groups where it keeps its codes; None where the format does not hold them in any of `known` bits."""
        raise NotImplementedError

    def floats(self, rows: slice) -> np.ndarray:
        """float32 of a run of rows."""
        raise NotImplementedError

    def noise(self) -> float | None:
        """The quantization noise that it has by itself, summed over all weights; None where that is not known."""
        raise NotImplementedError

    def share(self, how: str, error: float) -> float | None:
        """A squared error as a share of the noise that it has by itself; None where that is not known, or not meant:
        calibrated weights move on purpose."""
        noise = self.noise() if how == ROUNDED else None
        return error / noise if noise else None

    def runs(self, plan: LayerPlan) -> Iterator[Rows]:
        """The rows that are packed at once, one run after another."""
        return iter([(slice(0, self.shape[0]),)])

    def codes(self, plan: LayerPlan, rows: Rows, arrays: ReusedArrays) -> Coded:
        """Some rows, as they were planned."""
        raise NotImplementedError

    def squared_errors(self, plan: LayerPlan, tensor: Coded, rows: Rows) -> tuple[float, float]:
        """The squared error of rows as the format has them, and their squared weights; 0 where they are the layer's."""
        error, signal, row = 0.0, 0.0, 0
        moved = plan.how in (ROUNDED, CALIBRATED) or self._changes_scales()
        if isinstance(tensor, GroupedTensor) and moved:
            for piece in (piece for run in rows for piece in self._pieces(run)):
                weights = self.floats(piece)
                values = self._values(tensor, slice(row, row := row + len(weights)))
                error += _energy(values - weights)
                signal += _energy(weights)
        return error, signal

    def _changes_scales(self) -> bool:
        """Whether the format may round the scales or offsets of codes that it holds."""
        return True

    def _rounded_plan(self, bits: int | None) -> LayerPlan | None:
        """Bits of a layer that is rounded to nearest; None where the format has too few, or groups of 32 do not fit."""
        written = self.written
        if self.shape[1] % SIZE:
            return None
        noise = self.noise()
        limit = REQUANTIZED_LIMIT * noise if noise is not None and bits is None else np.inf
        for width in written.bits if bits is None else (bits,):
            if bits is None and width < 8 and noise is None:
                continue
            error, finite = 0.0, False
            for rows in runs(self.shape):
                weights = self.floats(rows)
                if not np.isfinite(weights).all():
                    raise not_finite(self.file, f"{self.module}.weight")
                tensor = self._rounded(weights, width)
                finite = bool(np.isfinite(tensor.scales).all())
                if self.written.zeros == "products":
                    finite = finite and bool(np.isfinite(tensor.half_products()).all())
                if not finite:
                    break
                error += float(np.square(tensor.dequantize() - weights, dtype=np.float64).sum())
                if width < 8 and not error <= limit:
                    break
            if finite and (width == 8 or error <= limit):
                return LayerPlan(ROUNDED, groups_of(width, SIZE, is_symmetric(width, written), self.shape, written))
        return None

    def _rounded(self, weights: np.ndarray, bits: int) -> GroupedTensor:
        """Weights rounded to nearest, in groups of 32."""
        symmetric = is_symmetric(bits, self.written)
        return round_to_groups(self.module, weights, bits, symmetric, least=self.written.from_1)

    def _rounded_pieces(self, plan: LayerPlan, rows: slice) -> Iterator[GroupedTensor]:
        """A run of rows, rounded, in pieces."""
        for piece in self._pieces(rows):
            yield self._rounded(self.floats(piece), plan.groups.bits)

    def _values(self, tensor: GroupedTensor, rows: slice) -> np.ndarray:
        """float32 of some rows as the checkpoint has them."""
        if self.written.from_1 and not tensor.zeros.all():
            tensor, rows = raised(tensor.take_rows(np.arange(*rows.indices(tensor.shape[0]))))[0], slice(None)
        if not self.written.any_zeros:
            return tensor.dequantize(rows)
        size, codes = tensor.group_size, tensor.codes[rows]
        scales = np.repeat(tensor.scales[rows].astype(np.float32), size, 1)
        if self.written.zeros == "products":
            return codes * scales + np.repeat(tensor.half_products()[rows].astype(np.float32), size, 1)
        return (codes - np.repeat(tensor.zeros[rows].astype(np.float16).astype(np.float32), size, 1)) * scales

    def _pieces(self, rows: slice) -> Iterator[slice]:
        """Some rows in runs of which floats take little memory."""
        return runs((rows.stop - rows.start, self.shape[1]), start=rows.start)


def _energy(values: np.ndarray) -> float:
    """The sum of squares of float32 [out, in]; of rows in float32, which is fast, and of these sums in float64."""
    return float(np.einsum("ij,ij->i", values, values).sum(dtype=np.float64))


def joined(parts: Sequence[GroupedTensor]) -> GroupedTensor:
    """Rows of a layer below one another."""
    if len(parts) == 1:
        return parts[0]
    codes, scales, zeros = map(np.concatenate, zip(*((p.codes, p.scales, p.zeros) for p in parts), strict=True))
    return replace(parts[0], codes=codes, scales=scales, zeros=zeros)


def is_symmetric(bits: int, written: WrittenFormat) -> bool:
    """Whether layers are rounded around the middle of the codes: below 8 bits, zero points are worth it."""
    return bits == 8 or written.rounding == "symmetric"


def groups_of(bits: int, size: int, middle: bool, shape: tuple[int, int], written: WrittenFormat) -> Groups:
    """How a format describes a layer; `middle`: all zero points are the middle of the codes."""
    by_row = SIZE < size == shape[1] and not written.any_zeros  # rows of 32 are groups as other layers have
    return Groups(bits, -1 if by_row else size, bool(written.zeros_part) and middle)


def runs(shape: tuple[int, int], at_once: int = AT_ONCE, first: int | None = None, start: int = 0) -> Iterator[slice]:
    """Slices of rows of about `at_once` values that cover a matrix, whole tiles.

    first  rows of the first slice
    start  the number of the matrix's first row
    """
    step, row = max(TILE, at_once // shape[1] // TILE * TILE), 0
    while row < shape[0]:
        stop = min(row + (min(first, step) if first and row == 0 else step), shape[0])
        yield slice(start + row, start + stop)
        row = stop
