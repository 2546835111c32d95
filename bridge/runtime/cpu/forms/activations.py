"""x [tokens, in] float32 -> records, one per token and block of columns, that the kernels read as one stream.

The integer record of a block of `size` columns (256 for K-quants, 32 or 64 otherwise), little-endian:

    bytes 0..size-1   q int8: x in multiples of d, one d for 32 columns
          size..      what the type needs of the sums s_j of q over its sub-blocks, of 32 at most:
                        zero point   int32 [subs]        -zero * s_j, where sums of products start
                        mins, K      int8  [2 * subs]    t_j >> 7, then t_j & 127, to be multiplied as int8
                        mins, plain  float32             d * s
          then        d float32 [size/32]
          then        with mins, K: float32 e, where d * s_j is e * t_j within 2^-14 of the largest

ggml's K-quants have one d for 256 columns; with eight the rounding error is a quarter less, and the kernels do
one operation more for each 32. d maps the value of largest magnitude onto -128, whatever its sign; values of
the other sign stop at 127. (ggml maps it onto +-127, in steps 0.8% coarser, and rounds d of 32-blocks to a half.)

The float record holds x itself, then the float32 sums over sub-blocks.

Records of `columns` tokens are one for each block, [tokens/columns, blocks, columns * record]: q of one token after
another, then the other fields, 4 bytes of each token in turn, or 8 of int8 sums, so that a vector brings a field of
several tokens. Paired ones, for targets that multiply two columns at once, have q of two tokens together: 8 bytes of
the first's, 8 of the second's, and so on. Unsigned ones have q + 128, for kernels whose codes are signed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bridge.blocks import BlockType
from bridge.blocks.read import READ
from bridge.runtime.cpu.machine.emitter import Emitter
from bridge.system.kernels import ir
from bridge.system.kernels.jit import CFunction, c_function, intrinsic, maker, types
from bridge.system.kernels.memory import array_at, floats, stack

# set per type by `quantize_function`
size = subs = sub = record = sums_at = d_at = 0
mins = paired = False
round32: Any = None
space: Any = None

PLAIN, PAIRED, UNSIGNED = "", "paired", "unsigned"  # forms of integer records
_GROUP = 32  # columns that share a d
_TINY = 0x03800000  # bits of 2^-120: 128 / it is still finite
_LOW = np.float32(8128)  # the largest t: 63 * 128 + 64, so that t >> 7 stays a small int8


class Record(NamedTuple):
    """Byte offsets in the integer record of a type."""

    sums_at: int
    d_at: int
    low_at: int  # where e is; meaningless for types without one
    nbytes: int

    def together(self, columns: int, offset: int, c: int, unit: int = 4) -> int:
        """Where byte `offset` of token c's record is, behind its values, in that of `columns` tokens.

        `unit`: bytes of a token that lie together.
        """
        field, part = divmod(offset - self.sums_at, unit)
        return self.sums_at * columns + (field * columns + c) * unit + part


def record_of(block: BlockType) -> Record:
    """The integer record of a type."""
    sums = 2 * block.subs if block.is_k and block.has_min else 4 * (block.size // block.sum_span)
    d_at = block.size + sums
    low_at = d_at + 4 * (block.size // _GROUP)
    return Record(block.size, d_at, low_at, low_at + 4 * (block.is_k and block.has_min))


def float_record(block: BlockType) -> int:
    """Bytes of the float record of a type."""
    return 4 * (block.size + block.size // block.sum_span)


def _round32(
    v: Any, sub: int, factor: int | None, form: str, x: Any, q: Any, d_at: Any, sums_at: Any, apart: Any
) -> None:
    """Write the code that rounds 32 values at x to int8 at q, their step to d_at, their sums to sums_at.

    Sums are `apart` bytes apart. In paired records, after 8 values come 8 of another column; in unsigned ones values
    are higher by 128.

    `factor` times the sums of `sub` values each, as int32; with factor None, d times the sums, as float32.
    Floats as integers are ordered by magnitude, NaN above infinity: a block with either gets d = NaN.
    """
    b = v.builder
    integers, floats = ir.VectorType(ir.I32, _GROUP), ir.VectorType(ir.F32, _GROUP)

    def same(value: int) -> ir.Constant:
        return ir.Constant(integers, [value] * _GROUP)

    values = b.load(b.inttoptr(x, floats.as_pointer()), align=4)
    bits = b.bitcast(values, integers)
    largest = v.call("llvm.vector.reduce.umax.v32i32", ir.I32, b.and_(bits, same(0x7FFFFFFF)))
    top = v.call("llvm.vector.reduce.smax.v32i32", ir.I32, bits)
    size = b.bitcast(largest, ir.F32)
    sign = b.select(b.icmp_signed("==", top, largest), ir.Constant(ir.F32, -1.0), ir.Constant(ir.F32, 1.0))
    step = b.fmul(b.fmul(size, ir.Constant(ir.F32, 1 / 128)), sign)
    inverse = b.fdiv(b.fmul(ir.Constant(ir.F32, 128.0), sign), size)
    # zeros, or so small that the inverse overflows: such a block counts as zero
    tiny = b.icmp_unsigned("<", largest, ir.Constant(ir.I32, _TINY))
    infinite = b.icmp_unsigned(">=", largest, ir.Constant(ir.I32, 0x7F800000))
    zero = ir.Constant(ir.F32, 0.0)
    step = b.select(infinite, ir.Constant(ir.F32, float("nan")), b.select(tiny, zero, step))
    inverse = b.select(b.or_(infinite, tiny), zero, inverse)
    rounded = v.call("llvm.rint.v32f32", floats, b.fmul(values, v.spread(inverse, floats)))
    rounded = v.call("llvm.minnum.v32f32", floats, rounded, ir.Constant(floats, [127.0] * _GROUP))
    codes = b.fptosi(rounded, integers)
    byte_vector = ir.VectorType(ir.I8, _GROUP)
    octets = b.trunc(codes, byte_vector)
    if form == UNSIGNED:
        octets = b.xor(octets, ir.Constant(byte_vector, [ir.Constant(ir.I8, 128)] * _GROUP))
    if form == PAIRED:
        longs = b.bitcast(octets, ir.VectorType(ir.I64, _GROUP // 8))
        for i in range(_GROUP // 8):
            pointer = b.inttoptr(b.add(q, ir.Constant(ir.I64, 16 * i)), ir.I64.as_pointer())
            b.store(b.extract_element(longs, ir.Constant(ir.I32, i)), pointer, align=4)
    else:
        b.store(octets, b.inttoptr(q, byte_vector.as_pointer()), align=4)
    b.store(step, b.inttoptr(d_at, ir.F32.as_pointer()))
    for j in range(_GROUP // sub):
        lanes = ir.Constant(ir.VectorType(ir.I32, sub), [ir.Constant(ir.I32, sub * j + i) for i in range(sub)])
        part = b.shuffle_vector(codes, ir.Constant(integers, ir.Undefined), lanes)
        total = v.call(f"llvm.vector.reduce.add.v{sub}i32", ir.I32, part)
        sum_at = b.add(sums_at, b.mul(apart, ir.Constant(ir.I64, j)))
        if factor is None:
            b.store(b.fmul(b.sitofp(total, ir.F32), step), b.inttoptr(sum_at, ir.F32.as_pointer()))
        else:
            b.store(b.mul(total, ir.Constant(ir.I32, factor)), b.inttoptr(sum_at, ir.I32.as_pointer()))


def _round32_intrinsic(sub: int, factor: int | None, form: str) -> Any:
    @intrinsic
    def round32(typingctx, x, q, d_at, sums_at, apart):
        def emit(context, builder, signature, arguments):
            _round32(Emitter(builder, None), sub, factor, form, *arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), emit

    return round32


def _quantize(x, out, count, columns, _0, _1, _2, first, last):
    """The integer records of tokens first..last of x float32 [tokens, count], for kernels of `columns` columns.

    x, out: addresses; a C function (`bridge.system.kernels.memory`), as `_copy` is.
    """
    blocks = count // size
    source = x + 4 * count * first
    scaled = space()
    wanted = mins and subs > 1  # the sums come last, in int8
    step = 2 * _GROUP if paired else _GROUP
    for t in range(first, last):
        c = t % columns
        fields_at = out + t // columns * blocks * columns * record
        values_at = fields_at + (c // 2 * 2 * size + c % 2 * 8 if paired else c * sums_at)
        fields_at += columns * sums_at  # the fields of all columns
        for _ in range(blocks):
            sums = scaled if wanted else fields_at + 4 * c
            apart = 4 if wanted else 4 * columns
            for g in range(size // _GROUP):
                step_at = fields_at + columns * (d_at - sums_at + 4 * g) + 4 * c
                round32(source, values_at + g * step, step_at, sums + g * (_GROUP // sub) * apart, apart)
                source += 4 * _GROUP
            if wanted:
                values = floats(scaled, subs)
                largest = np.float32(0)
                for j in range(subs):
                    largest = max(largest, abs(values[j]))
                inverse = _LOW / largest if largest > np.float32(1e-30) else np.float32(0)
                floats(fields_at + columns * (record - sums_at - 4) + 4 * c, np.int64(1))[0] = largest / _LOW
                low = array_at(fields_at, 2 * subs * columns, np.int8)
                for j in range(subs):
                    rounded = np.int32(np.rint(values[j] * inverse))
                    index = (j // 8 * columns + c) * 8 + j % 8
                    low[index] = rounded >> 7
                    low[subs * columns + index] = rounded & 127
            fields_at += columns * record
            values_at += columns * record


def _copy(x, out, count, columns, _0, _1, _2, first, last):
    """The float records of tokens first..last of x float32 [tokens, count]; otherwise as `_quantize`."""
    blocks = count // size
    for t in range(first, last):
        values = floats(x + 4 * count * t, count)
        address = out + (t // columns * blocks * columns + t % columns) * record
        for b in range(blocks):
            copy = floats(address, size + subs)
            for j in range(subs):
                total = np.float32(0)
                for i in range(j * sub, (j + 1) * sub):
                    copy[i] = values[b * size + i]
                    total += values[b * size + i]
                copy[size + j] = total
            address += columns * record


def record_kind(type: str, integer: bool) -> tuple[Any, ...]:
    """The kind of a type's records: tensors of the same kind share them."""
    block = READ[type]
    return block.size, block.sum_span, block.lift, block.has_min, integer


def record_bytes(type: str, columns: int, integer: bool) -> int:
    """Bytes of the records of `columns` values."""
    block = READ[type]
    return columns // block.size * (record_of(block).nbytes if integer else float_record(block))


@maker
def quantize_function(type: str, integer: bool, form: str = PLAIN) -> CFunction:
    """The C function that makes tokens' records for a type, integer ones in one of the forms; paired ones of an even
    number of columns."""
    block = READ[type]
    span = block.sum_span
    sizes = {"size": block.size, "sub": span, "subs": block.size // span}
    sizes["record"] = record_bytes(type, block.size, integer)
    kind = "_".join(str(int(part)) for part in record_kind(type, integer))
    if not integer:
        return c_function(_copy, kind, **sizes)
    offsets = record_of(block)
    round32 = _round32_intrinsic(span, None if block.has_min else -block.lift, form)
    kind += f"_{form}" if form else ""
    places: dict[str, Any] = {"paired": form == PAIRED, "mins": block.has_min}
    places |= {"sums_at": offsets.sums_at, "d_at": offsets.d_at}
    return c_function(_quantize, kind, round32=round32, space=stack(4 * sizes["subs"]), **sizes, **places)


def records(x: np.ndarray, block: BlockType, columns: int = 1, integer: bool = True, form: str = PLAIN) -> np.ndarray:
    """The records of x float32 [tokens, in], contiguous, as uint8; zeros pad tokens to a multiple of `columns`."""
    padded = -(-x.shape[0] // columns) * columns
    out = np.zeros(padded * record_bytes(block.name, x.shape[1], integer), np.uint8)
    make = quantize_function(block.name, integer, form).ctypes
    make(x.ctypes.data, out.ctypes.data, x.shape[1], columns, 0, 0, 0, 0, x.shape[0])
    return out
