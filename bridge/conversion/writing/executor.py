"""Executes a plan's tensors: codes carried or requantized, floats quantized, a few tensors at a time.

Worker threads read and map (the kernels hold no GIL); the caller takes the results in order. Parts are read one
after another: what is held is the finished tensor and one part, so memory follows the largest tensor, not the model.
A tensor of gigabytes (a table of n-grams) is kept in a file until it is written.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.blocks import BlockType
from bridge.blocks.read import WRITTEN
from bridge.blocks.tensor_types import FLOAT_TYPES
from bridge.checkpoint.files.dtypes import NUMPY, as_float32, from_float32
from bridge.conversion.planning.importance import Importance
from bridge.conversion.planning.part_reader import PartReader
from bridge.conversion.planning.plan import PlannedTensor
from bridge.conversion.writing import report
from bridge.conversion.writing.report import Outcome, TensorReport
from bridge.encode.block_bytes import row_bytes
from bridge.encode.carrying.carry import Fidelity
from bridge.encode.limits import FLOAT_LIMIT
from bridge.encode.rounding.round_rows import quantize_rows
from bridge.encode.type_choice import carry_or_requantize, exact_type
from bridge.errors import parameter
from bridge.models.outline import Part
from bridge.runtime.cpu.engines import dequantize
from bridge.system.cpu.cpus import usable_cpus
from bridge.system.cpu.row_threads import slices
from bridge.system.storage.filed_array import FiledArray
from bridge.system.storage.files import disk_errors

if TYPE_CHECKING:
    from bridge.quantize.layer_store import StoredLayer

_SAMPLED = 1 << 14  # values of floats that are looked at before all are
_IN_MEMORY = 1 << 32  # bytes of a finished tensor; larger ones are kept in a file
_IN_FLIGHT = 1 << 29  # bytes of the checkpoint that are worked on at a time; one tensor may be larger


@dataclass
class Result:
    """One tensor, ready to be written."""

    data: np.ndarray
    report: TensorReport


@dataclass
class Executor:
    """Makes any tensor of a plan; `results` makes several.

    layers   those that were quantized with a text, by module: their blocks are taken as they are
    threads  that work at a time; None: as many as there are CPUs
    output   the GGUF, beside which large tensors are kept
    """

    reader: PartReader
    importance: Importance
    layers: Mapping[str, StoredLayer] = field(default_factory=dict)
    threads: int | None = None
    output: Path = Path()
    _rows: ThreadPoolExecutor = field(init=False, repr=False)  # while there are results

    def results(self, tensors: Sequence[PlannedTensor]) -> Iterator[Result]:
        """Tensors in order, made by worker threads a few ahead of the consumer, fewer where they are large."""
        workers = self.threads or usable_cpus()
        pending: deque[tuple[Future[Result], int]] = deque()
        # two pools: a tensor waits for its rows, so rows in the first one could wait for each other
        with (
            ThreadPoolExecutor(max_workers=workers, thread_name_prefix="rows") as self._rows,
            ThreadPoolExecutor(max_workers=workers, thread_name_prefix="convert") as pool,
        ):
            try:
                for tensor in tensors:
                    nbytes = self.reader.nbytes(tensor)
                    while pending and sum(n for _, n in pending) + nbytes > _IN_FLIGHT:
                        yield pending.popleft()[0].result()
                    pending.append((pool.submit(self.make, tensor), nbytes))
                    if len(pending) > workers + 1:
                        yield pending.popleft()[0].result()
                while pending:
                    yield pending.popleft()[0].result()
            finally:
                for future, _ in pending:
                    future.cancel()

    def make(self, tensor: PlannedTensor) -> Result:
        """Read and map one tensor."""
        block = WRITTEN.get(tensor.type)
        if tensor.data is not None:
            data, outcome = tensor.data, Outcome(report.AS_IS)
        elif (stored := self.reader.copied(tensor)) is not None:
            copied = report.AS_IS if tensor.type in FLOAT_TYPES else report.COPIED
            data, outcome = stored, Outcome(copied, stored=tensor.type)
        elif block is None:
            data, outcome = self._as_floats(tensor)
        else:
            data, outcome = self._as_blocks(tensor, block)
        return Result(data, TensorReport.of(tensor, tensor.type, data.nbytes, outcome))

    def _as_blocks(self, tensor: PlannedTensor, block: BlockType) -> tuple[np.ndarray, Outcome]:
        """A tensor's parts in a block type."""
        rows = math.prod(tensor.shape[:-1])
        blocks_before = self.reader.blocks_of(tensor)
        data: np.ndarray | None = None  # of a stack, or of floats; else a single part's blocks are the result
        if len(tensor.parts) > 1 or tensor.how == ("rounded",):
            data = self._array((rows, row_bytes(block, tensor.shape[-1])), np.dtype(np.uint8))
        coded = floats = Fidelity(0, 0.0, 0.0, 0.0, 0)
        zeros = 0  # parts whose weights are all zero
        exact = set(WRITTEN)  # the types that would hold every part bit for bit
        reasons: list[str] = []
        notes: list[str] = []
        row = 0
        for number, (part, how) in enumerate(zip(tensor.parts, tensor.how, strict=True)):
            importance = self.importance.of(tensor, number)
            if how in ("rounded", "as it came"):
                assert data is not None
                span = slice(row, row + (part.shape[0] if len(part.shape) > 1 else 1))
                before = None if blocks_before is None else blocks_before[span]
                rounded = self._rounded(part, block, importance, data[span], before)
                floats += rounded
                zeros += rounded.signal == 0
                row = span.stop
                continue
            if how == "calibrated":
                blocks, fidelity = self._calibrated(part)
                coded += fidelity
                zeros += fidelity.signal == 0
            else:
                t = self.reader.grouped(part)
                mapped, reason = carry_or_requantize(t, block, importance, how == "carried")
                blocks = mapped.data
                coded += mapped.fidelity
                zeros += mapped.fidelity.signal == 0
                reasons.append(reason)
                notes += t.notes
                free = exact_type(t) if exact else None
                exact &= {free.name} if free else set()
            if data is None:
                data = blocks
            else:
                data[row : row + len(blocks)] = blocks
                row += len(blocks)
        assert data is not None
        hows = set(tensor.how)
        notes += report.zero_notes(tensor, zeros)
        if hows == {"calibrated"}:
            return data, Outcome(report.CALIBRATED, coded, notes=notes)
        if hows <= {"rounded", "as it came"}:
            return data, Outcome(report.FLOAT, floats, notes=notes, stored=self.reader.stored_as(tensor.parts[0]))
        notes += report.lost_codes(tensor.name, reasons, coded)
        smaller = next(iter(exact), None) if coded.error else None
        if "rounded" in hows:
            notes.append(
                f"{tensor.name}: {tensor.how.count('rounded')} of its {len(tensor.parts)} parts came as floats and are "
                f"{block.name} like the others (NMSE {floats.nmse:.1e})"
            )
        free_type = smaller if smaller and WRITTEN[smaller].bpw <= block.bpw else None
        return data, Outcome(report.carried_outcome(coded), coded, free_type, notes)

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An array to be filled, in memory or, where it is large, in a file."""
        if math.prod(shape) * dtype.itemsize <= _IN_MEMORY:
            return np.empty(shape, dtype)
        with disk_errors(self.output, "a large tensor", "output"):
            return FiledArray.create(self.output.parent, shape, dtype)

    def _rounded(
        self, part: Part, block: BlockType, importance: np.ndarray | None, data: np.ndarray, before: np.ndarray | None
    ) -> Fidelity:
        """Quantize a part of floats into `data`, uint8 [rows, row bytes]. Rows are divided among several threads:
        embeddings and head are the largest tensors, and the first and the last, when no others are at work.

        before  its blocks in the GGUF that it comes from: rows whose values they are keep them
        """
        total = Fidelity(0, 0.0, 0.0, 0.0, 0)
        row = 0
        for x in self.reader.floats(part):
            out = data[row : row + len(x)]
            old = None if before is None else before[row : row + len(x)]

            def encode(rows: slice, x: np.ndarray = x, out: np.ndarray = out, old: np.ndarray | None = old) -> Fidelity:
                return _encoded(x[rows], block, importance, out[rows], None if old is None else old[rows])

            for fidelity in self._rows.map(encode, slices(len(x), self.threads or usable_cpus())):
                total += fidelity
            row += len(x)
            if isinstance(data, FiledArray):
                data.release()
        return total

    def _calibrated(self, part: Part) -> tuple[np.ndarray, Fidelity]:
        """A calibrated part's blocks, uint8 [rows, row bytes], rows in the GGUF's order, and how close they are."""
        layer = self.layers[str(part.layer)]
        # the layer of a matrix of a 3-D source has the part's own rows only
        rows = slice(None) if part.rows is None or part.matrix is not None else part.rows
        noise = self.reader.grouped(part).noise() if self.reader.coded(part) else 0.0
        error, signal = layer.errors()[:, rows].sum(1).tolist()
        return layer.blocks()[rows], Fidelity(math.prod(part.shape), error, signal, noise, 0)

    def _as_floats(self, tensor: PlannedTensor) -> tuple[np.ndarray, Outcome]:
        """A tensor's parts as F32, F16 or BF16; codes are dequantized."""
        dtype = NUMPY[tensor.type]
        data = self._array((math.prod(tensor.shape),), dtype)
        done = 0

        def add(values: np.ndarray) -> np.ndarray:
            nonlocal done
            stored = from_float32(values, tensor.type, tensor.name)
            data[done : done + stored.size] = stored.reshape(-1)
            done += stored.size
            if isinstance(data, FiledArray):
                data.release()
            return stored

        coded: Fidelity | None = None
        stored: str | None = None
        notes: list[str] = []
        zeros, small = 0, Fidelity(0, 0.0, 0.0, 0.0, 0)
        for part, how in zip(tensor.parts, tensor.how, strict=True):
            if how == "as it came":
                empty = True
                for x in self.reader.floats(part):
                    values = add(x)
                    if tensor.type == "F16":
                        small += _underflow(x, values)
                    empty = empty and not values.any()
                zeros += empty
                stored = self.reader.stored_as(part)
                continue
            t = self.reader.grouped(part)
            exact = t.dequantize()
            values = add(exact)
            error = float(np.square(as_float32(values, tensor.type) - exact, dtype=np.float64).sum())
            signal = float(np.square(exact, dtype=np.float64).sum())
            fidelity = Fidelity(exact.size, error, signal, t.noise(), 0)
            coded = fidelity if coded is None else coded + fidelity
            zeros += signal == 0
            notes += t.notes
        assert done == data.size
        data = data.reshape(tensor.shape)
        notes += report.zero_notes(tensor, zeros)
        if small.nmse > FLOAT_LIMIT:
            notes.append(
                f"{tensor.name}: {small.weights} of its values are below half precision's range, and far off in F16 "
                f"(NMSE {small.nmse:.2g}); keep it with {parameter('tensor_types')} REGEX=BF16"
            )
        if coded is None:
            return data, Outcome(report.AS_IS, notes=notes, stored=stored)
        if coded.error:
            notes += report.lost_codes(tensor.name, [f"stored as {tensor.type}"], coded)
        return data, Outcome(report.REQUANTIZED, coded, notes=notes, stored=stored)


def _encoded(
    x: np.ndarray, block: BlockType, importance: np.ndarray | None, out: np.ndarray, before: np.ndarray | None
) -> Fidelity:
    """Quantize rows into `out`, but for those whose values are those of their blocks `before`, which are kept."""
    if before is None:
        rounded = quantize_rows(x, block, importance, out)
        return Fidelity(x.size, rounded.error, rounded.signal, 0.0, 0)
    changed = np.flatnonzero((dequantize.rows(block.name, before) != x).any(1))
    out[:] = before
    rounded = quantize_rows(x[changed], block, importance)
    out[changed] = rounded.data
    return Fidelity(x.size, rounded.error, float(np.square(x, dtype=np.float64).sum()), 0.0, 0)


def _underflow(x: np.ndarray, halves: np.ndarray) -> Fidelity:
    """How close halves are to float32 values of about their least normal number or less; nothing for other values."""
    some = x.reshape(-1)[:: max(1, x.size // _SAMPLED)]
    if not some.any() or np.abs(some).max() >= np.finfo(np.float16).tiny:
        return Fidelity(0, 0.0, 0.0, 0.0, 0)
    wide = x.astype(np.float64)
    error = float(np.square(as_float32(halves, "F16") - wide).sum())
    return Fidelity(x.size, error, float(np.square(wide).sum()), 0.0, 0)
