"""Repacking of types whose codes are numbered (codebooks, base 3): row by row, by the type's own `unpack`.

The result is the same as repack.py's, see layout.py; no bit of it is a bit of the file's block, so that nothing can be
moved.
"""

from functools import cache
from typing import Any

import numpy as np

from bridge.blocks.read import READ
from bridge.runtime.cpu.forms.layout import GROUP, InterleavedLayout, pieces
from bridge.runtime.cpu.forms.rowmajor import d_bits_of
from bridge.system.kernels.jit import from_plain, inlined, inner, specialize
from bridge.system.kernels.memory import array_at, array_on_stack

# set per type and lanes by `specialize`
unpack: Any = None
d_bits: Any = None
size = subs = most_subs = nbytes = lanes = scales = codes_at = group_words = block_words = 0
code_pieces: tuple[tuple[int, ...], ...] = ()  # (word, vector, start, low, width), by vector
scale_pieces: tuple[tuple[int, ...], ...] = ()


@inlined
def put_pieces(words, first, pieces, out, offset, step):
    """Words of four codes from words[first] on, as layout.py's vectors, to out[offset], out[offset + step], ..."""
    value = np.uint32(0)
    last = 0
    for word, vector, start, low, width in pieces:
        if vector != last:
            out[np.uint32(offset + step * last)] = value
            value = np.uint32(0)
            last = vector
        mask = np.uint32(0x01010101 * ((1 << width) - 1))
        value |= np.uint32(((words[np.uint32(first + word)] >> np.uint32(low)) & mask) << np.uint32(start))
    out[np.uint32(offset + step * last)] = value


def _move(source, row_bytes, halves, codes):
    """As repack.py's `move`: one block of `lanes` rows; bit r of the result: d of row r is not finite."""
    q = array_on_stack(size, np.uint8)
    sc = array_on_stack(most_subs, np.int8)
    for j in range(most_subs):
        sc[j] = 0
    mn = array_on_stack(1, np.uint8)
    code_words = q.view(np.uint32)
    scale_words = sc.view(np.uint32)
    ds = array_at(halves, lanes, np.uint16)
    out = array_at(codes, block_words, np.uint32)
    bad = np.int64(0)
    for row in range(lanes):
        block = array_at(source + row * row_bytes, nbytes, np.uint8)
        unpack(block, q, sc, mn)
        bits = d_bits(block)
        ds[row] = bits
        if bits & 0x7C00 == 0x7C00:
            bad |= np.int64(1) << row
        if scales:
            put_pieces(scale_words, 0, scale_pieces, out, row, lanes)
        for group in range(size // 32):
            put_pieces(code_words, 8 * group, code_pieces, out, codes_at + group * group_words + row, lanes)
    return bad


@cache
def recoder(name: str, lanes: int) -> Any:
    """The compiled `move(source, row_bytes, halves, codes)` of a type with numbered codes."""
    block = READ[name]
    layout = InterleavedLayout(block, lanes)
    sizes = {"size": block.size, "subs": block.subs, "nbytes": block.nbytes, "lanes": lanes}
    sizes["most_subs"] = max(block.subs, 4)
    places = {"codes_at": layout.codes_at // 4, "group_words": layout.group_bytes // 4}
    places |= {"block_words": layout.block_bytes // 4, "scales": layout.scale_words}
    parts = {"code_pieces": _by_vector(layout.code_bits, GROUP)}
    parts["scale_pieces"] = _by_vector(layout.scale_bits, layout.scale_words) if layout.scale_words else ()
    functions = {"unpack": from_plain(block.unpack, inlined), "d_bits": d_bits_of(block)}
    return specialize(_move, f"{name}_{lanes}", inner, **functions, **sizes, **places, **parts)


def _by_vector(bits: int, count: int) -> tuple[tuple[int, ...], ...]:
    """(word, vector, start, low, width) of the pieces of all words, those of a vector together."""
    numbered = [(i, *piece) for i, word in enumerate(pieces(bits, count)) for piece in word]
    return tuple(sorted(numbered, key=lambda piece: piece[1]))
