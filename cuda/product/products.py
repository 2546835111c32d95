"""A decoder's matrices on the device: those with the same input share launches if their types allow it.

    Stack     matrices of one input, their outputs one after the other (q, k, v); neighbours of one type are one
              matrix on the device, and two of these one launch. Types without a kernel (FloatMatrix) are left to torch
    Gated     gate and up: where both are of one type, row by row in turn, so that the launch ends with SwiGLU

`bind` gives the launches for one token; several tokens go through matmul.py.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from bridge.cuda.forms.layout import DeviceLayout
from bridge.cuda.forms.matrix import DeviceMatrix, FloatMatrix, kind_of
from bridge.cuda.norm import silu_grid, silu_kernel
from bridge.cuda.product import matvec
from bridge.cuda.product.activations import Records
from bridge.cuda.product.halves import Halves, gated
from bridge.cuda.product.matmul import Multiplier, product
from bridge.cuda.product.matvec import Normed, Recorded
from bridge.cuda.product.mma_int8 import tiles_of
from bridge.cuda.product.token_records import TokenRecords, recorded
from bridge.cuda.toolchain.device import Device, view, zeros

from bridge.blocks.read import WRITTEN
from bridge.runtime.quant_tensor import QuantTensor

Call = Callable[[], None]


def device_bytes(tensor: QuantTensor, precision: str) -> int:
    """Bytes that a matrix takes on the device."""
    rows, columns = tensor.shape
    if tensor.type in WRITTEN:
        return DeviceLayout(WRITTEN[tensor.type]).nbytes(rows, columns)
    return rows * columns * (4 if kind_of(tensor.type, precision) == "float32" else 2)


class Vector:
    """One token's values, f32 [columns], and their records, which its products read."""

    def __init__(self, columns: int, device: Device, precision: str):
        self.floats = zeros(device, columns)
        self.records = Records(columns, 1, device, precision)
        self._row = view(self.floats.reshape(1, -1))

    def quantize(self, dependent: bool = False) -> None:
        """Make the records of the floats."""
        self.records.quantize(self._row, 1, self.records.device.stream(), dependent)


class Stack:
    """Matrices that multiply one vector; `rows` in all. `bias` f32 [rows] or None."""

    def __init__(self, tensors: Sequence[QuantTensor], multiplier: Multiplier, bias: Any = None):
        self.multiplier, self.bias = multiplier, bias
        device = multiplier.device
        self.columns = tensors[0].shape[1]
        self.rows = 0
        self.parts: list[tuple[int, DeviceMatrix | FloatMatrix]] = []
        for type, group in groupby(tensors, key=lambda t: t.type):
            members = list(group)
            matrices: list[DeviceMatrix | FloatMatrix] = (
                [DeviceMatrix.upload(members, device)]
                if type in WRITTEN
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

    def bind(
        self, x: Vector, y: Any, accumulate: bool = False, normed: Normed | None = None,
        recorded: Recorded | None = None, dependent: bool = False,
    ) -> list[Call]:  # fmt: skip
        """Calls that compute y (f32 [rows]) = or += W x for one token; see matvec.py for the last three."""
        more = normed, recorded, dependent
        parts, calls = list(self.parts), []
        if len(parts) > 1 and not accumulate and all(isinstance(matrix, DeviceMatrix) for _, matrix in parts[:2]):
            calls, parts = [self._bound_pair(x, y, normed, dependent)], parts[2:]
        return calls + [self._bound(first, matrix, x, y, accumulate, *more) for first, matrix in parts]

    def _bound_pair(self, x: Vector, y: Any, normed: Normed | None, dependent: bool) -> Call:
        """A call for the first two matrices."""
        matrices: Any = tuple(matrix for _, matrix in self.parts[:2])
        parts = [slice(first, first + matrix.rows) for first, matrix in self.parts[:2]]
        rows: Any = tuple(view(y[part].reshape(1, -1)) for part in parts)
        bias: Any = None if self.bias is None else tuple(view(self.bias[part]) for part in parts)

        def launch() -> None:
            stream = self.multiplier.device.stream()
            matvec.launch_pair(matrices, x.records, rows, stream, bias, normed, dependent)

        return launch

    def _bound(
        self, first: int, matrix: Any, x: Vector, y: Any, accumulate: bool, normed: Normed | None,
        recorded: Recorded | None, dependent: bool,
    ) -> Call:  # fmt: skip
        out = y[first : first + matrix.rows]
        bias = None if self.bias is None else self.bias[first : first + matrix.rows]
        if isinstance(matrix, FloatMatrix):

            def by_torch() -> None:
                result = product(matrix.weight, x.floats[None])[0]
                if bias is not None:
                    result += bias
                out.copy_(out + result if accumulate else result)

            return by_torch
        rows, offset = view(out.reshape(1, -1)), None if bias is None else view(bias)

        def launch() -> None:
            stream = self.multiplier.device.stream()
            matvec.launch(matrix, x.records, rows, 1, stream, accumulate, offset, None, normed, recorded, dependent)

        return launch

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


def _empty(x: Any, rows: int) -> Any:
    """f32 [n, rows] for the products of x."""
    import torch

    values = x.buffer if isinstance(x, TokenRecords) else x.scale if isinstance(x, Halves) else x
    n = x.n if isinstance(x, TokenRecords) else len(values)
    return torch.empty((n, rows), dtype=torch.float32, device=values.device)


class Gated:
    """silu(gate x) * up x: what a decoder's down projection multiplies."""

    def __init__(self, gate: QuantTensor, up: QuantTensor, multiplier: Multiplier, bias: Any = None):
        self.multiplier = multiplier
        self.inner = gate.shape[0]
        self.fused = gate.type == up.type and gate.type in WRITTEN and bias is None
        self.stack: Any = None
        if self.fused:
            self.matrix = DeviceMatrix.upload([gate, up], multiplier.device, interleave=True)
        else:
            self.stack = Stack([gate, up], multiplier, bias)

    @property
    def fuses(self) -> bool:
        """Whether its launches can include the step before the product."""
        return self.fused or self.stack.fuses

    def bind(self, x: Vector, y: Vector, normed: Normed | None = None, dependent: bool = False) -> list[Call]:
        """Calls that compute y and its records for one token; see matvec.py for `normed` and `dependent`."""
        device = self.multiplier.device
        if self.fused:
            import torch

            out = view(y.floats.reshape(1, -1))
            recorded = Recorded(y.records, view(zeros(device, self.inner // 32, torch.int32)))

            def launch() -> None:
                matvec.launch_silu(self.matrix, x.records, out, 1, device.stream(), None, normed, recorded, dependent)

            return [launch]
        both = zeros(device, 2 * self.inner)
        kernel = silu_kernel(self.multiplier.precision == "f32", dependent)
        arguments = view(both), view(y.floats), y.records.buffer, np.int32(self.inner)
        grid = silu_grid(self.inner)
        products = self.stack.bind(x, both, normed=normed, dependent=dependent)
        return [*products, lambda: kernel.launch(*grid, device.stream(), *arguments)]

    def form(self, n: int) -> str:
        """What products of n tokens multiply, see Multiplier."""
        return self.multiplier.form([self.matrix], n) if self.fused else self.stack.form(n)

    def multiply(self, x: Any, then: Stack) -> Any:
        """x f32 [n, columns], or in its form, -> [n, inner] in the form that `then` multiplies."""
        import torch

        both = _empty(x, 2 * self.inner) if self.fused else self.stack.multiply(x)
        form, device, scale = then.form(len(both)), self.multiplier.device, None
        if self.fused and form == "halves":
            scale = self.multiplier.sums(self.matrix, x, both)
        elif self.fused:
            self.multiplier.multiply(self.matrix, x, both)
        if form == "int8":
            return recorded(both, tiles_of(len(both)), device, "gate_in_turn" if self.fused else "gate")
        if form == "halves":
            return gated(both, self.fused, device, scale)
        gate, up = (both[:, ::2], both[:, 1::2]) if self.fused else both.chunk(2, dim=1)
        return torch.nn.functional.silu(gate).mul_(up)
