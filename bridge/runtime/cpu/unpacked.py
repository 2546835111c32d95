"""Kernels that unpack a block to int16 before many tokens pass over it: AVX2's, for values of 8 bits.

AVX2 has no product of int8 that neither saturates nor takes 8 bits in two halves. As int16, weights that carry the
scale of their sub-block take the fewest instructions: for 32 products of a column two broadcasts, two pmaddwd and two
additions, no zero point, and after 32 columns no scale but that of x. Unpacking takes as long as two tokens' products,
so that up to four tokens are multiplied by the kernels of interleaved.py.

    unpacked block    int16 (value - zero) * sc of a word's codes 0 and 2 of each row, then of its codes 1 and 3,
                      word after word
    wide record       see activations.py: of a token and block, int16 q in the same order and d float32 [size/32]

The kernel is a C function as those of interleaved.py. A tile of tokens, whose records stay in the second-level cache,
passes over a row group block by block; sums are kept in y.
"""

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from bridge.blocks import BlockType
from bridge.blocks.read import READ
from bridge.runtime.cpu import vectors
from bridge.runtime.cpu.activations import WIDE, record_of
from bridge.runtime.cpu.layout import InterleavedLayout
from bridge.runtime.cpu.superblock import codes_of_group, d_of_block, scale_code, scale_words
from bridge.system import targets
from bridge.system.memory import c_function, stack

# set per kernel by `c_function`
zeros: Any = None
load: Any = None
accumulate: Any = None
store: Any = None
unpack: Any = None
space: Any = None
columns = lanes = record = block_bytes = halves_bytes = 0

_TILE = 1 << 18  # bytes of records


def widths(block: BlockType, target: ModuleType) -> tuple[int, ...]:
    """Columns of x that a type's kernels take at once."""
    unpacked = target.UNPACKED_WIDTH and block.value_bits == 8 and not block.has_min and not block.scales
    return (*target.WIDTHS, target.UNPACKED_WIDTH) if unpacked else target.WIDTHS


def unpacks(block: BlockType, target: ModuleType, width: int) -> bool:
    """Whether the kernel for so many columns of x unpacks a type's blocks first, and reads wide records."""
    return width not in target.WIDTHS and width in widths(block, target)


def unpack_block(v: Any, layout: InterleavedLayout, weights: Any, space: Any) -> None:
    """Write the unpacked form of one block, see above, to `space`."""
    block = layout.block
    scales = scale_words(v, layout, weights) if block.is_k else []
    for group in range(block.size // 32):
        v.barrier()
        codes = codes_of_group(v, layout, weights, group, False)
        for k, code in enumerate(codes):
            factor = None
            if block.is_k:
                j = (32 * group + 4 * k) // block.sub
                factor = v.doubled_short(scale_code(v, scales, j, layout))
            for half, value in enumerate(v.shorts(code(), block.lift)):
                product = value if factor is None else v.mul_shorts(value, factor)
                v.store_vector(product, space, 4 * v.lanes * (16 * group + 2 * k + half))


def multiply_block(v: Any, layout: InterleavedLayout, totals: list[Any], space: Any, halves: Any, x: Any) -> list[Any]:
    """totals + an unpacked block times as many values of each column of x."""
    block = layout.block
    record = record_of(block, WIDE)
    columns = range(len(totals))
    sums: list[Any] = [None for _ in columns]
    for group in range(block.size // 32):
        v.barrier()
        parts = [v.zero() for _ in columns]
        for k in range(16):
            weights = v.load(space, 4 * v.lanes * (16 * group + k))
            for c in columns:
                at = record.sums_at * c + 4 * (16 * group + k)
                parts[c] = v.in_order(v.add(parts[c], v.madd_shorts(weights, v.broadcast(x, at))))
        for c in columns:
            dx = v.broadcast_float(x, record.together(len(totals), record.d_at + 4 * group, c))
            value = v.to_float(parts[c])
            sums[c] = v.fmul(value, dx) if sums[c] is None else v.fma(value, dx, sums[c])
    d = d_of_block(v, layout, halves)
    return [v.fma(sums[c], d, totals[c]) for c in columns]


def _rows(weights, x, y, blocks, stride, tokens, y_stride, first, last):
    codes_from = (blocks * halves_bytes + 63) // 64 * 64
    unpacked = space()
    tile = max(4, _TILE // (blocks * columns * record))
    for start in range(0, tokens, tile):
        for group in range(first, last):
            halves = weights + group * stride
            codes = halves + codes_from
            for b in range(blocks):
                unpack(codes, unpacked)
                values = x + (start * blocks + b) * columns * record
                at = y + start * columns * y_stride + group * lanes * 4
                for _ in range(start, min(start + tile, tokens)):
                    totals = load(at, y_stride) if b else zeros()
                    store(accumulate(totals, unpacked, halves, values), at, y_stride)
                    values += blocks * columns * record
                    at += columns * y_stride
                codes += block_bytes
                halves += halves_bytes


def _scope(name: str, target: str, width: int) -> tuple[dict[str, int], ModuleType, vectors.Body, vectors.Routine]:
    """The sizes that a kernel is specialized with, and what its vector functions are made of."""
    block, module = READ[name], targets.module(target)
    layout = InterleavedLayout(block, module.LANES)

    def multiply(v: Any, totals: list[Any], weights: Any, halves: Any, x: Any) -> list[Any]:
        return multiply_block(v, layout, totals, weights, halves, x)

    def unpack(v: Any, weights: Any, space: Any) -> None:
        unpack_block(v, layout, weights, space)

    sizes = {"columns": width, "lanes": module.LANES, "record": record_of(block, WIDE).nbytes}
    sizes |= {"block_bytes": layout.block_bytes, "halves_bytes": layout.halves_bytes}
    return sizes, module, multiply, unpack


@cache
def kernel(name: str, target: str, width: int) -> Any:
    """The compiled kernel of a type for `width` columns: a numba CFunc, whose `.address` is callable."""
    sizes, module, multiply, unpack = _scope(name, target, width)
    made = {"unpack": vectors.routine(module, unpack), "space": stack(2 * module.LANES * READ[name].size)}
    made |= vectors.intrinsics(module, width, multiply)
    return c_function(_rows, f"{name}_{target}_{width}", **sizes, **made)


def twin(name: str, target: str, width: int) -> Callable[..., None]:
    """The same kernel as plain Python over numpy."""
    sizes, module, multiply, unpack = _scope(name, target, width)
    memory = np.zeros(2 * module.LANES * READ[name].size, np.uint8)
    made = {"unpack": partial(unpack, vectors.Twin(module)), "space": lambda: memory.ctypes.data}
    made |= vectors.twins(module, width, multiply)
    return FunctionType(_rows.__code__, {**_rows.__globals__, **sizes, **made}, f"twin_{name}")
