"""AVX2: pmaddubsw multiplies unsigned codes with int8 values and adds pairs, saturating, into int16.

A pair reaches 2 * 128 * (2^bits - 1), so some words are added as int16 before pmaddwd widens them: 8 of 4
bits, 4 of 5, 2 of 6. Codes of 8 bits would saturate: their high and low nibbles are multiplied apart.
"""

import numpy as np
from llvmlite import ir

from bridge.runtime.cpu.vectors import LookedUp

NAME = "avx2"
LANES = 8
WIDTHS = (1, 4)  # columns of x at once, as the registers allow
FEATURES = ("avx2", "f16c", "fma")
BYTE_SHIFTS = False
PAIRED = False
SIGNED_DOTS = False
UNPACKED_WIDTH = 8  # columns of the kernels that make weights of 8 bits int16 first, see unpacked.py; 0: none


def emit_look_up(v, table, codes):
    return v.call("llvm.x86.avx2.pshuf.b", v.bytes, table, codes)


def emit_dots(v, parts, words, x, places, bits):
    return pmaddubsw(v, "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd", parts, words, x, places, bits)


def emit_madd(v, a, b):
    return v.call("llvm.x86.avx2.pmadd.wd", v.ints, a, b)


def pmaddubsw(v, multiply, widen, parts, words, x, places, bits) -> list[ir.Value]:
    """The two instructions of a vector width, `multiply` and `widen`, on whatever lanes v has."""
    parts = list(parts)
    shorts = ir.VectorType(ir.IntType(16), 2 * v.lanes)
    rights = (0, 4) if bits == 8 else (0,)
    together = _together(4 if bits == 8 else bits)
    ordered = len(parts) > 1 and v.lanes == LANES  # AVX-512 has registers for all words
    for start in range(0, len(words), together):
        pairs: dict[tuple[int, int], ir.Value] = {}
        for k, word in enumerate(words[start : start + together], start):
            digits = {right: _nibble(v, word, right) for right in rights} if bits == 8 else {0: word()}
            for c in range(len(parts)):
                values = v.builder.bitcast(v.broadcast(x, places[c][k]), v.bytes)
                for right, digit in digits.items():
                    pair = v.call(multiply, shorts, v.builder.bitcast(digit, v.bytes), values)
                    pair = v.builder.add(pairs[c, right], pair) if (c, right) in pairs else pair
                    pairs[c, right] = v.in_order(pair) if ordered else pair
        for (c, right), pair in pairs.items():
            factors = ir.Constant(shorts, [1 << right] * (2 * v.lanes))
            parts[c] = v.add(parts[c], v.call(widen, v.ints, pair, factors))
    return parts


def _nibble(v, word, right):
    if isinstance(word, LookedUp):
        return word.nibble(right)
    return v.and_(v.shr(word(), right), 0x0F0F0F0F)


def _together(bits):
    """Words whose pairs of products can be added in int16."""
    return 32768 // (2 * 128 * ((1 << bits) - 1))


def twin_dots(part, codes, quads, bits):
    if bits == 8:
        high = twin_dots(part * 0, [code >> 4 for code in codes], quads, 4)
        return twin_dots(part, [code & 15 for code in codes], quads, 4) + (high << 4)
    total = part.astype(np.int32)
    together = _together(bits)
    for start in range(0, len(codes), together):
        pairs = np.zeros((len(part), 2), np.int16)
        for code, quad in list(zip(codes, quads, strict=True))[start : start + together]:
            products = (code.astype(np.int32) * quad).reshape(len(part), 2, 2).sum(2)
            pairs += np.clip(products, -32768, 32767).astype(np.int16)
        total += pairs.astype(np.int32).sum(1)
    return total
