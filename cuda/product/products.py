"""A decoder's matrices on the device: those with the same input share launches if their types allow it.

    Stack     matrices of one input, their outputs one after the other (q, k, v); neighbours of one type are one
              matrix on the device, and two of these one launch. Types without a kernel (FloatMatrix) are left to torch
    Gated     gate and up: where both are of one type, row by row in turn, so that the launch ends with the activation

`step` is for one token, or up to four with the same sums as of each alone; other tokens go through matmul.py.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from bridge.cuda.forms.layout import DeviceLayout
from bridge.cuda.forms.matrix import DeviceMatrix, FloatMatrix, has_kernel, kind_of
from bridge.cuda.norm import activation_grid, activation_kernel
from bridge.cuda.product import matvec
from bridge.cuda.product.activations import Records
from bridge.cuda.product.gates import by_torch
from bridge.cuda.product.halves import Halves, floats_by_torch, gated
from bridge.cuda.product.matmul import Multiplier, product
from bridge.cuda.product.matvec import Normed, Recorded
from bridge.cuda.product.matvec_shape import MatvecShape, choose_shape
from bridge.cuda.product.mma_int8 import tiles_of
from bridge.cuda.product.token_records import TokenRecords, recorded
from bridge.cuda.toolchain.device import Device, view, zeros

from bridge.blocks.read import WRITTEN
from bridge.runtime.quant_tensor import QuantTensor


def device_bytes(tensor: QuantTensor, precision: str) -> int:
    """Bytes that a matrix takes on the device."""
    rows, columns = tensor.shape
    if has_kernel(tensor):
        return DeviceLayout(WRITTEN[tensor.type]).nbytes(rows, columns)
    return rows * columns * (4 if kind_of(tensor.type, precision) == "float32" else 2)


class Vector:
    """Values of up to four tokens, f32 [n, columns], and their records, which products read; only floats are multiplied
    by others than whole blocks of 32. `recorded`: the records are those of the values."""

    def __init__(self, columns: int, device: Device, precision: str, n: int = 1):
        self.floats = zeros(device, (n, columns))
        self.recordable = columns % 32 == 0
        self.records = Records(max(32, columns // 32 * 32), n, device, precision)
        self.recorded = False

    def tokens(self) -> Iterator[tuple[Any, Records]]:
        """Each token's values, f32 [columns], and where its records are."""
        for column, floats in enumerate(self.floats):
            yield floats, self.records.of(column)

    def record(self, dependent: bool = False) -> None:
        """Make the records, if there are none yet."""
        if self.recordable and not self.recorded:
            self.records.quantize(view(self.floats), len(self.floats), self.records.device.stream(), dependent)
        self.recorded = True


class Stack:
    """Matrices that multiply one vector; `rows` in all. `bias` f32 [rows] or None."""

    def __init__(self, tensors: Sequence[QuantTensor], multiplier: Multiplier, bias: Any = None):
        self.multiplier, self.bias = multiplier, bias
        device = multiplier.device
        self.columns = tensors[0].shape[1]
        self.rows = 0
        self.parts: list[tuple[int, DeviceMatrix | FloatMatrix]] = []
        for (_, by_kernel), group in groupby(tensors, key=lambda t: (t.type, has_kernel(t))):
            members = list(group)
            matrices: list[DeviceMatrix | FloatMatrix] = (
                [DeviceMatrix.upload(members, device)]
                if by_kernel
                else [FloatMatrix(tensor, device, multiplier.precision) for tensor in members]
            )
            for matrix in matrices:
                self.parts.append((self.rows, matrix))
                self.rows += matrix.rows

    @property
    def fuses(self) -> bool:
        """Whether its launches can include the steps before and after a product: none may be torch's."""
        return all(isinstance(matrix, DeviceMatrix) for _, matrix in self.parts)

    @property
    def records(self) -> bool:
        """Whether its launch can make records of the result: there must be only one."""
        return self.fuses and len(self.parts) == 1 and self.rows % 32 == 0

    def step(
        self, x: Vector, y: Any, accumulate: bool = False, normed: Normed | None = None,
        recorded: Recorded | None = None, dependent: bool = False,
    ) -> None:  # fmt: skip
        """Queue y (f32 [n, rows]) = or += W x + bias; see matvec.py for the last three."""
        stream, parts, n = self.multiplier.device.stream(), list(self.parts), len(y)
        pair: Any = parts[:2]
        two = len(pair) > 1 and not accumulate and all(isinstance(matrix, DeviceMatrix) for _, matrix in pair)
        if two and n == 1:
            places = [slice(first, first + matrix.rows) for first, matrix in pair]
            rows: Any = tuple(view(y[:, place]) for place in places)
            offsets: Any = None if self.bias is None else tuple(view(self.bias[place]) for place in places)
            matrices: Any = tuple(matrix for _, matrix in pair)
            matvec.launch_pair(matrices, x.records, rows, stream, offsets, normed, dependent)
            parts = parts[2:]
        for first, matrix in parts:
            out = y[:, first : first + matrix.rows]
            bias = None if self.bias is None else self.bias[first : first + matrix.rows]
            if isinstance(matrix, FloatMatrix):
                for row, values in zip(out, x.floats, strict=True):  # sums of several would be others
                    result = product(matrix.weight, values[None])[0]
                    if bias is not None:
                        result += bias
                    row.copy_(row + result if accumulate else result)
                continue
            offset = None if bias is None else view(bias)
            alone = normed is None and recorded is None and not (two and matrix in (pair[0][1], pair[1][1]))
            matvec.launch(
                matrix, x.records, view(out, apart=True), n, stream, accumulate, offset, of_one(matrix, x, alone),
                normed, recorded, dependent,
            )  # fmt: skip

    def form(self, n: int) -> str:
        """What products of n tokens multiply, see Multiplier."""
        return self.multiplier.form([matrix for _, matrix in self.parts], n) if self.fuses else "floats"  # type: ignore[misc]

    def multiply(self, x: Any, onto: Any = None) -> Any:
        """x [n, columns] of floats, or in its form, -> f32 [n, rows], with the bias; added to `onto` where that is
        given."""
        y = _empty(x, self.rows) if onto is None else onto
        for first, matrix in self.parts:
            rows = slice(first, first + matrix.rows)
            bias = None if self.bias is None else self.bias[rows]
            self.multiplier.multiply(matrix, x, y[:, rows], bias, accumulate=onto is not None)
        return y


def of_one(matrix: DeviceMatrix, x: Vector, alone: bool) -> MatvecShape:
    """The shape of a launch for one token, with which several have its sums."""
    return choose_shape(matrix, 1, x.records.exact, alone=alone)


def _empty(x: Any, rows: int) -> Any:
    """f32 [n, rows] for the products of x."""
    import torch

    values = x.buffer if isinstance(x, TokenRecords) else x.scale if isinstance(x, Halves) else x
    n = x.n if isinstance(x, TokenRecords) else len(values)
    return torch.empty((n, rows), dtype=torch.float32, device=values.device)


class Gated:
    """activation(gate x, up x), of gates.py: what a decoder's down projection multiplies.

    `up` None: activation(gate x). `bias` f32 [2 * inner], that of gate first, or [inner] where there is no up; or None
    """

    def __init__(
        self, gate: QuantTensor, up: QuantTensor | None, multiplier: Multiplier, bias: Any = None,
        activation: str = "silu",
    ):  # fmt: skip
        self.multiplier, self.activation, self.bias = multiplier, activation, bias
        self.inner, self.gated = gate.shape[0], up is not None
        self._counters: Any = None
        tensors = [gate] if up is None else [gate, up]
        alike = all(has_kernel(tensor) and tensor.type == gate.type for tensor in tensors)
        self.fused = alike and self.inner % 32 == 0
        self.width = len(tensors) * self.inner
        if self.fused:
            self.matrix = DeviceMatrix.upload(tensors, multiplier.device, interleave=True)
            if bias is not None:
                self.bias = bias.reshape(len(tensors), -1).T.reshape(-1).contiguous()
        else:
            self.stack = Stack(tensors, multiplier, bias)

    @property
    def fuses(self) -> bool:
        """Whether its launches can include the step before the product."""
        return self.fused or self.stack.fuses

    def step(self, x: Vector, y: Vector, normed: Normed | None = None, dependent: bool = False) -> None:
        """Queue y and its records; see matvec.py for `normed` and `dependent`."""
        import torch

        device, n = self.multiplier.device, len(y.floats)
        if self.fused:
            if self._counters is None:
                self._counters = view(zeros(device, self.inner // 32, torch.int32))
            out, bias = view(y.floats), None if self.bias is None else view(self.bias)
            how = normed, Recorded(y.records, self._counters), dependent, bias, self.activation, self.gated
            shape = of_one(self.matrix, x, False)
            matvec.launch_activated(self.matrix, x.records, out, n, device.stream(), shape, *how)
            return
        values = torch.empty((n, self.width), device=y.floats.device)
        self.stack.step(x, values, normed=normed, dependent=dependent)
        if y.recordable:
            kernel = activation_kernel(self.multiplier.precision == "f32", dependent, self.activation, self.gated)
            for given, (floats, records) in zip(values, y.tokens(), strict=True):
                arguments = view(given), view(floats), records.buffer, np.int32(self.inner)
                kernel.launch(*activation_grid(self.inner), device.stream(), *arguments)
        else:
            gate, up = values.chunk(2, 1) if self.gated else (values, None)
            y.floats.copy_(by_torch(self.activation, gate, up))

    def form(self, n: int) -> str:
        """What products of n tokens multiply, see Multiplier."""
        return self.multiplier.form([self.matrix], n) if self.fused else self.stack.form(n)

    def multiply(self, x: Any, then: Stack | None = None) -> Any:
        """x f32 [n, columns], or in its form, -> [n, inner] in the form that `then` multiplies, or as floats."""
        values = _empty(x, self.width) if self.fused else self.stack.multiply(x)
        form, device, scale = "floats" if then is None else then.form(len(values)), self.multiplier.device, None
        if self.fused and form == "halves" and self.bias is None:
            scale = self.multiplier.sums(self.matrix, x, values)
        elif self.fused:
            self.multiplier.multiply(self.matrix, x, values, self.bias)
        way = ("gate_in_turn" if self.fused else "gate") if self.gated else "gate_alone"
        if form == "int8":
            return recorded(values, tiles_of(len(values)), device, way, activation=self.activation)
        if form == "halves":
            return gated(values, way, device, scale, self.activation)
        return floats_by_torch(way, values, activation=self.activation)
