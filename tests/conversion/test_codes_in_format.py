"""Codes in other formats: the same differences of code and zero point, or none at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.checkpoint.formats.registry import FORMATS
from bridge.checkpoint.grouped import GroupedTensor
from bridge.conversion.checkpoints.codes_in_format import in_format
from bridge.encode.limits import REQUANTIZED_LIMIT


def coded(bits: int, size: int, columns: int, seed: int, *, order: bool = False, fraction: float = 0) -> GroupedTensor:
    """Random codes with random zero points, `fraction` of a step beside a whole number."""
    random = np.random.default_rng(seed)
    rows, groups = 32, -(-columns // size)
    zeros = random.integers(0, 2**bits, (rows, groups)).astype(np.float32) + np.float32(fraction)
    scales = random.normal(0, 0.01, (rows, groups)).astype(np.float16).astype(np.float32)
    permuted = random.permutation(np.arange(columns, dtype=np.int32) // size) if order else None
    codes = random.integers(0, 2**bits, (rows, columns)).astype(np.uint8)
    return GroupedTensor("m", bits, codes, scales, zeros, size, permuted)


@settings(max_examples=150, deadline=None)
@given(
    format=st.sampled_from([*FORMATS.values()]), bits=st.sampled_from([2, 3, 4, 5, 8]),
    size=st.sampled_from([16, 32, 48, 64, 128]), columns=st.sampled_from([96, 128, 256]), seed=st.integers(0, 999),
    order=st.booleans(),
)  # fmt: skip
def test_what_a_format_holds_is_the_same_weights(format, bits, size, columns, seed, order):
    tensor = coded(bits, size, columns, seed, order=order)
    result = in_format(tensor, format, format.bits)
    if order and not format.act_order:
        assert result is None or tensor.sequential
    if result is None:
        return
    assert result.bits in format.bits
    assert result.codes.max() < 2**result.bits
    assert not format.group_sizes or result.group_size in format.group_sizes
    if not format.any_zeros:
        assert ((result.zeros >= 1 - format.holds_zero) & (result.zeros < 2**result.bits)).all()
        difference = result.codes.astype(int) - result.zeros[:, result.groups()]
        assert np.array_equal(difference, tensor.codes.astype(int) - tensor.zeros[:, tensor.groups()])
    assert np.array_equal(result.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("form", ["gptq_v2", "compressed-tensors", "awq"])
def test_fractions_of_zero_points_are_rounded_only_where_that_adds_little(form):
    """Rounded by f, a zero point adds f^2 to weights that have a noise of 1/12 each: 15% is reached at 0.11."""
    near, far = (coded(2, 64, 128, 0, fraction=fraction) for fraction in (0.1, 0.13))
    result = in_format(near, FORMATS[form], FORMATS[form].bits)
    assert result is not None
    error = np.square(result.dequantize() - near.dequantize(), dtype=np.float64).sum()
    assert 0 < error < REQUANTIZED_LIMIT * near.noise()
    assert in_format(far, FORMATS[form], FORMATS[form].bits) is None


def test_a_group_moves_to_the_middle_only_where_all_can():
    symmetric = replace(coded(3, 64, 128, 0), zeros=np.full((32, 2), 4, np.float32))
    result = in_format(symmetric, FORMATS["awq"], (4,))
    assert result is not None
    assert (result.zeros == 8).all()
    one_off = symmetric.zeros.copy()
    one_off[5, 1] = 7  # codes down to -7, which 4 bits hold around 8, and 7 more above
    one_off[6, 1] = 0
    codes = symmetric.codes.copy()
    codes[6, 64:] = 7
    result = in_format(replace(symmetric, zeros=one_off, codes=codes), FORMATS["awq"], (4,))
    assert result is not None
    assert (result.zeros == 8).all()
    wide = replace(symmetric, bits=4, codes=np.tile(np.arange(16, dtype=np.uint8), (32, 8)), zeros=one_off)
    result = in_format(wide, FORMATS["awq"], (4,))
    assert result is not None
    assert np.array_equal(result.zeros, one_off)


@pytest.mark.parametrize(("form", "bits"), [("gptq", 8), ("gptq_v2", 4)])
def test_gptq_v1_has_no_zero_point_of_0(form, bits):
    """A group from 0 to 15 with a zero point of 0 has no room in 4 bits to move."""
    tensor = coded(4, 64, 128, 0)
    codes = np.tile(np.arange(16, dtype=np.uint8), (32, 8))
    result = in_format(replace(tensor, codes=codes, zeros=np.zeros((32, 2), np.float32)), FORMATS[form], (2, 3, 4, 8))
    assert result is not None
    assert result.bits == bits
    assert (result.zeros > 0).all() or form == "gptq_v2"


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_compressed_tensors_keeps_scales_that_are_no_halves(dtype):
    scales = np.random.default_rng(0).normal(0, 1e-6, (32, 2)).astype(np.float32)
    if dtype == "BF16":
        scales = (scales.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    tensor = replace(coded(4, 64, 128, 0), scales=scales)
    written = FORMATS["compressed-tensors"]
    result = in_format(tensor, written, written.bits)
    assert result is not None
    assert np.array_equal(result.scales, scales)
    assert written.scale_dtype(scales) == dtype


@pytest.mark.parametrize("form", FORMATS)
def test_scales_beyond_a_half_are_held_by_no_format_of_halves(form):
    tensor = replace(coded(4, 64, 128, 0), scales=np.full((32, 2), 1e6, np.float32))
    result = in_format(tensor, FORMATS[form], FORMATS[form].bits)
    assert (result is not None) == ("F32" in FORMATS[form].scale_dtypes)
