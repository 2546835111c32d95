"""x [tokens, in] float32 -> records, one per token and block of columns, that the kernels read as one stream.

The integer record of a block of `size` columns (256 for K-quants, 32 otherwise), little-endian:

    bytes 0..size-1    q int8: x rounded to multiples of d
          size..       what the type needs of the sums s_j of q over its sub-blocks:
                         zero point   int32 [subs]        -zero * s_j, where sums of products start
                         mins, K      int8  [subs], [subs]  s_j >> 6 and s_j & 63, to be multiplied as int8
                         mins, plain  float32             d * s
          then         d float32

d maps the value of largest magnitude onto -128, whatever its sign; values of the other sign stop at 127.
ggml maps it onto +-127, so its steps are 0.8% coarser; and it keeps d of 32-blocks as a half.

The float record holds x itself, then the float32 sums over sub-blocks.

Records of `columns` tokens lie side by side for each block: [tokens/columns, blocks, columns, record].
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from bridge.blocks import BLOCKS, BlockType
from bridge.jit import specialize

# set per type by `specialize`
size = subs = sub = zero = record = 0
mins = False

_INFINITE = np.uint32(0x7F800000)


class Record(NamedTuple):
    """Byte offsets in the integer record of a type."""

    sums_at: int
    d_at: int
    nbytes: int


def record_of(block: BlockType) -> Record:
    """The integer record of a type."""
    sums = 4 if not block.is_k else 2 * block.subs if block.has_min else 4 * block.subs
    return Record(block.size, block.size + sums, block.size + sums + 4)


def float_record(block: BlockType) -> int:
    """Bytes of the float record of a type."""
    return 4 * (block.size + block.subs)


def _quantize(x, columns, out):
    """x float32 [tokens, in] -> integer records in out uint8 [nbytes]."""
    tokens = x.shape[0]
    blocks = x.shape[1] // size
    signed = out.view(np.int8)
    ints = out.view(np.int32)
    floats = out.view(np.float32)
    for t in range(tokens):
        for b in range(blocks):
            at = ((t // columns * blocks + b) * columns + t % columns) * record
            v = x[t, b * size : (b + 1) * size]
            bits = v.view(np.int32)
            top = np.int32(0)  # as integers, positive floats are ordered, NaN above infinity
            bottom = np.uint32(0x80000000)
            for i in range(size):
                top = max(top, bits[i])
            for i in range(size):
                bottom = max(bottom, np.uint32(bits[i]))
            size_bits = max(np.uint32(top), bottom & np.uint32(0x7FFFFFFF))
            positive = np.uint32(top) == size_bits
            d = np.float32(0)
            inverse = np.float32(0)
            if size_bits >= _INFINITE:
                d = np.float32(np.nan)
            elif size_bits > 0:
                largest = np.uint32(size_bits).view(np.float32)
                d = largest / np.float32(-128 if positive else 128)
                inverse = np.float32(1) / d
                if not abs(inverse) <= np.float32(3.0e38):  # a subnormal d: such a block counts as zero
                    d = np.float32(0)
                    inverse = np.float32(0)
            q = signed[at : at + size]
            if inverse != 0:
                for i in range(size):
                    q[i] = np.int8(min(np.float32(np.rint(v[i] * inverse)), np.float32(127)))
            else:
                q[:] = 0
            for j in range(subs):
                total = np.int32(0)
                for i in range(sub):
                    total += np.int32(q[j * sub + i])
                if not mins:
                    ints[(at + size) // 4 + j] = -zero * total
                elif subs > 1:
                    signed[at + size + j] = total >> 6
                    signed[at + size + subs + j] = total & 63
                else:
                    floats[(at + size) // 4] = d * np.float32(total)
            floats[(at + record) // 4 - 1] = d


def _copy(x, columns, out):
    """x float32 [tokens, in] -> float records in out uint8 [nbytes]."""
    blocks = x.shape[1] // size
    floats = out.view(np.float32)
    width = size + subs
    for t in range(x.shape[0]):
        for b in range(blocks):
            at = ((t // columns * blocks + b) * columns + t % columns) * width
            for j in range(subs):
                total = np.float32(0)
                for i in range(sub):
                    value = x[t, b * size + j * sub + i]
                    floats[at + j * sub + i] = value
                    total += value
                floats[at + size + j] = total


@cache
def quantizer(name: str) -> Any:
    """The compiled `quantize(x, columns, out)` of a type. Shared by types whose records are alike."""
    block = BLOCKS[name]
    kind = f"{block.size}_{block.sub}_{block.zero}_{int(block.has_min)}"
    return specialize(
        _quantize,
        kind,
        size=block.size,
        sub=block.sub,
        subs=block.subs,
        zero=np.int32(block.zero),
        record=record_of(block).nbytes,
        mins=block.has_min,
    )


@cache
def copier(name: str) -> Any:
    """The compiled `copy(x, columns, out)` of a type."""
    block = BLOCKS[name]
    return specialize(_copy, f"{block.size}_{block.sub}", size=block.size, sub=block.sub, subs=block.subs)


def records(x: np.ndarray, block: BlockType, columns: int = 1, integer: bool = True) -> np.ndarray:
    """The records of x [tokens, in], as uint8; tokens are padded with zeros to a multiple of `columns`."""
    width = record_of(block).nbytes if integer else float_record(block)
    padded = -(-x.shape[0] // columns) * columns
    make = np.empty if padded == x.shape[0] else np.zeros
    out = make(padded * (x.shape[1] // block.size) * width, np.uint8)
    (quantizer if integer else copier)(block.name)(x, columns, out)
    return out
