"""A tensor of the model that `verify` measures, by rows in the GGUF's order: blocks of a GGUF, parts of a checkpoint.

type     in a GGUF; of a checkpoint, the bits of its codes or the dtype of its floats
vector   whether it has one dimension; its rows are its values
raw      uint8: its bytes as they are stored; None where they are others than a GGUF has
rows     their number, those of experts one after another
nbytes   of the tensor as it is stored
"""

import math
from collections.abc import Iterator

import gguf
import numpy as np

from bridge.checkpoint import CodedTensor
from bridge.conversion.planning.part_reader import PartReader
from bridge.gguf_file.reader import StoredTensor
from bridge.models.outline import OutlineTensor, Part
from bridge.runtime.cpu.engines import dequantize
from bridge.system.cpu.row_threads import chunks


class BlockRows:
    """A tensor of a GGUF; `bytes_of` are its rows, uint8 [rows, bytes]."""

    def __init__(self, tensor: StoredTensor, scales: np.ndarray | None) -> None:
        """`scales`: what multiplies it, of one value or one for each expert."""
        self.type, self.shape, self.raw = tensor.type, tensor.shape, tensor.raw
        self.nbytes = tensor.raw.nbytes
        self.vector = len(tensor.shape) == 1
        unquantized = self.vector and tensor.type in dequantize.UNQUANTIZED
        self.rows = math.prod(tensor.shape if unquantized else tensor.shape[:-1])
        self.bytes_of = tensor.raw.reshape(self.rows, -1)
        factors = np.ones(1, np.float32) if scales is None else scales
        self._factors = np.repeat(factors, self.rows // len(factors))[:, None] if len(factors) > 1 else factors

    def values(self, start: int, stop: int | None) -> np.ndarray:
        """float32 rows, or values of a vector, by the gguf package."""
        raw = self.bytes_of[start:stop]
        try:
            values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[self.type])
        except NotImplementedError:  # a type newer than the package
            values = dequantize.rows(self.type, raw)
        values = values * (self._factors[start:stop] if self._factors.ndim > 1 else self._factors)
        return values.reshape(-1) if self.vector else values


class PartRows:
    """A tensor of a checkpoint. A layer at most is in memory: rows are best taken in order."""

    def __init__(self, reader: PartReader, tensor: OutlineTensor) -> None:
        self._reader, self._tensor = reader, tensor
        self.shape, self.raw = tensor.shape, tensor.data
        self.nbytes = reader.nbytes(tensor) if tensor.data is None else tensor.data.nbytes
        self.vector = len(tensor.shape) == 1
        self.rows = math.prod(tensor.shape if self.vector else tensor.shape[:-1])
        self.type = "+".join(sorted({*map(self._stored_as, tensor.parts)})) or tensor.fixed_type or "F32"
        self._layer = _LayerOf(reader)
        self._chunks = _chunks_of(tensor, self._layer)
        self._held, self._first = self._none(), 0  # rows that were read beyond those that were asked for

    def values(self, start: int, stop: int | None) -> np.ndarray:
        """float32 rows, or values of a vector."""
        stop = self.rows if stop is None else stop
        if start < self._first:
            self._chunks = _chunks_of(self._tensor, self._layer)
            self._held, self._first = self._none(), 0
        pieces, end = [self._held], self._first + len(self._held)
        while end < stop:
            if end <= start:
                pieces, self._first = [], end
            pieces.append(next(self._chunks))
            end += len(pieces[-1])
        rows = np.concatenate(pieces)
        taken = rows[start - self._first : stop - self._first]
        self._held, self._first = rows[stop - self._first :], stop
        return taken

    def codes(self, start: int, stop: int) -> Iterator[tuple[slice, CodedTensor, slice]]:
        """The codes of rows start..stop: which rows, counted from `start`, the codes, and which of the codes' rows."""
        first = 0
        for part in self._tensor.parts:
            last = first + part.shape[0]
            low, high = max(start, first), min(stop, last)
            if low < high and not self.vector and self._reader.coded(part):
                yield slice(low - start, high - start), self._layer(part), slice(low - first, high - first)
            first = last

    def _none(self) -> np.ndarray:
        """No rows."""
        return np.empty((0, *(() if self.vector else self.shape[-1:])), np.float32)

    def _stored_as(self, part: Part) -> str:
        ckpt = self._reader.ckpt
        module = ckpt.modules.get(part.module)
        return ckpt.tensors[part.source].dtype if module is None else f"{module.bits} bits"


class _LayerOf:
    """Reads the layer of a part, and holds the last one."""

    def __init__(self, reader: PartReader) -> None:
        self.reader = reader
        self._last: tuple[Part, CodedTensor] | None = None

    def __call__(self, part: Part) -> CodedTensor:
        if self._last is None or self._last[0] is not part:
            self._last = None  # before the next one is read
            self._last = part, self.reader.grouped(part)
        return self._last[1]


def _chunks_of(tensor: OutlineTensor, layer: _LayerOf) -> Iterator[np.ndarray]:
    """All rows of a tensor. Nothing here refers to what has this iterator: no cycle keeps its layer in memory."""
    shape = (-1,) if len(tensor.shape) == 1 else (-1, tensor.shape[-1])
    if tensor.data is not None:
        yield tensor.data.astype(np.float32).reshape(shape)
    for part in tensor.parts:
        if layer.reader.coded(part):
            t = layer(part)
            yield from (t.dequantize(rows).reshape(shape) for rows in chunks(*t.shape))
        else:
            yield from (x.reshape(shape) for x in layer.reader.floats(part))


TensorRows = BlockRows | PartRows
