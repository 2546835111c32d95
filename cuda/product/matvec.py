"""Products of a quantized matrix with up to eight columns of activations: one launch, every weight read once.

matvec_kernel.py says what a launch does and what that costs, matvec_shape.py how it shares the work.

In a decoder's step (products.py) a product can include the steps before and after it, which saves launches:

    recorded   once 32 values are complete, the thread block that ends last makes the next product's record of
               them, times `gain` if they are to be normalized first, and stores the sum of their squares
    normed     y times 1 / sqrt(mean of squares + eps), from such sums: the records were made before they were known

Two matrices of different types can share a launch (`launch_pair`): its first blocks multiply one, the others the other.
So v in Q6_K, whose 1024 rows are too few for a GPU by themselves, runs beside q and k in Q4_K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from bridge.cuda.forms.matrix import DeviceMatrix
from bridge.cuda.product.activations import COLUMNS, Records
from bridge.cuda.product.matvec_kernel import OF_EXPERTS, expanded_product, kernel
from bridge.cuda.product.matvec_shape import MatvecShape, choose_shape, registers_of
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import block_x, device_function
from bridge.cuda.toolchain.unroll import expand

from bridge.errors import BridgeError

if TYPE_CHECKING:
    from bridge.cuda.toolchain.launch import Launch

# set by `pair_kernel`
first: Any = None
second: Any = None
int32 = np.int32


@dataclass(frozen=True)
class Normed:
    """Sums of squares f32 [columns / 32] of the values whose records a product reads; `eps` is added to their mean.

    They are loaded four at a time: zeros follow up to a multiple of four. Those of each column of x follow the last
    one's, for as many columns as the kernel has (1, 2 or 4).
    """

    sums: Any
    eps: float

    @staticmethod
    def length(columns: int) -> int:
        """Elements of `sums` for so many columns."""
        return -(-columns // 128) * 4


@dataclass(frozen=True)
class Recorded:
    """Where records of a product's result go.

    counters        int32 [rows / 32], zeros before and after
    gain, squares   f32 [rows], by which the values are multiplied, and the `sums` of a Normed, or neither
    """

    records: Records
    counters: Any
    gain: Any = None
    squares: Any = None


def launch(
    matrix: DeviceMatrix, records: Records, y: Any, n: int, stream: Any, accumulate: bool = False,
    bias: Any = None, shape: MatvecShape | None = None, normed: Normed | None = None,
    recorded: Recorded | None = None, dependent: bool = False,
) -> None:  # fmt: skip
    """Queue y = W x for the first n columns of the records; y float32 [n, rows] on the device, its rows may be apart.

    `accumulate` adds to what is in y, `bias` float32 [rows] is added to every column; `normed` and
    `recorded` are for up to four columns. `dependent`: it may begin while the launch before it ends (launch.py).
    """
    epilogue = "_".join(name for name, wanted in (("bias", bias is not None), ("accumulate", accumulate)) if wanted)
    product, *arguments = _launch(matrix, records, y, n, stream, bias, epilogue, shape, normed, recorded, dependent)
    product.launch(*arguments)


def bind(matrix: DeviceMatrix, records: Records, y: Any, n: int, stream: Any, bias: Any = None) -> Launch:
    """A reusable launch of y = W x + bias; its arrays are the weights, the records, y and the bias."""
    product, *arguments = _launch(matrix, records, y, n, stream, bias, "" if bias is None else "bias", None)
    return product.bind(*arguments)


def launch_activated(
    matrix: DeviceMatrix, records: Records, y: Any, n: int, stream: Any, shape: MatvecShape | None = None,
    normed: Normed | None = None, recorded: Recorded | None = None, dependent: bool = False, bias: Any = None,
    activation: str = "silu", gated: bool = True,
) -> None:  # fmt: skip
    """Queue y[r] = activation(gate r . x, up r . x), see gates.py, the matrix uploaded with interleave; y float32
    [n, rows / 2]. Not `gated`: of row r . x alone; y float32 [n, rows]. `bias` is in the order of the rows."""
    epilogue = "bias_" * (bias is not None) + activation + "_ungated" * (not gated)
    product, *arguments = _launch(matrix, records, y, n, stream, bias, epilogue, shape, normed, recorded, dependent)
    product.launch(*arguments)


def check_columns(matrix: DeviceMatrix, records: Records, n: int) -> None:
    """Raises BridgeError where a matrix cannot multiply n columns of the records."""
    most = min(records.max_n, COLUMNS)
    if records.columns != matrix.columns or not 1 <= n <= most:
        raise BridgeError(
            f"{matrix.name}: {n} columns of {records.columns} values; must be 1 to {most} of {matrix.columns}"
        )


def work_of(
    matrix: DeviceMatrix, n: int, exact: bool, shape: MatvecShape | None = None, products: int = 1,
    alone: bool = True,
) -> tuple[MatvecShape, int]:  # fmt: skip
    """How a product with n columns, one of so many in a launch, is shared, see choose_shape; and its blocks."""
    shape = shape or choose_shape(matrix, n, exact, products, alone)
    if shape.rows > matrix.rows:
        shape = shape._replace(rows=1)
    sets = -(-matrix.rows // shape.rows)
    return shape, -(-sets * shape.split // shape.warps)


def _launch(
    matrix, records, y, n, stream, bias, epilogue, shape, normed=None, recorded=None, dependent=False
) -> tuple[Any, ...]:
    """A kernel, and the arguments of its `launch`."""
    check_columns(matrix, records, n)
    alone = normed is None and recorded is None
    shape, grid = work_of(matrix, n, records.exact, shape, alone=alone)
    more: tuple[Any, ...] = ()
    if not alone:
        names = [epilogue] * bool(epilogue) + ["normed"] * (normed is not None)
        placeholder = matrix.device.placeholder()
        more = (placeholder, np.float32(0)) if normed is None else (normed.sums, np.float32(normed.eps))
        if recorded is None:
            none = matrix.device.placeholder
            more += none("int32"), placeholder, placeholder, none("uint8")
        else:
            names.append("recorded" if recorded.gain is None else "recorded_gain")
            gain = (placeholder, placeholder) if recorded.gain is None else (recorded.gain, recorded.squares)
            more += recorded.counters, *gain, recorded.records.buffer
        epilogue = "_".join(names)
    product = kernel(matrix.type, 1 << (n - 1).bit_length(), shape, records.exact, epilogue, dependent)
    offset = matrix.device.placeholder() if bias is None else bias
    arguments = matrix.buffer, matrix.room // 16, records.buffer, y, offset, matrix.rows, matrix.units, *more
    return product, grid, (32, shape.warps), stream, *arguments


def _both(
    weights, room_16, y, bias, rows, other_weights, other_room_16, other_y, other_bias, other_rows, x, units, sums, eps,
    blocks,
):  # fmt: skip
    if block_x() < int32(blocks):
        first(weights, room_16, x, y, bias, rows, units, sums, eps)
    else:
        second(other_weights, other_room_16, x, other_y, other_bias, other_rows, units, sums, eps, blocks)


@recipe
def pair_kernel(
    types: tuple[str, str], shapes: tuple[MatvecShape, MatvecShape], exact: bool, epilogue: str, dependent: bool
) -> Any:
    """The kernel of two types for one column; `epilogue` names "bias" and "normed"."""
    from bridge.cuda.toolchain.launch import Kernel

    unused = ("counters", "gain", "squares", "records", *OF_EXPERTS)
    one, other = (
        device_function(expanded_product(type, 1, shape, exact, epilogue, dependent, without))
        for type, shape, without in zip(types, shapes, ((*unused, "skip"), unused), strict=True)
    )
    name = "_".join([*types, *("".join(map(str, shape)) for shape in shapes), "f32" if exact else "int8"])
    name += f"_{epilogue}" * bool(epilogue) + "_dependent" * dependent
    matrix = "uint8[::1], int64, float32[:,::1], float32[::1], int64"
    signature = f"void({matrix}, {matrix}, uint8[::1], int64, float32[::1], float32, int64)"
    registers = max(registers_of(type, 1, shape) for type, shape in zip(types, shapes, strict=True))
    return Kernel(expand(_both, name, first=one, second=other), signature, registers, dependent=dependent)


def launch_pair(
    matrices: tuple[DeviceMatrix, DeviceMatrix], records: Records, y: tuple[Any, Any], stream: Any,
    bias: tuple[Any, Any] | None = None, normed: Normed | None = None, dependent: bool = False,
) -> None:  # fmt: skip
    """Queue y = W x + bias of both matrices for one column of the records; y float32 [1, rows] each on the device.

    `bias` float32 [rows] each; see `launch` for the others. Raises BridgeError where the columns do not fit.
    """
    one, other = matrices
    for matrix in matrices:
        check_columns(matrix, records, 1)
    (shape, blocks), (other_shape, others) = (work_of(matrix, 1, records.exact, alone=False) for matrix in matrices)
    none = one.device.placeholder()
    biases = (none, none) if bias is None else bias
    epilogue = "_".join(["bias"] * (bias is not None) + ["normed"] * (normed is not None))
    sums, eps = (none, 0.0) if normed is None else (normed.sums, normed.eps)
    pair = pair_kernel((one.type, other.type), (shape, other_shape), records.exact, epilogue, dependent)
    parts = [
        (matrix.buffer, matrix.room // 16, out, offset, matrix.rows)
        for matrix, out, offset in zip(matrices, y, biases, strict=True)
    ]
    grid, block = blocks + others, (32, shape.warps)
    pair.launch(grid, block, stream, *parts[0], *parts[1], records.buffer, one.units, sums, np.float32(eps), blocks)
