"""A matrix in device memory: quantized, in the form of layout.py (several tensors can share one), or of floats.

Uploading repacks on the CPU, all cores at once, and copies once. What arrives is checked: a scale that is not finite
is refused with its tensor and row. Matrices of types without a kernel (F32, F16, BF16, Q1_0) are torch's
(FloatMatrix); matmul.py multiplies with them.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np
from bridge.cuda.forms.layout import UNIT, DeviceLayout, repacker
from bridge.cuda.toolchain import device as devices
from bridge.cuda.toolchain.device import Device, Memory

from bridge.blocks.read import WRITTEN
from bridge.errors import BridgeError
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.cpu.cpus import usable_cpus
from bridge.system.cpu.row_threads import thread_limit
from bridge.system.operands import check_matrix

KINDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # types kept as they are; others become float16
_PART = 1 << 22  # bytes repacked at a time by one thread
_FLOATS = 1 << 25  # weights uploaded at a time where they are floats


class DeviceMatrix:
    """`type`, `rows`, `columns`, the `buffer` uint8 [nbytes] in device memory, `names` of the tensors it came from."""

    def __init__(self, names: list[str], type: str, rows: int, columns: int, buffer: Any, device: Device):
        self.names, self.type, self.rows, self.columns = names, type, rows, columns
        self.device, self.buffer, self.memory = device, buffer, Memory(device, buffer)
        self.layout = DeviceLayout(WRITTEN[type])
        self.units = columns // UNIT
        self.room = self.layout.room(rows, columns)
        self.nbytes = self.layout.nbytes(rows, columns)  # in device memory

    @classmethod
    def upload(cls, tensors: QuantTensor | Sequence[QuantTensor], device: Any = None, interleave: bool = False) -> Self:
        """The tensors as one matrix: their rows one after the other, or in turn (0, 0', 1, 1', ...) with `interleave`.

        Raises BridgeError where they are not matrices of one type and width (of equal height, to be interleaved),
        where the type has no kernel, where a scale is not finite, and where memory does not suffice.
        """
        tensors = [tensors] if isinstance(tensors, QuantTensor) else list(tensors)
        gpu = devices.require(device)
        rows, columns = combined_shape(tensors, interleave)
        names, type = [tensor.name for tensor in tensors], tensors[0].type
        host = np.zeros(DeviceLayout(WRITTEN[type]).nbytes(rows, columns), np.uint8)
        repack(tensors, host, interleave)
        return cls(names, type, rows, columns, gpu.upload(host, " + ".join(names)), gpu)

    @property
    def bpw(self) -> float:
        """Bits per weight that a product reads."""
        return self.layout.bpw

    @property
    def name(self) -> str:
        return " + ".join(self.names)

    def __repr__(self) -> str:
        return f"DeviceMatrix({self.name!r}, {self.type}, {[self.rows, self.columns]}, {self.device})"


def has_kernel(tensor: QuantTensor) -> bool:
    """Whether there are kernels for a matrix: for its type, and its factor where it has one."""
    return tensor.type in WRITTEN and (tensor.factor == 1 or DeviceLayout(WRITTEN[tensor.type]).factored)


def combined_shape(tensors: Sequence[QuantTensor], interleave: bool = False) -> tuple[int, int]:
    """Rows and columns of the tensors as one matrix. Raises BridgeError where they cannot be one on a GPU."""
    first = tensors[0]
    for tensor in tensors:
        check_matrix(tensor)
        if tensor.type not in WRITTEN:
            raise BridgeError(f"{tensor.name}: no CUDA kernel for {tensor.type}; there is one for {', '.join(WRITTEN)}")
        if not has_kernel(tensor):
            raise BridgeError(f"{tensor.name}: no CUDA kernel for {tensor.type} with a factor, {tensor.factor:g}")
        if (tensor.type, tensor.shape[1]) != (first.type, first.shape[1]):
            raise BridgeError(
                f"{tensor.name}: {tensor.type} of {tensor.shape[1]} columns cannot be combined with {first.name}, "
                f"{first.type} of {first.shape[1]}"
            )
        if interleave and tensor.shape[0] != first.shape[0]:
            raise BridgeError(f"{tensor.name}: {tensor.shape[0]} rows cannot alternate with {first.shape[0]}")
    rows, columns = sum(tensor.shape[0] for tensor in tensors), first.shape[1]
    layout = DeviceLayout(WRITTEN[first.type])
    if layout.nbytes(rows, columns) >= layout.largest:
        raise BridgeError(f"{first.name}: {rows} rows of {columns} are too many for one matrix on a GPU")
    return rows, columns


def repack(tensors: Sequence[QuantTensor], host: np.ndarray, interleave: bool = False) -> None:
    """Write a matrix of the tensors to host, uint8 of its layout's size and zeros before.

    Raises BridgeError where a scale is not finite.
    """
    rows, columns = combined_shape(tensors, interleave)
    layout = DeviceLayout(WRITTEN[tensors[0].type])
    room, start = layout.room(rows, columns), 0
    for number, tensor in enumerate(tensors):
        first_row, step = (number, len(tensors)) if interleave else (start, 1)
        _repack(tensor, host, room, first_row, step)
        if layout.factored:
            if not np.isfinite(tensor.factor):
                raise BridgeError(f"{tensor.name}: its scale is {tensor.factor}; the file is damaged")
            factors = host[layout.factors_at(room) :].view(np.float32)  # of rows
            factors[first_row : first_row + step * tensor.shape[0] : step] = tensor.factor
        start += tensor.shape[0]
    if layout.book:
        table = layout.book.table.view(np.uint8)
        host[layout.factors_at(room) :][: len(table)] = table


def _repack(tensor: QuantTensor, host: np.ndarray, room: int, first: int, step: int) -> None:
    """Rows of the tensor become rows first, first + step, ... of the matrix."""
    raw = tensor.raw.reshape(tensor.shape[0], -1)
    pack = repacker(tensor.type)
    height = max(1, _PART // raw.shape[1])

    def part(start: int) -> int:
        bad = pack(raw[start : start + height], first + start * step, step, host, room)
        return bad if bad < 0 else start + bad

    threads = min(usable_cpus(), 16)
    with thread_limit(), ThreadPoolExecutor(threads) as executor:
        bad = [row for row in executor.map(part, range(0, raw.shape[0], height)) if row >= 0]
    if bad:
        raise BridgeError(f"{tensor.name}: the scales of row {min(bad)} are not finite; the file is damaged")


def kind_of(type: str, precision: str) -> str:
    """The torch dtype that holds a type: with precision "f32" always float32."""
    return "float32" if precision == "f32" else KINDS.get(type, "float16")


class FloatMatrix:
    """`name`, `rows`, `columns`, `device`, and `weight`, a torch tensor [rows, columns] of a float type."""

    def __init__(self, tensor: QuantTensor, device: Device, precision: str = "int8"):
        """Raises BridgeError if the tensor is not a matrix or memory runs out."""
        import torch

        check_matrix(tensor)
        self.name, self.device = tensor.name, device
        self.rows, self.columns = tensor.shape
        dtype = getattr(torch, kind_of(tensor.type, precision))
        device.check_memory(self.rows * self.columns * dtype.itemsize, tensor.name)
        self.weight = torch.empty(tensor.shape, dtype=dtype, device=device.place)
        self.memory = Memory(device, self.weight)
        step = max(1, _FLOATS // self.columns)
        for first in range(0, self.rows, step):
            part = torch.from_numpy(tensor.rows(np.arange(first, min(first + step, self.rows))))
            # rounded here: a copy from the host has arrived when it returns, what the GPU rounds would be queued
            self.weight[first : first + step].copy_(part.to(dtype))

    @property
    def nbytes(self) -> int:
        """Bytes in device memory."""
        return int(self.weight.nbytes)

    @property
    def bpw(self) -> float:
        """Bits per weight."""
        return float(8 * self.weight.itemsize)

    def __repr__(self) -> str:
        return f"FloatMatrix({self.name!r}, {self.weight.dtype}, {[self.rows, self.columns]}, {self.device})"
