"""Executes a plan's tensors: codes carried or requantized, floats quantized, a few tensors at a time.

Worker threads read and map (the kernels hold no GIL); the caller takes the results in order. Parts are read one
after another: what is held is the finished tensor and one part, so memory follows the largest tensor, not the model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bridge.blocks import TYPES, BlockType
from bridge.conversion.importance import Importance
from bridge.conversion.part_reader import Source
from bridge.conversion.recipe import block_type
from bridge.conversion.report import AS_IS, CALIBRATED, FLOAT, REQUANTIZED, TensorReport, how_kept, lost_codes
from bridge.errors import BridgeError
from bridge.models.outline import Part, PlannedTensor
from bridge.system.cpus import usable_cpus
from bridge.system.row_threads import slices

if TYPE_CHECKING:
    from bridge.encode.carry import Fidelity
    from bridge.quantize.layer_store import StoredLayer

_IN_FLIGHT = 1 << 29  # bytes of the checkpoint that are worked on at a time; one tensor may be larger
_FLOAT_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


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
    """

    source: Source
    importance: Importance
    layers: Mapping[str, StoredLayer] = field(default_factory=dict)
    threads: int | None = None
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
                    nbytes = self.source.nbytes(tensor)
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
        report = TensorReport(tensor.name, tensor.source, tensor.kind, str(tensor.type), tensor.shape, 0, AS_IS)
        if tensor.data is not None:
            data = tensor.data
        else:
            block = block_type(str(tensor.type))
            data = self._as_floats(tensor, report) if block is None else self._as_blocks(tensor, block, report)
        report.nbytes = data.nbytes
        return Result(data, report)

    def _as_blocks(self, tensor: PlannedTensor, block: BlockType, report: TensorReport) -> np.ndarray:
        """A tensor's parts in a block type. Fills the report."""
        from bridge.encode.block_bytes import row_bytes
        from bridge.encode.carry import Fidelity
        from bridge.encode.type_choice import exact_type, map_to, must_keep

        columns = tensor.shape[-1]
        keep = must_keep(tensor.limit)
        shape = math.prod(tensor.shape[:-1]), row_bytes(block, columns)
        # fresh memory is dear: that of the one part serves
        alone = (
            len(tensor.parts) == 1 and self.source.coded(tensor.parts[0]) and not self._layer(tensor.parts[0], block)
        )
        data = np.empty((0, 0) if alone else shape, np.uint8)
        coded = floats = calibrated = Fidelity(0, 0.0, 0.0, 0.0, 0)
        exact = set(TYPES)  # the types that would hold every part bit for bit
        whys: list[str] = []
        at = came_as_floats = 0
        for number, part in enumerate(tensor.parts):
            importance = self.importance.of(tensor, number)
            layer = self._layer(part, block)
            if layer is not None:
                rows, fidelity = self._calibrated(layer, part)
                data[at : at + len(rows)] = rows
                at += len(rows)
                calibrated += fidelity
                continue
            if self.source.coded(part):
                t = self.source.grouped(part)
                mapped = map_to(t, block, importance, keep)
                if alone:
                    data = mapped.data
                else:
                    data[at : at + len(mapped.data)] = mapped.data
                    at += len(mapped.data)
                coded += mapped.fidelity
                whys.append(mapped.why)
                free = exact_type(t) if exact else None
                exact &= {free.name} if free else set()
                report.notes += t.notes
                continue
            came_as_floats += 1
            for x in self.source.floats(part):
                floats += self._quantized(x, block, importance, data[at : at + len(x)])
                at += len(x)
        if calibrated.weights == math.prod(tensor.shape):
            report.how, report.fidelity = CALIBRATED, calibrated
            return data
        coded += calibrated
        if came_as_floats == len(tensor.parts):
            report.how, report.fidelity = FLOAT, floats
            report.stored = self.source.stored_as(tensor.parts[0])
            return data
        report.how, report.fidelity = how_kept(coded), coded
        report.notes += lost_codes(tensor.name, whys, coded)
        if coded.error and exact and TYPES[name := exact.pop()].bpw <= block.bpw:
            report.exact_for_free = name
        if came_as_floats:
            report.notes.append(
                f"{tensor.name}: {came_as_floats} of its {len(tensor.parts)} parts came as floats and are {block.name} "
                f"like the others (NMSE {floats.nmse:.1e})"
            )
        return data

    def _quantized(self, x: np.ndarray, block: BlockType, importance: np.ndarray | None, out: np.ndarray) -> Fidelity:
        """Quantize float rows to `out`, on several threads: embeddings and head are the largest tensors, and the first
        and the last, when others have nothing to do."""
        from bridge.encode.carry import Fidelity
        from bridge.encode.round_rows import quantize_rows

        parts = list(
            self._rows.map(
                lambda r: quantize_rows(x[r], block, importance, out[r]),
                slices(len(x), self.threads or usable_cpus()),
            )
        )
        return Fidelity(x.size, sum(p.error for p in parts), sum(p.signal for p in parts), 0.0, 0)

    def _layer(self, part: Part, block: BlockType) -> StoredLayer | None:
        """The part as it was quantized to this type with a text, if it was."""
        layer = self.layers.get(part.layer) if part.layer is not None else None
        return layer if layer is not None and layer.type == block.name else None

    def _calibrated(self, layer: StoredLayer, part: Part) -> tuple[np.ndarray, Fidelity]:
        """A part's blocks, uint8 [rows, row bytes], rows in the GGUF's order, and how close they are."""
        from bridge.encode.carry import Fidelity

        # the layer of a matrix of a 3-D source is no more than the part's own rows
        rows = np.arange(part.shape[0]) if part.rows is None or part.matrix is not None else part.rows
        noise = self.source.grouped(part).noise() if self.source.coded(part) else 0.0
        error, signal = layer.errors()[:, rows].sum(1).tolist()
        return layer.blocks()[rows], Fidelity(math.prod(part.shape), error, signal, noise, 0)

    def _as_floats(self, tensor: PlannedTensor, report: TensorReport) -> np.ndarray:
        """A tensor's parts as F32, F16 or BF16; codes are dequantized. Fills the report."""
        from bridge.encode.carry import Fidelity

        chunks: list[np.ndarray] = []
        coded = Fidelity(0, 0.0, 0.0, 0.0, 0)
        for part in tensor.parts:
            if not self.source.coded(part):
                chunks += [as_float(x, report.type, tensor.name) for x in self.source.floats(part)]
                report.stored = self.source.stored_as(part)
                continue
            t = self.source.grouped(part)
            exact = t.dequantize()
            chunks.append(as_float(exact, report.type, tensor.name))
            error = float(np.square(float_value(chunks[-1], report.type) - exact, dtype=np.float64).sum())
            signal = float(np.square(exact, dtype=np.float64).sum())
            coded += Fidelity(exact.size, error, signal, t.noise(), 0)
            report.how = REQUANTIZED
            report.notes += t.notes
        if report.how == REQUANTIZED:
            report.fidelity = coded
            if coded.error:
                report.notes += lost_codes(tensor.name, [f"stored as {report.type}"], coded)
        return np.concatenate(chunks).reshape(tensor.shape)


def as_float(x: np.ndarray, name: str, tensor: str) -> np.ndarray:
    """float32 as F32, F16 or BF16 (uint16 bits, rounded to nearest even)."""
    if name != "BF16":
        with np.errstate(over="ignore"):
            data = x.astype(_FLOAT_DTYPES[name])
        if name == "F16" and not np.isfinite(data).all():
            raise BridgeError(f"{tensor}: has values beyond half precision's 65504; choose BF16 or F32 for it")
        return data
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def float_value(data: np.ndarray, name: str) -> np.ndarray:
    """The inverse of `as_float`."""
    return (data.astype(np.uint32) << 16).view(np.float32) if name == "BF16" else data.astype(np.float32)
