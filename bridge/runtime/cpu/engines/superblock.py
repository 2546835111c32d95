"""The arithmetic of one block of the repacked form (see layout.py), written once.

The functions here do not compute: called with an `Emitter` they write the LLVM code of one block, unrolled,
for a target's vector width and a number of columns of x (tokens); called with a `Twin` (tests/support/kernel_twin.py)
the same lines run on numpy arrays, which is how a target is tested where it cannot run. `v` is either of them.

Vectors are of int32 or float32, one lane a row. `totals` is one float vector per column.

    affine  w = d*sc*q - dmin*mn         sum = d * sum_g dx_g sum_j sc_j (q_j . x_j)  -  dmin*e * sum_j mn_j t_j
    scaled  w = d*sc*(q - zero)          sum = d * sum_g dx_g sum_j sc_j (q_j . x_j - zero*s_j)
    plain   w = d*(q - zero)             sum = d*dx * (q . x - zero*s)
            w = d*q + dmin               sum = d*dx * (q . x)  +  dmin * (dx*s)
    table   w = scale_j*values[q]        sum = sum_j scale_j * dx * (u[q_j] . x_j - lift*s_j),  u = values + lift >= 0

A table type with d has the sum of a scaled or plain type, with u in place of q and lift in place of zero. Of some, sc_j
stands for 2*sc_j + 1 and d for unit*d.

x_j are the int8 values of sub-block j, s_j their sum, dx_g the scale of x for 32 columns, e*t_j is dx_g*s_j: see
activations.py. Sums over 32 columns are exact in int32, and times sc_j in float32 too, where they reach 2^24 at most.
Above them float32 rounds once for every 32 columns.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from bridge.blocks import BlockType
from bridge.runtime.cpu.forms.activations import Record, float_record, record_of
from bridge.runtime.cpu.forms.layout import GROUP, InterleavedLayout, Piece, pieces
from bridge.runtime.cpu.machine.operands import LookedUp, Permuted, Places, computed
from bridge.system.records import record


@record
class Word:
    """A word of codes in the vectors at base + offset: a function that emits its code.

    Called where it is used: an early result occupies a register, and registers are scarce.
    """

    v: Any
    base: Any
    offset: int
    pieces: tuple[Piece, ...]

    def __call__(self) -> Any:
        result = None
        for piece in self.pieces:
            part = self._field(piece)
            result = part if result is None else self.v.or_(result, part)
        return result

    @property
    def start(self) -> int:
        """The bit from which the codes lie whole in bytes whose highest bit is not theirs; otherwise 0."""
        (_, start, _, width), *more = self.pieces
        return 0 if more or start + width == 8 else start

    def unshifted(self) -> Any:
        """The codes, times 2^start."""
        return self._field(self.pieces[0]._replace(low=self.start))

    def loose(self, bits: int) -> tuple[Any, list[int]]:
        """A word whose codes are among the low `bits` bits of each byte, and the places of theirs, lowest first.

        The other bits are anything. Pieces move by even numbers of bits, so that words share what was moved.
        """
        value: Any = None
        places: list[int] = []
        for piece in self.pieces:
            right = max(0, piece.start + piece.width - bits + 1) // 2 * 2
            targets = range(piece.start - right, piece.start - right + piece.width)
            while set(targets) & set(places):
                right, targets = right + 2, range(targets.start - 2, targets.stop - 2)
            moved = self.v.shr(self._load(piece), right)
            value = moved if value is None else self.v.blend(moved, value, sum(1 << bit for bit in targets))
            places += targets
        return value, places

    def _load(self, piece: Piece) -> Any:
        return self.v.load(self.base, self.offset + 4 * self.v.lanes * piece.vector)

    def _field(self, piece: Piece) -> Any:
        return self.v.field(self._load(piece), *piece[1:])


def words(v: Any, base: Any, offset: int, bits: int, count: int) -> list[Any]:
    """`count` words of `bits` bits a code from the vectors at base + offset."""
    return [Word(v, base, offset, parts) for parts in pieces(bits, count)]


def _paired(bits: int, count: int) -> list[int]:
    """The order of words in which those whose lowest bits share a vector follow one another."""
    return sorted(range(count), key=lambda i: (pieces(bits, GROUP)[i][0].vector, i))


def scale_words(v: Any, layout: InterleavedLayout, weights: Any) -> list[Callable[[], Any]]:
    """The words of a block's scale codes (IQ types with odd scales: 2 * code + 1), then those of its min codes."""

    def odd(word: Callable[[], Any]) -> Any:
        return v.or_(v.shl(word(), 1), v.splat(0x01010101))

    codes = words(v, weights, 0, layout.scale_bits, layout.scale_words)
    return [partial(odd, word) for word in codes] if layout.block.odd_scales else codes


def scale_code(v: Any, scales: list[Any], j: int, layout: InterleavedLayout) -> Any:
    """Code j of the words as int32."""
    word = scales[j // 4]()
    if j < layout.block.subs and layout.block.scale_lo < 0:
        return v.ashr(v.shl(word, 32 - layout.scale_bits - 8 * (j % 4)), 32 - layout.scale_bits)
    return v.byte(word, j % 4)


def _scaled_in_pairs(v: Any, block: BlockType) -> bool:
    """Whether the sums of two sub-blocks fit int16 and are multiplied by their scales at once: of one column."""
    largest = max(map(abs, block.values or (block.zero, block.levels - 1 - block.zero)))
    fit = 128 * largest * block.sum_span < 1 << 15
    return v.multiplies_pairs and fit and block.sum_span == 16 and block.scale_lo >= 0


def codes_of_group(
    v: Any, layout: InterleavedLayout, weights: Any, group: int, signed: bool
) -> list[Callable[[], Any]]:
    """The words of 32 columns: codes, or their values if the type has a table; signed ones of 8 bits less 128."""
    block = layout.block
    codes = words(v, weights, layout.codes_at + group * layout.group_bytes, layout.code_bits, GROUP)
    if not block.values:
        return codes
    table = tuple((value + block.lift) ^ (128 if signed else 0) for value in block.values)
    return [(Permuted if v.index_bits else LookedUp)(v, code, table) for code in codes]


def scale_of_sub(v: Any, layout: InterleavedLayout, halves: Any, j: int) -> Any:
    """The scale of sub-block j of a type with one level of scales, and d of others."""
    if not layout.block.scales:
        return d_of_block(v, layout, halves)
    return (v.load_e8m0 if layout.block.subs == 1 else v.load_ue4m3)(halves, v.lanes * j)


def d_of_block(v: Any, layout: InterleavedLayout, halves: Any) -> Any:
    d = v.load_half(halves, 0)
    return d if layout.block.unit == 1 else v.fmul(d, v.splat_float(layout.block.unit))


def _signed(v: Any, block: BlockType) -> bool:
    """Whether 8 bits are multiplied as u - 128, so that no zero point is left."""
    return block.value_bits == 8 and v.signed_dots


def _dots(v: Any, parts: list[Any], words: list[Any], x: Any, places: list[list[int]], bits: int) -> list[Any]:
    """`v.dots`. Of one column, words that are not at the bottom of their bytes are multiplied where they are, if there
    are several: one shift of their sum is cheaper than one of each."""
    high = [word.start if isinstance(word, Word) and v.signed_dots and len(parts) == 1 else 0 for word in words]
    for start in sorted({start for start in high if start and high.count(start) > 1}):
        same = [k for k, other in enumerate(high) if other == start]
        products = v.dots([v.zero()], [words[k].unshifted for k in same], x, [[places[0][k] for k in same]], bits)
        parts = [v.add(parts[0], v.ashr(products[0], start))]
        rest = [k for k in range(len(words)) if k not in same]
        words, high = [words[k] for k in rest], [high[k] for k in rest]
        places = [[places[0][k] for k in rest]]
    return v.dots(parts, words, x, places, bits)


def value_at(v: Any, record: Record, c: int, index: int) -> int:
    """Where value `index` of column c is in the records of all columns, see activations.py."""
    if not v.paired:
        return record.sums_at * c + index
    return record.sums_at * (c & ~1) + index // 8 * 16 + 8 * (c & 1) + index % 8


def fields_at(record: Record, columns: range, offset: int) -> Places:
    """Where what follows the values in the columns' records is, `offset` bytes from the begin of each."""
    places = [record.together(len(columns), offset, c) for c in columns]
    return Places(places, record.nbytes * len(columns))


@record
class Repacked:
    """Where a block's codes and scale codes come from: the repacked form at `weights`."""

    v: Any
    layout: InterleavedLayout
    weights: Any

    @property
    def signed(self) -> bool:
        """Whether `dots` are of codes less the zero point, which is taken off otherwise."""
        return _signed(self.v, self.layout.block)

    def scale_words(self) -> list[Callable[[], Any]]:
        return scale_words(self.v, self.layout, self.weights)

    @property
    def fuses_scales(self) -> bool:
        """Whether `dots` multiplies by scales; it cannot where sums start at -zero * s_j."""
        return self.v.fuses_scales and not self.layout.block.lift

    def dots(self, parts: list[Any], j: int, x: Any, scale: Any = None) -> list[Any]:
        """parts + the codes of columns that share a sum, the j-th ones, times as many values of each column of x.

        scale  what these products are multiplied by, as int16 in both halves of a word
        """
        v, layout, block = self.v, self.layout, self.layout.block
        span = block.sum_span
        first = span * j % 32 // 4
        codes = codes_of_group(v, layout, self.weights, span * j // 32, self.signed)
        order = _paired(layout.code_bits, span // 4)
        places = [[value_at(v, record_of(block), c, span * j + 4 * k) for k in order] for c in range(len(parts))]
        chosen = [codes[first + k] for k in order]
        if scale is not None:
            return v.tile_dots([parts], [chosen], x, places, block.value_bits, [scale])[0]
        return _dots(v, parts, chosen, x, places, block.value_bits)


def k_block(
    v: Any, layout: InterleavedLayout, totals: list[Any], weights: Any, halves: Any, x: Any, source: Any = None
) -> list[Any]:
    """totals + one superblock, of 256 columns and two levels of scales, times as many values of each column of x.

    `source`: as `Repacked`, which is taken where it is None.
    """
    block = layout.block
    record = record_of(block)
    columns = range(len(totals))
    source = source or Repacked(v, layout, weights)
    scales = source.scale_words()
    if len(totals) == 1:  # registers to spare
        scales = [computed(word()) for word in scales]
    per_group = 32 // block.sub
    sums: list[Any] = [None for _ in columns]
    in_floats = v.float_scales and len(totals) > 1  # for one column, to convert the scale takes as long
    in_pairs = len(totals) == 1 and _scaled_in_pairs(v, block)
    # on Arm, LLVM would move loads and sums of all groups past one another and spill most of them
    in_turn = v.lanes == 4
    for group in range(block.size // 32):
        if len(totals) > 1 or in_turn:
            v.barrier()
        inner: list[Any] = [None for _ in columns]
        for i in range(per_group):
            j = group * per_group + i
            if block.lift and not source.signed:
                sums_at = fields_at(record, columns, record.sums_at + 4 * j)
                parts = [v.of_column(x, sums_at, c) for c in columns]
            else:
                parts = [v.zero() for _ in columns]
            if source.fuses_scales:
                inner = source.dots(inner if i else parts, j, x, v.short_of_byte(scales[j // 4](), j % 4))
                continue
            parts = source.dots(parts, j, x)
            if in_pairs:
                factors = v.two_bytes(scales[j // 4](), j % 4 // 2 * 2)
                inner = [v.sum_of_products(inner[0], parts[0], factors)] if i else parts
                continue
            scale = scale_code(v, scales, j, layout)
            if in_floats:
                scale = v.to_float(scale)
                parts = [v.to_float(part) for part in parts]
            for c in columns:
                inner[c] = _plus_product(v, inner[c], parts[c], v.of_rows(scale, c), in_floats)
        d_at = fields_at(record, columns, record.d_at + 4 * group)
        for c in columns:
            dx = v.of_column_float(x, d_at, c)
            value = inner[c] if in_floats else v.to_float(inner[c])
            sums[c] = v.fmul(value, dx) if sums[c] is None else v.fma(value, dx, sums[c])
            if in_turn:
                sums[c] = v.in_order(sums[c])
    d = d_of_block(v, layout, halves)
    totals = [v.fma(sums[c], v.of_rows(d, c), totals[c]) for c in columns]
    if block.has_min:
        dmin = v.fneg(v.load_half(halves, 2 * v.lanes))
        return plus_mins(v, block, totals, scales[block.subs // 4 :], layout.scale_bits, dmin, x)
    return totals


def _plus_product(v: Any, total: Any, value: Any, scale: Any, in_floats: bool) -> Any:
    """total (None: 0) + value * scale, in float32 or int32."""
    if in_floats:
        return v.fmul(value, scale) if total is None else v.fma(value, scale, total)
    product = v.mul(value, scale)
    return product if total is None else v.add(total, product)


def plus_mins(v: Any, block: BlockType, totals: list[Any], mins: list[Any], bits: int, dmin: Any, x: Any) -> list[Any]:
    """totals + dmin times the sums of x times mn, whose words of codes of `bits` bits are `mins`."""
    record = record_of(block)
    columns = range(len(totals))
    totals = list(totals)
    low_at = fields_at(record, columns, record.low_at)
    for together in v.column_groups(len(totals)):
        words_at = [record.sums_at + 4 * k for k in range(2 * len(mins))]
        places = [[record.together(len(columns), offset, c, 8) for offset in words_at] for c in together]
        high, low = (
            v.dots([v.zero() for _ in together], mins, x, [row[part] for row in places], bits)
            for part in (slice(len(mins)), slice(len(mins), None))
        )
        for i, c in enumerate(together):
            value = v.to_float(v.add(low[i], v.shl(high[i], 7)))
            e = v.of_column_float(x, low_at, c)
            totals[c] = v.fma(value, v.fmul(v.of_rows(dmin, c), e), totals[c])
    return totals


def plain_block(
    v: Any, layout: InterleavedLayout, totals: list[Any], weights: Any, halves: Any, x: Any, source: Any = None
) -> list[Any]:
    """totals + one block of a type with one level of scales times as many values of each column of x; see `k_block`."""
    block = layout.block
    record = record_of(block)
    columns = range(len(totals))
    source = source or Repacked(v, layout, weights)
    totals = list(totals)
    for j in range(block.size // block.sum_span):
        group = j * block.sum_span // 32
        if block.lift and not source.signed:
            sums_at = fields_at(record, columns, record.sums_at + 4 * j)
            parts = [v.of_column(x, sums_at, c) for c in columns]
        else:
            parts = [v.zero() for _ in columns]
        parts = source.dots(parts, j, x)
        scale = scale_of_sub(v, layout, halves, j * block.sum_span // block.sub)
        d_at, s_at = (fields_at(record, columns, offset) for offset in (record.d_at + 4 * group, record.sums_at))
        for c in columns:
            dx = v.of_column_float(x, d_at, c)
            totals[c] = v.fma(v.to_float(parts[c]), v.fmul(v.of_rows(scale, c), dx), totals[c])
            if block.has_min:
                dmin = v.of_rows(v.load_half(halves, 2 * v.lanes), c)
                totals[c] = v.fma(dmin, v.of_column_float(x, s_at, c), totals[c])
    return totals


def float_block(v: Any, layout: InterleavedLayout, totals: list[Any], weights: Any, halves: Any, x: Any) -> list[Any]:
    """As above with x in float32: codes become floats, nothing is rounded to integers."""
    block = layout.block
    columns = range(len(totals))
    record = float_record(block)
    scales = scale_words(v, layout, weights) if block.is_k else []
    per_group = 32 // block.sum_span
    d = d_of_block(v, layout, halves) if not block.scales else None
    dmin = v.load_half(halves, 2 * v.lanes) if block.has_min else None
    for group in range(block.size // 32):
        codes = codes_of_group(v, layout, weights, group, signed=False)
        for i in range(per_group):
            j = group * per_group + i
            parts = [v.zero_float() for _ in columns]
            for k in range(block.sum_span // 4):
                for byte in range(4):
                    code = v.shr(codes[i * block.sum_span // 4 + k](), 8 * byte)
                    code = v.and_(v.add(code, v.splat(128)) if layout.signed else code, 255)
                    value = v.to_float(v.add(code, v.splat(-block.lift)) if block.lift else code)
                    for c in columns:
                        offset = record * c + 4 * (block.sum_span * j + 4 * k + byte)
                        parts[c] = v.fma(value, v.broadcast_float(x, offset), parts[c])
            scale = d if d is not None else scale_of_sub(v, layout, halves, j)
            if block.is_k:
                scale = v.fmul(d, v.to_float(scale_code(v, scales, j, layout)))
            totals = [v.fma(parts[c], scale, totals[c]) for c in columns]
            if dmin is not None:
                low = dmin
                if block.is_k:
                    low = v.fneg(v.fmul(dmin, v.to_float(scale_code(v, scales, block.subs + j, layout))))
                for c in columns:
                    s = v.broadcast_float(x, record * c + 4 * (block.size + j))
                    totals[c] = v.fma(low, s, totals[c])
    return totals


def arithmetic(block: BlockType, integer: bool) -> Callable[..., list[Any]]:
    """The function above that multiplies a block of a type by int8 or float32 values."""
    if not integer:
        return float_block
    return k_block if block.is_k else plain_block
