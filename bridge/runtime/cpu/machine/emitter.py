"""The vector instructions that kernels are made of, written with llvmlite.

What differs between targets is the dot product: see the intrinsics_*.py modules.
"""

from __future__ import annotations

from bridge.runtime.cpu.machine.instruction_set import InstructionSet
from bridge.runtime.cpu.machine.operands import Places, interleaving
from bridge.system.kernels import ir
from bridge.system.kernels.memory import call_intrinsic, spread

_LINE = 64


class Emitter:
    """Writes vector instructions with an llvmlite builder.

    paired  columns of x come in pairs: vector c, even, holds rows 0 and 1 of columns c and c + 1, and vector c + 1 rows
            2 and 3, each row of both columns first
    ahead   bytes ahead of a load of weights at which lines are prefetched
    level   of cache that they are brought to: 1 or 2
    """

    def __init__(
        self, builder: ir.IRBuilder, target: InstructionSet | None, paired: bool = False, ahead: tuple[int, ...] = (),
        level: int = 1,
    ):  # fmt: skip
        self.builder, self.paired, self.ahead, self.level = builder, paired, ahead, level
        self.add, self.mul, self.or_ = builder.add, builder.mul, builder.or_
        self.fmul, self.fneg = builder.fmul, builder.fneg
        self._fetched: set[int] = set()
        if target is None:  # for code that is the same on all targets
            return
        self.target = target
        self.lanes: int = target.lanes
        self.signed_dots: bool = target.signed_dots
        self.index_bits: int = target.index_bits
        self.fuses_scales: bool = target.fuses_scales
        self.float_scales: bool = target.float_scales
        self.multiplies_pairs: bool = target.emit_pairs is not None
        self.ints = ir.VectorType(ir.I32, self.lanes)
        self.floats = ir.VectorType(ir.F32, self.lanes)
        self.bytes = ir.VectorType(ir.I8, 4 * self.lanes)

    def call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        """Call an LLVM intrinsic."""
        return call_intrinsic(self.builder, name, result, *arguments)

    def pointer(self, base: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
        address = self.builder.add(base, ir.Constant(ir.I64, offset)) if offset else base
        return self.builder.inttoptr(address, kind.as_pointer())

    # memory

    def load(self, base: ir.Value, offset: int) -> ir.Value:
        """A vector of weights; lines further on are fetched, some after each load rather than all in a burst."""
        loaded = self.builder.load(self.pointer(base, offset, self.ints), align=4 * self.lanes)
        line = offset // _LINE
        if self.ahead and line not in self._fetched:
            self._fetched.add(line)
            for distance in self.ahead:
                self.prefetch(base, line * _LINE + distance)
            return self.in_order(loaded)  # its users wait, so that LLVM leaves the prefetches among them
        return loaded

    def broadcast(self, base: ir.Value, offset: int) -> ir.Value:
        return self.spread(self.builder.load(self.pointer(base, offset, ir.I32), align=4), self.ints)

    def broadcast_sixteen(self, base: ir.Value, offset: int) -> ir.Value:
        """16 bytes again and again."""
        quad = ir.VectorType(ir.I32, 4)
        loaded = self.builder.load(self.pointer(base, offset, quad), align=4)
        return self._shuffled(loaded, ir.Constant(quad, ir.Undefined), (0, 1, 2, 3) * (self.lanes // 4))

    def interleaved_sum(self, a: ir.Value, b: ir.Value, words: int) -> ir.Value:
        """In every 16 bytes, one half of a and of b, in turn `words` of 4 bytes of each, plus the other half."""
        kind = a.type
        a, b = (self.builder.bitcast(value, self.ints) for value in (a, b))
        parts = []
        for first in (0, 2):
            order = interleaving(self.lanes, range(first // words, (first + 2) // words), words)
            parts.append(self.builder.bitcast(self._shuffled(a, b, tuple(order)), kind))
        return self.builder.add(*parts)

    def broadcast_float(self, base: ir.Value, offset: int) -> ir.Value:
        return self.spread(self.builder.load(self.pointer(base, offset, ir.F32), align=4), self.floats)

    def of_column(self, base: ir.Value, places: Places, c: int) -> ir.Value:
        """The int32 at base + places.offsets[c] in all lanes of column c; see `paired`."""
        return self._of_column(base, places, c, self.ints)

    def of_column_float(self, base: ir.Value, places: Places, c: int) -> ir.Value:
        """As `of_column`, of a float32."""
        return self._of_column(base, places, c, self.floats)

    def _of_column(self, base: ir.Value, places: Places, c: int, kind: ir.VectorType) -> ir.Value:
        offset = places.offsets[c]
        if self.paired:  # this column's word and the other's, which follow one another
            pair = self.builder.load(self.pointer(base, places.offsets[c & ~1], ir.I64), align=4)
            return self.builder.bitcast(self.spread(pair, ir.VectorType(ir.I64, 2)), kind)
        if self.lanes == 4 and offset // 16 * 16 + 16 <= places.end:  # neighbours share a load
            return self.word_of_quad(base, offset, kind)
        return self.spread(self.builder.load(self.pointer(base, offset, kind.element), align=4), kind)

    def word_of_quad(self, base: ir.Value, offset: int, kind: ir.VectorType) -> ir.Value:
        """The word at base + offset in all four lanes, from a vector of those around it: Arm multiplies by a lane."""
        quad = self.builder.load(self.pointer(base, offset // 16 * 16, kind), align=4)
        return self._shuffled(quad, ir.Constant(kind, ir.Undefined), (offset // 4 % 4,) * 4)

    def byte(self, word: ir.Value, i: int) -> ir.Value:
        """Byte i of each word, as int32."""
        if i in (1, 2):  # one instruction instead of two
            return self.builder.bitcast(self._bytes_of_words(word, (i, None, None, None)), self.ints)
        return self.and_(self.shr(word, 8 * i), 255)

    def short_of_byte(self, word: ir.Value, i: int) -> ir.Value:
        """Byte i of each word in both of its halves, as int16."""
        return self.builder.bitcast(self._bytes_of_words(word, (i, None, i, None)), self._shorts)

    def two_bytes(self, word: ir.Value, i: int) -> ir.Value:
        """Bytes i and i + 1 of each word as int16 in its halves."""
        return self._bytes_of_words(word, (i, None, i + 1, None))

    def sum_of_products(self, a: ir.Value, b: ir.Value, factors: ir.Value) -> ir.Value:
        """a times the lower int16 of each word of `factors`, plus b times the upper; a and b fit int16."""
        pair = self.or_(self.and_(a, 0xFFFF), self.shl(b, 16))
        return self.target.emit_pairs(self, pair, factors)

    def _bytes_of_words(self, word: ir.Value, chosen: tuple[int | None, ...]) -> ir.Value:
        """Four bytes for each word, which are the chosen ones of it; None: zero."""
        quad = [255 if k is None else 4 * lane + k for lane in range(4) for k in chosen]  # from 128 on: zero
        octets = self.builder.bitcast(word, self.bytes)
        return self.target.emit_look_up(self, octets, ir.Constant(self.bytes, quad * (self.lanes // 4)))

    def column_groups(self, count: int) -> list[list[int]]:
        """The columns whose products are taken together where that saves nothing: one by one, or in pairs."""
        step = 2 if self.paired else 1
        return [list(range(c, c + step)) for c in range(0, count, step)]

    def of_rows(self, value: ir.Value, c: int) -> ir.Value:
        """A vector of rows, as lanes of column c; see `paired`."""
        return self.zipped(value, value, c & 1) if self.paired else value

    def zipped(self, a: ir.Value, b: ir.Value, half: int) -> ir.Value:
        """The lower or upper lanes of a and b in turn."""
        return self._shuffled(a, b, (0, 4, 1, 5) if half == 0 else (2, 6, 3, 7))

    def load_half(self, base: ir.Value, offset: int) -> ir.Value:
        f16 = ir.VectorType(ir.F16, self.lanes)
        return self.builder.fpext(self.builder.load(self.pointer(base, offset, f16), align=2 * self.lanes), self.floats)

    def load_e8m0(self, base: ir.Value, offset: int) -> ir.Value:
        """2^(e - 128) of a byte a lane, but 0 for e < 2: those are below the least normal float."""
        exponent = self.builder.zext(self._load_bytes(base, offset), self.ints)
        positive = self.builder.icmp_unsigned(">", exponent, self.splat(1))
        bits = self.shl(self.builder.sub(exponent, self.splat(1)), 23)
        return self.builder.bitcast(self.builder.select(positive, bits, self.zero()), self.floats)

    def load_ue4m3(self, base: ir.Value, offset: int) -> ir.Value:
        """Half of a UE4M3 a lane: a half of these bits is 2^-8 of it, subnormal ones alike."""
        shorts = ir.VectorType(ir.I16, self.lanes)
        bits = self.builder.zext(self._load_bytes(base, offset), shorts)
        bits = self.builder.shl(bits, ir.Constant(shorts, [7] * self.lanes))
        halves = self.builder.bitcast(bits, ir.VectorType(ir.F16, self.lanes))
        return self.fmul(self.builder.fpext(halves, self.floats), self.splat_float(128.0))

    def _load_bytes(self, base: ir.Value, offset: int) -> ir.Value:
        return self.builder.load(self.pointer(base, offset, ir.VectorType(ir.I8, self.lanes)), align=1)

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

    def prefetch(self, base: ir.Value, offset: int) -> None:
        flags = (ir.Constant(ir.I32, 0), ir.Constant(ir.I32, 4 - self.level), ir.Constant(ir.I32, 1))  # read, of data
        self.call("llvm.prefetch.p0", ir.VoidType(), self.pointer(base, offset, ir.I8), *flags)

    def barrier(self) -> None:
        """Keep LLVM from moving loads across: its scheduler, given a whole superblock, spills most registers."""
        self.builder.fence("seq_cst", targetscope="singlethread")

    def in_order(self, value: ir.Value) -> ir.Value:
        """The value. LLVM keeps the order of such values; else it may multiply column by column and spill the words."""
        kind = ir.FunctionType(value.type, [value.type])
        return self.builder.asm(kind, "", f"={self._any_vector},0", [value], True)

    @property
    def _any_vector(self) -> str:
        """What LLVM calls any vector register; its x leaves out the upper 16 of AVX-512."""
        return "w" if self.lanes == 4 else "v"

    # int32 lanes

    def zero(self) -> ir.Value:
        return ir.Constant(self.ints, [0] * self.lanes)

    def splat(self, value: int) -> ir.Value:
        return ir.Constant(self.ints, [ir.Constant(ir.I32, value)] * self.lanes)

    def and_(self, value: ir.Value, bits: int) -> ir.Value:
        return self.builder.and_(value, self.splat(bits))

    def field(self, value: ir.Value, start: int, low: int, width: int) -> ir.Value:
        """`width` bits of each byte, from bit `start` on, moved to bit `low`; zeros elsewhere."""
        if width == 8:
            return value
        if start and start + width <= self.index_bits:  # one instruction instead of two
            fields = (i >> start & ((1 << width) - 1) for i in range(1 << self.index_bits))
            return self.permute(value, tuple(part << low for part in fields))
        right = start - low
        if self.target.byte_shifts and low == 0 and start + width == 8:  # nothing is left to mask
            moved = self.builder.lshr(
                self.builder.bitcast(value, self.bytes), ir.Constant(self.bytes, [start] * 4 * self.lanes)
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

    def sub_bytes(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """a - b, byte by byte."""
        difference = self.builder.sub(*(self.builder.bitcast(value, self.bytes) for value in (a, b)))
        return self.builder.bitcast(difference, self.ints)

    def mul_bytes(self, word: ir.Value, factor: ir.Value) -> ir.Value:
        """Each byte of a word times the int32 of its lane, modulo 256."""
        factors = self.builder.bitcast(self.doubled_short(factor), self._shorts)
        halves = (self.builder.bitcast(self.shr(word, right), self._shorts) for right in (0, 8))
        even, odd = (self.builder.bitcast(self.builder.mul(half, factors), self.ints) for half in halves)
        return self.or_(self.and_(even, 0x00FF00FF), self.shl(self.and_(odd, 0x00FF00FF), 8))

    def look_up(self, word: ir.Value, table: tuple[int, ...]) -> ir.Value:
        """The table's entry for each byte of a word, 0..15; the table may be shorter."""
        entries = ir.Constant(self.bytes, [*table, *[0] * (16 - len(table))] * (4 * self.lanes // 16))
        octets = self.target.emit_look_up(self, entries, self.builder.bitcast(word, self.bytes))
        return self.builder.bitcast(octets, self.ints)

    def permute(self, indices: ir.Value, table: tuple[int, ...]) -> ir.Value:
        """The table's entry for the low `index_bits` bits of each byte."""
        entries = ir.Constant(self.bytes, table)
        octets = self.target.emit_permute(self, entries, self.builder.bitcast(indices, self.bytes))
        return self.builder.bitcast(octets, self.ints)

    def blend(self, a: ir.Value, b: ir.Value, bits: int) -> ir.Value:
        """The `bits` of each byte of a, the others of b."""
        return self.target.emit_blend(self, a, b, self.splat(0x01010101 * bits))

    def dots(self, parts: list, words: list, x: ir.Value, places: list[list[int]], bits: int) -> list:
        """parts[c] + sum over k of words[k] . the 4 int8 at x + places[c][k], in every lane; codes of `bits` bits.

        A word is a function that emits it.
        """
        return self.target.emit_dots(self, parts, words, x, places, bits)

    def tile_dots(
        self, parts: list[list], words: list[list], x: ir.Value | None, places: list[list[int]], bits: int,
        scales: list | None, magnitude: int = 0, starts: list[list] | None = None,
    ) -> list[list]:  # fmt: skip
        """As `dots`, parts[r][c] and words[r][k] of several groups of rows, which the same values are multiplied by.

        x          None: all values are 1
        scales     int16 of each group of rows that its sums are multiplied by, see `doubled_short`
        magnitude  of signed codes, at most, or of their digits where bits is 8; then values are uint8. 0: unsigned ones
        starts     functions that emit int16 of each group of rows, where sums of as many words each start
        """
        return self.target.emit_tile(self, parts, words, x, places, bits, scales, magnitude, starts)

    # int16, two a lane

    def start_of(self, words: list) -> ir.Value:
        """-128 times the sums of the signed bytes of words, two sums a lane."""
        return self.target.emit_start(self, words)

    def doubled_short(self, value: ir.Value) -> ir.Value:
        """The lower half of each int32 in both halves."""
        return self.or_(self.and_(value, 0xFFFF), self.shl(value, 16))

    def load_shorts(self, base: ir.Value, offset: int) -> ir.Value:
        return self.builder.bitcast(self.load(base, offset), self._shorts)

    def store_vector(self, value: ir.Value, base: ir.Value, offset: int) -> None:
        self.builder.store(value, self.pointer(base, offset, value.type), align=4 * self.lanes)

    @property
    def _shorts(self) -> ir.VectorType:
        return ir.VectorType(ir.I16, 2 * self.lanes)

    # float32 lanes

    def load_floats(self, base: ir.Value, offset: int) -> ir.Value:
        return self.builder.load(self.pointer(base, offset, self.floats), align=4 * self.lanes)

    def zero_float(self) -> ir.Value:
        return ir.Constant(self.floats, [0.0] * self.lanes)

    def splat_float(self, value: float) -> ir.Value:
        return ir.Constant(self.floats, [value] * self.lanes)

    def to_float(self, value: ir.Value) -> ir.Value:
        return self.builder.sitofp(value, self.floats)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.call(f"llvm.fma.v{self.lanes}f32", self.floats, a, b, c)

    def _shuffled(self, a: ir.Value, b: ir.Value, order: tuple[int, ...]) -> ir.Value:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.I32, len(order)), order))

    def spread(self, scalar: ir.Value, kind: ir.VectorType) -> ir.Value:
        """A scalar in all lanes."""
        return spread(self.builder, scalar, kind)
