"""A decoder's matrices on the device: those that multiply one vector, in as few launches as their types allow.

    Stack     matrices of one input, their outputs one after the other (q, k, v); neighbours of one type are one
              matrix on the device, and one launch. Types without a kernel (IQ*, F16, BF16 ...) are float
              matrices, which torch multiplies with.
    Gated     gate and up: where both are of one type, row by row in turn, so that the launch ends with SwiGLU

Up to 8 tokens are multiplied by matvec.py, whose weights stay quantized. More go tile by tile: weights are
dequantized to halves for torch's matrix product, and each token is scaled to +-8 before, so that neither it nor
its result leaves the range of halves. With precision "f32" records, tiles and products are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
from bridge.cuda import matvec
from bridge.cuda.activations import COLUMNS, Records
from bridge.cuda.buffers import zeros
from bridge.cuda.dequantize import tile
from bridge.cuda.device import Device, torch_device, view
from bridge.cuda.layout import Layout
from bridge.cuda.matrix import DeviceMatrix
from bridge.cuda.norm import silu_grid, silu_kernel

from bridge.blocks import BLOCKS
from bridge.runtime.quant_tensor import QuantTensor

_TILE = 1 << 25  # weights dequantized at a time: 64 MB of halves
_LARGEST = 8.0  # what tokens are scaled to
_FLOATS = {"F32": "float32", "BF16": "bfloat16"}  # others become float16; all are float32 with precision "f32"

Launch = Callable[[], None]


def quantized(type: str) -> bool:
    """Whether there is a kernel for a type."""
    return type in BLOCKS


def device_bytes(tensor: QuantTensor, precision: str) -> int:
    """What a matrix takes on the device."""
    rows, columns = tensor.shape
    if quantized(tensor.type):
        return Layout(BLOCKS[tensor.type]).nbytes(rows, columns)
    return rows * columns * (4 if _float_type(tensor, precision) == "float32" else 2)


def _float_type(tensor: QuantTensor, precision: str) -> str:
    """What a type without a kernel is kept as."""
    return "float32" if precision == "f32" else _FLOATS.get(tensor.type, "float16")


class Vector:
    """One token's values, f32 [columns], and their records, which its products read."""

    def __init__(self, columns: int, device: Device, precision: str):
        self.floats = zeros(device, columns)
        self.records = Records(columns, 1, device, precision)
        self._row = view(self.floats.reshape(1, -1))

    def quantize(self) -> None:
        """Make the records of the floats."""
        self.records.quantize(self._row, 1, self.records.device.stream())


class FloatMatrix:
    """A matrix of a type without a kernel, as torch has it."""

    def __init__(self, tensor: QuantTensor, device: Device, precision: str):
        import torch

        dtype = getattr(torch, _float_type(tensor, precision))
        self.rows = tensor.shape[0]
        self.weight = torch.empty(tensor.shape, dtype=dtype, device=torch_device(device))
        step = max(1, _TILE // tensor.shape[1])
        for first in range(0, self.rows, step):
            part = torch.from_numpy(tensor.rows(np.arange(first, min(first + step, self.rows))))
            self.weight[first : first + step] = part.to(self.weight.device)

    def multiply(self, x: Any) -> Any:
        """x f32 [n, columns] -> f32 [n, rows]."""
        return _multiply(self.weight, x)


class Stack:
    """Matrices that multiply one vector; `rows` of them all. `bias` f32 [rows] or None."""

    def __init__(self, tensors: Sequence[QuantTensor], device: Device, precision: str, bias: Any = None):
        self.device, self.precision, self.bias = device, precision, bias
        self.columns = tensors[0].shape[1]
        self.rows = 0
        self.parts: list[tuple[int, DeviceMatrix | FloatMatrix]] = []
        for type, group in groupby(tensors, key=lambda t: t.type):
            members = list(group)
            matrices: list[DeviceMatrix | FloatMatrix] = (
                [DeviceMatrix.upload(members, device)]
                if quantized(type)
                else [FloatMatrix(tensor, device, precision) for tensor in members]
            )
            for matrix in matrices:
                self.parts.append((self.rows, matrix))
                self.rows += matrix.rows

    def bind(self, x: Vector, y: Any, accumulate: bool = False) -> list[Launch]:
        """What computes y (f32 [rows]) = or += W x for one token."""
        return [self._bound(first, matrix, x, y, accumulate) for first, matrix in self.parts]

    def _bound(self, first: int, matrix: Any, x: Vector, y: Any, accumulate: bool) -> Launch:
        out = y[first : first + matrix.rows]
        bias = None if self.bias is None else self.bias[first : first + matrix.rows]
        if isinstance(matrix, FloatMatrix):

            def by_torch() -> None:
                result = matrix.multiply(x.floats[None])[0]
                if bias is not None:
                    result += bias
                out.copy_(out + result if accumulate else result)

            return by_torch
        rows, offset = view(out.reshape(1, -1)), None if bias is None else view(bias)

        def launch() -> None:
            matvec.launch(matrix, x.records, rows, 1, self.device.stream(), accumulate, offset)

        return launch

    def multiply(self, x: Any) -> Any:
        """x f32 [n, columns] -> f32 [n, rows], with the bias."""
        import torch

        y = torch.empty((x.shape[0], self.rows), dtype=torch.float32, device=x.device)
        for first, matrix in self.parts:
            _multiply_into(matrix, x, y[:, first : first + matrix.rows], self.device, self.precision)
        return y if self.bias is None else y.add_(self.bias)


class Gated:
    """silu(gate x) * up x: what a decoder's down projection multiplies."""

    def __init__(self, gate: QuantTensor, up: QuantTensor, device: Device, precision: str, bias: Any = None):
        self.device, self.precision = device, precision
        self.inner = gate.shape[0]
        self.fused = gate.type == up.type and quantized(gate.type) and bias is None
        self.stack: Any = None
        if self.fused:
            self.matrix = DeviceMatrix.upload([gate, up], device, interleave=True)
        else:
            self.stack = Stack([gate, up], device, precision, bias)

    def bind(self, x: Vector, y: Vector) -> list[Launch]:
        """What computes y and its records for one token."""
        device = self.device
        if self.fused:
            out = view(y.floats.reshape(1, -1))

            def launch() -> None:
                matvec.launch_silu(self.matrix, x.records, out, 1, device.stream())

            return [launch, y.quantize]
        both = zeros(device, 2 * self.inner)
        kernel = silu_kernel(self.precision == "f32")
        arguments = view(both), view(y.floats), y.records.buffer, np.int32(self.inner)
        grid = silu_grid(self.inner)
        return [*self.stack.bind(x, both), lambda: kernel.launch(*grid, device.stream(), *arguments)]

    def multiply(self, x: Any) -> Any:
        """x f32 [n, columns] -> f32 [n, inner]."""
        import torch

        if self.fused:
            both = torch.empty((x.shape[0], 2 * self.inner), dtype=torch.float32, device=x.device)
            _multiply_into(self.matrix, x, both, self.device, self.precision)
            gate, up = both[:, ::2], both[:, 1::2]
        else:
            gate, up = self.stack.multiply(x).split(self.inner, dim=1)
        return torch.nn.functional.silu(gate) * up


@cache
def _records(columns: int, device: Device, precision: str) -> Records:
    """Of the few tokens that pass through a product at once; the stream keeps those of different ones apart."""
    return Records(columns, COLUMNS, device, precision)


def _multiply_into(matrix: Any, x: Any, y: Any, device: Device, precision: str) -> None:
    """y [n, rows] = x W^T for any number of tokens."""
    import torch

    n = x.shape[0]
    if isinstance(matrix, FloatMatrix):
        y.copy_(matrix.multiply(x))
        return
    if n <= COLUMNS:
        records = _records(matrix.columns, device, precision)
        out = torch.empty((n, matrix.rows), dtype=torch.float32, device=x.device)
        stream = device.stream()
        matvec.launch(matrix, records.quantize(x.contiguous(), n, stream), view(out), n, stream)
        y.copy_(out)
        return
    step = max(1, _TILE // matrix.columns)
    dtype = torch.float32 if precision == "f32" else torch.float16
    weights = torch.empty((min(step, matrix.rows), matrix.columns), dtype=dtype, device=x.device)
    for first in range(0, matrix.rows, step):
        count = min(step, matrix.rows - first)
        tile(matrix, first, count, weights[:count], device.stream())
        y[:, first : first + count] = _multiply(weights[:count], x)


def _multiply(weight: Any, x: Any) -> Any:
    """x f32 [n, in] times weight^T, in the weight's type -> f32 [n, out]."""
    import torch

    if weight.dtype != torch.float16:
        return (x.to(weight.dtype) @ weight.T).float()
    scale = (x.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp_min(1e-30)
    return ((x / scale).half() @ weight.T).float() * scale
