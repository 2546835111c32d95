"""Bit streams, planes and interleaving: the kernels against plain numpy, zero points against their encoders."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.checkpoint.formats.bits import unpack_columns, unpack_gemm, unpack_rows
from bridge.checkpoint.formats.zeros import Dialect, decode, dialects, lost_words, symmetric_dialect
from tests.support.encode import (
    pack_planar,
    pack_stream,
    pack_zeros_autogptq,
    pack_zeros_old_3bit,
    pack_zeros_v1,
)


def plain_unpack(words: np.ndarray, bits: int, n: int) -> np.ndarray:
    """[rows, m] words -> uint8 [rows, n]: bit by bit."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    return (stream[:, : n * bits].reshape(len(words), n, bits) << np.arange(bits)).sum(-1).astype(np.uint8)


def codes_of(seed: int, rows: int, n: int, bits: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**bits, (rows, n), dtype=np.uint8)


def test_a_word_holds_its_first_code_in_its_lowest_bits():
    assert unpack_rows(np.array([[0x76543210]], np.uint32), 4, 8).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    words = np.array([[0x24924924, 0x49249249, 0x92492492]], np.uint32)  # 3 bits: 96 bits hold 32 codes
    assert unpack_rows(words, 3, 32).tolist() == [[4] * 32]


@given(
    st.sampled_from([2, 3, 4, 5, 6, 8]),
    st.sampled_from(["int8", "int16", "int32", "int64"]),
    st.integers(1, 37),
    st.integers(1, 200),
    st.integers(0, 2**32),
)
def test_streams_of_any_bits_in_words_of_any_width_unpack_to_what_was_packed(bits, dtype, rows, n, seed):
    codes = codes_of(seed, rows, n, bits)
    words = pack_stream(codes, bits, dtype)
    assert np.array_equal(plain_unpack(words, bits, n), codes)
    assert np.array_equal(unpack_rows(words, bits, n), codes)
    assert np.array_equal(unpack_columns(np.ascontiguousarray(words.T), bits, n), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_matrices_larger_than_a_tile_unpack_in_every_part(bits):
    codes = codes_of(1, 37, 3 * 64 * 32 + 96, bits)
    words = np.ascontiguousarray(pack_stream(codes, bits).T)
    assert np.array_equal(unpack_columns(words, bits, codes.shape[1]), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_planar_words_unpack_along_rows_and_columns(bits):
    codes = codes_of(2, 33, 2 * 64 * 32 + 64, bits)
    words = pack_planar(codes, bits)
    assert np.array_equal(unpack_rows(words, bits, codes.shape[1], planar=True), codes)
    assert np.array_equal(unpack_columns(np.ascontiguousarray(words.T), bits, codes.shape[1], planar=True), codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_planar_packing_of_powers_of_two_is_the_plain_stream(bits):
    codes = codes_of(3, 5, 96, bits)
    assert np.array_equal(pack_planar(codes, bits), pack_stream(codes, bits))


@pytest.mark.parametrize(("columns", "out"), [(256, 256), (64, 8), (100, 136), (3, 24)])
def test_awq_gemm_words_unpack_by_the_published_order(columns, out):
    words = np.random.default_rng(4).integers(0, 2**32, (columns, out // 8), dtype=np.uint32)
    plain = plain_unpack(words, 4, out).reshape(columns, -1, 8)[:, :, [0, 4, 1, 5, 2, 6, 3, 7]]
    assert np.array_equal(unpack_gemm(words), plain.reshape(columns, out).T)


zero_points = st.integers(0, 2**32).map(np.random.default_rng)


@given(st.sampled_from([2, 3, 4, 8]), st.sampled_from(["int8", "int16", "int32", "int64"]), zero_points, st.booleans())
def test_v1_zero_points_of_0_come_back_though_they_borrowed(bits, dtype, rng, many_zeros):
    z = rng.integers(0, 2 if many_zeros else 2**bits, (3, 192))
    assert np.array_equal(decode(pack_zeros_v1(z, bits, dtype), bits, 192, Dialect(bits)), z)
    assert np.array_equal(decode(pack_stream(z, bits, dtype), bits, 192, Dialect()), z)


@given(zero_points)
def test_3_bit_zero_points_of_old_gptqmodel_come_back(rng):
    z = rng.integers(0, 8, (2, 64))
    assert np.array_equal(decode(pack_zeros_old_3bit(z), 3, 64, Dialect(3, old=True)), z)


@given(st.sampled_from([2, 4, 8]), st.sampled_from([2, 4, 8]), zero_points)
def test_v1_zero_points_come_back_when_the_default_bits_constant_was_subtracted(bits, default, rng):
    z = rng.integers(0, 2**bits, (2, 64))
    words = pack_zeros_v1(z, bits, constant_bits=default)
    label_first = dialects(bits, default, "gptq", (7, 3))[0]
    assert np.array_equal(decode(words, bits, 64, label_first), z)


@pytest.mark.parametrize(
    ("words", "bits", "dialect"),
    [
        ([0x77777777], 4, "v1"),
        ([0x88888888], 4, "v2"),
        ([0x55555555], 2, "v1"),
        ([0xAAAAAAAA], 2, "v2"),
        ([0x7F7F7F7F], 8, "v1"),
        ([0x80808080], 8, "v2"),
        ([0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D], 3, "v1"),
        ([0x24924924, 0x49249249, 0x92492492], 3, "v2"),
        ([0x00000000, 0xB6DB6DB7, 0x49249249], 3, "v1 of GPTQModel < 7.0.0"),
        ([0, 0, 0xFFFFFFFF], 3, "planar (gptq_p)"),
    ],
)
def test_symmetric_words_name_their_dialect_whatever_the_label(words, bits, dialect):
    words = np.tile(np.array(words, np.uint32), (2, 2))
    out = words.shape[1] * 32 // bits
    for label in ("gptq", "gptq_v2", "gptq_p"):
        found = symmetric_dialect(words, bits, out, dialects(bits, 4, label, None))
        assert str(found) == dialect


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_words_that_autogptq_filled_with_ones_are_counted_and_whole_ones_are_not(bits):
    lanes = 32 // bits
    z = np.full((1, lanes * 4), 2 ** (bits - 1))
    z[0, lanes + lanes - 1] = 0  # the topmost lane of word 1: still known
    words = pack_zeros_autogptq(z, bits)
    assert lost_words(words, bits) == 0
    assert np.array_equal(decode(words, bits, z.shape[1], Dialect(bits)), z)
    z[0, 2 * lanes] = 0
    z[0, 4 * lanes - 2] = 0
    assert lost_words(pack_zeros_autogptq(z, bits), bits) == 2
