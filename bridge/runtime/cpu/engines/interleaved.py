"""Kernels on the repacked form: the loop over row groups and blocks that superblock.py's arithmetic sits in.

A kernel is a C function of nine int64:

    weights   address of the repacked tensor
    x         address of the records, [tokens/columns, blocks, columns, record]
    y         address of float32 [tokens, padded rows]
    blocks    blocks in a row
    stride    bytes of a row group
    tokens    groups of `columns` tokens
    y_stride  bytes between tokens in y
    first, last   row groups to do

With many tokens, all pass over a tile of row groups while it is in the second-level cache.

With every line of weights, later ones are prefetched; how far and how near to the core, see `AHEAD`.
Measured from memory, one thread, as a share of plain reading. Zen 5, Q4_K, to the first-level cache: without
prefetch 0.5, one distance of 4 KB 0.7 to 0.8, 2 and 8 KB 0.85 to 1.0. Zen 4, Q4_K and Q6_K: that gives 0.37, as
the first level has few misses in flight there; to the second level 2 and 8 KB 0.65, 2, 4 and 8 KB 0.83 to 0.9, 4, 8
and 16 KB 0.95 to 1.0, with two threads too (a prefetch that finds no room is dropped, and the next distance makes up
for it). Four distances gain nothing from memory. In the cache three cost 10 to 25%, so there are kernels without any
(`near`), for weights that are known to be there. Where arithmetic takes longer than reading (AVX2, types of fewer than
4.5 bits a weight), 6 and 12 KB are 1 to 6% faster than three, but 3% slower for Q4_K.

What uses a line's weights waits for the prefetches that go with it: else LLVM moves those of a block, up to 100, to one
place, before its arithmetic or behind it, more than a core keeps in flight (24 on a Zen 3). Where they were behind it
(AVX2, Zen 3, one thread), K- and IQ-quants read from memory took as long as reading and arithmetic one after the other:
spread out they are 1.5 to 1.6 times as fast, as fast as plain reading, and 1.05 to 1.27 times in the cache; types of 32
weights a block, whose few prefetches lie well anyhow, are the same within 2%. With AVX-512, by count, K-quants take a
tenth fewer instructions, since LLVM spills less.

On Arm, where nothing was measured, nothing is prefetched: CPUs follow the two streams of a row group by themselves, and
ggml leaves it to them.
"""

from typing import Any

from bridge.blocks.read import READ
from bridge.runtime.cpu.engines import scaled, unpacked
from bridge.runtime.cpu.engines.superblock import arithmetic
from bridge.runtime.cpu.forms.activations import PAIRED, PLAIN, float_record, record_of
from bridge.runtime.cpu.forms.layout import InterleavedLayout
from bridge.runtime.cpu.machine import vectors
from bridge.runtime.cpu.machine.instruction_set import InstructionSet
from bridge.system.cpu import machine, targets
from bridge.system.kernels.jit import CFunction, c_function, maker

# set per kernel by `_scope`
zeros: Any = None
accumulate: Any = None
store: Any = None
columns = lanes = record = block_bytes = halves_bytes = 0

# by LLVM's name of the host: bytes ahead, and the level of cache that lines are brought to
AHEAD = {"znver5": ((2048, 8192), 1)}
_AHEAD_ELSEWHERE = ((4096, 8192, 16384), 2)
_AHEAD_OF_ARITHMETIC = ((6144, 12288), 2)
_TILE = 1 << 18  # bytes
_MadeOf = tuple[InstructionSet, int, vectors.Body, bool]  # what `vectors.intrinsics` takes first


def _rows(weights, x, y, blocks, stride, tokens, y_stride, first, last):
    codes_from = (blocks * halves_bytes + 63) // 64 * 64
    tile = max(1, _TILE // stride)
    for start in range(first, last, tile):
        for t in range(tokens):
            for group in range(start, min(start + tile, last)):
                halves = weights + group * stride
                codes = halves + codes_from
                values = x + t * blocks * columns * record
                totals = zeros()
                for _ in range(blocks):
                    totals = accumulate(totals, codes, halves, values)
                    codes += block_bytes
                    halves += halves_bytes
                    values += columns * record
                store(totals, y + t * columns * y_stride + group * lanes * 4, y_stride)


def _scope(name: str, target: str, width: int, integer: bool) -> tuple[dict[str, int], _MadeOf]:
    """The sizes that a kernel is specialized with, and what its vector functions are made of."""
    block = READ[name]
    isa = targets.isa(target)
    layout = InterleavedLayout(block, isa.lanes)
    multiply = arithmetic(block, integer)

    def body(v: Any, totals: list[Any], weights: Any, halves: Any, x: Any) -> list[Any]:
        return multiply(v, layout, totals, weights, halves, x)

    record = record_of(block).nbytes if integer else float_record(block)
    sizes = {"columns": width, "lanes": isa.lanes, "record": record}
    sizes |= {"block_bytes": layout.block_bytes, "halves_bytes": layout.halves_bytes}
    return sizes, (isa, width, body, isa.paired and width > 1 and integer)


@maker
def kernel(name: str, target: str, width: int, integer: bool, near: bool = False) -> CFunction:
    """The compiled kernel of a type for `width` columns: a C function.

    `near`: for weights that are in the cache; nothing is prefetched.
    """
    isa = targets.isa(target)
    bound = target == "avx2" and width == 1 and READ[name].bpw < 4.5
    elsewhere = _AHEAD_OF_ARITHMETIC if bound else _AHEAD_ELSEWHERE
    cpu = machine.host().cpu
    ahead, level = ((), 1) if near or isa.lanes == 4 else AHEAD.get(cpu, elsewhere)
    cpu_suffix = f"_{cpu}" if ahead and cpu in AHEAD else ""
    if integer and unpacked.unpacks(isa, READ[name], width):
        return unpacked.kernel(name, target, width, ahead, level, cpu_suffix)
    if near and isa.lanes == 4:  # nothing is prefetched anyhow
        return kernel(name, target, width, integer)
    sizes, made_of = _scope(name, target, width, integer)
    suffix = f"{name}_{target}_{width}_{'int8' if integer else 'f32'}{'_near' * near}{cpu_suffix}"
    return c_function(_rows, suffix, **sizes, **vectors.intrinsics(*made_of, ahead, level))


def widths(name: str, target: str) -> tuple[int, ...]:
    """Columns that a type has kernels for."""
    isa = targets.isa(target)
    scales_codes = isa.scales_codes and scaled.fits(READ[name])
    return (*isa.widths, scaled.COLUMNS) if scales_codes else isa.widths


def kinds(name: str, target: str) -> tuple[tuple[int, bool], ...]:
    """The columns of each kernel of a type, and whether it unpacks its weights first."""
    isa = targets.isa(target)
    return tuple((width, unpacked.unpacks(isa, READ[name], width)) for width in widths(name, target))


def form(name: str, target: str, width: int, integer: bool) -> str:
    """The form of the records that `kernel` reads, see activations.py."""
    isa = targets.isa(target)
    if not integer or width == 1:
        return PLAIN
    if unpacked.unpacks(isa, READ[name], width):
        return unpacked.form(READ[name])
    return PAIRED if isa.paired else PLAIN


def block_by_block(name: str, target: str, integer: bool) -> dict[str, Any]:
    """What a kernel of one column is made of, for weights whose blocks come one at a time: sizes and functions."""
    sizes, made_of = _scope(name, target, 1, integer)
    return {**sizes, **vectors.intrinsics(*made_of)}
