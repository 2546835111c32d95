"""Block types: our bit layouts against the gguf package's, bit for bit."""

from functools import cache

import gguf
import numpy as np
import pytest

from bridge.blocks import BLOCKS, FP4, NEWER, TYPES, BlockType, tensor_types
from bridge.blocks.ggml import GGML_QUANT_SIZES
from bridge.blocks.read import READ, WRITTEN
from bridge.blocks.tensor_types import type_named, type_numbered
from bridge.runtime.bench import put_d
from bridge.runtime.cpu.engines import dequantize
from bridge.system.kernels.jit import from_plain
from scripts.peers.llama import ggml

ALL = pytest.mark.parametrize("block", READ.values(), ids=str)
RECENT = pytest.mark.parametrize("block", [*FP4.values(), *NEWER.values(), READ["Q1_0"]], ids=str)
UNKNOWN = {*NEWER, "Q1_0"}  # to the gguf package
READ_ONLY = pytest.mark.parametrize("block", [b for b in READ.values() if b.name not in TYPES], ids=str)
compiled = cache(from_plain)
HALVES = np.array([0.01, -2, 0, -0.0, 6e-8, -5e-5, 65504, np.inf, -np.inf, np.nan], np.float16)  # two are subnormal


def test_the_types_of_tensors_are_those_of_gguf(monkeypatch):
    for kind, (size, nbytes) in GGML_QUANT_SIZES.items():
        expected = (kind.name, int(kind), size, nbytes)
        assert type_named(kind.name) == type_numbered(int(kind)) == tensor_types._BY_NAME[kind.name]
        assert tensor_types._BY_NAME[kind.name][:4] == expected
        if kind.name in READ:
            assert (READ[kind.name].size, READ[kind.name].nbytes) == (size, nbytes)
    assert type_named("Q4_9") is type_numbered(4) is None
    monkeypatch.setattr(tensor_types, "_BY_NAME", {})  # as types of a later gguf package
    monkeypatch.setattr(tensor_types, "_BY_NUMBER", {})
    assert type_named("Q4_0") == type_numbered(2) == ("Q4_0", 2, 32, 18, "", "")


def test_records_are_found_by_name():
    assert list(READ) == [*WRITTEN, "Q1_0"]
    assert {name: READ[name] for name in WRITTEN} == WRITTEN
    assert all(name == block.name and name in READ for name, block in READ.items())
    assert len(READ) == len(WRITTEN) + 1
    assert READ.get("F32") is None
    with pytest.raises(KeyError):
        READ["F32"]
    with pytest.raises(ImportError):
        from bridge.blocks.read import NONE  # type: ignore[attr-defined]  # noqa: F401


def random_fields(block: BlockType, rng: np.random.Generator):
    q = rng.integers(0, block.levels, block.size).astype(np.uint8)
    if block.numbered:  # not all codes make up a point of a codebook
        raw = rng.integers(0, 256, block.nbytes).astype(np.uint8)
        compiled(block.unpack)(raw, q, np.zeros(block.subs, np.int8), np.zeros(1, np.uint8))
    sc = rng.integers(block.scale_lo, block.scale_hi + 1, block.subs).astype(np.int8)
    mn = rng.integers(0, block.min_hi + 1, block.subs).astype(np.uint8)
    d, dmin = (rng.standard_normal(2) * 0.01).astype(np.float16)
    return q, sc, mn, d, dmin


def packed(pack, block: BlockType, q, sc, mn, d, dmin) -> np.ndarray:
    out = np.zeros(block.nbytes, np.uint8)
    pack(q, sc, mn, int(d.view(np.uint16)), int(dmin.view(np.uint16)), out)
    return out


def value(block: BlockType, q, sc, mn, d, dmin) -> np.ndarray:
    """The formula in the head of bridge.blocks.base, in float32."""
    d, dmin = np.float32(d * np.float32(block.unit)), np.float32(dmin)
    if block.values:
        scale = np.array(block.scales, np.float32)[np.repeat(sc.view(np.uint8), block.sub)] if block.scales else d
        if block.is_k:
            scale = d * np.repeat(2 * sc + 1 if block.odd_scales else sc, block.sub).astype(np.float32)
        return scale * np.array(block.values, np.float32)[q]
    code = q.astype(np.float32) - block.zero
    if not block.is_k:
        return d * code + (dmin if block.has_min else 0)
    scale = d * np.repeat(sc, block.sub).astype(np.float32)
    return scale * code - (dmin * np.repeat(mn, block.sub).astype(np.float32) if block.has_min else 0)


@pytest.mark.parametrize("block", [b for b in READ.values() if b.name not in UNKNOWN], ids=str)
def test_a_packed_block_means_what_gguf_reads(block):
    rng = np.random.default_rng(1)
    pack = compiled(block.pack)
    for _ in range(200):
        fields = random_fields(block, rng)
        raw = packed(pack, block, *fields)
        with np.errstate(over="ignore"):  # MXFP4's largest scales
            read = gguf.quants.dequantize(raw[None], block.ggml)[0]
            np.testing.assert_array_equal(read, value(block, *fields))


def alike(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """The same bits, but those of a NaN."""
    nan = np.isnan(theirs)
    return np.array_equal(np.isnan(ours), nan) and np.array_equal(ours[~nan].view("u4"), theirs[~nan].view("u4"))


@READ_ONLY
def test_whatever_bytes_a_file_holds_are_read_as_gguf_and_ggml_read_them(block):
    """Bit for bit, with any code, number and scale, and any d."""
    pytest.importorskip("xllamacpp")
    raw = np.random.default_rng(5).integers(0, 256, (1000, block.nbytes)).astype(np.uint8)
    put_d(block, raw, np.resize(HALVES, 1000))
    ours = dequantize.rows(block.name, raw)
    assert alike(ours, ggml.dequantize(raw, int(block.ggml)))
    if block.name not in UNKNOWN:
        with np.errstate(all="ignore"):
            assert alike(ours, gguf.quants.dequantize(raw, block.ggml))


@RECENT
def test_llama_cpp_knows_the_recent_types_and_reads_them_alike(block):
    pytest.importorskip("xllamacpp")
    name, size, nbytes = ggml.type_size(int(block.ggml))
    assert (name.upper(), size, nbytes) == (block.name, block.size, block.nbytes)
    rng = np.random.default_rng(4)
    pack = compiled(block.pack)
    for _ in range(50):
        fields = random_fields(block, rng)
        if block.scales:
            fields[1][:] &= 127  # gguf and ggml differ where a sign bit or a NaN is set, and nobody writes these
            fields[1][fields[1] == 127] = 0
        read = ggml.dequantize(packed(pack, block, *fields)[None], int(block.ggml))[0]
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(read, value(block, *fields))


@ALL
def test_the_plain_functions_are_the_compiled_ones(block):
    fields = random_fields(block, np.random.default_rng(2))
    wide = [f.astype(np.int64) for f in fields[:3]]  # plain Python would overflow uint8
    np.testing.assert_array_equal(
        packed(block.pack, block, *wide, *fields[3:]), packed(compiled(block.pack), block, *fields)
    )


@ALL
def test_unpacking_returns_the_fields(block):
    rng = np.random.default_rng(3)
    unpack = compiled(block.unpack)
    for _ in range(50):
        q, sc, mn, d, dmin = random_fields(block, rng)
        raw = packed(compiled(block.pack), block, q, sc, mn, d, dmin)
        got = np.zeros_like(q), np.zeros_like(sc), np.zeros_like(mn)
        unpack(raw, *got)
        np.testing.assert_array_equal(got[0], q)
        if block.is_k or block.scales:
            np.testing.assert_array_equal(got[1], sc)
        if block.min_hi:
            np.testing.assert_array_equal(got[2], mn)
        if block.d_nibbles:
            assert sum((int(raw[at]) >> 4) << (4 * i) for i, at in enumerate(block.d_nibbles)) == d.view(np.uint16)
        if block.d_at >= 0:
            assert raw[block.d_at : block.d_at + 2].view(np.float16)[0] == d
        if block.has_min:
            assert raw[block.dmin_at : block.dmin_at + 2].view(np.float16)[0] == dmin


@ALL
def test_sizes_are_those_of_gguf(block):
    assert gguf.GGML_QUANT_SIZES[block.ggml] == (block.size, block.nbytes)


def test_blocks_are_listed_by_bits_per_weight():
    bpw = [block.bpw for block in BLOCKS.values()]
    k_first = [(b.bpw, not b.is_k) for b in BLOCKS.values()]
    assert k_first[0] == (2.625, False)
    assert bpw[:3] == [2.625, 3.4375, 4.5]
    assert max(bpw) == 8.5
