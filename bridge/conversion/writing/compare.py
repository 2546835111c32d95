"""One tensor of the model that `verify` measures against the reference's: a GGUF's or a checkpoint's against either.

Codes are those of a checkpoint, and where a checkpoint is measured against a GGUF, those of its evenly spaced types.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from bridge.blocks.read import WRITTEN
from bridge.checkpoint import CodedTensor, GroupedTensor
from bridge.checkpoint.formats.fp4 import Fp4Tensor
from bridge.conversion.checkpoints.codes_of_blocks import codes_of, own_noise
from bridge.conversion.gguf_input.gguf_checkpoint import GgufCheckpoint
from bridge.conversion.planning.part_reader import PartReader
from bridge.conversion.writing.report import AS_IS, FLOAT, Outcome, TensorReport, carried_outcome, lost_codes
from bridge.conversion.writing.tensor_rows import BlockRows, PartRows, TensorRows
from bridge.encode.block_bytes import unpack_codes
from bridge.encode.carrying.carry import Fidelity, carry, obstacle, stored_codes
from bridge.encode.type_choice import has_exact_fp16_scales
from bridge.errors import BridgeError
from bridge.models.outline import OutlineTensor, Part
from bridge.system.cpu.row_threads import chunks

_CHOSEN = 0.5  # if fewer codes of a tensor are another's, they are so by chance
_DAMAGED = 0.99  # if so many are, the others are damaged
_CODE_BITS = tuple(range(1, 9))


class Sums(NamedTuple):
    """Of weights: squared error, squared signal, and the greatest difference."""

    error: float
    signal: float
    largest: float


def compare(reader: PartReader, tensor: OutlineTensor, measured: TensorRows, names: tuple[str, str]) -> TensorReport:
    """The report on one tensor; `names`: what the measured one and the reference's, that of the reader, are part of.

    Raises BridgeError where they differ in shape, or where a template's was not taken.
    """
    if measured.shape != tensor.shape:
        model, reference = names
        shapes = f"shape {list(measured.shape)} in {model}, {list(tensor.shape)} in {reference}"
        raise BridgeError(f"{tensor.name}: {shapes}; they are not of the same model")
    if any(reader.coded(part) for part in tensor.parts):
        outcome = _compare_codes(reader, tensor, measured)
    elif tensor.origin == "template":
        assert tensor.data is not None
        raw = measured.raw
        if measured.type != tensor.fixed_type or raw is None or not np.array_equal(raw, tensor.data):
            raise BridgeError(f"{tensor.name}: is not the template's, from which it should have been taken")
        outcome = Outcome(AS_IS, largest_difference=0.0)
    else:
        outcome = _compare_floats(reader, tensor, measured)
    return TensorReport.of(tensor, measured.type, measured.nbytes, outcome)


def squared_error(reader: PartReader, tensor: OutlineTensor, measured: TensorRows) -> float:
    """Of the weights of a tensor of matrices; infinite where shapes differ."""
    if measured.shape != tensor.shape:
        return math.inf
    row, error = 0, 0.0
    for part in tensor.parts:
        if reader.coded(part):
            error += _sums(_grouped_pairs(reader.grouped(part), measured, row)).error
        else:
            error += _sums(_part_pairs(reader, part, measured, row)).error
        row += part.shape[0]
    return error


def _compare_floats(reader: PartReader, tensor: OutlineTensor, measured: TensorRows) -> Outcome:
    """A tensor that the reference has as floats, or as the blocks of a GGUF."""
    if tensor.data is not None:
        values = measured.values(0, None).reshape(tensor.shape)
        sums = _sums([(tensor.data.reshape(tensor.shape), values)])
    else:
        sums = _sums(_float_pairs(reader, tensor, measured))
    if not sums.largest and measured.type not in WRITTEN:
        return Outcome(AS_IS, largest_difference=0.0)
    if isinstance(measured, PartRows) and (outcome := _compare_blocks(reader, tensor, measured, sums)) is not None:
        return outcome
    fidelity = Fidelity(math.prod(tensor.shape), sums.error, sums.signal, 0.0, 0)
    stored = reader.stored_as(tensor.parts[0]) if tensor.parts else None
    return Outcome(FLOAT, fidelity, stored=stored, largest_difference=sums.largest)


def _compare_blocks(reader: PartReader, tensor: OutlineTensor, measured: PartRows, sums: Sums) -> Outcome | None:
    """A tensor of a checkpoint against a GGUF's blocks, with the noise of the coarser of the two; None for types whose
    values are not evenly spaced, and for floats."""
    if not isinstance(reader.ckpt, GgufCheckpoint) or measured.vector:
        return None
    type, weights = reader.stored_as(tensor.parts[0]), math.prod(tensor.shape)
    blocks = reader.ckpt.blocks(tensor.name, type, tensor.shape)
    if blocks is None or own_noise(type, blocks[:1]) is None:
        return None
    noise, equal = 0.0, 0
    for rows in chunks(measured.rows, tensor.shape[-1]):
        noise += own_noise(type, blocks[rows]) or 0.0
        for some, other, of_other in measured.codes(rows.start, rows.stop):
            t = codes_of(tensor.name, type, blocks[rows][some], _CODE_BITS, offsets=True)
            if t is not None:
                equal += _equal_codes(t, slice(None), other, of_other)[0]
    kept, damaged = _kept_and_damaged(equal, weights)
    measured_noise = sum(t.noise() for _, t, _ in measured.codes(0, measured.rows))
    total = Fidelity(weights, sums.error, sums.signal, max(noise, measured_noise), kept)
    return Outcome(
        carried_outcome(total), total, codes_missing=damaged, stored=type, largest_difference=sums.largest
    )  # fmt: skip


def _compare_codes(reader: PartReader, tensor: OutlineTensor, measured: TensorRows) -> Outcome:
    """A tensor that came as codes, all of it or most parts. Parts that came as floats are not in its fidelity."""
    reasons: list[str] = []
    notes: list[str] = []
    total = Fidelity(0, 0.0, 0.0, 0.0, 0)
    row = all_missing = 0
    largest = 0.0
    for part in tensor.parts:
        if reader.coded(part):
            t = reader.grouped(part)
            notes += t.notes
            sums = _sums(_grouped_pairs(t, measured, row))
            count_kept = _codes_of_checkpoint if isinstance(measured, PartRows) else _codes_kept
            codes_kept, missing, reason = count_kept(t, measured, row)  # type: ignore[arg-type]
            all_missing += missing
            total += Fidelity(math.prod(t.shape), sums.error, sums.signal, t.noise(), codes_kept)
            reasons.append(reason if sums.error else "")
        else:
            sums = _sums(_part_pairs(reader, part, measured, row))
        largest = max(largest, sums.largest)
        row += part.shape[0]
    notes += lost_codes(tensor.name, reasons, total)
    return Outcome(carried_outcome(total), total, notes=notes, codes_missing=all_missing, largest_difference=largest)


def _grouped_pairs(t: CodedTensor, measured: TensorRows, first_row: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of rows of the reference's and the measured weights; the part begins at row `first_row` of the tensor."""
    if measured.vector:  # in the GGUF; a matrix of one row in the checkpoint
        yield t.dequantize(), measured.values(0, None).reshape(t.shape)
        return
    for rows in chunks(*t.shape):
        yield t.dequantize(rows), measured.values(first_row + rows.start, first_row + rows.stop)


def _float_pairs(
    reader: PartReader, tensor: OutlineTensor, measured: TensorRows
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    start = 0
    if all(len(part.shape) == 1 for part in tensor.parts):  # in the GGUF it may be a matrix
        values = measured.values(0, None).reshape(-1)
        for x in (x for part in tensor.parts for x in reader.floats(part)):
            yield x, values[start : start + len(x)]
            start += len(x)
        return
    for part in tensor.parts:
        for reference, values in _part_pairs(reader, part, measured, start):
            yield reference, values
            start += len(reference)


def _part_pairs(
    reader: PartReader, part: Part, measured: TensorRows, first_row: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """As `_grouped_pairs`, of a part of floats that is a matrix."""
    for x in reader.floats(part):
        rows = x.reshape(-1, x.shape[-1])  # those of filters too
        yield rows, measured.values(first_row, first_row + len(rows))
        first_row += len(rows)


def _sums(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> Sums:
    """The sums over (reference, measured) pairs."""
    error = signal = largest = 0.0
    for reference, value in pairs:
        difference = value.astype(np.float64) - reference
        error += float(np.square(difference).sum())
        signal += float(np.square(reference, dtype=np.float64).sum())
        largest = float(np.maximum(largest, np.abs(difference).max(initial=0.0)))  # NaN stays
    return Sums(error, signal, largest)


def _codes_of_checkpoint(t: CodedTensor, measured: PartRows, first_row: int) -> tuple[int, int, str]:
    """How many codes of a reference a checkpoint has, how many are damaged, and what differs."""
    equal, weights, scales = 0, math.prod(t.shape), []
    for rows, other, of_other in measured.codes(first_row, first_row + t.shape[0]):
        codes, same_scales = _equal_codes(t, rows, other, of_other)
        equal += codes
        scales.append(same_scales)
    kept, damaged = _kept_and_damaged(equal, weights)
    if not kept:
        return 0, 0, "the other has others" if scales else f"stored as {measured.type}"
    same = "the same scales" if kept < weights else "other zero points"
    return kept, damaged, f"{f'all but {damaged}, ' if damaged else ''}with {same if all(scales) else 'other scales'}"


def _kept_and_damaged(equal: int, weights: int) -> tuple[int, int]:
    """How many codes were kept where so many are equal, and how many of them are damaged."""
    if equal < _CHOSEN * weights:
        return 0, 0
    return equal, weights - equal if equal >= _DAMAGED * weights else 0


def _equal_codes(t: CodedTensor, rows: slice, other: CodedTensor, of_other: slice) -> tuple[int, bool]:
    """How many codes of rows of two tensors are equal, less their zero points, and whether all scales are."""
    same_scales, equal = True, 0
    if type(t) is not type(other) or not isinstance(t, GroupedTensor | Fp4Tensor):
        return 0, False
    first, second = rows.indices(t.shape[0])[0], of_other.indices(other.shape[0])[0]
    count = rows.indices(t.shape[0])[1] - first
    for run in chunks(count, t.shape[1]):
        points, scales = _points(t, slice(first + run.start, first + run.stop))
        others, other_scales = _points(other, slice(second + run.start, second + run.stop))
        equal += int((np.abs(points - others) < 0.5).sum())  # zero points may be rounded to whole numbers
        same_scales = same_scales and np.array_equal(scales, other_scales)
    return equal, same_scales


def _points(t: CodedTensor, rows: slice) -> tuple[np.ndarray, np.ndarray]:
    """Of rows, float32 [n, in]: codes less zero points, those of negative scales mirrored; and what multiplies them."""
    groups = t.groups()
    if isinstance(t, Fp4Tensor):
        return t.codes[rows].astype(np.float32), t.scale_values(rows)[:, groups] * np.float32(t.tensor_scale)
    assert isinstance(t, GroupedTensor)
    scales = t.scales[rows][:, groups]
    return (t.codes[rows] - t.zeros[rows][:, groups]) * np.where(scales < 0, np.float32(-1), 1), np.abs(scales)


def _codes_kept(t: CodedTensor, stored: BlockRows, first_row: int) -> tuple[int, int, str]:
    """How many integer codes in the file are the checkpoint's, shifted or mirrored as the type has them; how many are
    not, though a plain type holds them bit for bit: Q8_0 by the block, the others all or none; and why."""
    block = WRITTEN.get(stored.type)
    if block is None:
        return 0, 0, f"stored as {stored.type}"
    if reason := obstacle(t, block):
        return 0, 0, reason
    if block.scales:  # scales and all, by the block
        raw = stored.bytes_of[first_row : first_row + t.shape[0]]
        same = (raw == carry(t, block).data).reshape(-1, block.nbytes).all(1)
        codes_kept, missing = int(same.sum()) * block.size, int((~same).sum()) * block.size
        return codes_kept, missing, "the file has others" if missing else ""
    exact = not block.is_k and not block.has_min and has_exact_fp16_scales(t)
    codes_kept = missing = 0
    for rows in chunks(*t.shape):
        raw = stored.bytes_of[first_row + rows.start : first_row + rows.stop]
        codes = stored_codes(t, block, raw, rows).reshape(-1, block.sub)
        same = unpack_codes(block, raw).reshape(codes.shape) == codes
        codes_kept += int(same.sum())
        if exact:
            fits = (codes.min(-1) >= 0) & (codes.max(-1) < block.levels)
            exact = bool(fits.all()) or block.clips
            missing += int((~same[fits]).sum())
    reason = "" if codes_kept == math.prod(t.shape) else "the file has others"
    return codes_kept, missing if exact else 0, reason
