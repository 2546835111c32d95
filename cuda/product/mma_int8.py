"""Products of a quantized matrix with tokens of int8 on tensor cores: the weights stay the integers that they are.

A warp takes 16 rows and up to 48 tokens, a *group* of token_records.py, and walks along the rows 128 columns, a step,
at a time. mma.sync's k is the 32 columns of a unit, which share a scale (16 where a type has a scale for 16), so its
sums are exact in int32; then float32 adds, for every unit, row and token,

    d_x * d_w * sum(q * x)  +  m_w * (d_x * sum(x))        m_w: what a type with minima adds to each weight

Lane 4g + t loads unit t of the step of rows g and g + 8 as it comes from memory, makes bytes of the codes and leaves
them, with d_w and m_w, in the warp's part of shared memory, where the lanes find their fragments: lane 4g + t words t
and t + 4 of each unit, of both rows, in 16 bytes. A unit takes 33 times 16 bytes there, of which the last are unused,
so that neither stores nor loads of a warp meet in a bank. The warps of a block share tokens, whose next step is copied
meanwhile.

Q2_K has a scale and a min for 16 columns. A code times its scale, at most 45, is a byte still, so that units are one
product; the mins, as bytes that multiply x, are another: d_x * (d * sum(sc * q * x) - dmin * sum(mn * x)).

Groups of tokens are neighbours in the grid: they read the same rows at the same time, all but the first from L2.

Floors as in mma.py, clocks of a multiprocessor for 16 rows x 128 columns; 8192 x 28672 has 869 of these for each. The
loop of Q4_K has 269 instructions for 16 tokens and 572 for 48 on 9.0, so 118 are for the weights and 76 for 8 tokens:
a product, 4 conversions, 4 multiplications, 8 of multiply-add and 2 loads for 32 columns. Halves take 393 for 16, 423
for 32. The counts of all types are in `_ISSUED`. Beyond 64 tokens halves are stored and loaded, 8192 bytes, and then
multiplied:

              H200                        A100                        RTX 4090
    tokens    memory  here  halves        memory  here  halves        memory  here  halves
    Q4_K  16      61    68      98           105   105     105           384   384     384
    Q4_K  24      61    86     105           105   105     105           384   384     384
    Q4_K  96      61   287     492           105   384     849           384   384    3115
    Q4_K 128      61   430     492           105   576     849           384   430    3115
    Q4_K 512      61  1578     975           105  2112    1682           384  1578    6308
    Q5_K  16      74    76     108           128   128     128           469   469     469
    Q5_K  96      74   305     505           128   384     873           469   469    3200
    Q3_K  16      47   104      95            81   104      95           299   299     299
    Q3_K  96      47   407     478            81   407     826           299   407    3029
    Q4_0  16      61    66      76           105   105     105           384   384     384
    Q4_0  96      61   261     492           105   384     849           384   384    3115
    Q2_K  16      35    84     100            61   128     100           224   224     224
    Q2_K  96      35   368     467            61   768     806           224   368    2955

An H100 was measured, 14336 x 4096 in us:

    tokens      16           24           96           128          512          2048
    Q4_K      32 / 30      37 / 67      84 / 101    139 / 102    412 / 146    1465 / 427
    Q6_K      36 / 35      42 / 72     100 / 106    149 / 106    474 / 159    1684 / 421

Both take longer than counted. As halves 24 tokens take longer than 32, 38 us: lanes of tokens that do not exist read
the last one's values and wait for each other. So `takes` says 17 to 24 and 65 to 96 tokens of all types there.
Elsewhere it says where there is less to do by count, by at least 5%: on an A100 (16 conversions a clock) for 65 to some
200 tokens, but not of Q2_K; and for all from 65 on where memory is slow.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from bridge.cuda.forms.matrix import DeviceMatrix
from bridge.cuda.forms.superblock import functions
from bridge.cuda.product.mma import TOKENS as _MMA_TOKENS
from bridge.cuda.product.mma import MMAShape, choose_shape, epilogue_of, launch_parts
from bridge.cuda.product.token_records import CHUNK, TILE, TokenRecords
from bridge.cuda.toolchain import device as devices
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import (
    bits,
    bits_float,
    block_x,
    block_y,
    block_z,
    copies_end,
    copies_wait_all,
    copy_16,
    float_bits,
    fma,
    mad,
    mma_s8,
    mma_s8_short,
    prmt,
    put_16,
    put_16_further,
    shared_8_further,
    shared_16_further,
    signed_byte,
    thread_x,
    thread_y,
    warp_meets,
)
from bridge.cuda.toolchain.unroll import expand, registers, unroll
from numba import cuda

from bridge.blocks.read import WRITTEN
from bridge.errors import BridgeError

# set per kernel by `expand`
TILES = WARPS = AREA = 0
WIDE = MINS = LESS = FOLDED = PARTIAL = False
put: Any = None
load: Any = None
unpack: Any = None
signed: Any = ()
int32 = np.int32
float32 = np.float32

OLDEST = (8, 0)  # compute capability
MAX_REGISTERS = 128  # so that 16 warps find room on a multiprocessor
_FOLDED_REGISTERS = 120  # with 128, ptxas moves so many loads together for 8.0 that it has to spill one
_ROWS = 16  # rows of a warp
_PIECES = CHUNK // 16  # of a tile and step
_UNIT = 33  # pieces of a unit of 16 rows
_TILES = 6  # of a group, at most: with more, 8.0 has too few registers
_ISSUES = 4  # instructions of a warp a clock
# numbers of tokens for which int8 took less time than halves, of all types
_MEASURED = {(9, 0): (*range(17, 3 * TILE + 1), *range(_MMA_TOKENS + 1, 2 * _TILES * TILE + 1))}
# of a multiprocessor a clock: bytes of memory and multiply-adds of halves, both four fifths of the peak; conversions
_RATES = {(8, 0): (11, 870, 16), (9, 0): (19, 1500, 64)}
_NARROW = (3, 230, 64)  # 8.6, 8.9 and 12.0, within a third
# instructions of a warp for 16 rows and 128 columns: for the weights, and for 8 tokens
_ISSUED = {"Q4_K": (118, 76), "Q6_K": (202, 99), "Q8_0": (91, 64), "Q5_K": (154, 76), "Q3_K": (214, 100),
           "Q4_0": (138, 64), "Q2_K": (135, 100)}  # fmt: skip
_ISSUED_HALVES = {"Q4_K": (365, 14.2), "Q6_K": (342, 13.8), "Q8_0": (256, 14.7), "Q5_K": (406, 14.0),
                  "Q3_K": (351, 14.0), "Q4_0": (276, 14.2), "Q2_K": (373, 14.0)}  # of mma.py  # fmt: skip
TYPES = tuple(_ISSUED)
_FOLDED = ("Q2_K",)  # codes are multiplied by their scales, see above


def _product(weights, room_16, x, y, bias, rows, units, tokens, steps, per):
    lane = thread_x()
    warp = thread_y()
    t = bits(lane, 0, 3)
    g = bits(lane, 2, 7)
    end = int32(units)
    part = block_z()
    step = mad(part, int32(per), 0)
    stop = min(mad(step, 1, int32(per)), int32(steps))
    first = mad(block_y(), WARPS * 16, mad(warp, 16, g))
    # beyond the last row the last unit is repeated, and nothing of it is stored
    unit_at = mad(first, end, mad(step, 4, t))
    last = int32(rows * end - 1)
    total = registers()
    for m in unroll(TILES):
        for k in unroll(4):
            total[m, k] = float32(0)
    tile = cuda.shared.array(2 * TILES * _PIECES, np.complex128)  # 16 bytes each
    area = cuda.shared.array(WARPS * AREA, np.complex128)
    area_at = mad(warp, AREA, 0)
    put_at = mad(t, _UNIT, mad(g, 4, area_at))
    factors_at = mad(lane, 1, mad(area_at, 1, 4 * _UNIT))
    words_at = mad(area_at, 1, lane)
    pair = mad(g, 4, mad(area_at, 1, 4 * _UNIT))
    thread = mad(warp, 32, lane)
    source = mad(mad(block_x(), int32(steps), step), TILES * _PIECES, thread)
    for k in unroll((TILES * _PIECES + 32 * WARPS - 1) // (32 * WARPS)):
        if (k + 1) * 32 * WARPS <= TILES * _PIECES or thread < TILES * _PIECES - k * 32 * WARPS:
            copy_16(tile, thread + k * 32 * WARPS, x, source + k * 32 * WARPS)
    copies_end()
    held = registers()
    for r in unroll(2):
        held[r] = load(weights, room_16, min(mad(end, 8 * r, unit_at), last))
    unit = registers()
    factor = registers()
    less = registers()
    minimum = registers()
    word = registers()
    scale = registers()
    buffer = int32(0)
    while step < stop:
        copies_wait_all()
        cuda.syncthreads()
        if int32(step + 1) < stop:
            source = mad(source, 1, TILES * _PIECES)
            free = mad(thread, 1, int32(TILES * _PIECES - buffer))
            for k in unroll((TILES * _PIECES + 32 * WARPS - 1) // (32 * WARPS)):
                if (k + 1) * 32 * WARPS <= TILES * _PIECES or thread < TILES * _PIECES - k * 32 * WARPS:
                    copy_16(tile, free + k * 32 * WARPS, x, source + k * 32 * WARPS)
        copies_end()
        for r in unroll(2):
            unit[r] = unpack(held[r], mad(step, 4, t))
            codes, both, least, d, dmin = unit[r]
            for i in unroll(8):
                word[r, i] = signed[i](codes[i])
                if FOLDED:  # no byte reaches the next one
                    word[r, i] = mad(word[r, i], bits(both, i // 4 * 8, 255), 0)
            if FOLDED:
                for h in unroll(2):
                    minimum[h, r] = prmt(least, 0, 0x1111 * h)
            factor[r] = float_bits(d)
            if MINS:
                less[r] = float_bits(-dmin if LESS else dmin)
            else:
                less[r] = int32(both)
        if FOLDED:
            put_16_further(area, factors_at, 32, (minimum[0, 0], minimum[0, 1], minimum[1, 0], minimum[1, 1]))
        for i in unroll(4):
            put_16_further(area, put_at, i, (word[0, i], word[1, i], word[0, i + 4], word[1, i + 4]))
        put_16(area, factors_at, (factor[0], less[0], factor[1], less[1]))
        unit_at = mad(unit_at, 1, 4)
        if int32(step + 1) < stop:
            for r in unroll(2):
                held[r] = load(weights, room_16, min(mad(end, 8 * r, unit_at), last))
        warp_meets()
        codes_at = mad(buffer, 2, lane)
        scales_at = mad(buffer, 1, mad(t, 1, 64))
        for u in unroll(4):
            own_factors = shared_16_further(area, pair, u)
            d0 = bits_float(own_factors[0])
            d1 = bits_float(own_factors[2])
            a = shared_16_further(area, words_at, _UNIT * u)
            if FOLDED:
                mins = shared_16_further(area, pair, 32 + u)
            if not WIDE:
                for h in unroll(2):
                    scale[0, h] = signed_byte(own_factors[1], 8 * h)
                    scale[1, h] = signed_byte(own_factors[3], 8 * h)
            for m in unroll(TILES):
                b = shared_8_further(tile, codes_at, 2 * _PIECES * m + 32 * u)
                both_x = shared_16_further(tile, scales_at, _PIECES * m + 4 * u)
                start = (int32(0), int32(0), int32(0), int32(0))
                if FOLDED:
                    sums = mma_s8(start, mins[0], mins[1], mins[2], mins[3], b[0], b[1])
                if WIDE:
                    products = mma_s8(start, a[0], a[1], a[2], a[3], b[0], b[1])
                else:
                    products = mma_s8_short(start, a[0], a[1], b[0])
                    other = mma_s8_short(start, a[2], a[3], b[1])
                for k in unroll(4):
                    dx = bits_float(both_x[k % 2 * 2])
                    dw = d1 if k > 1 else d0
                    if WIDE:
                        value = float32(products[k])
                    else:
                        value = float32(mad(other[k], scale[k // 2, 1], mad(products[k], scale[k // 2, 0], 0)))
                    if FOLDED:
                        value = fma(bits_float(own_factors[k // 2 * 2 + 1]), float32(sums[k]), dw * value)
                        total[m, k] = fma(value, dx, total[m, k])
                    else:
                        total[m, k] = fma(value, dw * dx, total[m, k])
                        if MINS:
                            sum_x = bits_float(both_x[k % 2 * 2 + 1])
                            total[m, k] = fma(bits_float(own_factors[k // 2 * 2 + 1]), sum_x, total[m, k])
        buffer = int32(TILES * _PIECES - buffer)
        step = int32(step + 1)
    for m in unroll(TILES):
        for k in unroll(4):
            row = mad(first, 1, 8 * (k // 2))
            token = mad(block_x(), 8 * TILES, mad(t, 2, 8 * m + k % 2))
            if row < int32(rows) and token < int32(tokens):
                y_row = mad(part, int32(tokens), token) if PARTIAL else token
                put(y, y_row, row, total[m, k], bias)


@recipe
def kernel(type: str, tiles: int, warps: int, epilogue: str) -> Any:
    """The kernel of a type for groups of 8 * tiles tokens.

    `epilogue` is "partial", or names of "bias" and "accumulate".
    """
    from bridge.cuda.toolchain.launch import Kernel

    formulas, block = functions(type), WRITTEN[type]
    scope = epilogue_of(epilogue, without=("scale", "token"))
    folded = type in _FOLDED
    expanded = expand(
        _product, f"int8_{type}_{tiles}_{warps}{epilogue and '_'}{epilogue}", TILES=tiles, WARPS=warps, **scope,
        # pieces of a warp: four units, and one or two for 8 pairs of rows and four units
        AREA=4 * _UNIT + 32 * (1 + folded), WIDE=folded or block.sum_span == 32, FOLDED=folded, MINS=block.has_min,
        LESS=block.is_k, load=formulas.load_rows, unpack=formulas.unpack, signed=formulas.signed,
    )  # fmt: skip
    arrays = "uint8[::1], int64, uint8[::1], float32[:,::1], float32[::1]"
    registers = _FOLDED_REGISTERS if folded else MAX_REGISTERS
    return Kernel(expanded, f"void({arrays}, int64, int64, int64, int64, int64)", registers, OLDEST)


def tiles_of(n: int) -> int:
    """Tiles of a group for n tokens."""
    return max(2, -(-n // TILE)) if n <= 3 * TILE else _TILES


def takes(matrix: DeviceMatrix, n: int) -> bool:
    """Whether a product of n tokens takes less time here than as halves, as measured or counted for the device."""
    capability = matrix.device.capability
    if capability in _MEASURED:
        return matrix.type in TYPES and n in _MEASURED[capability]
    if matrix.type not in TYPES or (capability not in _RATES and capability[0] not in (8, 12)):
        return False
    _, int8, halves = clocks(matrix.type, capability, n)
    return int8 < 0.95 * halves


@lru_cache(1 << 12)
def clocks(type: str, capability: tuple[int, int], n: int) -> tuple[float, float, float]:
    """Clocks of a multiprocessor for 16 rows and 128 columns, see above: of memory, here, and as halves."""
    through_memory, halves_multiplied, converted = _RATES.get(capability, _NARROW)
    memory = 256 * functions(type).layout.bpw / through_memory
    (fixed, more), (fixed_halves, more_halves) = _ISSUED[type], _ISSUED_HALVES[type]
    tiles = tiles_of(n)
    groups = -(-n // (TILE * tiles))
    conversions = groups * tiles * 512 * (2 if type in _FOLDED else 1)
    int8 = max(memory, groups * (fixed + tiles * more) / _ISSUES, conversions / converted)
    if n <= _MMA_TOKENS:
        halves = max(memory, (fixed_halves + -(-n // (2 * TILE)) * 2 * more_halves) / _ISSUES)
    else:
        halves = memory + 4096 / through_memory + max(4096 / through_memory, 16 * 128 * n / halves_multiplied)
    return memory, int8, halves


def launch(
    matrix: DeviceMatrix, records: TokenRecords, y: Any, stream: Any, accumulate: bool = False, bias: Any = None,
    shape: MMAShape | None = None,
) -> None:  # fmt: skip
    """Queue y = x W^T + bias for the tokens of the records; y float32 [n, rows], whose rows may be apart.

    `accumulate` adds to what is in y, `bias` is float32 [rows].
    """
    n, tiles = records.n, records.tiles
    if records.columns != matrix.columns:
        raise BridgeError(f"{matrix.name}: records of {records.columns} columns; must be {matrix.columns}")
    warps, parts = shape or choose_shape(matrix, n, TILE * tiles)

    def multiply(epilogue: str, sums: Any, _: Any, biases: Any) -> None:
        product = kernel(matrix.type, tiles, warps, epilogue)
        grid = -(-n // (TILE * tiles)), -(-matrix.rows // (_ROWS * warps)), parts
        arrays = matrix.buffer, matrix.room // 16, devices.view(records.buffer), sums, biases
        sizes = matrix.rows, matrix.units, n, records.steps, -(-records.steps // parts)
        product.launch(grid, (32, warps), stream, *arrays, *sizes)

    launch_parts(matrix, multiply, parts, y, stream, bias=bias, accumulate=accumulate)
