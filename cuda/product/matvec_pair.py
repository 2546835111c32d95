"""Two products of matrices of different types with one vector in one launch: v in Q6_K beside q and k in Q4_K.

The first blocks multiply one matrix, the others the other; a block does what it does in matvec.py. So v's 1024 rows,
too few for a GPU by themselves, run beside q's and k's, and a layer has a launch less.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from bridge.cuda.forms.matrix import DeviceMatrix
from bridge.cuda.product import matvec
from bridge.cuda.product.activations import Records
from bridge.cuda.product.matvec import Normed
from bridge.cuda.product.matvec_kernel import OF_EXPERTS, expanded_product
from bridge.cuda.product.matvec_shape import MatvecShape, registers_of
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import block_x, device_function
from bridge.cuda.toolchain.unroll import expand

# set by `kernel`
first: Any = None
second: Any = None
int32 = np.int32


def _both(
    weights, room_16, y, bias, rows, other_weights, other_room_16, other_y, other_bias, other_rows, x, units, sums, eps,
    blocks,
):  # fmt: skip
    if block_x() < int32(blocks):
        first(weights, room_16, x, y, bias, rows, units, sums, eps)
    else:
        second(other_weights, other_room_16, x, other_y, other_bias, other_rows, units, sums, eps, blocks)


@recipe
def kernel(
    types: tuple[str, str], shapes: tuple[MatvecShape, MatvecShape], exact: bool, epilogue: str, dependent: bool
) -> Any:
    """The kernel of two types for one column; `epilogue` names "bias" and "normed"."""
    from bridge.cuda.toolchain.launch import Kernel

    unused = ("counters", "gain", "squares", "records", *OF_EXPERTS)
    one, other = (
        device_function(expanded_product(type, 1, shape, exact, epilogue, dependent, without), True)
        for type, shape, without in zip(types, shapes, ((*unused, "skip"), unused), strict=True)
    )
    name = "_".join([*types, *("".join(map(str, shape)) for shape in shapes), "f32" if exact else "int8"])
    name += f"_{epilogue}" * bool(epilogue) + "_dependent" * dependent
    matrix = "uint8[::1], int64, float32[:,::1], float32[::1], int64"
    signature = f"void({matrix}, {matrix}, uint8[::1], int64, float32[::1], float32, int64)"
    registers = max(registers_of(type, 1, shape) for type, shape in zip(types, shapes, strict=True))
    return Kernel(expand(_both, name, first=one, second=other), signature, registers, dependent=dependent)


def launch(
    matrices: tuple[DeviceMatrix, DeviceMatrix], records: Records, y: tuple[Any, Any], stream: Any,
    bias: tuple[Any, Any] | None = None, normed: Normed | None = None, dependent: bool = False,
) -> None:  # fmt: skip
    """Queue y = W x + bias of both matrices for one column of the records; y float32 [1, rows] each on the device.

    `bias` float32 [rows] each; see matvec.py for the others. Raises BridgeError where the columns do not fit.
    """
    one, other = matrices
    for matrix in matrices:
        matvec.check_columns(matrix, records, 1)
    (shape, blocks), (other_shape, others) = (
        matvec.work_of(matrix, 1, records.exact, alone=False) for matrix in matrices
    )
    none = one.device.placeholder()
    biases = (none, none) if bias is None else bias
    epilogue = "_".join(["bias"] * (bias is not None) + ["normed"] * (normed is not None))
    sums, eps = (none, 0.0) if normed is None else (normed.sums, normed.eps)
    pair = kernel((one.type, other.type), (shape, other_shape), records.exact, epilogue, dependent)
    parts = [
        (matrix.buffer, matrix.room // 16, out, offset, matrix.rows)
        for matrix, out, offset in zip(matrices, y, biases, strict=True)
    ]
    grid, block = blocks + others, (32, shape.warps)
    pair.launch(grid, block, stream, *parts[0], *parts[1], records.buffer, one.units, sums, np.float32(eps), blocks)
