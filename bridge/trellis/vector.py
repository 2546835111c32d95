"""Vector code that turns states into values: 16 lanes of LLVM, which splits them where registers are smaller.

Where the target has it, the sum of a word's four bytes is one instruction (VNNI) or two (AVX2), and halves are
converted by the CPU; elsewhere both are shifts and additions. Looked-up values are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from bridge.system.kernels.memory import LANES
from bridge.trellis.codebooks import (
    BYTES_MEAN,
    BYTES_SCALE,
    COMPUTED,
    HALVES_FLIP,
    HALVES_MASK,
    MUL1_ADDEND,
    MUL1_FACTOR,
    SECOND_MAD,
    BitshiftCodebook,
)

_I8, _I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_F32, _F16 = ir.FloatType(), ir.HalfType()
INTS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(_F32, LANES)
WORDS = ir.VectorType(_I16, LANES)
_CONVERTING = ("avx512vbmi", "avx512", "avxvnni", "avx512bw", "avx2", "neon")  # targets whose CPUs convert halves


@dataclass(frozen=True)
class Code:
    """What a kernel is compiled for: how states lie in a stream, and how values are made of them."""

    mode: str
    bits: int  # L
    step: int  # bits from one state to the next
    values: int  # V
    table_bits: int
    affine: tuple[int, int]
    target: str
    halves: bool = False  # the table's pairs are stored as halves, and fetched at once

    @classmethod
    def of(cls, book: BitshiftCodebook, step: int, target: str) -> Code:
        if book.decode_mode in COMPUTED:
            return cls(book.decode_mode, book.L, step, book.V, 0, book.affine, target)
        halves = book.V == 2 and target in _CONVERTING and np.array_equal(book.tlut, book.tlut.astype(np.float16))
        return cls(book.decode_mode, book.L, step, book.V, book.tlut_bits, (0, 0), target, halves)

    def table(self, book: BitshiftCodebook) -> np.ndarray:
        """The table that the kernels read: the codebook's table, or its pairs as halves."""
        if not self.table_bits:
            return np.zeros(1, np.float32)
        return book.tlut.astype(np.float16) if self.halves else book.tlut

    @property
    def suffix(self) -> str:
        a, b = self.affine
        layout = f"{self.bits}_{self.step}_{self.values}_{self.table_bits}{'_halves' * self.halves}"
        return f"{self.mode}_{layout}_{a:x}_{b:x}_{self.target}"

    @property
    def unit(self) -> float:
        """The factor for values that are not `scaled`."""
        return 1 / float(BYTES_SCALE) if self.mode in ("1mad", "2mad") else 1.0

    def shift(self, state: int) -> tuple[int, int]:
        """(word, right): a state is in the 32 bits that begin with this word, shifted right so far."""
        bit = state * self.step
        return bit >> 4, 32 - self.bits - (bit & 15)


class Lanes:
    """Writes vector instructions with an llvmlite builder.

    scaled  values are those of the codebook, bit for bit; else they lack their constant factor, `Code.unit`
    """

    def __init__(self, builder: ir.IRBuilder, code: Code, scaled: bool = True):
        self.builder = builder
        self.code = code
        self.scaled = scaled

    def call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        """Call an LLVM intrinsic."""
        kind = ir.FunctionType(result, [a.type for a in arguments])
        return self.builder.call(self.builder.module.declare_intrinsic(name, fnty=kind), arguments)

    def pointer(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        return self.builder.inttoptr(address, kind.as_pointer())

    def splat(self, value: float, kind: ir.VectorType = INTS) -> ir.Value:
        return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)

    def load(self, address: ir.Value, kind: ir.Type, align: int) -> ir.Value:
        return self.builder.load(self.pointer(address, kind), align=align)

    def store(self, value: ir.Value, address: ir.Value, align: int) -> None:
        self.builder.store(value, self.pointer(address, value.type), align=align)

    def words(self, address: ir.Value) -> ir.Value:
        """16 words of 16 bits as int32 lanes."""
        return self.builder.zext(self.load(address, WORDS, 2), INTS)

    def broadcast(self, address: ir.Value) -> ir.Value:
        """A float32 in every lane."""
        empty = ir.Constant(FLOATS, ir.Undefined)
        first = self.builder.insert_element(empty, self.load(address, _F32, 4), I32(0))
        return self.builder.shuffle_vector(first, empty, ir.Constant(INTS, [0] * LANES))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.call(f"llvm.fma.v{LANES}f32", FLOATS, a, b, c)

    def pick(self, value: ir.Value, lanes: Sequence[int]) -> ir.Value:
        """Some lanes of a vector."""
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), [I32(lane) for lane in lanes])
        return self.builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)

    def window(self, high: ir.Value, low: ir.Value) -> ir.Value:
        return self.builder.or_(self.builder.shl(high, self.splat(16)), low)

    def states(self, windows: ir.Value, right: ir.Value) -> ir.Value:
        return self.builder.and_(self.builder.lshr(windows, right), self.splat((1 << self.code.bits) - 1))

    # values

    def values(self, x: ir.Value, table: ir.Value) -> list[ir.Value]:
        """V float vectors of 16 states; `table`: the address of tlut as float32 [2^Q, V]."""
        b, mode = self.builder, self.code.mode
        if self.code.table_bits:
            return self._looked_up(x, table)
        factor, addend = self.code.affine
        z = b.mul(x, self.splat(factor))
        if addend:
            z = b.add(z, self.splat(addend))
        if mode in ("3inst", "mcg"):
            return [self._halves(b.xor(b.and_(z, self.splat(HALVES_MASK)), self.splat(HALVES_FLIP)))]
        if mode == "2mad":
            wide = ir.VectorType(I64, LANES)
            high = b.lshr(b.mul(b.zext(z, wide), self.splat(SECOND_MAD, wide)), self.splat(32, wide))
            z = b.add(z, b.trunc(high, INTS))
        if mode == "mul1":
            total = b.uitofp(b.add(self.byte_sums(z), self.splat(1024)), FLOATS)
            factor, addend = self.splat(MUL1_FACTOR, FLOATS), self.splat(MUL1_ADDEND, FLOATS)
            return [self._to_half_precision(self.fma(total, factor, addend))]
        centred = b.sitofp(b.sub(self.byte_sums(z), self.splat(BYTES_MEAN)), FLOATS)
        return [b.fdiv(centred, self.splat(float(BYTES_SCALE), FLOATS)) if self.scaled else centred]

    def byte_sums(self, z: ir.Value) -> ir.Value:
        """The sum of each lane's four bytes, int32."""
        b = self.builder
        if self.code.target in ("avx512vbmi", "avx512"):
            flat = b.bitcast(z, ir.VectorType(_I8, 4 * LANES))
            ones = self.splat(1, ir.VectorType(_I8, 4 * LANES))
            return self.call("llvm.x86.avx512.vpdpbusd.512", INTS, self.splat(0), flat, ones)
        if self.code.target in ("avx2", "avxvnni", "avx512bw"):
            return self._joined([self._byte_sums_avx2(self.pick(z, range(i, i + 8))) for i in (0, 8)])
        pairs = self.splat(0x00FF00FF)
        total = b.add(b.and_(z, pairs), b.and_(b.lshr(z, self.splat(8)), pairs))
        return b.and_(b.add(total, b.lshr(total, self.splat(16))), self.splat(0x7FF))

    def _byte_sums_avx2(self, z: ir.Value) -> ir.Value:
        bytes_, shorts, ints = (ir.VectorType(t, n) for t, n in ((_I8, 32), (_I16, 16), (I32, 8)))
        pairs = self.call("llvm.x86.avx2.pmadd.ub.sw", shorts, self.builder.bitcast(z, bytes_), self.splat(1, bytes_))
        return self.call("llvm.x86.avx2.pmadd.wd", ints, pairs, self.splat(1, shorts))

    def _joined(self, halves: list[ir.Value]) -> ir.Value:
        mask = ir.Constant(INTS, [I32(i) for i in range(LANES)])
        return self.builder.shuffle_vector(*halves, mask)

    def _halves(self, z: ir.Value) -> ir.Value:
        """The sum of the two halves in each lane, rounded to a half; they are normal, between 1/8 and 2."""
        b = self.builder
        if self.code.target == "portable":
            parts = [self._normal_half(z), self._normal_half(b.lshr(z, self.splat(16)))]
        else:
            sixteen = ir.VectorType(_F16, LANES)
            parts = [
                b.fpext(b.bitcast(b.trunc(part, WORDS), sixteen), FLOATS) for part in (z, b.lshr(z, self.splat(16)))
            ]
        return self._to_half_precision(b.fadd(*parts))

    def _normal_half(self, bits: ir.Value) -> ir.Value:
        b = self.builder
        sign = b.shl(b.and_(bits, self.splat(0x8000)), self.splat(16))
        rest = b.add(b.shl(b.and_(bits, self.splat(0x7FFF)), self.splat(13)), self.splat(112 << 23))
        return b.bitcast(b.or_(sign, rest), FLOATS)

    def _to_half_precision(self, x: ir.Value) -> ir.Value:
        """Rounded to eleven bits. Without hardware conversion by Dekker's splitting, inexact for subnormals."""
        b = self.builder
        if self.code.target != "portable":
            return b.fpext(b.fptrunc(x, ir.VectorType(_F16, LANES)), FLOATS)
        scaled = b.fmul(x, self.splat(8193.0, FLOATS))
        return b.fsub(scaled, b.fsub(scaled, x))

    def _looked_up(self, x: ir.Value, table: ir.Value) -> list[ir.Value]:
        b, width = self.builder, self.code.table_bits
        signed = self.code.mode == "quantlut_sym"
        y = x
        if self.code.mode != "lut":
            y = b.mul(x, b.add(x, self.splat(1)))
        right = 0 if self.code.mode == "lut" else 16 - signed - width
        index = b.and_(b.lshr(y, self.splat(right)), self.splat((1 << width) - 1))
        if self.code.halves:
            pairs = self._gather(table, index, 0, INTS)
            sixteen = ir.VectorType(_F16, LANES)
            words = [b.trunc(part, WORDS) for part in (pairs, b.lshr(pairs, self.splat(16)))]
            values = [b.fpext(b.bitcast(word, sixteen), FLOATS) for word in words]
        else:
            values = [self._gather(table, index, v, FLOATS) for v in range(self.code.values)]
        if signed:
            sign = b.and_(b.shl(y, self.splat(16)), self.splat(0x80000000))
            values[0] = b.bitcast(b.xor(b.bitcast(values[0], INTS), sign), FLOATS)
        return values

    def _gather(self, table: ir.Value, index: ir.Value, value: int, kind: ir.VectorType) -> ir.Value:
        """Entry `index` of a table of `kind`'s elements, or value `value` of those of an entry."""
        b = self.builder
        each = 1 if self.code.halves else self.code.values
        wide = ir.VectorType(I64, LANES)
        offsets = b.zext(b.shl(index, self.splat(1 + each)), wide)
        first = b.insert_element(ir.Constant(wide, ir.Undefined), b.add(table, I64(4 * value)), I32(0))
        starts = b.shuffle_vector(first, ir.Constant(wide, ir.Undefined), ir.Constant(INTS, [0] * LANES))
        places = b.inttoptr(b.add(starts, offsets), ir.VectorType(kind.element.as_pointer(), LANES))
        every = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [ir.IntType(1)(1)] * LANES)
        name = f"llvm.masked.gather.v{LANES}{'f32' if kind is FLOATS else 'i32'}.v{LANES}p0"
        return self.call(name, kind, places, I32(4), every, self.splat(0, kind))
