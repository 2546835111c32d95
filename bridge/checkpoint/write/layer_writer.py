"""Layers into the files of a new checkpoint, each to its place: the files are there, with headers and full sizes.

Any machine that sees the folder can write some of the layers: a `LayerWriter` is sent to it, and what it counted there
is sent back, see `counts`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np

from bridge.checkpoint.files.dtypes import NUMPY, from_float32
from bridge.checkpoint.formats.registry import FORMATS
from bridge.checkpoint.formats.written import Groups, WrittenFormat, raised, zeros_of_0
from bridge.checkpoint.grouped import GroupedTensor, PackedTensor
from bridge.errors import BridgeError
from bridge.system.progress import Progress
from bridge.system.storage.files import disk_errors


@dataclass
class Counts:
    """What is known of layers once they are written.

    layers      that are written whole
    asymmetric  whether a layer has zero points other than the middle
    act_order   whether a layer has it
    raised      zero points of 0 that became 1, and weights that lost a step by it
    nbytes      that were written
    """

    layers: set[str] = field(default_factory=set)
    asymmetric: bool = False
    act_order: bool = False
    raised: tuple[int, int] = (0, 0)
    nbytes: int = 0

    def add(self, other: "Counts") -> None:
        """Count what another machine wrote."""
        self.layers |= other.layers
        self.asymmetric |= other.asymmetric
        self.act_order |= other.act_order
        self.raised = self.raised[0] + other.raised[0], self.raised[1] + other.raised[1]
        self.nbytes += other.nbytes


@dataclass
class LayerWriter:
    """Writes layers.

    path       the checkpoint's final folder, for messages
    folder     where its files are now
    format     a name of `FORMATS`
    layers     the layers that may be written
    shapes     (out, in) of each
    locations  tensor -> file, and the place of its first byte; of a matrix in a stack, its part's
    clamp      see `CheckpointWriter`
    total      bytes of all tensors of the checkpoint
    progress   called with (bytes done, bytes in all, tensor)
    """

    path: Path
    folder: Path
    format: str
    layers: Mapping[str, Groups]
    shapes: Mapping[str, tuple[int, int]]
    locations: Mapping[str, tuple[str, int]]
    clamp: bool
    total: int
    progress: Progress | None = None
    counts: Counts = field(default_factory=Counts)

    def for_others(self, layers: Iterable[str]) -> Self:
        """A writer of some of the layers, for another machine."""
        return replace(self, layers={name: self.layers[name] for name in layers}, progress=None, counts=Counts())

    def add(self, tensor: GroupedTensor | PackedTensor, first: int | None = None) -> None:
        """See `CheckpointWriter.add`."""
        name, written = tensor.name, self._written
        if name not in self.layers or name in self.counts.layers:
            raise BridgeError(f"{name}: is not a layer to be quantized, or was added twice")
        layer, (out, columns) = self.layers[name], self.shapes[name]
        begin, rows, count = first or 0, out if first is None else tensor.shape[0], tensor.scales.shape[1]
        announced = layer.kind, layer.bits, (rows, columns), layer.count(columns)
        if (tensor.kind, tensor.bits, tensor.shape, count) != announced:
            raise BridgeError(
                f"{name}: is {list(tensor.shape)} of {tensor.bits} bits in {count} groups per row; "
                f"announced was {list(self.shapes[name])} of {layer.bits} bits in groups of {layer.group_size}"
            )
        if isinstance(tensor, GroupedTensor):
            tensor = self._counted(tensor, layer)
        shapes, lanes = written.shapes(layer, (out, columns)), written.lanes(layer.bits)
        for part, values in written.pack(tensor).items():
            if f"{name}.{part}" in self.locations:
                if part == written.shape_part:
                    values = np.array((out, columns), values.dtype)
                dtype, shape = shapes[part]
                if values.dtype.kind == "f" and values.dtype != NUMPY[dtype]:  # scales, which it holds
                    values = from_float32(values, dtype)
                if rows < out and lanes > 1 and len(values) == rows * count:  # of groups, row by row
                    values, shape = values.reshape(lanes, -1), (lanes, math.prod(shape) // lanes)
                self._write_rows(f"{name}.{part}", values, shape, begin, out)
        if begin + rows == out:
            self.counts.layers.add(name)

    def count(self, others: Counts) -> None:
        """Count what another machine wrote."""
        self.counts.add(others)
        if self.progress:
            self.progress(self.counts.nbytes, self.total, "")

    @property
    def _written(self) -> WrittenFormat:
        return FORMATS[self.format]

    def _counted(self, tensor: GroupedTensor, layer: Groups) -> GroupedTensor:
        """The tensor as it is written. Raises BridgeError if it is not as announced."""
        name, written, counts = tensor.name, self._written, self.counts
        if self.clamp and not written.holds_zero:
            zeros = zeros_of_0(tensor)
            tensor, lost = raised(tensor)
            counts.raised = counts.raised[0] + zeros, counts.raised[1] + lost
        asymmetric = bool((tensor.zeros != 1 << (layer.bits - 1)).any())
        if layer.symmetric and asymmetric:
            raise BridgeError(f"{name}: was announced as symmetric, but has zero points")
        if written.order_part and tensor.sequential == layer.act_order:
            raise BridgeError(f"{name}: has {'no ' * layer.act_order}act-order, other than was announced")
        counts.asymmetric |= asymmetric
        counts.act_order |= not tensor.sequential
        return tensor

    def write(self, name: str, pieces: Iterable[np.ndarray], offset: int = 0, step: int = 0) -> None:
        """Write the bytes of a tensor, piece by piece.

        offset  byte of the first
        step    bytes from one to the next; 0: there are none in between
        """
        file, start = self.locations[name]
        with disk_errors(self.path, name, "folder"), open(self.folder / file, "rb+") as out:
            out.seek(start + offset)
            for i, piece in enumerate(pieces):
                if step:
                    out.seek(start + offset + i * step)
                out.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
                self.counts.nbytes += piece.nbytes
                if self.progress:
                    self.progress(self.counts.nbytes, self.total, name)

    def _write_rows(self, name: str, values: np.ndarray, shape: tuple[int, ...], first: int, out: int) -> None:
        """Write what a tensor of this shape has of the rows from `first` on of a layer of `out` rows."""
        if values.shape == shape:
            if first == 0:
                self.write(name, [values])
        elif values.shape[1:] == shape[1:]:
            self.write(name, [values], first * shape[0] // out * (values.nbytes // len(values)))
        else:  # rows of the layer are columns of it
            self.write(name, values, first * shape[1] // out * values.itemsize, shape[1] * values.itemsize)
