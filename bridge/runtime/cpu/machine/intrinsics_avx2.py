"""AVX2: pmaddubsw multiplies unsigned codes with int8 values and adds pairs, saturating, into int16.

A pair reaches 2 * 128 * (2^bits - 1), so some words are added as int16 before pmaddwd widens them: 8 of 4
bits, 4 of 5, 2 of 6. Codes of 8 bits would saturate: their high and low nibbles are multiplied apart.

Kernels that unpack blocks first (unpacked.py) turn the operands around where codes have a zero point: values of x are
unsigned there, x + 128, and codes are signed. What 128 adds is known when a block is unpacked, and sums start there.
"""

from __future__ import annotations

from functools import partial

from bridge.runtime.cpu.machine.instruction_set import InstructionSet
from bridge.runtime.cpu.machine.operands import nibble
from bridge.system.kernels import ir

_MULTIPLY, _WIDEN = "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"


def emit_look_up(v, table, codes):
    return v.call("llvm.x86.avx2.pshuf.b", v.bytes, table, codes)


def emit_pairs(widen, v, a, b):
    """In each word, the products of the lower and of the upper int16 of a and b, added."""
    shorts = ir.VectorType(ir.I16, 2 * v.lanes)
    return v.call(widen, v.ints, v.builder.bitcast(a, shorts), v.builder.bitcast(b, shorts))


def dots(multiply, widen, v, parts, words, x, places, bits):
    return tile(multiply, widen, v, [parts], [words], x, places, bits)[0]


def emit_start(v, words):
    shorts = ir.VectorType(ir.I16, 2 * v.lanes)
    total = ir.Constant(shorts, [0] * (2 * v.lanes))
    for word in words:
        halves = v.builder.bitcast(v.splat(-0x7F7F7F80), v.bytes)  # 128 in each byte
        total = v.builder.sub(total, v.call(_MULTIPLY, shorts, halves, v.builder.bitcast(word(), v.bytes)))
    return total


def tile(
    multiply, widen, v, parts, words, x, places, bits, scales=None, magnitude=0, starts=None
) -> list[list[ir.Value]]:
    """`Emitter.tile_dots` by the two instructions of a vector width, on whatever lanes v has."""
    parts = [list(row) for row in parts]
    shorts = ir.VectorType(ir.I16, 2 * v.lanes)
    rights = (0, 4) if bits == 8 else (0,)
    count = len(words[0])
    together = count // len(starts[0]) if starts else count if x is None else words_together(bits, magnitude)
    ordered = len(parts[0]) > 1 and v.lanes == ISA.lanes  # AVX-512 has registers for all words
    pairs: dict[tuple[int, int, int], ir.Value] = {}
    for k in range(count):
        digits = {
            (r, right): nibble(v, row[k], right) if bits == 8 else row[k]()
            for r, row in enumerate(words)
            for right in rights
        }
        if starts and k % together == 0:
            begin = [row[k // together]() for row in starts]
            pairs = {(c, r, 0): begin[r] for c in range(len(parts[0])) for r in range(len(words))}
        last = k + 1 == count or (k + 1) % together == 0
        for c in range(len(parts[0])):
            spread = v.splat(0x01010101) if x is None else v.broadcast(x, places[c][k])
            values = v.builder.bitcast(spread, v.bytes)
            for (r, right), digit in digits.items():
                operands = v.builder.bitcast(digit, v.bytes), values
                pair = v.call(multiply, shorts, *(reversed(operands) if magnitude else operands))
                pair = v.builder.add(pairs[c, r, right], pair) if (c, r, right) in pairs else pair
                pairs[c, r, right] = v.in_order(pair) if ordered else pair
                if not last:
                    continue
                left = ir.Constant(shorts, [right if scales else 1 << right] * (2 * v.lanes))
                factors = left if not scales else v.builder.shl(scales[r], left) if right else scales[r]
                total = v.add(parts[r][c], v.call(widen, v.ints, pairs.pop((c, r, right)), factors))
                parts[r][c] = v.in_order(total) if ordered and len(words) > 1 else total
    return parts


def row_dots(multiply, widen, v, rows, x, places, bits) -> list[ir.Value]:
    """Sums s: in each lane the codes of a row times values, see filerows.py.

    rows    [s][i][k]: word k of the rows i, i + 4 and so on, 16 codes each; a function that emits it
    places  [s][k]: where the 16 values are that it is multiplied with, from x on
    """
    shorts = ir.VectorType(ir.I16, 2 * v.lanes)
    rights = (0, 4) if bits == 8 else (0,)
    most = words_together(bits)
    values = [[v.builder.bitcast(v.broadcast_sixteen(x, offset), v.bytes) for offset in row] for row in places]

    def pairs(words, quads, right):
        total = None
        for word, quad in zip(words, quads, strict=True):
            digit = nibble(v, word, right) if bits == 8 else word()
            pair = v.call(multiply, shorts, v.builder.bitcast(digit, v.bytes), quad)
            total = pair if total is None else v.builder.add(total, pair)
        return v.in_order(total)

    def widened(pair, right):
        return v.call(widen, v.ints, pair, ir.Constant(shorts, [1 << right] * (2 * v.lanes)))

    def one(s, i):
        return [pairs(rows[s][i], values[s], right) for right in rights]

    count = len(places[0])  # pairs that are added so far
    halves: list[list[list[ir.Value]]] = [[] for _ in rows]
    for i in (0, 2):
        row_pairs = [[one(s, k) for s in range(len(rows))] for k in (i, i + 1)]
        for s in range(len(rows)):
            a, b = row_pairs[0][s], row_pairs[1][s]
            halves[s].append([v.interleaved_sum(p, q, 1) for p, q in zip(a, b, strict=True)])
    sums = []
    for low, high in halves:
        if 4 * count <= most:
            parts = [widened(v.interleaved_sum(p, q, 2), right) for p, q, right in zip(low, high, rights, strict=True)]
        else:
            wide = [[widened(p, right) for p, right in zip(half, rights, strict=True)] for half in (low, high)]
            parts = [v.interleaved_sum(*(_total(v, half) for half in wide), 2)]
        sums.append(_total(v, parts))
    return sums


def emit_signed_row_dots(v, rows, x, places):
    """As `row_dots`, of words of -127..127: the values' magnitudes, up to 128, times codes with the values' signs."""
    shorts = ir.VectorType(ir.I16, 2 * v.lanes)
    one = ir.Constant(shorts, [1] * (2 * v.lanes))
    values = [[v.builder.bitcast(v.broadcast_sixteen(x, offset), v.bytes) for offset in row] for row in places]
    sizes = [[v.call("llvm.abs.v32i8", v.bytes, value, ir.Constant(ir.I1, 0)) for value in row] for row in values]
    four: list[list[ir.Value]] = [[] for _ in rows]
    for i in range(4):
        for s, words in enumerate(rows):
            parts = []
            for word, value, size in zip(words[i], values[s], sizes[s], strict=True):
                code = v.call("llvm.x86.avx2.psign.b", v.bytes, v.builder.bitcast(word(), v.bytes), value)
                parts.append(v.call(_WIDEN, v.ints, v.call(_MULTIPLY, shorts, size, code), one))
            four[s].append(v.in_order(_total(v, parts)))
    return [v.interleaved_sum(v.interleaved_sum(a, b, 1), v.interleaved_sum(c, d, 1), 2) for a, b, c, d in four]


def _total(v, parts):
    total = parts[0]
    for part in parts[1:]:
        total = v.add(total, part)
    return total


def words_together(bits, magnitude=0, started=False):
    """Words whose pairs of products can be added in int16; `started`: from -128 times their codes."""
    if magnitude:
        return 32767 // (2 * (128 if started else 255) * magnitude)
    return 32768 // (2 * 128 * ((1 << (4 if bits == 8 else bits)) - 1))


ISA = InstructionSet(
    8, (1, 2, 4), emit_look_up, partial(dots, _MULTIPLY, _WIDEN), partial(tile, _MULTIPLY, _WIDEN), emit_start,
    partial(row_dots, _MULTIPLY, _WIDEN), emit_signed_row_dots, emit_pairs=partial(emit_pairs, _WIDEN),
    row_bits=8, unpacks=True, fuses_scales=True,
)  # fmt: skip
