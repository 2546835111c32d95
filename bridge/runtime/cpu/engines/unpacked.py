"""Kernels that unpack a block before all tokens pass over it: those of four columns for AVX2, and with AVX-512's VNNI
those of 16 columns for types whose codes are multiplied by their scales then, see scaled.py. The rest is about AVX2.

Shifts, masks and tables are then paid once for all tokens, and the 16 registers hold what a tile of 16 rows and four
columns takes: a broadcast of x serves two groups of rows. On a Zen 4 two loads a cycle are the limit otherwise, and
those of an unpacked block and of x meet in the banks of the first-level cache.

The form of an unpacked block is in unpacked_layout.py.

The kernel is a C function as those of interleaved.py. A tile of tokens and blocks, whose records stay in the
second-level cache, passes over the row groups block by block; from one range of blocks to the next, sums are in y.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from bridge.blocks import BlockType
from bridge.blocks.read import READ
from bridge.runtime.cpu.engines import scaled
from bridge.runtime.cpu.engines.superblock import (
    codes_of_group,
    fields_at,
    plus_mins,
    scale_code,
    scale_of_sub,
    scale_words,
    value_at,
)
from bridge.runtime.cpu.forms.activations import PLAIN, UNSIGNED, record_of
from bridge.runtime.cpu.forms.layout import InterleavedLayout
from bridge.runtime.cpu.forms.unpacked_layout import UnpackedLayout
from bridge.runtime.cpu.machine import vectors
from bridge.runtime.cpu.machine.instruction_set import InstructionSet
from bridge.runtime.cpu.machine.operands import LookedUp, computed
from bridge.system.cpu import targets
from bridge.system.kernels.jit import CFunction, c_function, maker
from bridge.system.kernels.memory import stack

# set per kernel by `c_function`
zeros: Any = None
load: Any = None
accumulate: Any = None
store: Any = None
load_group: Any = None
store_group: Any = None
unpack: Any = None
space: Any = None
sums: Any = None
columns = lanes = record = block_bytes = halves_bytes = unpacked_bytes = groups = 0

_TILE = 5 << 16  # bytes of records: 8 blocks of a K-quant for 128 tokens
_TOKENS = 128  # in a tile at most


def unpacks(target: InstructionSet, block: BlockType, width: int) -> bool:
    """Whether the kernel for so many columns of x unpacks blocks first: for few, that takes longer than it saves."""
    if target.scales_codes:
        return width == scaled.COLUMNS and scaled.fits(block)
    return target.unpacks and width > 2


def form(block: BlockType) -> str:
    """The form of the records that these kernels read, see activations.py."""
    return UNSIGNED if block.lift else PLAIN


def row_groups(target: InstructionSet, block: BlockType) -> int:
    """Row groups that are multiplied at once."""
    return 1 if target.scales_codes else UnpackedLayout(block, target.lanes).groups


def unpack_block(v: Any, layout: InterleavedLayout, weights: Any, halves: Any, space: Any) -> None:
    """Write the unpacked form of one block to `space`."""
    block, unpacked = layout.block, UnpackedLayout(layout.block, v.lanes)
    if block.is_k:
        words = scale_words(v, layout, weights)
        for j in range(block.subs):
            code = scale_code(v, words, j, layout)
            v.store_vector(v.doubled_short(code), space, unpacked.scales_at + j * unpacked.vector)
        for i, word in enumerate(words[block.subs // 4 :]):
            v.store_vector(word(), space, unpacked.mins_at + i * unpacked.vector)
    codes = [code for group in range(block.size // 32) for code in codes_of_group(v, layout, weights, group, False)]
    for i in range(unpacked.sums):
        v.barrier()
        total = [[v.zero()]]
        for part, scale_at in unpacked.parts(i):
            values: list[Any] = []
            for k in part:
                value, *digits = _signed(v, unpacked, codes[k]) if block.lift else (codes[k](),)
                values.append(computed(value))
                for digit_at, digit in enumerate(digits or [value]):
                    v.store_vector(digit, space, (k * unpacked.digits + digit_at) * unpacked.vector)
            for first in range(0, len(values), unpacked.started) if unpacked.started else ():
                start = v.start_of(values[first : first + unpacked.started])
                v.store_vector(start, space, unpacked.starts_at + (part[first] // unpacked.started) * unpacked.vector)
            if block.lift and not unpacked.started:
                scales = [v.load_shorts(space, scale_at)] if block.is_k else None
                total = v.tile_dots(total, [values], None, [[0] * len(values)], 7, scales, 128)
        if block.lift and not unpacked.started:
            v.store_vector(v.mul(total[0][0], v.splat(-128)), space, unpacked.starts_at + i * unpacked.vector)
    for j in range(block.subs if block.scales else 1):
        scale = scale_of_sub(v, layout, halves, j)
        scale = scale if unpacked.step == 1 else v.fmul(scale, v.splat_float(unpacked.step))
        v.store_vector(scale, space, unpacked.d_at + j * unpacked.vector)
    if block.has_min:
        dmin = v.load_half(halves, 2 * v.lanes)
        v.store_vector(v.fneg(dmin) if block.is_k else dmin, space, unpacked.dmin_at)


def _signed(v: Any, layout: UnpackedLayout, word: Callable[[], Any]) -> tuple[Any, ...]:
    """A word of codes or values as int8; if they have 8 bits, their low and high digits too."""
    block = layout.block
    if block.value_bits < 8 and isinstance(word, LookedUp):
        return (v.look_up(word.code(), tuple(value // layout.step & 255 for value in block.values)),)
    if block.value_bits < 8:
        return (v.sub_bytes(word(), v.splat(0x01010101 * block.lift)),)
    if isinstance(word, LookedUp):
        code = word.code()
        low = tuple((value + 8) % 16 - 8 for value in block.values)
        high = tuple((value - digit) // 16 for value, digit in zip(block.values, low, strict=True))
        return tuple(v.look_up(code, tuple(entry & 255 for entry in table)) for table in (block.values, low, high))
    code, sign = word(), v.splat(-0x7F7F7F80)  # 0x80 in each byte
    low = v.sub_bytes(v.and_(code, 0x0F0F0F0F), v.shl(v.and_(code, 0x08080808), 1))
    high = v.add(v.and_(v.shr(code, 4), 0x0F0F0F0F), v.and_(v.shr(code, 3), 0x01010101))
    return v.sub_bytes(code, sign), low, v.sub_bytes(high, v.splat(0x08080808))


def multiply_block(v: Any, block: BlockType, totals: list[Any], space: Any, x: Any) -> list[Any]:
    """totals + unpacked blocks, one of each row group, times as many values of each column of x: totals are those of
    all columns of one group of rows, then of the next."""
    layout = UnpackedLayout(block, v.lanes)
    width = len(totals) // layout.groups
    rows = [totals[r * width : (r + 1) * width] for r in range(layout.groups)]
    multiply = _multiply_k if block.is_k else _multiply_plain
    return [total for row in multiply(v, layout, rows, space, x) for total in row]


def _sum(v: Any, layout: UnpackedLayout, i: int, columns: range, space: Any, x: Any) -> list[list[Any]]:
    """Sum i in int32 of each row group and column, times sc where there are two levels of scales."""
    block, record, groups = layout.block, record_of(layout.block), range(layout.groups)
    offset, loads = layout.starts_at + i * layout.vector, block.lift and not layout.started
    starts = [v.load(space, r * layout.nbytes + offset) if loads else v.zero() for r in groups]
    totals = [[start for _ in columns] for start in starts]
    for part, scale_at in layout.parts(i):
        scales = [v.load_shorts(space, r * layout.nbytes + scale_at) for r in groups] if block.is_k else None
        places = [[value_at(v, record, c, 4 * k) for k in part] for c in columns]
        words = [layout.words(v, space, r, part) for r in groups]
        shorts = [layout.starts_of(v, space, r, part) for r in groups] if layout.started else None
        totals = v.tile_dots(totals, words, x, places, block.value_bits, scales, layout.magnitude, shorts)
    return totals


def _multiply_k(v: Any, layout: UnpackedLayout, totals: list[list[Any]], space: Any, x: Any) -> list[list[Any]]:
    """As superblock.k_block."""
    block = layout.block
    record = record_of(block)
    groups, columns = range(layout.groups), range(len(totals[0]))
    sums: list[list[Any]] = [[None for _ in columns] for _ in groups]
    for group in range(layout.sums):
        v.barrier()
        inner = _sum(v, layout, group, columns, space, x)
        d_at = fields_at(record, columns, record.d_at + 4 * group)
        for c in columns:
            dx = v.of_column_float(x, d_at, c)
            for r in groups:
                value = v.to_float(inner[r][c])
                sums[r][c] = v.fmul(value, dx) if sums[r][c] is None else v.fma(value, dx, sums[r][c])
    for r in groups:
        v.barrier()
        d = v.load_floats(space, r * layout.nbytes + layout.d_at)
        totals[r] = [v.fma(sums[r][c], d, totals[r][c]) for c in columns]
        if block.has_min:
            mins_at = r * layout.nbytes + layout.mins_at
            mins = [partial(v.load, space, mins_at + i * layout.vector) for i in range(block.subs // 4)]
            dmin = v.load_floats(space, r * layout.nbytes + layout.dmin_at)
            bits = InterleavedLayout(block, v.lanes).scale_bits
            totals[r] = plus_mins(v, block, totals[r], mins, bits, dmin, x)
    return totals


def _multiply_plain(v: Any, layout: UnpackedLayout, totals: list[list[Any]], space: Any, x: Any) -> list[list[Any]]:
    """As superblock.plain_block."""
    block = layout.block
    record = record_of(block)
    groups, columns = range(layout.groups), range(len(totals[0]))
    span = block.sum_span
    totals = [list(row) for row in totals]
    for j in range(layout.sums):
        v.barrier()
        parts = _sum(v, layout, j, columns, space, x)
        d_at, s_at = (fields_at(record, columns, field) for field in (record.d_at + j * span // 32 * 4, record.sums_at))
        scale_at = layout.d_at + (j * span // block.sub * layout.vector if block.scales else 0)
        for c in columns:
            dx = v.of_column_float(x, d_at, c)
            for r in groups:
                scale = v.load_floats(space, r * layout.nbytes + scale_at)
                totals[r][c] = v.fma(v.to_float(parts[r][c]), v.fmul(scale, dx), totals[r][c])
                if block.has_min:
                    dmin = v.load_floats(space, r * layout.nbytes + layout.dmin_at)
                    totals[r][c] = v.fma(dmin, v.of_column_float(x, s_at, c), totals[r][c])
    return totals


def _rows(weights, x, y, blocks, stride, tokens, y_stride, first, last):
    codes_from = (blocks * halves_bytes + 63) // 64 * 64
    unpacked = space()
    totals_at = sums()
    turn = groups * columns * lanes
    together = min(_TOKENS // columns, tokens)
    ranges = -(-blocks * together * columns * record // _TILE)
    reach = -(-blocks // ranges)
    for start in range(0, tokens, together):
        count = min(start + together, tokens) - start
        for begin in range(0, blocks, reach):
            end = min(begin + reach, blocks)
            for group in range(first, last, groups):
                used = min(groups, last - group)
                out = y + start * columns * y_stride + 4 * group * lanes
                for t in range(count if begin else 0):
                    for r in range(used):
                        part = load_group(out + t * columns * y_stride + 4 * r * lanes, y_stride)
                        store_group(part, totals_at + 4 * (turn * t + r * columns * lanes), 4 * lanes)
                for b in range(begin, end):
                    for r in range(groups):  # the last one twice if there is no other
                        row_group = weights + min(group + r, last - 1) * stride
                        codes, halves = row_group + codes_from + b * block_bytes, row_group + b * halves_bytes
                        unpack(codes, halves, unpacked + r * unpacked_bytes)
                    values = x + (start * blocks + b) * columns * record
                    for t in range(count):
                        address = totals_at + 4 * turn * t
                        totals = load(address, 4 * lanes) if b else zeros()
                        store(accumulate(totals, unpacked, halves, values), address, 4 * lanes)
                        values += blocks * columns * record
                for t in range(count):
                    for r in range(used):
                        part = load_group(totals_at + 4 * (turn * t + r * columns * lanes), 4 * lanes)
                        store_group(part, out + t * columns * y_stride + 4 * r * lanes, y_stride)


def _scope(name: str, target: str, width: int) -> tuple[dict[str, int], InstructionSet, vectors.Body, vectors.Routine]:
    """The sizes that a kernel is specialized with, and what its vector functions are made of."""
    block, isa = READ[name], targets.isa(target)
    layout = InterleavedLayout(block, isa.lanes)

    def multiply(v: Any, totals: list[Any], space: Any, halves: Any, x: Any) -> list[Any]:
        if isa.scales_codes:
            return scaled.multiply_block(v, layout, totals, space, halves, x)
        return multiply_block(v, block, totals, space, x)

    def unpack(v: Any, weights: Any, halves: Any, space: Any) -> None:
        if isa.scales_codes:
            scaled.scale_block(v, layout, weights, space)
        else:
            unpack_block(v, layout, weights, halves, space)

    form = scaled.ScaledLayout(block, isa.lanes) if isa.scales_codes else UnpackedLayout(block, isa.lanes)
    sizes = {"columns": width, "lanes": isa.lanes, "record": record_of(block).nbytes}
    sizes |= {"groups": row_groups(isa, block), "unpacked_bytes": form.nbytes}
    sizes |= {"block_bytes": layout.block_bytes, "halves_bytes": layout.halves_bytes}
    return sizes, isa, multiply, unpack


def _memory(sizes: dict[str, int]) -> dict[str, int]:
    """Bytes that a kernel needs."""
    turn = 4 * sizes["groups"] * sizes["columns"] * sizes["lanes"]
    return {"space": sizes["groups"] * sizes["unpacked_bytes"], "sums": _TOKENS // sizes["columns"] * turn}


def _of_a_group(functions: dict[str, Any]) -> dict[str, Any]:
    """Those of the functions of one group of rows that a kernel needs."""
    return {"load_group": functions["load"], "store_group": functions["store"]}


@maker
def kernel(name: str, target: str, width: int, ahead: tuple[int, ...], level: int, cpu_suffix: str = "") -> CFunction:
    """The compiled kernel of a type for `width` columns: a C function."""
    sizes, isa, multiply, unpack = _scope(name, target, width)
    scope = {part: stack(nbytes) for part, nbytes in _memory(sizes).items()}
    scope |= {"unpack": vectors.routine(isa, unpack, ahead, level)}
    scope |= vectors.intrinsics(isa, sizes["groups"] * width, multiply)
    scope |= _of_a_group(vectors.intrinsics(isa, width, multiply))
    return c_function(_rows, f"{name}_{target}_{width}{'_near' * (not ahead)}{cpu_suffix}", **sizes, **scope)
