"""CPU kernels against a slow numpy reference, and against ggml itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from llvmlite import ir

from bridge.blocks import BLOCKS, TYPES, BlockType
from bridge.blocks.read import READ
from bridge.errors import BridgeError
from bridge.runtime import QuantTensor
from bridge.runtime.bench import put_d, put_dmin
from bridge.runtime.cpu.engines import dequantize, filerows, interleaved, superblock, turns, unpacked
from bridge.runtime.cpu.engines.portable import Dequantizing, RowMajor
from bridge.runtime.cpu.engines.prepared import Prepared
from bridge.runtime.cpu.engines.tiled import Tiled
from bridge.runtime.cpu.forms import activations, layout, repack
from bridge.runtime.cpu.machine.emitter import Emitter
from bridge.system.cpu import row_threads, targets
from bridge.system.cpu.row_threads import over_rows
from bridge.system.threads import pool
from scripts.peers.llama import ggml_matvec
from tests.conftest import ROOT, repacked
from tests.support import kernel_twin
from tests.support.random_blocks import random_matrix, round32


def types_of(*names: str) -> pytest.MarkDecorator:
    """All types; only these are in every run, for each compiles for seconds."""
    return pytest.mark.parametrize(
        "block",
        [
            pytest.param(block, id=name, marks=[] if name in names else [pytest.mark.exhaustive])
            for name, block in READ.items()
        ],
    )


# kernels of several columns: affine, scaled, plain with a minimum, with a zero point, of 8 bits, of tables with bytes
# as scales and with two levels of scales
_SEVERAL_COLUMNS = ("Q4_K", "Q6_K", "Q4_1", "Q5_0", "Q8_0", "NVFP4", "IQ4_XS")
# those of one column have more kinds: powers of two as scales, blocks of 64, a codebook, base 3. Others differ from
# these in numbers alone, which test_every_target_in_python and test_repacked_words_are_those_of_the_layout have
ALL = types_of(*_SEVERAL_COLUMNS, "MXFP4", "Q2_0", "IQ2_XS", "TQ1_0")
SEVERAL_COLUMNS = types_of(*_SEVERAL_COLUMNS)
CHEAP = types_of("Q4_K", "Q8_0")  # kernels that tests of models compile as well
HERE = [name for name in targets.available() if name != targets.PORTABLE]
LANES_HERE = {targets.isa(name).lanes for name in HERE}
# every way a kernel can differ: affine, scaled, plain with and without zero point, 8 bits
KINDS = [BLOCKS[name] for name in ("Q4_K", "Q6_K", "Q4_1", "Q5_0", "Q8_0")]
# those, and scales of 8 bits; kernels of other types differ in numbers alone, and each takes a second to compile
SOME_BLOCKS = (*KINDS, TYPES["NVFP4"])
SOME = pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=[] if block in SOME_BLOCKS else [pytest.mark.exhaustive]) for block in TYPES.values()],
    ids=str,
)


def rounded(x: np.ndarray) -> np.ndarray:
    """What the int8 path makes of x, in float64: multiples of a 128th of each 32 columns' largest magnitude."""
    out = []
    for part in x.reshape(-1, 32):
        largest = part[np.abs(part).argmax()]
        d = largest / np.float32(-128)
        out.append(np.minimum(np.rint(part * (np.float32(1) / d)), 127).astype(np.float64) * d if d else part * 0.0)
    return np.array(out).reshape(x.shape)


def close(y: np.ndarray, x: np.ndarray, weights: np.ndarray, block: BlockType, integer: bool = True) -> None:
    """Within float32 rounding of the sum, whose terms may cancel; with K mins, the 14 bits of sums of x."""
    tolerance = 3e-6 if not integer else 5e-4 if block.is_k and block.has_min else 3e-5
    scale = np.sqrt((x.astype(np.float64) ** 2) @ (weights.T**2))
    assert np.abs((y - x @ weights.T) / scale).max() < tolerance


def run(engine, x: np.ndarray, rows: int, integer: bool = True) -> np.ndarray:
    y = np.full((x.shape[0], rows), np.nan, np.float32)
    engine.run(x, y, integer)
    return y


@SEVERAL_COLUMNS
def test_prepared_products_are_those_of_the_rounded_x(block):
    rows = 35  # two row groups and a bit
    tensor, weights = random_matrix(block, rows, 512)
    x = np.random.default_rng(1).standard_normal((3, 512)).astype(np.float32)
    close(tensor.prepare().matmul(x), rounded(x), weights, block)


@ALL
def test_products_with_one_vector_are_those_of_the_rounded_x(block):
    tensor, weights = random_matrix(block, 35, 512)
    x = np.random.default_rng(1).standard_normal(512).astype(np.float32)
    close(tensor.prepare().matvec(x)[None], rounded(x[None]), weights, block)


@CHEAP
def test_unprepared_products_are_those_of_the_rounded_x(block):
    """The kernels are those of prepared tensors but for what they prefetch, and the loop around them is all types'."""
    tensor, weights = random_matrix(block, 35, 512)
    x = np.random.default_rng(1).standard_normal((3, 512)).astype(np.float32)
    close(tensor.matmul(x), rounded(x), weights, block)


@SOME
def test_the_portable_kernel_multiplies_the_files_own_blocks(block):
    tensor, weights = random_matrix(block, 19, 512)
    x = np.random.default_rng(12).standard_normal((3, 512)).astype(np.float32)
    close(run(RowMajor(tensor), x, 19), rounded(x), weights, block)


@repacked
@CHEAP
def test_a_product_is_the_same_with_weights_from_the_cache(block):
    tensor, _ = random_matrix(block, 40, 512)
    tensor.prepare()
    x = np.random.default_rng(13).standard_normal(512).astype(np.float32)
    first = tensor.matvec(x)
    np.testing.assert_array_equal(tensor.matvec(x), first)
    assert {near for _, _, near in tensor._engine._plans} == {False, True}


@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=[] if name in ("Q4_K", "Q6_K", "IQ4_XS", "MXFP4") else [pytest.mark.exhaustive])
        for name, block in READ.items()
        if filerows.sixteens(name)
    ],
    ids=str,
)
def test_the_file_s_rows_have_the_products_of_repacked_ones_to_the_last_bit(block, target):
    """Random codes and x, then the largest and smallest codes of all times -128, where sums of int16 are largest."""
    tensor, _ = random_matrix(block, 35, 512)
    ends = [np.full((35, tensor.raw.size // 35), byte, np.uint8) for byte in (0, 255)]
    for blocks in (part for end in ends for part in np.split(end, 512 // block.size, 1)):
        if block.scales:
            blocks[:, : block.subs] = 100
        else:
            put_d(block, blocks, np.full(35, 0.5, np.float16))
        put_dmin(block, blocks, np.zeros(35, np.float16))
    x = np.random.default_rng(14).standard_normal((1, 512)).astype(np.float32)
    for raw, values in ((tensor.raw, x), *((end, sign * np.ones_like(x)) for end in ends for sign in (1, -1))):
        matrix = QuantTensor("w", block.name, (35, 512), raw.reshape(-1))
        y = run(Tiled(matrix, target), values, 35)
        np.testing.assert_array_equal(y, run(Prepared(matrix, target), values, 35))


def repacked_into(memory, raw, block, form):
    """The row groups of raw uint8 [rows, row bytes] go to `memory`."""
    (rows, row_bytes), blocks = raw.shape, raw.shape[1] // block.nbytes
    sizes = rows, row_bytes, form.stride(blocks), form.codes_from(blocks)
    bad = np.full(1, -1, np.int64)
    repack.repacker(block.name, form.lanes).ctypes(
        raw.ctypes.data, *sizes, memory.ctypes.data, bad.ctypes.data, 0, -(-rows // form.lanes)
    )
    assert bad == -1


@pytest.mark.parametrize(
    ("block", "lanes"),
    [
        pytest.param(
            block, lanes, marks=[] if lanes in LANES_HERE or name in ("Q4_K", "NVFP4") else [pytest.mark.exhaustive]
        )
        for name, block in TYPES.items()
        for lanes in (4, 8, 16)
    ],
    ids=str,
)
def test_repacked_words_are_those_of_the_layout(block, lanes):
    form = layout.InterleavedLayout(block, lanes)
    rows, blocks = lanes + 3, 2  # a second row group with three rows
    raw = np.random.default_rng(14).integers(0, 256, (rows, blocks * block.nbytes), np.uint8)
    parts = raw.reshape(-1, block.nbytes)
    put_d(block, parts, np.ones(len(parts), np.float16))
    parts[:, range(block.subs) if block.scales else [block.dmin_at + 1] * block.has_min] &= 0x3F
    stride = form.stride(blocks)
    memory = np.zeros(2 * stride + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: 2 * stride]
    repacked_into(memory, raw, block, form)
    for row in range(rows):
        group = memory[row // lanes * stride :][:stride]
        codes = group[form.codes_from(blocks) :].view(np.uint32).reshape(blocks, -1, lanes)
        kind = np.uint8 if block.scales else np.uint16
        halves = group[: blocks * form.halves_bytes].view(kind).reshape(blocks, -1, lanes)
        for b, part in enumerate(raw[row].reshape(blocks, -1)):
            np.testing.assert_array_equal(codes[b, :, row % lanes], form.words(part))
            first = part[: block.subs] if block.scales else np.ones(1, np.float16).view(np.uint16)
            np.testing.assert_array_equal(halves[b, : len(first), row % lanes], first)
    assert not halves[:, :, 3:].any()


@SOME
def test_float_precision_rounds_nothing(block):
    tensor, weights = random_matrix(block, 17, 512)
    x = np.random.default_rng(2).standard_normal((3, 512)).astype(np.float32)
    close(tensor.matmul(x, precision="f32"), x, weights, block, integer=False)
    close(tensor.prepare().matvec(x[0], precision="f32")[None], x[:1], weights, block, integer=False)


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize(
    ("block", "target"),
    [
        pytest.param(
            block,
            target,
            marks=[] if target == HERE[0] or block.name in ("Q4_K", "Q5_0") else [pytest.mark.exhaustive],
        )
        for target in HERE
        for block in KINDS
    ],
    ids=str,
)
def test_every_target_of_this_machine(block, rows, target):
    columns = block.size * (3 if block.is_k else 5)
    tensor, weights = random_matrix(block, rows, columns)
    tokens = 11 if rows == 33 else 3  # more than a kernel takes at once, and a rest
    x = np.random.default_rng(3).standard_normal((tokens, columns)).astype(np.float32)
    engine = Prepared(tensor, target)
    assert engine.name.startswith(target)
    close(run(engine, x, rows), rounded(x), weights, block)
    close(run(engine, x[:1], rows), rounded(x[:1]), weights, block)


def repacked_slowly(memory, raw, block, form):
    """As `repacked_into`, of one row group, by the plain reference."""
    rows, blocks = len(raw), raw.shape[1] // block.nbytes
    halves = memory[: blocks * form.halves_bytes].reshape(blocks, -1, form.lanes, 1 if block.scales else 2)
    codes = memory[form.codes_from(blocks) :].view(np.uint32).reshape(blocks, -1, form.lanes)
    for row in range(rows):
        for b, part in enumerate(raw[row].reshape(blocks, -1)):
            codes[b, :, row] = form.words(part)
            places = range(block.subs) if block.scales else [block.d_at, block.dmin_at][: 1 + block.has_min]
            for i, at in enumerate(places):
                halves[b, i, row] = part[at : at + halves.shape[-1]]


@pytest.mark.parametrize(
    ("block", "target"),
    [
        pytest.param(block, target, marks=[] if target == "avx2" or block in SOME_BLOCKS else [pytest.mark.exhaustive])
        for block in TYPES.values()
        for target in ("avx512vbmi", "avx512", "avxvnni", "avx512bw", "avx2", "i8mm", "neon")
    ],
    ids=str,
)
def test_every_target_in_python(block, target):
    """The twin runs the kernel's own lines on numpy arrays, also where the target does not exist."""
    isa = targets.isa(target)
    lanes, columns = isa.lanes, block.size * 2
    tensor, weights = random_matrix(block, lanes, columns)
    form = layout.InterleavedLayout(block, lanes)
    blocks = columns // block.size
    stride = form.stride(blocks)
    memory = np.zeros(stride, np.uint8)
    repacked_slowly(memory, tensor.raw.reshape(lanes, -1), block, form)
    x = np.random.default_rng(4).standard_normal((4, columns)).astype(np.float32)
    for tokens in (1, 2, 4) if isa.unpacks else (1, 2):
        kind = interleaved.form(block.name, target, tokens, True)
        records = activations.records(x[:tokens], block, columns=tokens, form=kind)
        y = np.zeros((tokens, lanes), np.float32)
        kernel = kernel_twin.kernel(block.name, target, tokens)
        kernel(memory.ctypes.data, records.ctypes.data, y.ctypes.data, blocks, stride, 1, 4 * lanes, 0, 1)
        close(y, rounded(x[:tokens]), weights, block)


@pytest.mark.parametrize("form", [activations.PLAIN, activations.PAIRED, activations.UNSIGNED])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q4_1"])
def test_a_field_of_several_tokens_lies_together(name, form):
    block = READ[name]
    record = activations.record_of(block)
    x = np.random.default_rng(6).standard_normal((4, 2 * block.size)).astype(np.float32)
    alone = activations.records(x, block).reshape(4, 2, record.nbytes)
    together = activations.records(x, block, 4, form=form).reshape(2, 4 * record.nbytes)
    units = dict.fromkeys(range(record.sums_at, record.d_at), 8 if block.is_k and block.has_min else 4)
    units |= dict.fromkeys(range(record.d_at, record.nbytes), 4)
    for at, unit in units.items():
        places = [record.together(4, at, c, unit) for c in range(4)]
        assert places == [places[0] + unit * c for c in range(4)]
        np.testing.assert_array_equal(together[:, places], alone[:, :, at].T)


def test_unsigned_records_have_values_that_are_higher_by_128():
    block = READ["Q6_K"]
    record = activations.record_of(block)
    x = np.random.default_rng(6).standard_normal((4, 2 * block.size)).astype(np.float32)
    plain, unsigned = (
        activations.records(x, block, 4, form=form).reshape(2, 4 * record.nbytes)[:, : 4 * block.size]
        for form in (activations.PLAIN, activations.UNSIGNED)
    )
    np.testing.assert_array_equal(unsigned, plain.view(np.int8).astype(np.int16) + 128)


@pytest.mark.parametrize(
    "name",
    [
        *("Q4_K", "Q6_K", "IQ4_XS", "Q4_1", "NVFP4", "Q8_0", "IQ2_XS", "MXFP4"),
        pytest.param("IQ3_XXS", marks=pytest.mark.exhaustive),
    ],
)
def test_unpacked_blocks_give_the_same_sums_as_the_repacked_form(name, monkeypatch):
    """An odd number of row groups, two turns of columns, two blocks: each turn's sums are kept from block to block, in
    y if there is one block in a tile."""
    block, isa = READ[name], targets.isa("avx2")
    lanes, groups = isa.lanes, 3
    columns, rows = block.size * 2, groups * lanes
    assert unpacked.unpacks(isa, block, 4)
    tensor, _ = random_matrix(block, rows, columns)
    form = layout.InterleavedLayout(block, lanes)
    memory = np.zeros(groups * form.stride(2), np.uint8)
    repacked_into(memory, tensor.raw.reshape(rows, -1), block, form)
    x = np.random.default_rng(5).standard_normal((8, columns)).astype(np.float32)
    sums = []
    for width, tile in ((1, None), (2, None), (4, 1), (4, 1 << 20)):
        if tile:
            monkeypatch.setattr(unpacked, "_TILE", tile)
        records = activations.records(x, block, width, form=interleaved.form(name, "avx2", width, True))
        y = np.full((8, rows), np.nan, np.float32)
        sizes = 2, form.stride(2), 8 // width, 4 * rows, 0, groups
        kernel_twin.kernel(name, "avx2", width)(memory.ctypes.data, records.ctypes.data, y.ctypes.data, *sizes)
        sums.append(y)
    for other in sums[1:]:
        np.testing.assert_array_equal(other, sums[0])


@pytest.mark.parametrize("target", targets.FEATURES)
@pytest.mark.parametrize("one_pass", [False, True])
def test_passes_take_all_tokens_and_leave_few_columns_unused(target: str, one_pass: bool) -> None:
    widths, kinds = interleaved.widths("Q3_K", target), interleaved.kinds("Q3_K", target)
    for tokens in range(1, 100):
        passes = turns.split(kinds, tokens, one_pass)
        assert sum(count for count, _ in passes) == tokens
        assert {width for _, width in passes} <= set(widths)
        assert sum(-count % width for count, width in passes) < 8
        assert len(passes) == 1 or ((tokens > widths[-1] or tokens > 8) and not one_pass)


def test_the_kernel_of_16_columns_is_for_many_tokens() -> None:
    kinds = interleaved.kinds("Q3_K", "avx512")
    assert [turns.split(kinds, n, False) for n in (9, 31)] == [((8, 8), (1, 1)), ((16, 16), (8, 8), (7, 8))]
    assert [turns.split(kinds, n, True) for n in (5, 9, 20, 500)] == [((5, 8),), ((9, 8),), ((20, 8),), ((500, 16),)]


@pytest.mark.parametrize("one_pass", [False, True])
def test_few_tokens_take_one_pass_of_a_kernel_that_does_not_unpack(one_pass: bool) -> None:
    kinds = interleaved.kinds("Q4_K", "avx2")
    splits = [turns.split(kinds, n, one_pass) for n in range(1, 9)]
    assert splits == [((1, 1),), *(((n, 2),) for n in range(2, 8)), ((8, 4),)]
    assert turns.split(kinds, 11, False) == ((8, 4), (3, 2))
    assert turns.split(kinds, 11, True) == ((11, 4),)


@pytest.mark.parametrize("widths", [(1,), (1, 2, 4), (1, 4, 8, 16)])
@pytest.mark.parametrize("unpacks", [False, True])
def test_turns_are_the_same_in_compiled_code(widths: tuple[int, ...], unpacks: bool) -> None:
    kernels = np.array([(width, unpacks and width == widths[-1] > 1) for width in widths], np.int64)
    compiled = numba.njit(turns.next_turns.py_func)
    for tokens in range(1, 60):
        for one_pass in (False, True):
            assert compiled(kernels, tokens, one_pass) == turns.next_turns.py_func(kernels, tokens, one_pass)


@pytest.mark.parametrize("block", [block for block in READ.values() if block.is_k], ids=str)
def test_scaled_sums_of_32_columns_are_exact_in_float32(block):
    values = block.values or (-block.zero, block.levels - 1 - block.zero)
    largest = max(map(abs, values)) * max(block.scale_hi * (1 + block.odd_scales) + block.odd_scales, -block.scale_lo)
    assert 32 * 128 * largest <= 2**24


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ2_XS", "IQ4_XS", "Q4_1", "Q8_0"])
def test_kernels_of_several_columns_have_the_sums_of_one_to_the_last_bit(name):
    """With the largest of all scales and codes too, whose sums float32 just holds."""
    block, target = READ[name], "avx512vbmi"
    isa = targets.isa(target)
    columns, rows = block.size * 2, 2 * isa.lanes
    form = layout.InterleavedLayout(block, isa.lanes)
    tensor, _ = random_matrix(block, rows, columns)
    raw = tensor.raw.reshape(rows, -1).copy()
    raw[:4] = np.array([0, 255, 0x80, 0x7F], np.uint8)[:, None]
    put_d(block, raw.reshape(rows, 2, -1), np.ones((rows, 2), np.float16))
    put_dmin(block, raw.reshape(rows, 2, -1), np.ones((rows, 2), np.float16))
    memory = np.zeros(2 * form.stride(2), np.uint8)
    repacked_into(memory, raw, block, form)
    x = np.random.default_rng(5).standard_normal((16, columns)).astype(np.float32)
    x[0], x[1] = 1, -1
    sums = []
    for width in interleaved.widths(name, target):
        records = activations.records(x, block, width, form=interleaved.form(name, target, width, True))
        y = np.full((len(x), rows), np.nan, np.float32)
        sizes = 2, form.stride(2), len(x) // width, 4 * rows, 0, 2
        kernel_twin.kernel(name, target, width)(memory.ctypes.data, records.ctypes.data, y.ctypes.data, *sizes)
        sums.append(y)
    for other in sums[1:]:
        np.testing.assert_array_equal(other, sums[0])


@pytest.mark.skipif("avx2" not in HERE, reason="needs AVX2")
@pytest.mark.parametrize(
    "name", ["IQ2_XS", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("IQ2_XXS", "IQ3_XXS", "IQ3_S"))]
)
def test_sums_of_the_largest_values_do_not_overflow(name):
    """Values of one magnitude, with the signs of a row's weights."""
    block = READ[name]
    tensor, _ = random_matrix(block, 16, 512)
    x = np.sign(tensor.dequantize()[:4])
    engine = Prepared(tensor, "avx2")
    one = np.concatenate([run(engine, row[None], 16) for row in x])
    np.testing.assert_array_equal(run(engine, x, 16), one)


@pytest.mark.parametrize("name", ["Q2_K", "IQ2_S", pytest.param("IQ1_M", marks=pytest.mark.exhaustive)])
def test_sums_of_16_columns_with_the_largest_values_are_exact(name):
    """Those of Q2_K and IQ1_M fit int16, and are multiplied by their scales there; those of IQ2_S do not."""
    block = READ[name]
    tensor, weights = random_matrix(block, 16, 512)
    x = np.where(weights[:1] < 0, -0.99, 1).astype(np.float32)  # with one largest magnitude, which is rounded to -128
    for target in HERE:
        close(run(Prepared(tensor, target), x, 16), rounded(x), weights, block)


@pytest.mark.parametrize(
    ("target", "triple", "features", "instruction"),
    [
        ("neon", "aarch64-linux-gnu", "+neon,+dotprod", "sdot"),
        ("i8mm", "aarch64-linux-gnu", "+neon,+dotprod,+i8mm", "smmla"),
        ("avx2", "x86_64-linux-gnu", "+avx2,+fma,+f16c", "vpmaddubsw"),
        ("avxvnni", "x86_64-linux-gnu", "+avx2,+fma,+f16c,+avxvnni", "vpdpbusd"),
        ("avx512bw", "x86_64-linux-gnu", "+avx512f,+avx512bw,+avx512vl,+f16c,+fma", "vpmaddubsw"),
        ("avx512", "x86_64-linux-gnu", "+avx512f,+avx512bw,+avx512vl,+avx512vnni,+f16c,+fma", "vpdpbusd"),
        (
            "avx512vbmi",
            "x86_64-linux-gnu",
            "+avx512f,+avx512bw,+avx512vl,+avx512vnni,+avx512vbmi,+f16c,+fma",
            "vpdpbusd",
        ),
    ],
)
@ALL
def test_every_target_compiles_to_its_instruction(block, target, triple, features, instruction):
    """LLVM compiles for machines that this one is not."""
    assembly = _assembly(block, target, triple, features)
    assert instruction in assembly
    assert "prefetch" in assembly or "prfm" in assembly
    assert "\tcall" not in assembly  # of a library, for what the target lacks
    assert "\tbl\t" not in assembly


@pytest.mark.parametrize("name", ["Q4_K", "IQ3_XXS"])
def test_prefetches_are_spread_over_the_loads_of_a_block(name):
    """By itself, LLVM moves some 35 of them to the front of the block for this processor."""
    features = "+avx512f,+avx512bw,+avx512vl,+avx512vnni,+f16c,+fma"
    assembly = _assembly(READ[name], "avx512", "x86_64-linux-gnu", features, "znver4")
    runs = re.findall(r"(?:^\tprefetch.*\n)+", assembly, re.MULTILINE)
    assert max(len(run.splitlines()) for run in runs) <= 2


def _assembly(block: BlockType, target: str, triple: str, features: str, cpu: str = "") -> str:
    """What LLVM compiles the arithmetic of a block to."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        processor = llvm.Target.from_triple(triple)
    except RuntimeError:
        pytest.skip(f"this llvmlite does not know {triple}")
    isa = targets.isa(target)
    words = ir.IntType(64)
    code = ir.Module()
    code.triple = triple
    function = ir.Function(code, ir.FunctionType(ir.VoidType(), [words] * 4), "block")
    paired = isa.paired
    emitter = Emitter(ir.IRBuilder(function.append_basic_block()), isa, paired, ahead=(2048,))
    body = superblock.k_block if block.is_k else superblock.plain_block
    form = layout.InterleavedLayout(block, isa.lanes)
    weights, halves, x, y = function.args
    totals = body(emitter, form, [emitter.zero_float()] * (2 if paired else 1), weights, halves, x)
    emitter.store_all(totals, y, words(0))
    emitter.builder.ret_void()
    machine = processor.create_target_machine(cpu=cpu, features=features)
    return machine.emit_assembly(llvm.parse_assembly(str(code)))


def test_the_file_s_rows_have_a_kernel_for_avxvnni():
    """No CPU of the tests has it: its kernel is AVX2's, but for the sums of mins."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    code = ir.Module()
    code.triple = "x86_64-linux-gnu"
    function = ir.Function(code, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 7), "block")
    emitter = Emitter(ir.IRBuilder(function.append_basic_block()), targets.isa("avxvnni"), level=2)
    total = filerows.add_block(emitter, BLOCKS["Q4_K"], emitter.zero_float(), *function.args[:6])
    emitter.store_all([total], function.args[6], ir.IntType(64)(0))
    emitter.builder.ret_void()
    processor = llvm.Target.from_triple(code.triple).create_target_machine(features="+avx2,+fma,+f16c,+avxvnni")
    assembly = processor.emit_assembly(llvm.parse_assembly(str(code)))
    assert assembly.count("vpmaddubsw") == 64
    assert "vpdpbusd" in assembly
    assert "\tcall" not in assembly


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("block", READ.values(), ids=str)
def test_the_repacked_form_has_the_bytes_of_the_file(block, lanes):
    """Of codes that are numbered, and of IQ4_XS's scales, the bits that the head of layout.py says."""
    form = layout.InterleavedLayout(block, lanes)
    bits = 8 * (form.block_bytes + form.halves_bytes) / lanes / block.size
    more = dict(re.findall(r"(\w+) +[\d.]+ -> ([\d.]+)", layout.__doc__))
    assert set(more) == {b.name for b in READ.values() if b.numbered or b.name == "IQ4_XS"}
    assert bits == pytest.approx(float(more.get(block.name, block.bpw)), abs=0 if block.name not in more else 5e-3)


@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "F64", "Q4_K"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (65, 512), (130, 1280)])
def test_a_dense_product_is_that_of_the_dequantized_weights(type: str, rows: int, columns: int) -> None:
    """Whatever the number of threads, and of vectors that the kernels take at a time."""
    rng = np.random.default_rng(11)
    values = rng.standard_normal((rows, columns))
    if type in READ:
        tensor, values = random_matrix(READ[type], rows, columns)
    else:
        stored = values.astype({"F16": np.float16, "F64": np.float64}.get(type, np.float32))
        raw = (stored.view(np.uint32) >> 16).astype(np.uint16) if type == "BF16" else stored
        tensor = QuantTensor("w", type, (rows, columns), raw.view(np.uint8).reshape(-1))
        values = dequantize.rows(type, raw.view(np.uint8))
    for vectors in (1, 2, 7, 15, 40):
        x = rng.standard_normal((vectors, columns)).astype(np.float32)
        products = [np.full((vectors, rows), np.nan, np.float32) for _ in range(2)]
        before = pool.get_num_threads()
        try:
            for threads, product in zip((1, 3), products, strict=True):
                pool.set_num_threads(threads)
                Dequantizing(tensor).run(x, product, False)
        finally:
            pool.set_num_threads(before)
        assert np.array_equal(*products)
        exact = x.astype(np.float64) @ values.T.astype(np.float64)
        assert np.abs(products[0] - exact).max() < 1e-6 * np.abs(exact).max() * np.sqrt(columns)


@SEVERAL_COLUMNS
def test_the_int8_path_errs_no_more_than_ggml(block):
    columns, rows, tokens = 2048, 128, 64
    rng = np.random.default_rng(5)
    tensor, weights = random_matrix(block, rows, columns)
    tensor.prepare()
    peer = ggml_matvec.Matrix(ggml_matvec.wheel(), block.name, tensor.raw.reshape(rows, -1), columns, tokens)
    for x in (rng.standard_normal((tokens, columns)), rng.standard_t(3, (tokens, columns))):
        x = x.astype(np.float32)
        exact = x.astype(np.float64) @ weights.T
        y = np.concatenate([tensor.matmul(part) for part in x.reshape(-1, 4, columns)])
        ours, theirs = (np.sqrt(np.mean((values - exact) ** 2)) for values in (y, peer.matmul(x)))
        # blocks of 256: ggml rounds as many values alike, here 32
        # others: the same 32-blocks; the two roundings are as good as independent, their errors are 2% noise
        assert ours < theirs * (0.85 if block.size == 256 else 1.03)
    peer.close()


@repacked
@SOME
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_not_finite_are_refused(block, bad):
    tensor, _ = random_matrix(block, 20, 512)
    raw = tensor.raw.reshape(20, -1).copy()
    if block.scales:
        raw[18, block.nbytes] = block.no_scale  # of the second block
    else:
        put_d(block, raw[18:19, : block.nbytes], np.array([bad], np.float16))
    damaged = QuantTensor("blk.0.w", block.name, (20, 512), raw.reshape(-1))
    x = np.ones(512, np.float32)
    for _ in range(2):
        with pytest.raises(BridgeError, match=r"blk\.0\.w: the scales of row 18 are not finite"):
            damaged.matvec(x)
    with pytest.raises(BridgeError, match="row 18"):
        run(RowMajor(damaged), x[None], 20)
    with pytest.raises(BridgeError, match="row 18"):
        damaged.prepare()


@pytest.mark.parametrize("block", KINDS, ids=str)
def test_odd_values_of_x(block):
    tensor, weights = random_matrix(block, 16, 512)
    tensor.prepare()
    zero = np.zeros(512, np.float32)
    assert not tensor.matvec(zero).any()
    for value in (np.nan, np.inf, -np.inf):
        x = zero.copy()
        x[300] = value
        assert np.isnan(tensor.matvec(x)).all()
    tiny = np.full(512, 1e-42, np.float32)
    assert np.isfinite(tensor.matvec(tiny)).all()
    large = np.random.default_rng(6).standard_normal(512).astype(np.float32) * np.float32(1e30)
    close(tensor.matvec(large)[None], rounded(large[None]), weights, block)


@pytest.mark.parametrize("sub", [16, 32])
def test_rounding_32_values_is_its_twin(sub):
    block = BLOCKS["Q6_K" if sub == 16 else "Q4_0"]
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((1, 2560)) * 10.0 ** rng.integers(-30, 30, (1, 2560))).astype(np.float32)
    x[0, 32:64], x[0, 70], x[0, 100] = 0, np.nan, np.inf
    record = activations.record_of(block)
    records = activations.records(x, block).reshape(-1, record.nbytes)
    q = records[:, : block.size].view(np.int8).reshape(-1, 32)
    d = records[:, record.d_at : record.d_at + 4 * (block.size // 32)].copy().view(np.float32).reshape(-1)
    sums = records[:, record.sums_at : record.d_at].copy().view(np.int32).reshape(-1, 32 // sub)
    for i, part in enumerate(x.reshape(-1, 32)):
        wanted_q, wanted_d, wanted_sums = round32(part, sub)
        np.testing.assert_array_equal(d[i], wanted_d)
        if wanted_d == wanted_d:
            np.testing.assert_array_equal(q[i], wanted_q)
            np.testing.assert_array_equal(sums[i], -block.zero * wanted_sums)


def test_threads_agree_with_one_thread():
    tensor, _ = random_matrix(BLOCKS["Q4_K"], 3000, 512)
    tensor.prepare()
    x = np.random.default_rng(8).standard_normal((5, 512)).astype(np.float32)
    before = pool.get_num_threads()
    try:
        pool.set_num_threads(1)
        alone = tensor.matmul(x)
        pool.set_num_threads(3)
        for _ in range(200):
            np.testing.assert_array_equal(tensor.matmul(x), alone)
    finally:
        pool.set_num_threads(before)


@pytest.mark.parametrize("value", ["many", "0", "-1", "999999", "\u0661", "1.0", pytest.param("9" * 5000, id="long")])
def test_a_number_of_threads_that_is_none_is_refused(monkeypatch, value):
    monkeypatch.setattr("bridge.system.threads.pool._wanted", None)
    monkeypatch.setenv("BRIDGE_THREADS", value)
    with pytest.raises(BridgeError, match=f"BRIDGE_THREADS={value[:9]}.*: must be between 1 and 1024"):
        pool.get_num_threads()


def test_threads_that_the_system_refuses_are_told(monkeypatch):
    started = []

    def start(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        begin(thread)

    begin = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(BridgeError, match=r"the system starts no more threads for this user: raise the limit"):
        pool.Pool(8)
    for thread in started:
        thread.join(60)
    assert not any(thread.is_alive() for thread in started)
    monkeypatch.setattr("bridge.system.cpu.row_threads.usable_cpus", lambda: 2)
    monkeypatch.setattr("bridge.system.cpu.row_threads._pool", row_threads._Pool())
    with pytest.raises(BridgeError, match="no more threads"):
        over_rows(8, lambda rows: None)


def test_many_python_threads_may_multiply_at_once():
    from concurrent.futures import ThreadPoolExecutor

    tensor, _ = random_matrix(BLOCKS["Q4_K"], 3000, 512)
    tensor.prepare()
    x = np.random.default_rng(9).standard_normal((40, 512)).astype(np.float32)
    expected = [tensor.matvec(row) for row in x]
    with ThreadPoolExecutor(4) as executor:
        for y, wanted in zip(executor.map(tensor.matvec, x), expected, strict=True):
            np.testing.assert_array_equal(y, wanted)


def test_callers_that_come_at_once_start_one_pool(monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    started = []

    class Slow:
        def __init__(self, threads: int, cpus: object):
            time.sleep(0.05)
            started.append(self)

    monkeypatch.setattr(pool, "_pool", None)
    monkeypatch.setattr(pool, "Pool", Slow)
    with ThreadPoolExecutor(4) as executor:
        found = list(executor.map(lambda _: pool.get_pool(), range(4)))
    assert len(started) == 1
    assert found == started * 4


def test_numba_is_loaded_without_touching_the_hosts_garbage_collector():
    code = "import gc, numba\ncalls = []\nfor name in ('disable', 'enable', 'freeze', 'unfreeze', 'set_threshold'):\n"
    code += "    setattr(gc, name, lambda *_, name=name: calls.append(name))\n"
    code += "import bridge.system.kernels.compiler\nprint(calls)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_home_that_cannot_be_written_to_costs_the_cache_and_nothing_else() -> None:
    code = "from bridge.system.kernels import half; from bridge.system.threads import pool; import numpy as np; "
    code += "pool.Pool(2).stop(); print(half.half_bits(np.ones(2, np.float32)))"
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | {"XDG_CACHE_HOME": os.devnull}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[15360 15360]\n", 0), done.stderr
    assert done.stderr.count("every process compiles its kernels again") == 1
