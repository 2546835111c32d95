"""A K-quant whose codes times scales fit a byte (Q3_K): these products are made before tokens are multiplied.

They are made once for all tokens of a tile (see unpacked.py); then 32 columns take 8 multiplications with VNNI, and one
of the sum by x's scale. Without that they take 2 more for the scales of their halves, and a Zen 4 has one pipe of 512
bits for multiplications of all kinds. Prompts in Q2_K, which fit too, are no faster so.

The form of a block, vectors of one lane a row:

    products   [64] words of (zero - q) * sc as int8: -32 * -4 is beyond int8, its negative is not
    starts     int32 [8], -128 times the sums of 32 products, as values of x are x + 128
"""

from functools import partial
from typing import Any

from bridge.blocks import BlockType
from bridge.runtime.cpu.engines.superblock import (
    codes_of_group,
    d_of_block,
    fields_at,
    scale_code,
    scale_words,
    value_at,
)
from bridge.runtime.cpu.forms.activations import record_of
from bridge.runtime.cpu.forms.layout import GROUP, InterleavedLayout
from bridge.runtime.cpu.machine.operands import computed
from bridge.system.records import record

COLUMNS = 16  # of x: as many sums leave room for their words in 32 registers


def fits(block: BlockType) -> bool:
    """Whether the zero point less the code, times the scale, is always an int8."""
    if not block.is_k or block.values or not block.lift:
        return False
    code, scale = max(block.zero, block.levels - 1 - block.zero), max(block.scale_hi, -block.scale_lo)
    return code * scale <= 128


@record
class ScaledLayout:
    """Where the parts of a block are, in bytes."""

    block: BlockType
    lanes: int

    @property
    def vector(self) -> int:
        return 4 * self.lanes

    @property
    def starts_at(self) -> int:
        return self.block.size // 4 * self.vector

    @property
    def nbytes(self) -> int:
        return self.starts_at + self.block.size // 32 * self.vector


def scale_block(v: Any, layout: InterleavedLayout, weights: Any, space: Any) -> None:
    """Write a block's products, and what sums of them need, to `space`."""
    block, scaled = layout.block, ScaledLayout(layout.block, v.lanes)
    scales = scale_words(v, layout, weights)
    for group in range(block.size // 32):
        v.barrier()
        products = []
        for k, codes in enumerate(codes_of_group(v, layout, weights, group, False)):
            factors = v.sub_bytes(v.splat(0x01010101 * block.lift), codes())
            scale = scale_code(v, scales, (32 * group + 4 * k) // block.sub, layout)
            products.append(computed(v.mul_bytes(factors, scale)))
            v.store_vector(products[k](), space, (GROUP * group + k) * scaled.vector)
        [[total]] = v.tile_dots([[v.zero()]], [products], None, [[0] * GROUP], 7, None, 128)
        v.store_vector(v.mul(total, v.splat(-128)), space, scaled.starts_at + group * scaled.vector)


def multiply_block(v: Any, layout: InterleavedLayout, totals: list[Any], space: Any, halves: Any, x: Any) -> list[Any]:
    """totals + one scaled block times as many values of each column of x; the same as superblock.k_block."""
    block, scaled = layout.block, ScaledLayout(layout.block, v.lanes)
    record = record_of(block)
    columns = range(len(totals))
    sums: list[Any] = [None for _ in columns]
    for group in range(block.size // 32):
        v.barrier()
        words = range(GROUP * group, GROUP * (group + 1))
        start = v.load(space, scaled.starts_at + group * scaled.vector)
        products = [partial(v.load, space, k * scaled.vector) for k in words]
        places = [[value_at(v, record, c, 4 * k) for k in words] for c in columns]
        (parts,) = v.tile_dots([[start for _ in columns]], [products], x, places, 7, None, 128)
        d_at = fields_at(record, columns, record.d_at + 4 * group)
        for c in columns:
            dx, value = v.of_column_float(x, d_at, c), v.to_float(parts[c])
            sums[c] = v.fmul(value, dx) if sums[c] is None else v.fma(value, dx, sums[c])
    d = v.fneg(d_of_block(v, layout, halves))
    return [v.fma(sums[c], d, totals[c]) for c in columns]
