"""The kernel of matvec.py, and what it costs.

A warp takes `rows` rows (x is loaded once for them) and walks along them, each lane a unit of 32 columns at a time;
`split` warps may share these rows, each with its part of the columns. First come the loads of `units` units of all
rows, then the arithmetic, then shuffles add up the lanes. Of five to eight columns of x, lanes 0..15 take one half and
lanes 16..31 the other, for the same 16 units: sums of more than four for two rows do not fit into registers. Kernels
are for 1, 2, 4 and 8 columns: three take one of four, which waits for memory as well.

At 4.4 TB/s and 1.75 GHz one of 132 multiprocessors reads 19 bytes a clock. In a clock it issues 4 instructions of a
warp, no more than 2 of them to the integer units and 2 to the multipliers of integers, and moves 128 bytes from L1 to
registers: 512 bytes of x take 4 clocks, which two rows share. The table lists the clocks that 2048 weights (two rows)
take, counted in the machine code for 9.0: for memory, and next to it for the largest of the other limits:

             int8:  1 column       4 columns      8 columns       f32:  1 column       4 columns      8 columns
           memory   issue          issue    L1    issue    L1           issue          issue    L1    issue    L1
    Q4_K       61      25             48    50       97   100              75            129   138      262   276
    Q6_K       88      31             57    56      117   112              84            138   144      278   288
    Q8_0      115      14             33    58       68   116              62            116   146      232   292
    Q4_0       61      19             39    50       80   100              68            122   138      245   276
    Q2_K       35      26             52    48      107    96              78            131   136      266   272
    Q3_K       47      35             62    50      130   100              85            140   138      284   276
    Q5_K       74      38             58    54      117   108              84            139   142      282   284

So int8 products of one column wait for memory, Q2_K and Q3_K least of all; so do those of four, except these two. Float
products are bound by arithmetic and by L1: each lane loads 32 float32 for every column.

Types with a table or a codebook, for one column; shared memory is L1's, and look-ups of random points take 3.5 clocks:

           memory  issue   L1               memory  issue   L1               memory  issue   L1
    IQ4_NL     60     35   10      IQ2_S        34     40   38      IQ1_M        23     46   38
    IQ4_XS     57     39   10      IQ2_XS       31     43   38      IQ1_S        21     36   38
    IQ3_S      47     66   66      IQ2_XXS      28     35   38      TQ1_0        23     38   10
    IQ3_XXS    41     61   66      MXFP4        57     36   10      TQ2_0        28     19   10

So those with codebooks take up to twice as long as their bytes where a multiprocessor reads 19 bytes a clock, and wait
for memory where it reads less than 10, as those of most GPUs do (an RTX 4090's reads 3, an A100's 10).

With CHOSEN the matrices of a layer's experts lie one after the other, and the grid has two more dimensions, for the
experts of a token and for columns of x: see experts.py. A block finds its expert's number in memory, and otherwise does
what it does for one matrix and one column.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from bridge.cuda.forms.superblock import functions
from bridge.cuda.product.activations import BEYOND, FLOAT_RECORD, FLOAT_TILE, RECORD, TILE, store, store_exact
from bridge.cuda.product.gates import function_of, named_in
from bridge.cuda.product.matvec_shape import COLUMNS_OF_A_LANE, MatvecShape, registers_of
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import (
    bits,
    bits_float,
    block_x,
    block_y,
    block_z,
    cached_4_further,
    cached_8,
    cached_16,
    cached_16f,
    half_warp_sum,
    launch_dependents,
    launches_wait,
    load_8,
    load_16,
    load_16f,
    mad,
    sub,
    thread_x,
    thread_y,
    warp_sum,
)
from bridge.cuda.toolchain.last_block import last_block
from bridge.cuda.toolchain.unroll import expand, registers, unroll
from numba import cuda

from bridge.errors import BridgeError

# set per kernel by `expand`
ROWS = UNITS = SPLIT = SPLIT_LOG = WARPS = COLUMNS = TOKENS = LANES = LANES_LOG = 0
EXACT = ACCUMULATE = BIAS = GATED = UNGATED = FACTORED = NORMED = RECORDED = GAIN = DEPENDENT = NUMBERED = False
SECOND = CHOSEN = False
MADE = 0  # values that a thread block computes
BOOK = TABLE_AT = 0  # points of a codebook, and where it is
load: Any = None
prefetch: Any = None
decode: Any = None
unpack: Any = None
integer: Any = None
line: Any = None
lifted: Any = ()
factor: Any = None
activate: Any = None
put: Any = None
int32 = np.int32
float32 = np.float32


def _product(
    experts, weights, room_16, x, y, bias, rows, units, sums, eps, counters, gain, squares, records, skip, chosen, used
):
    lane = thread_x()
    warp = thread_y()
    block = sub(block_x(), int32(skip)) if SECOND else block_x()
    start = mad(block, WARPS // SPLIT * ROWS, mad(bits(warp, SPLIT_LOG, 31), ROWS, 0))
    end = int32(units)
    if CHOSEN:
        if DEPENDENT:
            launch_dependents()
            launches_wait()
        expert = chosen[mad(block_z(), int32(used), block_y())]
        if expert < 0 or expert >= experts.shape[0]:  # of another process: sums of no units
            expert = 0
            end = int32(0)
        weights = experts[expert]
        tiles = int32(bits(int32(units + 31), 5, 0x07FFFFFF) + BEYOND)  # of eight columns of x
        first_16 = mad(bits(block_z(), 3, 0x1FFFFFFF), mad(tiles, (FLOAT_TILE if EXACT else TILE) // 16, 0), 0)
        first_16 = mad(bits(block_z(), 0, 7), (FLOAT_RECORD if EXACT else RECORD) // 16, first_16)
    lane_unit = bits(lane, 0, LANES - 1)
    # the last warps repeat rows of others rather than go beyond the end, and do not store them
    base = mad(min(start, int32(rows - ROWS)), end, lane_unit)
    total = registers()
    for r in unroll(ROWS):
        for c in unroll(TOKENS):
            total[r, c] = float32(0)
    held = registers()
    codes = registers()
    unit = registers()
    weight = registers()
    begin = mad(bits(warp, 0, SPLIT - 1), LANES * UNITS, 0)
    if DEPENDENT and not CHOSEN:
        launch_dependents()
        if begin < end:
            for u in unroll(UNITS):
                for r in unroll(ROWS):
                    prefetch(weights, room_16, mad(end, r, int32(base + begin + LANES * u)))
        launches_wait()
    table = int32(0)
    if BOOK:
        table = cuda.shared.array(BOOK, np.int32)
        for i in range(int32(warp * 32 + lane), BOOK, 32 * WARPS):
            table[i] = cached_4_further(weights, room_16 * TABLE_AT, int32(i))
        cuda.syncthreads()
    if NORMED and COLUMNS == 1:  # on their way until the end
        four_sums = load_16f(sums, min(lane, int32((units + 3) // 4 - 1)))
    while begin < end:
        for u in unroll(UNITS):
            for r in unroll(ROWS):
                held[u, r] = load(weights, room_16, mad(end, r, int32(base + begin + LANES * u)))
        for u in unroll(UNITS):
            # the next row or zeros follow the end of a row; the records of x hold zeros there
            tile = int32(bits(begin, 5, 0x07FFFFFF) + u)
            if LANES == 16:
                tile = bits(int32(begin + 16 * u), 5, 0x07FFFFFF)
                lane_unit = int32(bits(int32(begin + 16 * u), 0, 16) + bits(lane, 0, 15))
                first = mad(bits(lane, 4, 1), TOKENS, 0)
            for r in unroll(ROWS):
                codes[r] = decode(weights, room_16, table, held[u, r], lane_unit) if NUMBERED else held[u, r]
            if EXACT:
                for r in unroll(ROWS):
                    unit[r] = line(codes[r], lane_unit)
                index = mad(tile, FLOAT_TILE // 16, lane_unit)
                if LANES == 16:
                    index = mad(first, FLOAT_RECORD // 16, index)
                if CHOSEN:
                    index = int32(index + first_16)
                for k in unroll(8):  # words that share a factor follow one another
                    for r in unroll(ROWS):
                        weight[r] = lifted[k // 2 + k % 2 * 4](codes[r], unit[r])
                    for c in unroll(TOKENS):
                        quad = cached_16f(x, index + (c * (FLOAT_RECORD // 16) + 32 * (k // 2 + k % 2 * 4)))
                        for r in unroll(ROWS):
                            for j in unroll(4):
                                total[r, c] += weight[r][j] * quad[j]
            else:
                for r in unroll(ROWS):
                    unit[r] = unpack(codes[r], lane_unit)
                index = mad(tile, TILE // 16, lane_unit)
                if LANES == 16:
                    index = mad(first, RECORD // 16, index)
                if CHOSEN:
                    index = int32(index + first_16)
                step = int32(index + index - lane_unit)
                for c in unroll(TOKENS):
                    low = cached_16(x, index + c * (RECORD // 16))
                    high = cached_16(x, index + (c * (RECORD // 16) + 32))
                    scale = cached_8(x, step + (c * (RECORD // 8) + 128))
                    for r in unroll(ROWS):
                        total[r, c] += integer(unit[r], low, high, bits_float(scale[0]), scale[1])
        begin = int32(begin + LANES * UNITS * SPLIT)
    for r in unroll(ROWS):
        for c in unroll(TOKENS):
            total[r, c] = warp_sum(total[r, c]) if LANES == 32 else half_warp_sum(total[r, c])
    # computed again, so that no registers hold it throughout the row
    lane = thread_x()
    warp = thread_y()
    team = bits(warp, SPLIT_LOG, 31)
    block = sub(block_x(), int32(skip)) if SECOND else block_x()
    start = mad(block, WARPS // SPLIT * ROWS, mad(team, ROWS, 0))
    first = mad(bits(lane, LANES_LOG, 1), TOKENS, 0)
    if SPLIT > 1:
        shared = cuda.shared.array((WARPS, 32 // LANES * TOKENS, ROWS), np.float32)
        if bits(lane, 0, LANES - 1) == 0:
            for r in unroll(ROWS):
                for c in unroll(TOKENS):
                    shared[warp, first + c, r] = total[r, c]
        cuda.syncthreads()
        for r in unroll(ROWS):
            for c in unroll(TOKENS):
                total[r, c] = shared[team * SPLIT, first + c, r]
                for s in unroll(1, SPLIT):
                    total[r, c] += shared[team * SPLIT + s, first + c, r]
    if NORMED:
        fours = int32((units + 3) // 4)
        for c in unroll(TOKENS):
            column = int32(c * fours)
            if COLUMNS > 1:
                four_sums = load_16f(sums, int32(column + min(lane, int32(fours - 1))))
            inverse = float32(0)
            if 4 * lane < units:
                for j in unroll(4):
                    inverse += four_sums[j]
            for i in range(128 + lane, units, 32):
                inverse += sums[4 * column + i]
            inverse = float32(1) / math.sqrt(warp_sum(inverse) / float32(units * 32) + eps)
            for r in unroll(ROWS):
                total[r, c] *= inverse
    if bits(lane, 0, LANES - 1) == 0 and bits(warp, 0, SPLIT - 1) == 0:
        first_row = start
        start = min(start, int32(rows - ROWS))
        if FACTORED:
            for r in unroll(ROWS):
                weight[r] = factor(weights, room_16, int32(start + r))
                for c in unroll(TOKENS):
                    total[r, c] *= weight[r]
        if CHOSEN:
            first = mad(block_z(), int32(used), block_y())
            expert = chosen[first]
        for r in unroll(ROWS):
            if int32(start + r) >= first_row:
                for c in unroll(TOKENS):
                    if COLUMNS == 1 or c + first < y.shape[0]:
                        if BIAS and CHOSEN:
                            if expert >= 0 and expert < experts.shape[0]:
                                total[r, c] += bias[expert * rows + start + r]
                        elif BIAS:
                            total[r, c] += bias[start + r]
                        if GATED:
                            if r % 2 == 1:
                                y[first + c, (start + r) >> 1] = activate(total[r - 1, c], total[r, c])
                        elif UNGATED:
                            y[first + c, start + r] = activate(total[r, c], float32(1))
                        elif ACCUMULATE:
                            y[first + c, start + r] += total[r, c]
                        else:
                            y[first + c, start + r] = total[r, c]
    if RECORDED:
        group = bits(mad(block_x(), MADE, 0), 5, 0x07FFFFFF)
        counter = group
        pair = int32(0)
        if CHOSEN:
            width = int32(y.shape[1])
            pair = mad(block_z(), int32(used), block_y())
            counter = mad(pair, bits(width, 5, 0x07FFFFFF), group)
        if last_block(counters, counter, 32 // MADE):  # all values are complete
            for c in unroll(TOKENS):
                if COLUMNS == 1 or c < y.shape[0]:
                    value = y[pair + c, group * 32 + lane]
                    if GAIN:
                        square = warp_sum(value * value)
                        if lane == 0:
                            squares[int32((rows + 127) // 128 * (4 * c)) + group] = square
                        value *= gain[group * 32 + lane]
                    if CHOSEN:  # columns of eight in tiles of their own
                        beyond = 32 * (bits(int32(width + 1023), 10, 0x003FFFFF) + BEYOND)
                        group += mad(bits(pair, 3, 0x1FFFFFFF), beyond, 0)
                    put(value, group, bits(pair, 0, 7) if COLUMNS == 1 else int32(c), records)


_FUSED = "sums", "eps", "counters", "gain", "squares", "records"  # parameters of a product with the steps around it
OF_EXPERTS = "experts", "chosen", "used"


@recipe
def kernel(type: str, n: int, shape: MatvecShape, exact: bool, epilogue: str, dependent: bool = False) -> Any:
    """The kernel of a type for 1, 2, up to 4 or up to 8 columns (n): y's are stored, what lies beyond counts nothing.

    `epilogue` is "", or names: "bias", "accumulate" or an activation of gates.py, whose gate and up are rows in turn
    unless it is "ungated"; for one column also "normed", and "recorded" or "recorded_gain", and "chosen". A `dependent`
    one (launch.py) fetches the first weights into the L2 cache while it waits, unless they are still to be chosen.
    """
    from bridge.cuda.toolchain.launch import Kernel

    gated = named_in(epilogue) is not None and "ungated" not in epilogue
    if gated and shape.rows % 2:
        raise BridgeError(f"{type}: {shape} separates gate from up, whose rows alternate; rows must be 2 or 4")
    fused = "normed" in epilogue or "recorded" in epilogue
    if fused and (n > COLUMNS_OF_A_LANE or (32 << gated) % (shape.warps // shape.split * shape.rows)):
        raise BridgeError(f"{type}: {n} columns, {shape} and records of 32 rows do not go together")
    chosen = "chosen" in epilogue
    unused = ("skip", *(() if fused else _FUSED), *(("weights",) if chosen else OF_EXPERTS))
    expanded = expanded_product(type, n, shape, exact, epilogue, dependent, unused)
    more = ", float32[::1], float32, int32[::1], float32[::1], float32[::1], uint8[::1]" if fused else ""
    more += ", int64[::1], int64" * chosen
    weights = "uint8[:,::1]" if chosen else "uint8[::1]"
    signature = f"void({weights}, int64, uint8[::1], float32[:,::1], float32[::1], int64, int64{more})"
    return Kernel(expanded, signature, registers_of(type, n, shape, exact, fused), dependent=dependent)


def expanded_product(
    type: str, n: int, shape: MatvecShape, exact: bool, epilogue: str, dependent: bool, without: tuple[str, ...]
) -> Any:
    """What a kernel does, without some of its parameters; with `skip` it is for blocks from that one on."""
    formulas = functions(type)
    suffix = f"{type}_{n}_{'f32' if exact else 'int8'}_{'_'.join(map(str, shape))}{epilogue and '_'}{epilogue}"
    suffix += "_dependent" * dependent
    activation = named_in(epilogue)
    gated = activation is not None and "ungated" not in epilogue
    # what the previous launch writes changes while a dependent kernel runs
    x = {"cached_8": load_8, "cached_16": load_16, "cached_16f": load_16f} if dependent else {}
    return expand(
        _product, suffix, without=without, SECOND="skip" not in without, DEPENDENT=dependent,
        NORMED="normed" in epilogue, RECORDED="recorded" in epilogue,
        GAIN="gain" in epilogue, MADE=shape.warps // shape.split * shape.rows >> gated,
        put=store_exact if exact else store, COLUMNS=n, TOKENS=min(n, COLUMNS_OF_A_LANE),
        LANES=32 if n <= COLUMNS_OF_A_LANE else 16, LANES_LOG=5 if n <= COLUMNS_OF_A_LANE else 4,
        ROWS=shape.rows, UNITS=shape.units, SPLIT=shape.split, SPLIT_LOG=shape.split.bit_length() - 1,
        WARPS=shape.warps, EXACT=exact, ACCUMULATE="accumulate" in epilogue, BIAS="bias" in epilogue,
        GATED=gated, UNGATED="ungated" in epilogue, activate=activation and function_of(activation),
        CHOSEN="chosen" in epilogue, FACTORED=formulas.layout.factored, load=formulas.load, prefetch=formulas.prefetch,
        BOOK=0 if formulas.layout.book is None else len(formulas.layout.book.table), TABLE_AT=formulas.table_at,
        NUMBERED=formulas.decode is not None, decode=formulas.decode_shared, unpack=formulas.unpack,
        integer=formulas.integer, line=formulas.line, lifted=formulas.lifted,
        factor=formulas.factor, **x,
    )  # fmt: skip
