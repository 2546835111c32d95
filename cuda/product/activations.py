"""Activations on the device: x rounded to int8 in blocks of 32 columns, as ggml's q8_1, or kept as float32.

Both forms are stored in tiles of 32 blocks, so that a warp whose lanes hold consecutive blocks reads 512 contiguous
bytes. A tile has room for 8 columns of x (tokens). The bytes of a column are

    int8       0..511    q[0..15] of 32 blocks          float32   0..4095     x[4k..4k+3] of 32 blocks, k 0..7
             512..1023   q[16..31]
            1024..1279   step d, float32; the sums of
                         q[0..15] and of q[16..31], int16

so all columns are at constant distances; each further eight have tiles of their own, after all those of the first eight
(only experts.py takes so many). x = d * q: d maps the value of largest magnitude onto
-128, whatever its sign, and values of the other sign stop at 127, as in bridge/runtime/cpu/forms/activations.py. A
block with NaN or infinity gets d = NaN. A product with one token reads 40 bytes for 32 columns, from the L1 cache.

The rest of the last tile and some tiles after it are zero, because products read beyond the last block. `quantize`
writes the zeros too, so memory for records can hold anything before.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import (
    bits,
    bits_float,
    device_function,
    float_bits,
    half_warp_sum,
    launch_dependents,
    launches_wait,
    low_half,
    or_,
    other_half,
    round_even,
    shl,
    store_1,
    store_4,
    warp_any,
    warp_max,
)
from bridge.cuda.toolchain.unroll import expand
from numba import cuda

from bridge.errors import BridgeError

if TYPE_CHECKING:
    from bridge.cuda.toolchain.launch import Launch

COLUMNS = 8  # columns that a tile has room for
RECORD = 1280  # bytes of a column in a tile of int8 records
FLOAT_RECORD = 4096  # bytes of a column in a tile of float32 records
TILE = COLUMNS * RECORD
FLOAT_TILE = COLUMNS * FLOAT_RECORD
BEYOND = 3  # tiles of zeros after the last
_TINY = np.float32(2.0**-120)  # 128 / _TINY is still finite
_WARPS = 4  # warps in a block of `quantize`

float32 = np.float32
int32 = np.int32
KIND = "f32"
DEPENDENT = False


def _rounded(value):
    """(code, step) of 32 values, one per lane; takes the whole warp."""
    largest = warp_max(abs(value))
    positive = warp_any(value == largest)
    bad = warp_any(not (abs(value) <= float32(3.4028235e38)))
    sign = float32(-1) if positive else float32(1)
    step = largest * float32(0.0078125) * sign
    inverse = float32(128) * sign / largest if largest >= _TINY and not bad else float32(0)
    if largest < _TINY:
        step = float32(0)
    if bad:
        step = float32(np.nan)
        code = int32(0)
    else:
        code = round_even(min(value * inverse, float32(127)))
    return code, step


rounded = device_function(_rounded)


def _store(value, group, column, records):
    """Write the int8 record of block `group` of `column` from 32 values, one per lane; takes the whole warp."""
    lane = cuda.threadIdx.x & 31
    code, step = rounded(value)
    total = half_warp_sum(code)
    last = other_half(total)
    index = (group >> 5) * TILE + column * RECORD + (lane >> 4) * 512 + (group & 31) * 16 + (lane & 15)
    store_1(records, index, code)
    if lane == 0:
        index = ((group >> 5) * TILE + column * RECORD + 1024 + (group & 31) * 8) // 4
        store_4(records, index, float_bits(step))
        store_4(records, index + 1, or_(bits(total, 0, 0xFFFF), shl(last, 16)))


def _store_exact(value, group, column, records):
    """The same for the float32 record."""
    lane = cuda.threadIdx.x & 31
    base = (group >> 5) * FLOAT_TILE + column * FLOAT_RECORD
    store_4(records, (base + (lane >> 2) * 512 + (group & 31) * 16) // 4 + (lane & 3), float_bits(value))


store = cuda.jit(device=True)(_store)
store_exact = cuda.jit(device=True)(_store_exact)
put: Any = None


def _quantize(x, groups, room, records):
    """x [tokens, 32 * groups] -> records of `room` blocks, those after x zeros: one warp per token and block of 32.

    f16 and bf16 are passed as int16 bits.
    """
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    lane = cuda.threadIdx.x
    number = cuda.blockIdx.x * _WARPS + cuda.threadIdx.y
    token = number // room
    group = number % room
    value = float32(0)
    if group < groups:
        if KIND == "f32":
            value = x[token, group * 32 + lane]
        elif KIND == "bf16":
            value = bits_float(shl(x[token, group * 32 + lane], 16))
        else:
            value = low_half(x[token, group * 32 + lane])
    put(value, group + token // COLUMNS * room, token % COLUMNS, records)


@recipe
def quantizer(kind: str, exact: bool, dependent: bool = False) -> Any:
    """The kernel `quantize(x, groups, room, records)` for x of "f32", "f16" or "bf16"."""
    from bridge.cuda.toolchain.launch import Kernel

    name = f"{kind}_{'f32' if exact else 'int8'}{'_dependent' * dependent}"
    expanded = expand(_quantize, name, KIND=kind, DEPENDENT=dependent, put=store_exact if exact else store)
    element = "float32" if kind == "f32" else "int16"
    return Kernel(expanded, f"void({element}[:,::1], int64, int64, uint8[::1])", dependent=dependent)


class Records:
    """Device memory for the records of up to `max_n` tokens of `columns` values, and how it is filled.

    A product with a matrix takes up to COLUMNS of them, one with matrices of experts any number.

    `clear`: it is zeros at first, which whatever fills it other than by `quantize` needs.
    """

    def __init__(
        self, columns: int, max_n: int, device: Any = None, precision: str = "int8", clear: bool = True
    ):  # fmt: skip
        if columns % 32 or max_n < 1:
            raise BridgeError(f"records of {max_n} x {columns} values: must be 1 or more times a multiple of 32")
        from bridge.cuda.toolchain import device as devices

        self.columns = columns
        self.max_n = max_n
        self.exact = precision == "f32"
        self.device = devices.require(device)
        self.tiles = -(-columns // 1024) + BEYOND
        nbytes = -(-max_n // COLUMNS) * self.tiles * (FLOAT_TILE if self.exact else TILE)
        self.buffer = self.device.upload(np.zeros(nbytes, np.uint8)) if clear else self.device.empty(nbytes)

    def of(self, column: int) -> Records:
        """Those of one of the first COLUMNS: the same memory from there on."""
        one = copy(self)
        one.buffer, one.max_n = self.buffer[column * (FLOAT_RECORD if self.exact else RECORD) :], 1
        return one

    def quantize(self, x: Any, n: int, stream: Any = 0, dependent: bool = False) -> Records:
        """Fill from x [>= n, columns], float32, float16 or bfloat16, contiguous, on the device; returns self."""
        kernel, *arguments = self._launch(x, n, stream, dependent)
        kernel.launch(*arguments)
        return self

    def bind(self, x: Any, n: int, stream: Any) -> Launch:
        """A reusable launch that fills the records, its array 1, from x, its array 0."""
        kernel, *arguments = self._launch(x, n, stream)
        return kernel.bind(*arguments)

    def _launch(self, x: Any, n: int, stream: Any, dependent: bool = False) -> tuple[Any, ...]:
        """A kernel, and the arguments of its `launch`."""
        from bridge.cuda.toolchain import device as devices

        array, kind = devices.view(x), devices.kind(x)
        if kind is None:
            raise BridgeError(f"x has dtype {x.dtype}; must be float32, float16 or bfloat16")
        groups, room = self.columns // 32, 32 * self.tiles
        grid = n * room // _WARPS
        return quantizer(kind, self.exact, dependent), grid, (32, _WARPS), stream, array, groups, room, self.buffer
