"""Vector code for numba: an `Emitter` of LLVM instructions, its numpy `Twin`, and the intrinsics made of them.

Numba has no vector types. Here a kernel holds its running sums in a `Totals`, an LLVM array of vectors, and
three intrinsics work on it: `zeros()`, `accumulate(totals, weights, halves, x)`, which is a function of
superblock.py written out, and `store(totals, y, stride)`. Addresses are plain int64.

What differs between targets is the dot product: see the intrinsics_*.py modules.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, models, register_model

_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_F32 = ir.FloatType()
_LINE = 64


class Totals(types.Type):
    """`columns` float vectors of `lanes`."""

    def __init__(self, columns: int, lanes: int):
        self.columns = columns
        self.lanes = lanes
        super().__init__(name=f"Totals({columns}, {lanes})")


@register_model(Totals)
class _TotalsModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        vector = ir.VectorType(_F32, fe_type.lanes)
        super().__init__(dmm, fe_type, ir.ArrayType(vector, fe_type.columns))


@dataclass(frozen=True)
class LookedUp:
    """A word of a table's entries: a function that emits it, as other words are."""

    v: Any
    code: Callable[[], Any]
    table: tuple[int, ...]

    def __call__(self) -> Any:
        return self.v.look_up(self.code(), self.table)

    def nibble(self, right: int) -> Any:
        """Four bits of each entry, by a look-up of their own, which is cheaper than to shift and mask."""
        return self.v.look_up(self.code(), tuple(entry >> right & 15 for entry in self.table))


@dataclass(frozen=True)
class Nibbles:
    """A word of codes of 8 bits whose low nibbles are at base + at, and whose high ones are in the vector after it."""

    v: Any
    base: Any
    at: int

    def __call__(self) -> Any:
        return self.v.or_(self.nibble(0), self.v.shl(self.nibble(4), 4))

    def nibble(self, right: int) -> Any:
        return self.v.load(self.base, self.at + (4 * self.v.lanes if right else 0))


def nibble(v: Any, word: Callable[[], Any], right: int) -> Any:
    """Four bits of each byte of a word, from bit `right` on."""
    if isinstance(word, LookedUp | Nibbles):
        return word.nibble(right)
    return v.and_(v.shr(word(), right), 0x0F0F0F0F)


class Places(NamedTuple):
    """Where a field of each column's record is, and where the records end, in bytes."""

    at: list[int]
    end: int


class Emitter:
    """Writes vector instructions with an llvmlite builder.

    paired  columns of x come in pairs: vector c, even, holds rows 0 and 1 of columns c and c + 1, and vector c + 1 rows
            2 and 3, each row of both columns first
    ahead   bytes ahead of a load of weights at which lines are prefetched
    level   of cache that they are brought to: 1 or 2
    """

    def __init__(
        self,
        builder: ir.IRBuilder,
        target: ModuleType | None,
        paired: bool = False,
        ahead: tuple[int, ...] = (),
        level: int = 1,
    ):
        self.builder = builder
        self.paired = paired
        self.ahead = ahead
        self.level = level
        self._fetched: set[int] = set()
        if target is None:  # for code that is the same on all targets
            return
        self.target = target
        self.lanes: int = target.LANES
        self.signed_dots: bool = target.SIGNED_DOTS
        self.ints = ir.VectorType(_I32, self.lanes)
        self.floats = ir.VectorType(_F32, self.lanes)
        self.bytes = ir.VectorType(_I8, 4 * self.lanes)

    def call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        """Call an LLVM intrinsic."""
        kind = ir.FunctionType(result, [a.type for a in arguments])
        return self.builder.call(self.builder.module.declare_intrinsic(name, fnty=kind), arguments)

    def pointer(self, base: ir.Value, at: int, kind: ir.Type) -> ir.Value:
        address = self.builder.add(base, ir.Constant(_I64, at)) if at else base
        return self.builder.inttoptr(address, kind.as_pointer())

    # memory

    def load(self, base: ir.Value, at: int) -> ir.Value:
        """A vector of weights; lines further on are fetched, some with each load rather than all in a burst."""
        line = at // _LINE
        if self.ahead and line not in self._fetched:
            self._fetched.add(line)
            for distance in self.ahead:
                self.prefetch(base, line * _LINE + distance)
        return self.builder.load(self.pointer(base, at, self.ints), align=4 * self.lanes)

    def broadcast(self, base: ir.Value, at: int) -> ir.Value:
        return self._spread(self.builder.load(self.pointer(base, at, _I32), align=4), self.ints)

    def broadcast_float(self, base: ir.Value, at: int) -> ir.Value:
        return self._spread(self.builder.load(self.pointer(base, at, _F32), align=4), self.floats)

    def of_column(self, base: ir.Value, places: Places, c: int) -> ir.Value:
        """The int32 at base + places.at[c] in all lanes of column c; see `paired`."""
        return self._of_column(base, places, c, self.ints)

    def of_column_float(self, base: ir.Value, places: Places, c: int) -> ir.Value:
        """As `of_column`, of a float32."""
        return self._of_column(base, places, c, self.floats)

    def _of_column(self, base: ir.Value, places: Places, c: int, kind: ir.VectorType) -> ir.Value:
        at = places.at[c]
        if self.paired:  # this column's word and the other's, which follow one another
            pair = self.builder.load(self.pointer(base, places.at[c & ~1], _I64), align=4)
            return self.builder.bitcast(self._spread(pair, ir.VectorType(_I64, 2)), kind)
        if self.lanes == 4 and at // 16 * 16 + 16 <= places.end:  # neighbours share a load
            return self.word_of_quad(base, at, kind)
        return self._spread(self.builder.load(self.pointer(base, at, kind.element), align=4), kind)

    def word_of_quad(self, base: ir.Value, at: int, kind: ir.VectorType) -> ir.Value:
        """The word at base + at in all of four lanes, from a vector of those around it: Arm multiplies by a lane."""
        quad = self.builder.load(self.pointer(base, at // 16 * 16, kind), align=4)
        return self._shuffled(quad, ir.Constant(kind, ir.Undefined), (at // 4 % 4,) * 4)

    def byte(self, word: ir.Value, i: int) -> ir.Value:
        """Byte i of each word, as int32."""
        if self.lanes == 4 and i in (1, 2):  # one instruction instead of two
            table = [4 * lane + i if k == 0 else 255 for lane in range(4) for k in range(4)]  # 255: zero
            octets = self.builder.bitcast(word, self.bytes)
            found = self.target.emit_look_up(self, octets, ir.Constant(self.bytes, table))
            return self.builder.bitcast(found, self.ints)
        return self.and_(self.shr(word, 8 * i), 255)

    def column_groups(self, count: int) -> list[list[int]]:
        """The columns whose products are taken together where that saves nothing."""
        return column_groups(self.paired, count)

    def of_rows(self, value: ir.Value, c: int) -> ir.Value:
        """A vector of rows, as lanes of column c; see `paired`."""
        return self.zipped(value, value, c & 1) if self.paired else value

    def zipped(self, a: ir.Value, b: ir.Value, half: int) -> ir.Value:
        """The lower or upper lanes of a and b in turn."""
        return self._shuffled(a, b, (0, 4, 1, 5) if half == 0 else (2, 6, 3, 7))

    def load_half(self, base: ir.Value, at: int) -> ir.Value:
        halves = ir.VectorType(ir.HalfType(), self.lanes)
        return self.builder.fpext(self.builder.load(self.pointer(base, at, halves), align=2 * self.lanes), self.floats)

    def load_e8m0(self, base: ir.Value, at: int) -> ir.Value:
        """2^(e - 128) of a byte a lane, but 0 for e < 2: those are below the least normal float."""
        exponent = self.builder.zext(self._load_bytes(base, at), self.ints)
        positive = self.builder.icmp_unsigned(">", exponent, self.splat(1))
        bits = self.shl(self.builder.sub(exponent, self.splat(1)), 23)
        return self.builder.bitcast(self.builder.select(positive, bits, self.zero()), self.floats)

    def load_ue4m3(self, base: ir.Value, at: int) -> ir.Value:
        """Half of a UE4M3 a lane: a half of these bits is 2^-8 of it, subnormal ones alike."""
        shorts = ir.VectorType(ir.IntType(16), self.lanes)
        bits = self.builder.zext(self._load_bytes(base, at), shorts)
        bits = self.builder.shl(bits, ir.Constant(shorts, [7] * self.lanes))
        halves = self.builder.bitcast(bits, ir.VectorType(ir.HalfType(), self.lanes))
        return self.builder.fmul(
            self.builder.fpext(halves, self.floats), ir.Constant(self.floats, [128.0] * self.lanes)
        )

    def _load_bytes(self, base: ir.Value, at: int) -> ir.Value:
        return self.builder.load(self.pointer(base, at, ir.VectorType(_I8, self.lanes)), align=1)

    def load_all(self, count: int, base: ir.Value, stride: ir.Value) -> list[ir.Value]:
        """What `store_all` has stored, of unpaired columns."""
        totals = []
        for _ in range(count):
            totals.append(self.builder.load(self.pointer(base, 0, self.floats), align=4))
            base = self.builder.add(base, stride)
        return totals

    def store_all(self, totals: list[ir.Value], base: ir.Value, stride: ir.Value) -> None:
        """Each column's vector of rows, `stride` bytes apart."""
        if self.paired:
            pairs = [(totals[c], totals[c + 1]) for c in range(0, len(totals), 2)]
            totals = [self._shuffled(*pair, order) for pair in pairs for order in ((0, 2, 4, 6), (1, 3, 5, 7))]
        for total in totals:
            self.builder.store(total, self.pointer(base, 0, self.floats), align=4)
            base = self.builder.add(base, stride)

    def prefetch(self, base: ir.Value, at: int) -> None:
        flags = (ir.Constant(_I32, 0), ir.Constant(_I32, 4 - self.level), ir.Constant(_I32, 1))  # read, of data
        self.call("llvm.prefetch.p0", ir.VoidType(), self.pointer(base, at, _I8), *flags)

    def barrier(self) -> None:
        """Keep LLVM from moving loads across: its scheduler, given a whole superblock, spills most registers."""
        self.builder.fence("seq_cst", targetscope="singlethread")

    def in_order(self, value: ir.Value) -> ir.Value:
        """The value. LLVM keeps the order of such values; else it may multiply column by column and spill the words."""
        kind = ir.FunctionType(value.type, [value.type])
        return self.builder.asm(kind, "", "=w,0" if self.lanes == 4 else "=x,0", [value], True)

    # int32 lanes

    def zero(self) -> ir.Value:
        return ir.Constant(self.ints, [0] * self.lanes)

    def splat(self, value: int) -> ir.Value:
        return ir.Constant(self.ints, [ir.Constant(_I32, value)] * self.lanes)

    def and_(self, value: ir.Value, bits: int) -> ir.Value:
        return self.builder.and_(value, self.splat(bits))

    def field(self, value: ir.Value, place: int, low: int, width: int) -> ir.Value:
        """`width` bits of each byte, from bit `place` on, moved to bit `low`; zeros elsewhere."""
        if width == 8:
            return value
        right = place - low
        if self.target.BYTE_SHIFTS and low == 0 and place + width == 8:  # nothing is left to mask
            moved = self.builder.lshr(
                self.builder.bitcast(value, self.bytes), ir.Constant(self.bytes, [place] * 4 * self.lanes)
            )
            return self.builder.bitcast(moved, self.ints)
        mask = 0x01010101 * ((1 << width) - 1) << low
        return self.and_(self.shr(value, right) if right > 0 else self.shl(value, -right), mask)

    def shl(self, value: ir.Value, left: int) -> ir.Value:
        return self.builder.shl(value, self.splat(left)) if left else value

    def shr(self, value: ir.Value, right: int) -> ir.Value:
        """Shifts in zeros; `ashr` shifts in copies of the sign."""
        return self.builder.lshr(value, self.splat(right)) if right else value

    def ashr(self, value: ir.Value, right: int) -> ir.Value:
        return self.builder.ashr(value, self.splat(right))

    def or_(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.or_(a, b)

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.add(a, b)

    def sub_bytes(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Byte by byte."""
        difference = self.builder.sub(*(self.builder.bitcast(value, self.bytes) for value in (a, b)))
        return self.builder.bitcast(difference, self.ints)

    def mul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.mul(a, b)

    def look_up(self, word: ir.Value, table: tuple[int, ...]) -> ir.Value:
        """The table's entry for each byte of a word, 0..15; the table may be shorter."""
        entries = ir.Constant(self.bytes, [*table, *[0] * (16 - len(table))] * (4 * self.lanes // 16))
        found = self.target.emit_look_up(self, entries, self.builder.bitcast(word, self.bytes))
        return self.builder.bitcast(found, self.ints)

    def dots(self, parts: list, words: list, x: ir.Value, places: list[list[int]], bits: int) -> list:
        """parts[c] + sum over k of words[k] . the 4 int8 at x + places[c][k], in every lane; codes of `bits` bits.

        A word is a function that emits it.
        """
        return self.target.emit_dots(self, parts, words, x, places, bits)

    def tile_dots(
        self,
        parts: list[list],
        words: list[list],
        x: ir.Value | None,
        places: list[list[int]],
        bits: int,
        scales: list | None,
        magnitude: int = 0,
    ) -> list[list]:
        """As `dots`, parts[r][c] and words[r][k] of several groups of rows, which the same values are multiplied by.

        x          None: all values are 1
        scales     int16 of each group of rows that its sums are multiplied by, see `doubled_short`
        magnitude  of signed codes, at most, or of their digits where bits is 8; then values are uint8. 0: unsigned ones
        """
        return self.target.emit_tile(self, parts, words, x, places, bits, scales, magnitude)

    # int16, two a lane

    def doubled_short(self, value: ir.Value) -> ir.Value:
        """The lower half of each int32 in both halves."""
        return self.or_(self.and_(value, 0xFFFF), self.shl(value, 16))

    def load_shorts(self, base: ir.Value, at: int) -> ir.Value:
        return self.builder.bitcast(self.load(base, at), self._shorts)

    def store_vector(self, value: ir.Value, base: ir.Value, at: int) -> None:
        self.builder.store(value, self.pointer(base, at, value.type), align=4 * self.lanes)

    @property
    def _shorts(self) -> ir.VectorType:
        return ir.VectorType(_I16, 2 * self.lanes)

    # float32 lanes

    def load_floats(self, base: ir.Value, at: int) -> ir.Value:
        return self.builder.load(self.pointer(base, at, self.floats), align=4 * self.lanes)

    def zero_float(self) -> ir.Value:
        return ir.Constant(self.floats, [0.0] * self.lanes)

    def splat_float(self, value: float) -> ir.Value:
        return ir.Constant(self.floats, [value] * self.lanes)

    def to_float(self, value: ir.Value) -> ir.Value:
        return self.builder.sitofp(value, self.floats)

    def fmul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.fmul(a, b)

    def fneg(self, a: ir.Value) -> ir.Value:
        return self.builder.fneg(a)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.call(f"llvm.fma.v{self.lanes}f32", self.floats, a, b, c)

    def _shuffled(self, a: ir.Value, b: ir.Value, order: tuple[int, ...]) -> ir.Value:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(order)), order))

    def _spread(self, scalar: ir.Value, kind: ir.VectorType) -> ir.Value:
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I32, 0))
        zeros = ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count)
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


class Twin:
    """The Emitter's methods on numpy arrays, bit for bit except for the FMA, which rounds twice here."""

    def __init__(self, target: ModuleType, paired: bool = False):
        self.target = target
        self.paired = paired
        self.lanes: int = target.LANES
        self.signed_dots: bool = target.SIGNED_DOTS

    def read(self, address: int, dtype: Any, count: int) -> np.ndarray:
        return np.frombuffer(ctypes.string_at(address, np.dtype(dtype).itemsize * count), dtype)

    def load(self, base: int, at: int) -> np.ndarray:
        return self.read(base + at, np.int32, self.lanes)

    def broadcast(self, base: int, at: int) -> np.ndarray:
        return np.repeat(self.read(base + at, np.int32, 1), self.lanes)

    def broadcast_float(self, base: int, at: int) -> np.ndarray:
        return np.repeat(self.read(base + at, np.float32, 1), self.lanes)

    def load_half(self, base: int, at: int) -> np.ndarray:
        return self.read(base + at, np.float16, self.lanes).astype(np.float32)

    def load_e8m0(self, base: int, at: int) -> np.ndarray:
        exponent = self.read(base + at, np.uint8, self.lanes).astype(np.int32)
        return np.where(exponent > 1, (exponent - 1) << 23, 0).astype(np.int32).view(np.float32)

    def load_ue4m3(self, base: int, at: int) -> np.ndarray:
        bits = self.read(base + at, np.uint8, self.lanes).astype(np.uint16) << np.uint16(7)
        return bits.view(np.float16).astype(np.float32) * np.float32(128)

    def look_up(self, word: np.ndarray, table: tuple[int, ...]) -> np.ndarray:
        return np.array(table, np.uint8)[np.ascontiguousarray(word).view(np.uint8)].view(np.int32)

    def barrier(self) -> None:
        pass

    def zero(self) -> np.ndarray:
        return np.zeros(self.lanes, np.int32)

    def splat(self, value: int) -> np.ndarray:
        return np.full(self.lanes, value, np.int64).astype(np.int32)

    def and_(self, value: np.ndarray, bits: int) -> np.ndarray:
        return value & self.splat(bits)

    def field(self, value: np.ndarray, place: int, low: int, width: int) -> np.ndarray:
        found = value.view(np.uint8) >> np.uint8(place) & np.uint8((1 << width) - 1)
        return (found << np.uint8(low)).view(np.int32)

    def shl(self, value: np.ndarray, left: int) -> np.ndarray:
        return value << np.int32(left)

    def shr(self, value: np.ndarray, right: int) -> np.ndarray:
        return (value.view(np.uint32) >> np.uint32(right)).view(np.int32)

    def ashr(self, value: np.ndarray, right: int) -> np.ndarray:
        return value >> np.int32(right)

    def or_(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a | b

    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a + b

    def sub_bytes(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a.view(np.uint8) - b.view(np.uint8)).view(np.int32)

    def mul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a * b

    def dots(self, parts: list, words: list, x: Any, places: list[list[int]], bits: int) -> list:
        quads = [[self.read(x + place, np.int8, 4) for place in row] for row in places]
        codes = [np.ascontiguousarray(word()).view(np.uint8).reshape(-1, 4) for word in words]
        if self.paired:
            sums = [self.target.twin_dots(self.zero(), codes, row, bits) for row in quads]
            return [part + added for part, added in zip(parts, self.crossed(sums), strict=True)]
        return [self.target.twin_dots(part, codes, row, bits) for part, row in zip(parts, quads, strict=True)]

    def crossed(self, columns: list) -> list:
        """Vectors of rows, one a column, as vectors of pairs, or back; see Emitter."""
        pairs = [np.stack(columns[c : c + 2], 1).reshape(2, -1) for c in range(0, len(columns), 2)]
        return [half for pair in pairs for half in pair]

    def tile_dots(
        self,
        parts: list,
        words: list,
        x: int | None,
        places: list[list[int]],
        bits: int,
        scales: list | None,
        magnitude: int = 0,
    ) -> list:
        if magnitude:
            sums = [self._signed_dots(row, x, places, bits, magnitude) for row in words]
        else:
            sums = [self.dots([self.zero() for _ in places], row, x, places, bits) for row in words]
        if scales:
            sums = [[total * scale[::2] for total in row] for row, scale in zip(sums, scales, strict=True)]
        pairs = zip(parts, sums, strict=True)
        return [[part + total for part, total in zip(*row, strict=True)] for row in pairs]

    def _signed_dots(self, words: list, x: int | None, places: list[list[int]], bits: int, magnitude: int) -> list:
        sums = [self.zero() for _ in places]
        for right in (0, 4) if bits == 8 else (0,):
            found = [nibble(self, word, right) if bits == 8 else word() for word in words]
            digits = [np.ascontiguousarray(digit).view(np.int8).reshape(-1, 4) for digit in found]
            for c, row in enumerate(places):
                if x is None:
                    sums[c] += sum(digit.sum(1, dtype=np.int32) for digit in digits) << right
                else:
                    quads = [self.read(x + place, np.uint8, 4) for place in row]
                    sums[c] += self.target.twin_signed(self.zero(), digits, quads, magnitude) << right
        return sums

    def doubled_short(self, value: np.ndarray) -> np.ndarray:
        return np.repeat(value.astype(np.int16), 2)

    def load_shorts(self, base: int, at: int) -> np.ndarray:
        return self.read(base + at, np.int16, 2 * self.lanes)

    def store_vector(self, value: np.ndarray, base: int, at: int) -> None:
        ctypes.memmove(base + at, value.tobytes(), value.nbytes)

    def in_order(self, value: np.ndarray) -> np.ndarray:
        return value

    def byte(self, word: np.ndarray, i: int) -> np.ndarray:
        return self.and_(self.shr(word, 8 * i), 255)

    def of_column(self, base: int, places: Places, c: int) -> np.ndarray:
        return self._both(base, places, c, np.int32)

    def of_column_float(self, base: int, places: Places, c: int) -> np.ndarray:
        return self._both(base, places, c, np.float32)

    def _both(self, base: int, places: Places, c: int, dtype: Any) -> np.ndarray:
        own = places.at[c & ~1 : (c & ~1) + 2] if self.paired else [places.at[c]]
        return np.tile(np.concatenate([self.read(base + at, dtype, 1) for at in own]), self.lanes // len(own))

    def column_groups(self, count: int) -> list[list[int]]:
        return column_groups(self.paired, count)

    def of_rows(self, value: np.ndarray, c: int) -> np.ndarray:
        return np.repeat(value, 2).reshape(2, -1)[c & 1] if self.paired else value

    def load_floats(self, base: int, at: int) -> np.ndarray:
        return self.read(base + at, np.float32, self.lanes)

    def zero_float(self) -> np.ndarray:
        return np.zeros(self.lanes, np.float32)

    def splat_float(self, value: float) -> np.ndarray:
        return np.full(self.lanes, value, np.float32)

    def to_float(self, value: np.ndarray) -> np.ndarray:
        return value.astype(np.float32)

    def fmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a * b

    def fneg(self, a: np.ndarray) -> np.ndarray:
        return -a

    def fma(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (a.astype(np.float64) * b + c).astype(np.float32)


def column_groups(paired: bool, count: int) -> list[list[int]]:
    """Columns one by one, or in pairs."""
    step = 2 if paired else 1
    return [list(range(c, c + step)) for c in range(0, count, step)]


Body = Callable[[Any, list[Any], Any, Any, Any], list[Any]]
Routine = Callable[[Any, Any, Any, Any], None]


def intrinsics(
    target: ModuleType, columns: int, body: Body, paired: bool = False, ahead: tuple[int, ...] = (), level: int = 1
) -> dict[str, Any]:
    """zeros(), load(y, stride), accumulate(totals, weights, halves, x), store(totals, y, stride)."""
    kind = Totals(columns, target.LANES)

    @intrinsic
    def zeros(typingctx):
        def emit(context, builder, signature, arguments):
            return context.get_constant_null(kind)

        return kind(), emit

    @intrinsic
    def load(typingctx, y, stride):
        def emit(context, builder, signature, arguments):
            packed = context.get_constant_null(kind)
            for c, vector in enumerate(Emitter(builder, target).load_all(columns, *arguments)):
                packed = builder.insert_value(packed, vector, c)
            return packed

        return kind(types.int64, types.int64), emit

    @intrinsic
    def accumulate(typingctx, totals, weights, halves, x):
        def emit(context, builder, signature, arguments):
            packed, *addresses = arguments
            vectors = [builder.extract_value(packed, c) for c in range(columns)]
            for c, vector in enumerate(body(Emitter(builder, target, paired, ahead, level), vectors, *addresses)):
                packed = builder.insert_value(packed, vector, c)
            return packed

        return kind(kind, types.int64, types.int64, types.int64), emit

    @intrinsic
    def store(typingctx, totals, y, stride):
        def emit(context, builder, signature, arguments):
            packed, address, step = arguments
            Emitter(builder, target, paired).store_all(
                [builder.extract_value(packed, c) for c in range(columns)], address, step
            )
            return context.get_dummy_value()

        return types.void(kind, types.int64, types.int64), emit

    return {"zeros": zeros, "load": load, "accumulate": accumulate, "store": store}


def routine(target: ModuleType, body: Routine, ahead: tuple[int, ...] = (), level: int = 1) -> Any:
    """The function of three addresses that `body` emits."""

    @intrinsic
    def run(typingctx, weights, halves, out):
        def emit(context, builder, signature, arguments):
            body(Emitter(builder, target, False, ahead, level), *arguments)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), emit

    return run


def twins(target: ModuleType, columns: int, body: Body, paired: bool = False) -> dict[str, Any]:
    """The same functions in numpy."""

    def zeros():
        return np.zeros((columns, target.LANES), np.float32)

    def load(y, stride):
        return np.array([Twin(target).read(y + c * stride, np.float32, target.LANES) for c in range(columns)])

    def accumulate(totals, weights, halves, x):
        return np.array(body(Twin(target, paired), list(totals), weights, halves, x), np.float32)

    def store(totals, y, stride):
        if paired:
            totals = [row for c in range(0, columns, 2) for row in totals[c : c + 2].reshape(-1, 2).T]
        for c in range(columns):
            ctypes.memmove(y + c * stride, totals[c].tobytes(), 4 * target.LANES)

    return {"zeros": zeros, "load": load, "accumulate": accumulate, "store": store}
