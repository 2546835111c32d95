"""Products of a quantized matrix with 9 to 64 columns of activations on tensor cores: weights are read once.

A warp takes 16 rows and all columns of x (tokens), and walks along the rows 128 columns, a step, at a time. Rows are
the 16 of mma.sync's A, tokens the 8 of its B. Any 16 columns of the matrix can be its k, as long as A and B
agree: lane 4g + t holds unit t of the step (32 columns) of rows g and g + 8, as it comes from memory, and the four
weights of word i are what A needs from the lane in the i-th of 8 products. So codes become fragments without leaving
their lane, and one lane decodes the scales of a unit. Weights are rounded to halves, from the float32 that
dequantize.py makes of them; the sums are float32.

The warps of a block have rows of their own and share x, halves in shared memory: three buffers of a step each,
filled by copies that run two steps ahead. A token's 256 bytes of a step are 16 pieces: piece 4j + t is columns 8j .. 8j
+ 7 of unit t, at place 4 (j xor token mod 2) + t, so that 8 lanes that read 16 bytes at once find 8 different places
modulo 128 bytes. Codes of the next step are loaded into registers while this one is multiplied.

Where rows are too few to fill the device, blocks share rows, each with its part of the steps; `_combine` adds up.

Floors for 8192 x 28672 on 132 multiprocessors of 1.75 GHz that read 4.4 TB/s: clocks of a multiprocessor for 16 rows x
128 columns, a step of a warp; each has 869 steps (100 clocks: 50 us). It issues 4 instructions of a warp a clock,
counted in the loop's machine code for 9.0, and moves 128 bytes from shared memory to registers; tensor cores multiply
1024 halves a clock on 8.0, twice that on 9.0:

             memory    16 tokens: issue  shared  mma     64 tokens: issue  shared  mma
    Q4_K         61                  98      36   32                  120     144  128
    Q6_K         88                  93      36   32                  113     144  128
    Q8_0        115                  71      36   32                   93     144  128

So 16 tokens of Q4_K wait for their instructions, three or four for a weight, and 64 tokens for shared memory, from
which every 16 rows read all of x: 32 rows a warp would halve that and need twice the registers for sums. Storing all
weights as halves and loading them again, which this replaces, takes 213 us more than reading the weights. This is
reasoning, not measurement: scripts/gpu_check.py times both ways where there is a GPU.

Int8 on tensor cores has no halves to make, but sums to convert and to multiply: mma_int8.py, for fewer tokens or more.

Registers: 32 sums, 36 of codes of this step and the next, 16 of fragments of A and B, and what leads to them: 128,
so that 16 warps run at once. Scales and other small fields, of which a row takes less than 32 bytes a step, stay in
the L1 cache for the next steps.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from bridge.cuda.forms.matrix import DeviceMatrix, FloatMatrix
from bridge.cuda.forms.superblock import functions
from bridge.cuda.toolchain import device as devices
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import (
    bits,
    block_x,
    block_y,
    copies_end,
    copies_wait,
    copy_16,
    device_function,
    mad,
    mma_bf16,
    mma_f16,
    or_,
    pack_bf16,
    pack_f16,
    shared_16_further,
    shl,
    thread_x,
    thread_y,
    xor,
)
from bridge.cuda.toolchain.unroll import expand, registers, unroll
from numba import cuda

from bridge.blocks import BLOCKS, ROUNDED
from bridge.errors import BridgeError

# set per kernel by `expand`
TILES = WARPS = 0
ORDER = (0, 2, 1, 3)
RAGGED = PARTIAL = SCALED = BIAS = ACCUMULATE = NUMBERED = False
put: Any = None
load: Any = None
decode: Any = None
line: Any = None
lifted: Any = ()
mma: Any = None
pack: Any = None
int32 = np.int32
float32 = np.float32

TOKENS = 64  # at most
OLDEST = (8, 0)  # compute capability
MAX_REGISTERS = 128  # so that 16 warps find room on a multiprocessor
_ALL_REGISTERS = 255  # where rows are too few for that, and a warp copies more of x
TYPES = (*ROUNDED, *BLOCKS)

_TILE = 8  # tokens of mma.sync
_ROWS = 16  # rows of a warp
_UNITS = 4  # units of a step
_MOST_WARPS = 8
_MOST_PARTS = 8
_LEAST_STEPS = 4  # of a part
_THREADS = 128  # in a block of `_combine`
_BLOCKS_AT_ONCE = 2  # of 8 warps of 128 registers on a multiprocessor


class MMAShape(NamedTuple):
    """How a product is shared: warps of a block, 16 rows each, and parts of the columns, a block each."""

    warps: int
    parts: int


def _product(weights, room_16, x, scale, y, bias, rows, units, tokens, per):
    lane = thread_x()
    warp = thread_y()
    t = bits(lane, 0, 3)
    g = bits(lane, 2, 7)
    end = int32(units)
    part = block_y()
    step = mad(part, int32(per), 0)
    stop = min(mad(step, 1, int32(per)), bits(mad(end, 1, 3), 2, 0x3FFFFFFF))
    first = mad(block_x(), WARPS * 16, mad(warp, 16, g))
    # beyond the last row or token the last one is repeated, and nothing of it is stored
    unit_at = mad(first, end, mad(step, 4, t))
    last = int32(rows * end - 1)
    total = registers()
    for m in unroll(TILES):
        total[m] = (float32(0), float32(0), float32(0), float32(0))
    tile = cuda.shared.array(3 * TILES * 128, np.complex128)  # 16 bytes each
    # what this thread copies of its tokens: 8 columns, a piece of unit u of a step
    u = bits(lane, 0, 3)
    piece = bits(lane, 2, 3)
    token = mad(warp, 2, bits(lane, 4, 1))
    target = mad(token, 16, or_(u, shl(xor(piece, bits(token, 0, 1)), 2)))
    # is repeated, where it is: lanes that all read one address would wait for each other
    last_token = int32(tokens - 1)
    for b in unroll(2):
        if int32(step + b) < stop:
            unit = mad(int32(step + b), 4, u)
            if RAGGED:
                unit = min(unit, int32(end - 1))
            for k in unroll(TILES * 4 // WARPS):
                source_token = min(int32(token + 2 * WARPS * k), last_token)
                origin = mad(source_token, mad(end, 4, 0), mad(unit, 4, piece))
                copy_16(tile, target + (b * TILES * 128 + k * WARPS * 32), x, origin)
        copies_end()
    held = registers()
    ahead = registers()
    for r in unroll(2):
        held[r] = load(weights, room_16, min(mad(end, 8 * r, unit_at), last))
        ahead[r] = held[r]
    x_at = or_(mad(g, 16, t), shl(bits(g, 0, 1), 2))
    buffer = int32(0)
    free = int32(2 * TILES * 128)
    codes = registers()
    lines = registers()
    a = registers()
    while step < stop:
        unit_at = mad(unit_at, 1, 4)
        if int32(step + 1) < stop:
            ahead[0] = load(weights, room_16, min(unit_at, last))
        copies_wait()
        cuda.syncthreads()
        if int32(step + 2) < stop:
            unit = mad(step, 4, mad(u, 1, 8))
            if RAGGED:
                unit = min(unit, int32(end - 1))
            for k in unroll(TILES * 4 // WARPS):
                source_token = min(int32(token + 2 * WARPS * k), last_token)
                origin = mad(source_token, mad(end, 4, 0), mad(unit, 4, piece))
                copy_16(tile, mad(target, 1, free) + k * WARPS * 32, x, origin)
        copies_end()
        for r in unroll(2):
            codes[r] = decode(weights, room_16, 0, held[r], mad(step, 4, t)) if NUMBERED else held[r]
            lines[r] = line(codes[r], mad(step, 4, t))
            if RAGGED:  # noqa: SIM102  # beyond the end of the row all weights are 0
                if mad(step, 4, t) >= end:
                    lines[r] = (float32(0), float32(0), float32(0), float32(0))
        for j in unroll(4):
            if j == 2:  # noqa: SIM102  # not earlier, for want of registers
                if int32(step + 1) < stop:
                    ahead[1] = load(weights, room_16, min(mad(end, 8, unit_at), last))
            for i in unroll(2):
                for r in unroll(2):
                    quad = lifted[2 * ORDER[j] + i](codes[r], lines[r])
                    a[i, r] = pack(quad[0], quad[1])
                    a[i, 2 + r] = pack(quad[2], quad[3])
            here = mad(xor(x_at, 4 * ORDER[j]), 1, buffer)
            for m in unroll(TILES):
                b = shared_16_further(tile, here, 128 * m)
                total[m] = mma(total[m], a[0, 0], a[0, 1], a[0, 2], a[0, 3], b[0], b[1])
                total[m] = mma(total[m], a[1, 0], a[1, 1], a[1, 2], a[1, 3], b[2], b[3])
        for r in unroll(2):
            held[r] = ahead[r]
        free = buffer
        buffer = mad(buffer, 1, TILES * 128) if buffer < int32(2 * TILES * 128) else int32(0)
        step = int32(step + 1)
    for m in unroll(TILES):
        for k in unroll(4):
            row = mad(first, 1, 8 * (k // 2))
            out_token = mad(t, 2, 8 * m + k % 2)
            if row < int32(rows) and out_token < int32(tokens):
                y_row = mad(part, int32(tokens), out_token) if PARTIAL else out_token
                put(y, y_row, row, total[m][k], bias, scale, out_token)


def _put(y, y_row, row, value, bias, scale, token):
    """Store the sum of a row and a token in y[y_row, row], after the epilogue."""
    if SCALED:
        value *= scale[token]
    if BIAS:
        value += bias[row]
    if ACCUMULATE:
        value += y[y_row, row]
    y[y_row, row] = value


def _combine(part, scale, bias, y, rows, tokens, parts):
    """Add up all parts, then apply the epilogue."""
    token = block_x()  # a grid has more than 65,535 blocks in this direction alone
    row = mad(block_y(), _THREADS, thread_x())
    if row < int32(rows):
        value = part[token, row]
        for p in range(1, parts):
            value += part[mad(int32(p), int32(tokens), token), row]
        put(y, token, row, value, bias, scale, token)


def takes(matrix: DeviceMatrix | FloatMatrix, n: int) -> bool:
    """Whether there is a kernel for a product of n columns on the matrix's device."""
    known = isinstance(matrix, DeviceMatrix) and matrix.type in TYPES
    return known and 1 <= n <= TOKENS and matrix.device.capability >= OLDEST


def choose_shape(matrix: DeviceMatrix, n: int, group: int = TOKENS) -> MMAShape:
    """As many warps a block as there are rows for; as many parts as take the least time, counted in bytes.

    `group`: tokens that a block multiplies.

    A block takes the time of its bytes; as many blocks as the device has room for run at once; sums of parts are
    stored and loaded again.
    """
    return _chosen(matrix.rows, matrix.units, matrix.nbytes, matrix.device.multiprocessors, n, -(-n // group))


@lru_cache(1 << 12)
def _chosen(rows: int, units: int, nbytes: int, multiprocessors: int, n: int, groups: int) -> MMAShape:
    warps = _MOST_WARPS
    while warps > 1 and rows <= _ROWS * warps // 2:
        warps //= 2
    blocks = -(-rows // (_ROWS * warps)) * groups
    at_once = _BLOCKS_AT_ONCE * _MOST_WARPS // warps * multiprocessors
    steps = -(-units // _UNITS)

    def time(parts: int) -> float:
        rounds = -(-blocks * parts // at_once)
        return rounds * at_once / (blocks * parts) * nbytes * groups + (8 * n * rows * parts if parts > 1 else 0)

    parts = min(range(1, max(1, min(_MOST_PARTS, steps // _LEAST_STEPS)) + 1), key=time)
    return MMAShape(warps, -(-steps // -(-steps // parts)))


@recipe
def kernel(type: str, kind: str, tiles: int, warps: int, ragged: bool, epilogue: str) -> Any:
    """The kernel of a type for up to 8 * tiles tokens of "f16" or "bf16".

    `epilogue` is "partial", or names of "scaled", "bias" and "accumulate".
    """
    from bridge.cuda.toolchain.launch import Kernel

    formulas = functions(type)
    expanded = expand(
        _product, f"mma_{type}_{kind}_{tiles}_{warps}{'_ragged' * ragged}{epilogue and '_'}{epilogue}",
        TILES=tiles, WARPS=warps, RAGGED=ragged, **epilogue_of(epilogue), load=formulas.load_rows,
        NUMBERED=formulas.decode is not None, decode=formulas.decode, line=formulas.line_exact,
        lifted=formulas.lifted_exact, mma=mma_f16 if kind == "f16" else mma_bf16,
        pack=pack_f16 if kind == "f16" else pack_bf16,
    )  # fmt: skip
    arrays = "int16[:,::1], float32[::1], float32[:,::1], float32[::1]"
    signature = f"void(uint8[::1], int64, {arrays}, int64, int64, int64, int64)"
    return Kernel(expanded, signature, MAX_REGISTERS if warps == _MOST_WARPS else _ALL_REGISTERS, OLDEST)


@recipe
def combiner(epilogue: str) -> Any:
    """The kernel that adds up parts; `epilogue` names "scaled", "bias" and "accumulate"."""
    from bridge.cuda.toolchain.launch import Kernel

    expanded = expand(_combine, epilogue or "plain", **epilogue_of(epilogue))
    return Kernel(expanded, "void(float32[:,::1], float32[::1], float32[::1], float32[:,::1], int64, int64, int64)")


@cache
def epilogue_of(names: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a kernel's end needs by these names: constants, and `put`, without some of its parameters."""
    scope = {name.upper(): name in names for name in ("partial", "scaled", "bias", "accumulate")}
    return scope | {"put": device_function(expand(_put, names or "plain", without, **scope))}


def launch(
    matrix: DeviceMatrix, x: Any, y: Any, stream: Any, scale: Any = None, accumulate: bool = False,
    bias: Any = None, shape: MMAShape | None = None,
) -> None:  # fmt: skip
    """Queue y = x W^T * scale + bias for x float16 or bfloat16 [n, columns] and y float32 [n, rows].

    All are tensors on the device, contiguous but for y, whose rows may be apart, and x begins on 16 bytes. `scale`
    float32 [n] multiplies the sums of each token, `accumulate` adds to what is in y, `bias` is float32 [rows].
    """
    n, kind = x.shape[0], devices.kind(x)
    if kind not in ("f16", "bf16") or x.shape[1] != matrix.columns or not 1 <= n <= TOKENS:
        raise BridgeError(
            f"{matrix.name}: x is {x.dtype} {list(x.shape)}; must be float16 or bfloat16 of 1 to {TOKENS} times "
            f"{matrix.columns}"
        )
    warps, parts = shape or choose_shape(matrix, n)
    tiles = -(-n // (2 * _TILE)) * 2
    steps = -(-matrix.units // _UNITS)

    def multiply(epilogue: str, sums: Any, scales: Any, biases: Any) -> None:
        product = kernel(matrix.type, kind, tiles, warps, matrix.units % _UNITS != 0, epilogue)
        grid = -(-matrix.rows // (_ROWS * warps)), parts
        arrays = matrix.buffer, matrix.room // 16, devices.view(x), scales, sums, biases
        product.launch(grid, (32, warps), stream, *arrays, matrix.rows, matrix.units, n, -(-steps // parts))

    launch_parts(matrix, multiply, parts, y, stream, scale, bias, accumulate)


def launch_parts(
    matrix: DeviceMatrix, multiply: Callable[[str, Any, Any, Any], None], parts: int, y: Any, stream: Any,
    scale: Any = None, bias: Any = None, accumulate: bool = False,
) -> None:  # fmt: skip
    """Queue multiply(epilogue, sums, scales, biases), which stores a product in `sums`, y or one for each part of the
    columns; then, if there are several, what adds them up. The last three are those of `launch`."""
    import torch

    n, rows, none = len(y), matrix.rows, matrix.device.placeholder()
    wanted = {"scaled": scale is not None, "bias": bias is not None, "accumulate": accumulate}
    epilogue = "_".join(name for name in wanted if wanted[name])
    out = devices.view(y, apart=True)
    scales, biases = (none if tensor is None else devices.view(tensor) for tensor in (scale, bias))
    if parts == 1:
        return multiply(epilogue, out, scales, biases)
    sums = devices.view(torch.empty((parts * n, rows), device=y.device))
    multiply("partial", sums, scales, biases)
    grid = n, -(-rows // _THREADS)
    combiner(epilogue).launch(grid, _THREADS, stream, sums, scales, biases, out, rows, n, parts)
