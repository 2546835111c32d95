"""Weights of a matrix on the device as floats: tiles for torch's matrix product, rows for an embedding.

Weights of a FloatMatrix are copied. For all others:

A thread takes a unit of a row and leaves its values in shared memory, from where a warp stores those of its 32 units,
512 bytes at a time: if each lane stored its own, half of every sector of 32 bytes would be written. There a unit takes
16 bytes more, so that lanes that put theirs meet in no bank. Values are those of gguf's dequantization but for one
rounding of float32: d * sc * q and dmin * mn are subtracted in one step.
"""

from typing import Any

import numpy as np
from bridge.cuda.forms.matrix import DeviceMatrix, FloatMatrix
from bridge.cuda.forms.superblock import functions
from bridge.cuda.toolchain import device as devices
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import (
    bits,
    device_function,
    float_bits,
    launch_dependents,
    launches_wait,
    mad,
    or_,
    put_16,
    shared_16,
    shl,
    store_16,
    to_half,
    warp_meets,
)
from bridge.cuda.toolchain.unroll import expand, gathered, registers, unroll
from numba import cuda

from bridge.errors import BridgeError

# set per kernel by `expand`
CHOSEN = FACTORED = DEPENDENT = NUMBERED = False
KIND = "f32"
PIECES, PIECES_LOG = 8, 3  # of 16 bytes that a unit takes
load: Any = None
decode: Any = None
unpack: Any = None
floats: Any = ()
factor: Any = None
int32 = np.int32

THREADS = 128
_ELEMENT = {"f32": "float32", "f16": "int16", "bf16": "int16"}


def _packed(one, other):
    """Two float32 as halves in a word, rounded to nearest, ties to even; `one` is the lower."""
    if KIND == "f16":
        return or_(to_half(one), shl(to_half(other), 16))
    low = float_bits(one)
    high = float_bits(other)
    low = mad(bits(low, 16, 1), 1, mad(low, 1, 0x7FFF))
    high = mad(bits(high, 16, 1), 1, mad(high, 1, 0x7FFF))
    return or_(bits(low, 16, 0xFFFF), bits(high, 0, -65536))


packed: Any = None


def _dequantize(weights, room_16, first, chosen, out, count, units):
    """Write rows from `first` on, or those in int32 `chosen`, to out [count, columns]."""
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    thread = int32(cuda.threadIdx.x)
    lane = bits(thread, 0, 31)
    begin = int32(cuda.blockIdx.x) * THREADS + (thread - lane)  # the warp's first unit
    number = min(begin + lane, int32(count * units - 1))  # beyond the end the last unit is made again
    out_row = int32(np.uint32(number) // np.uint32(units))
    unit = int32(number - out_row * int32(units))
    row = int32(chosen[out_row] if CHOSEN else first + out_row)
    held = load(weights, room_16, mad(row, int32(units), unit))
    word = registers()
    value = registers()
    group = unpack(decode(weights, room_16, 0, held, unit) if NUMBERED else held, unit)
    row_factor = factor(weights, room_16, row) if FACTORED else 1
    area = cuda.shared.array(THREADS * (PIECES + 1), np.complex128)  # 16 bytes each
    put_at = mad(thread, PIECES + 1, 0)
    for i in unroll(8):
        quad = floats[i](group)
        for k in unroll(4):
            value[k] = quad[k] * row_factor if FACTORED else quad[k]
        if KIND == "f32":
            for k in unroll(4):
                word[k] = float_bits(value[k])
            put_16(area, int32(put_at + i), gathered(word, 4))
        else:
            word[i % 2 * 2] = packed(value[0], value[1])
            word[i % 2 * 2 + 1] = packed(value[2], value[3])
            if i % 2 == 1:
                put_16(area, int32(put_at + i // 2), gathered(word, 4))
    warp_meets()
    left = int32(min(count * units - begin, 32)) * PIECES
    take_at = mad(mad(bits(lane, PIECES_LOG, 31), 1, thread - lane), PIECES + 1, bits(lane, 0, PIECES - 1))
    out_at = np.int64(begin) * PIECES + lane
    for i in unroll(PIECES):
        if lane < left - 32 * i:
            store_16(out, out_at + 32 * i, shared_16(area, int32(take_at + 32 * i // PIECES * (PIECES + 1))))


@recipe
def kernel(type: str, kind: str, chosen: bool, dependent: bool = False) -> Any:
    """The kernel of a type that writes "f32", "f16" or "bf16"."""
    from bridge.cuda.toolchain.launch import Kernel

    formulas, pieces = functions(type), 8 if kind == "f32" else 4
    expanded = expand(
        _dequantize, f"{type}_{kind}{'_rows' * chosen}{'_dependent' * dependent}", CHOSEN=chosen,
        DEPENDENT=dependent, KIND=kind, PIECES=pieces, PIECES_LOG=pieces.bit_length() - 1,
        load=formulas.load, decode=formulas.decode, NUMBERED=formulas.decode is not None,
        unpack=formulas.unpack, floats=formulas.floats,
        FACTORED=formulas.layout.factored, factor=formulas.factor,
        packed=device_function(expand(_packed, kind, KIND=kind)),
    )  # fmt: skip
    element = _ELEMENT[kind]
    signature = f"void(uint8[::1], int64, int64, int32[::1], {element}[:,::1], int64, int64)"
    return Kernel(expanded, signature, dependent=dependent)


def tile(matrix: DeviceMatrix | FloatMatrix, first: int, count: int, out: Any, stream: Any) -> None:
    """Queue writing `count` rows from `first` on to `out`, contiguous float16, bfloat16 or float32 [count, columns]."""
    if not 0 <= first <= first + count <= matrix.rows:
        raise BridgeError(f"{matrix.name}: rows {first} to {first + count} are not in a matrix of {matrix.rows}")
    if isinstance(matrix, FloatMatrix):
        out.copy_(matrix.weight[first : first + count])
    else:
        _launch(matrix, first, None, count, out, stream, False)


def rows(matrix: DeviceMatrix | FloatMatrix, ids: Any, out: Any, n: int, stream: Any, dependent: bool = False) -> None:
    """Queue writing the rows in the first n of int32 `ids` on the device to `out` [n, columns]; ids go unchecked."""
    if isinstance(matrix, FloatMatrix):
        out[:n].copy_(matrix.weight.index_select(0, ids[:n]))
    else:
        _launch(matrix, 0, ids, n, out, stream, dependent)


def _launch(matrix: DeviceMatrix, first: int, ids: Any, count: int, out: Any, stream: Any, dependent: bool) -> None:
    kind = devices.kind(out)
    if kind is None or tuple(out.shape) < (count, matrix.columns) or out.shape[1] != matrix.columns:
        raise BridgeError(f"{matrix.name}: out is {out.dtype} {list(out.shape)}; must be [{count}, {matrix.columns}]")
    if not count:
        return
    kernel(matrix.type, kind, ids is not None, dependent).launch(
        -(-count * matrix.units // THREADS), THREADS, stream, matrix.buffer, matrix.room // 16, first,
        matrix.device.placeholder("int32") if ids is None else devices.view(ids), devices.view(out), count,
        matrix.units,
    )  # fmt: skip
