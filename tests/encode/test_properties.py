"""What holds for every tensor of codes, whatever its bits, groups, widths, signs and order."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.blocks import BLOCKS
from bridge.checkpoint.formats.zeros import Dialect, decode, lost_words, recode
from bridge.checkpoint.grouped import GroupedTensor
from bridge.encode.type_choice import CARRIED_LIMIT, REQUANTIZED_LIMIT, choose, map_to

generators = st.integers(0, 2**32).map(np.random.default_rng)


@st.composite
def tensors(
    draw: st.DrawFn, rows: st.SearchStrategy[int], columns: st.SearchStrategy[int], sizes: st.SearchStrategy[int]
) -> GroupedTensor:
    """Codes rounded from Gaussian weights; scales of one sign or both, whole or fractional zero points, any order."""
    rng = draw(generators)
    bits, out, width, size = draw(st.integers(2, 8)), draw(rows), draw(columns), draw(sizes)
    groups = -(-width // size)
    group = np.arange(width) // size
    top = 2**bits - 1
    scales = rng.uniform(0.5, 1.5, (out, groups)).astype(np.float16).astype(np.float32) / 64
    if draw(st.booleans()):
        scales *= rng.choice([-1, 1], scales.shape)
    zeros = np.full(scales.shape, 2.0 ** (bits - 1), np.float32)
    kind = draw(st.sampled_from(["symmetric", "asymmetric", "fractional"]))
    if kind != "symmetric":
        zeros += rng.uniform(-0.1, 0.1, zeros.shape).astype(np.float32) * top
    if kind == "asymmetric":
        zeros = np.rint(zeros)
    order = rng.permutation(group).astype(np.int32) if draw(st.booleans()) else None
    codes = np.rint(rng.normal(0, top / 6, (out, width)) + zeros[:, group if order is None else order])
    return GroupedTensor(
        "t", bits, np.clip(codes, 0, top).astype(np.uint8), scales, zeros, size, order,
        bias=rng.normal(size=out).astype(np.float32),
    )  # fmt: skip


small = tensors(st.integers(1, 9), st.integers(1, 70), st.integers(1, 40))


@given(small, generators)
def test_taking_rows_takes_rows_of_the_weights(t: GroupedTensor, rng: np.random.Generator) -> None:
    order = rng.integers(0, t.shape[0], rng.integers(1, 12))
    taken = t.take_rows(order)
    np.testing.assert_array_equal(taken.dequantize(), t.dequantize()[order])
    assert t.bias is not None
    assert taken.bias is not None
    np.testing.assert_array_equal(taken.bias, t.bias[order])


@given(small, generators)
def test_taking_columns_takes_columns_of_the_weights(t: GroupedTensor, rng: np.random.Generator) -> None:
    order = rng.permutation(t.shape[1])[: rng.integers(1, t.shape[1] + 1)]
    np.testing.assert_array_equal(t.take_columns(order).dequantize(), t.dequantize()[:, order])


@given(small)
def test_columns_in_the_order_of_their_groups_are_sequential(t: GroupedTensor) -> None:
    sorted_ = t.take_columns(np.argsort(t.groups(), kind="stable"))
    assert sorted_.sequential
    assert sorted_.group_size == min(t.group_size, t.shape[1])
    assert sorted_.noise() == pytest.approx(t.noise(), rel=1e-6)


@given(small, generators)
def test_a_cropped_tensor_has_the_first_of_the_weights(t: GroupedTensor, rng: np.random.Generator) -> None:
    out, columns = (int(rng.integers(1, n + 1)) for n in t.shape)
    cropped = t.crop(out, columns)
    np.testing.assert_array_equal(cropped.dequantize(), t.dequantize()[:out, :columns])
    np.testing.assert_array_equal(t.dequantize(slice(0, out))[:, :columns], cropped.dequantize())


V2, OLD = Dialect(), Dialect(3, old=True)


@st.composite
def zero_points(draw: st.DrawFn) -> tuple[int, np.ndarray, Dialect]:
    """Bits, random words of qzeros with room for 32 zero points or more, and the dialect that they are in."""
    bits = draw(st.sampled_from([2, 3, 4, 8]))
    dtype = draw(st.sampled_from(["int32"] if bits == 3 else ["int8", "int16", "int32", "int64"]))
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 3)) * bits * 32 // (np.dtype(dtype).itemsize * 8)
    words = draw(generators).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    dialects = [V2, Dialect(bits), *([OLD] if bits == 3 else [])]
    return bits, words.view(dtype).reshape(shape), draw(st.sampled_from(dialects))


def lanes(words: np.ndarray, bits: int) -> int:
    return words.shape[1] * words.itemsize * 8 // bits


@given(zero_points())
def test_zero_points_in_another_dialect_are_the_same_and_come_back(case: tuple[int, np.ndarray, Dialect]) -> None:
    bits, words, source = case
    out = lanes(words, bits)
    for target in (V2, Dialect(bits)):
        there = recode(words, bits, source, target)
        assert (there.dtype, there.shape) == (words.dtype, words.shape)
        np.testing.assert_array_equal(decode(there, bits, out, target), decode(words, bits, out, source))
        if source != OLD:
            np.testing.assert_array_equal(recode(there, bits, target, source), words)


@given(zero_points())
def test_zero_points_of_0_that_are_raised_for_v1_become_1(case: tuple[int, np.ndarray, Dialect]) -> None:
    bits, words, source = case
    out = lanes(words, bits)
    true = decode(words, bits, out, source)
    v1 = recode(words, bits, source, Dialect(bits), raised=true == 0)
    np.testing.assert_array_equal(decode(v1, bits, out, Dialect(bits)), np.maximum(true, 1))
    assert lost_words(v1, bits) == 0


wide = tensors(st.integers(1, 6), st.integers(1, 24).map(lambda n: 32 * n), st.sampled_from([16, 32, 48, 64, 128, 512]))


@settings(max_examples=60)
@given(wide, st.sampled_from(["auto", "exact", "at_most"]), st.data())
def test_a_chosen_type_keeps_its_limit_and_is_as_close_as_it_says(
    t: GroupedTensor, mode: str, data: st.DataObject
) -> None:
    asked = data.draw(st.sampled_from([b for b in BLOCKS.values() if t.shape[1] % b.size == 0]))
    choice = choose(mode, asked if mode == "at_most" else None, lambda _sampled: [(t, None)], t.shape[1])
    block = BLOCKS[choice.type]
    assert mode != "at_most" or block.bpw <= asked.bpw
    mapped = map_to(t, block)
    weights = t.dequantize()
    stored = gguf.quants.dequantize(mapped.data, block.ggml)
    error, signal = np.linalg.norm(stored.astype(np.float64) - weights), np.linalg.norm(weights)
    # float32 weights are themselves good to about 2e-7
    assert np.sqrt(mapped.fidelity.error) == pytest.approx(error, rel=1e-3, abs=5e-7 * float(signal))
    assert mapped.fidelity.noise == pytest.approx(t.noise(), rel=1e-5)
    assert choice.limit in (None, 0.0, CARRIED_LIMIT, REQUANTIZED_LIMIT)
    if choice.limit is not None:
        assert mapped.fidelity.share <= choice.limit
    if choice.limit == 0:
        np.testing.assert_array_equal(stored, weights)
