"""Carrying codes onto blocks: exactness, error bounds on Gaussian weights, and what is refused."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.blocks import BLOCKS
from bridge.blocks.integers.q4_0 import Q4_0
from bridge.blocks.integers.q4_1 import Q4_1
from bridge.blocks.integers.q5_0 import Q5_0
from bridge.blocks.integers.q5_1 import Q5_1
from bridge.blocks.integers.q8_0 import Q8_0
from bridge.blocks.k_quants.q2_k import Q2_K
from bridge.blocks.k_quants.q3_k import Q3_K
from bridge.blocks.k_quants.q4_k import Q4_K
from bridge.blocks.k_quants.q5_k import Q5_K
from bridge.blocks.k_quants.q6_k import Q6_K
from bridge.checkpoint.grouped import GroupedTensor
from bridge.encode.block_bytes import unpack_codes
from bridge.encode.carrying.carry import CannotCarryError, Mapped, carry, stored_codes
from bridge.encode.type_choice import Choice, carry_or_requantize, choose, exact_type, map_to, requantize
from bridge.system.kernels.half import half_bits, round_half
from tests.support.least_error import least_affine_error, least_q8_0_error, least_scaled_error


def grouped(bits, group_size, sym, shape=(64, 1024), seed=0, scale=0.02) -> GroupedTensor:
    """Gaussian weights rounded to nearest, as a GPTQ tool would without its error feedback."""
    out, columns = shape
    rng = np.random.default_rng(seed)
    groups = columns // group_size
    x = (rng.standard_normal(shape) * scale).astype(np.float32).reshape(out, groups, group_size)
    top = 2**bits - 1
    if sym:
        s = np.abs(x).max(-1) * 2 / top
        z = np.full(s.shape, 2.0 ** (bits - 1))
    else:
        low, high = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
        s = (high - low) / top
        z = np.rint(-low / s)
    s = s.astype(np.float16).astype(np.float32)
    step = np.where(s == 0, 1, s)[..., None]  # scales below the smallest half are 0
    q = np.clip(np.rint(x / step) + z[..., None], 0, top).astype(np.uint8)
    return GroupedTensor("t", bits, q.reshape(shape), s, z.astype(np.float32), group_size)


def fractional_zeros(bits, group_size, shape=(64, 1024)) -> GroupedTensor:
    """As hqq starts out: codes run from the least weight of a group to the greatest."""
    x = np.random.default_rng(0).normal(0, 0.02, (shape[0], shape[1] // group_size, group_size)).astype(np.float32)
    top = 2**bits - 1
    low, high = x.min(-1), x.max(-1)
    s = ((high - low) / top).astype(np.float16).astype(np.float32)
    z = -low / s
    q = np.clip(np.rint(x / s[..., None] + z[..., None]), 0, top).astype(np.uint8)
    return GroupedTensor("t", bits, q.reshape(shape), s, z, group_size)


def choice(t: GroupedTensor, mode: str = "auto") -> Choice:
    return choose(mode, None, lambda _sampled: [(t, None)], t.shape[1])


def automatic(t: GroupedTensor) -> Mapped:
    return map_to(t, BLOCKS[choice(t).type])


def exactly(t: GroupedTensor) -> Mapped:
    """In the smallest type that holds it bit for bit."""
    found = choice(t, "exact")
    assert found.limit == 0
    return map_to(t, BLOCKS[found.type])


def stored(mapped) -> np.ndarray:
    return gguf.quants.dequantize(mapped.data, mapped.block.ggml)


def nmse(mapped, t) -> float:
    w = t.dequantize().astype(np.float64)
    return float(((stored(mapped) - w) ** 2).sum() / (w**2).sum())


def mirrored(t: GroupedTensor) -> GroupedTensor:
    """The same weights without a negative scale: in groups that have one, q and z become 2^bits - 1 less them."""
    top = 2**t.bits - 1
    negative = t.scales < 0
    codes = np.where(negative[:, t.groups()], top - t.codes, t.codes).astype(np.uint8)
    zeros = np.where(negative, top - t.zeros, t.zeros)
    return GroupedTensor(t.name, t.bits, codes, np.abs(t.scales), zeros, t.group_size)


def with_offsets(bits, group_size, shape=(32, 1024), dtype=np.float16, seed=0) -> GroupedTensor:
    """As mlx: scales of both signs, zero points divided out of rounded offsets and so not quite whole."""
    t = grouped(bits, group_size, False, shape, seed)
    sign = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), t.scales.shape)
    turned = mirrored(GroupedTensor("t", bits, t.codes, sign * t.scales, t.zeros, group_size))
    scales = sign * t.scales
    offsets = (-scales * turned.zeros).astype(dtype).astype(np.float32)
    zeros = np.divide(-offsets, scales, out=np.zeros_like(scales), where=scales != 0)
    return GroupedTensor("t", bits, turned.codes, scales, zeros, group_size)


def grouped_asymmetric(bits, group_size):
    return grouped(bits, group_size, False, (32, 1024))


def assert_holds_the_codes(mapped, t):
    """The codes, less zero points, or those of whole groups mirrored: within a superblock, by their scales' signs."""
    found = unpack_codes(mapped.block, mapped.data).astype(int)
    if mapped.block.zero:
        np.testing.assert_array_equal(found, t.codes + (mapped.block.zero - np.rint(t.zeros))[:, t.groups()])
        return
    if not mapped.block.is_k:
        np.testing.assert_array_equal(found, t.codes)
        return
    same, turned = (
        (found == codes).reshape(-1, t.group_size).all(-1).reshape(-1, max(256 // t.group_size, 1))
        for codes in (t.codes, 2**t.bits - 1 - t.codes.astype(int))
    )
    assert (same != turned).all()
    negative = (t.scales < 0).reshape(turned.shape)
    assert ((turned ^ negative) == (turned ^ negative)[:, :1]).all()


# source, type, bound: the bars, or what the prototype reached on Gaussian weights where it is lower
BOUNDS = [
    (4, 128, True, Q4_K, 5e-7),
    (4, 128, False, Q4_K, 7e-7),
    (4, 64, False, Q4_K, 1e-5),
    (4, 32, False, Q4_K, 4.2e-5),
    (4, 32, True, Q4_K, 1.6e-5),
    (3, 128, True, Q3_K, 3.4e-6),
    (2, 128, False, Q2_K, 4.5e-5),
    (2, 64, False, Q2_K, 2.1e-4),
    (5, 128, True, Q5_K, 5e-7),
    (4, 32, False, Q6_K, 1e-5),
    (4, 16, False, Q6_K, 1e-5),
    (4, 128, False, Q4_1, 1e-6),
]


@pytest.mark.parametrize(("bits", "group_size", "sym", "block", "bound"), BOUNDS)
def test_a_carried_tensor_keeps_its_codes_and_hardly_moves(bits, group_size, sym, block, bound):
    t = grouped(bits, group_size, sym, (128, 2048))
    mapped = carry(t, block)
    assert nmse(mapped, t) <= bound
    assert mapped.fidelity.kept == t.codes.size
    assert_holds_the_codes(mapped, t)


@pytest.mark.parametrize(
    ("bits", "group_size", "block", "bound"),
    [
        (2, 128, Q2_K, 4.9e-5),
        (3, 64, Q4_K, 1e-5),
        (4, 128, Q4_K, 9e-7),
        (4, 64, Q4_K, 1e-5),
        (4, 32, Q4_K, 4.2e-5),
        (5, 128, Q5_K, 9.5e-7),
        (5, 64, Q6_K, 1e-5),
        (6, 64, Q8_0, 1e-5),
    ],
)
def test_scales_of_both_signs_and_fractional_zero_points_keep_their_codes(bits, group_size, block, bound):
    t = with_offsets(bits, group_size)
    assert 0.3 < (t.scales < 0).mean() < 0.7
    mapped = carry(t, block)
    assert nmse(mapped, t) <= bound
    assert mapped.fidelity.error == pytest.approx(nmse(mapped, t) * mapped.fidelity.signal, rel=1e-3)
    assert mapped.fidelity.kept == t.codes.size
    assert_holds_the_codes(mapped, t)


@pytest.mark.parametrize(("bits", "block"), [(2, Q2_K), (3, Q4_K), (4, Q4_K), (5, Q5_K)])
@pytest.mark.parametrize("make", [with_offsets, grouped_asymmetric])
def test_what_verify_expects_in_the_blocks_is_what_is_in_them(make, bits, block):
    t = make(bits, 64)
    data = carry(t, block).data
    found = unpack_codes(block, data)
    assert 0.1 < (found != t.codes).mean() < 0.9  # some superblocks are mirrored, some are not
    np.testing.assert_array_equal(found, stored_codes(t, block, data))
    np.testing.assert_array_equal(found[5:9], stored_codes(t, block, data[5:9], slice(5, 9)))


@pytest.mark.parametrize(("bits", "block"), [(4, Q4_1), (5, Q5_1)])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_half_precision_offsets_are_held_bit_for_bit(bits, block, group_size):
    t = with_offsets(bits, group_size)
    offsets = (-t.scales.astype(np.float64) * t.zeros).astype(np.float16).astype(np.float32)
    exact = t.scales[:, t.groups()] * t.codes + offsets[:, t.groups()]
    assert exactly(t).block is block
    assert exactly(t).fidelity.error == 0
    np.testing.assert_array_equal(stored(carry(t, block)), exact)


def test_eight_bit_codes_with_fractional_zero_points_are_carried_where_that_is_closer():
    t = with_offsets(8, 64)
    mapped = automatic(t)
    assert mapped.block is Q8_0
    assert mapped.fidelity.error <= min(carry(t, Q8_0).fidelity.error, requantize(t, Q8_0).fidelity.error)
    far = GroupedTensor("t", 4, *(getattr(grouped(4, 64, False), k) for k in ("codes", "scales", "zeros")), 64)
    far.zeros[:] += 0.5
    assert map_to(far, Q8_0).fidelity.kept == 0  # half a step off would cost more than rounding to 127 steps
    assert map_to(far, Q4_K).fidelity.kept == far.codes.size


def test_zero_points_out_of_proportion_are_requantized_or_held_by_an_offset():
    t = grouped(4, 64, False, (8, 512))
    t.zeros[3, 2] = -1e6
    for block in (Q4_K, Q8_0, Q4_1, Q6_K):
        mapped = map_to(t, block)
        assert np.isfinite(stored(mapped)).all()
        assert np.isfinite(mapped.fidelity.error)


EXACT = [
    (4, 128, True, Q4_0),
    (4, 32, True, Q4_0),
    (8, 128, True, Q8_0),
    (8, 32, True, Q8_0),
    (4, 256, True, Q4_K),
    (4, 256, False, Q4_K),
    (4, 1024, False, Q4_K),
    (4, 128, False, Q5_0),
    (3, 128, False, Q4_0),
    (2, 256, False, Q2_K),
    (3, 256, True, Q3_K),
    (5, 128, True, Q5_0),
    (5, 512, False, Q5_K),
    (6, 256, True, Q6_K),
]


@pytest.mark.parametrize(("bits", "group_size", "sym", "block"), EXACT)
def test_types_that_can_hold_a_tensor_exactly_do(bits, group_size, sym, block):
    t = grouped(bits, group_size, sym)
    mapped = carry(t, block)
    np.testing.assert_array_equal(stored(mapped), t.dequantize())
    assert mapped.fidelity.error == 0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(2, Q2_K), (3, Q4_K), (4, Q4_K), (5, Q5_K), (4, Q4_1), (3, Q3_K), (6, Q6_K), (8, Q8_0)]),
    st.sampled_from([32, 64, 128, 256]),
    st.booleans(),
    st.floats(1e-6, 1e3),
    st.integers(0, 2**20),
)
def test_reported_fidelity_is_what_gguf_reads(kind, group_size, sym, scale, seed):
    bits, block = kind
    t = grouped(bits, group_size, sym or block in (Q3_K, Q6_K, Q8_0), (4, 512), seed, scale)
    mapped = carry(t, block)
    w = t.dequantize().astype(np.float64)
    error = ((stored(mapped) - w) ** 2).sum()
    assert mapped.fidelity.signal == pytest.approx((w**2).sum(), rel=1e-5)
    assert mapped.fidelity.noise == pytest.approx(t.noise(), rel=1e-5)
    # float32 dequantization itself is good to about 1e-14 of the signal
    assert mapped.fidelity.error == pytest.approx(error, rel=1e-3, abs=1e-12 * mapped.fidelity.signal)


@pytest.mark.parametrize("zero", [-40, 300, -3000, 1e5])
@pytest.mark.parametrize(("bits", "group_size", "block"), [(2, 16, Q2_K), (4, 128, Q4_K), (5, 64, Q5_K), (4, 32, Q4_1)])
def test_reported_error_is_right_for_zero_points_far_outside_the_codes(bits, group_size, block, zero):
    t = with_offsets(bits, group_size)
    t.zeros[:] = zero * np.random.default_rng(0).uniform(0.9, 1.1, t.zeros.shape)
    mapped = carry(t, block)
    w = t.scales[:, t.groups()] * (t.codes - t.zeros[:, t.groups()].astype(np.float64))
    assert mapped.fidelity.error == pytest.approx(np.square(stored(mapped) - w).sum(), rel=1e-4)


@pytest.mark.parametrize(
    ("bits", "group_size", "block", "levels", "bound"),
    [
        (4, 128, Q4_K, 63, 1.001),
        (4, 64, Q4_K, 63, 1.001),
        (3, 128, Q3_K, 32, 1.001),
        (3, 64, Q3_K, 32, 1.001),
        # eight scales a superblock: each d requantizes them, and the search steps over a few good ones
        (4, 32, Q4_K, 63, 1.03),
        (3, 32, Q3_K, 32, 1.04),
    ],
)
def test_no_encoding_that_keeps_symmetric_codes_is_closer(bits, group_size, block, levels, bound):
    t = grouped(bits, group_size, True, (24, 1024))
    assert carry(t, block).fidelity.error <= bound * least_scaled_error(t, levels)


@pytest.mark.parametrize(
    ("bits", "group_size", "block", "bound", "rows"),
    [
        (4, 128, Q4_K, 1.02, 32),
        (5, 128, Q5_K, 1.02, 32),
        (4, 64, Q4_K, 1.01, 8),
        (3, 64, Q4_K, 1.02, 4),
        (5, 64, Q5_K, 1.06, 8),
        (4, 32, Q4_K, 1.05, 1),
        (3, 32, Q4_K, 1.1, 2),
        (2, 64, Q2_K, 1.02, 4),
        (2, 128, Q2_K, 1.02, 6),
        (2, 32, Q2_K, 1.25, 2),
    ],
)
def test_encodings_of_asymmetric_codes_are_near_the_best_there_is(bits, group_size, block, bound, rows):
    t = grouped(bits, group_size, False, (rows, 1024), seed=1)
    assert carry(t, block).fidelity.error <= bound * least_affine_error(t, block)


@pytest.mark.parametrize("make", [with_offsets, grouped_asymmetric])
def test_no_codes_at_all_would_bring_asymmetric_8_bits_much_closer_in_q8_0(make):
    t = make(8, 64).take_rows(np.arange(4))
    assert automatic(t).fidelity.error <= 1.2 * least_q8_0_error(t)


def test_scales_of_every_size_avoid_subnormal_d():
    for scale in (1e-5, 1e-4, 1e-3, 1.0, 100.0):
        t = grouped(4, 128, True, (32, 1024), scale=scale)
        # the two smallest have scales that are subnormal halves themselves
        assert nmse(carry(t, Q4_K), t) < {1e-5: 2e-4, 1e-4: 2e-5}.get(scale, 2e-6)


def test_dead_rows_stay_zero():
    t = grouped(4, 128, False, (8, 512))
    t.scales[3] = 0
    for block in (Q4_K, Q4_1, Q5_0):
        assert (stored(carry(t, block))[3] == 0).all()


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, 1024])
@pytest.mark.parametrize(("bits", "block"), [(4, Q4_K), (3, Q3_K), (6, Q6_K), (2, Q2_K)])
def test_rows_of_zeros_with_scales_stay_zero(bits, block, group_size):
    t = grouped(bits, group_size, True, (8, 1024))
    t.codes[3] = 2 ** (bits - 1)
    t.codes[5, :256] = 2 ** (bits - 1)
    mapped = carry(t, block)
    weights = stored(mapped)
    assert (weights[3] == 0).all()
    assert (weights[5, :256] == 0).all()
    assert np.isfinite(weights).all()
    assert np.isfinite(mapped.fidelity.error)


def test_symmetric_zero_weights_stay_exactly_zero():
    t = grouped(4, 32, True)
    assert (stored(carry(t, Q4_K))[t.codes == 8] == 0).all()


def test_a_short_last_group_is_carried():
    t = grouped(4, 64, False, (16, 512))
    short = GroupedTensor("t", 4, t.codes[:, :288].copy(), t.scales[:, :5].copy(), t.zeros[:, :5].copy(), 64)
    mapped = carry(short, Q5_0)
    np.testing.assert_array_equal(stored(mapped), short.dequantize())


def test_groups_permuted_as_wholes_are_carried():
    t = grouped(4, 128, True)
    order = np.array([3, 1, 0, 2, 7, 6, 5, 4])[np.arange(1024) // 128].astype(np.int32)
    shuffled = GroupedTensor("t", 4, t.codes, t.scales, t.zeros, 128, order)
    mapped = carry(shuffled, Q4_0)
    np.testing.assert_array_equal(stored(mapped), shuffled.dequantize())


def test_what_a_type_cannot_hold_is_refused_with_the_reason():
    t = grouped(4, 128, False, (8, 512))
    for tensor, block, reason in [
        (t, Q3_K, "4-bit"),
        (t, Q2_K, "0..3"),
        (t, Q4_0, "do not fit"),
        (grouped(4, 16, True, (8, 512)), Q4_K, "sub-blocks of 32"),
        (grouped(8, 128, True, (8, 512)), Q6_K, "8-bit"),
        (grouped(4, 32, True, (8, 288)), Q4_K, "multiple"),
    ]:
        with pytest.raises(CannotCarryError, match=reason):
            carry(tensor, block)


def test_eight_bit_asymmetric_blocks_that_overflow_are_counted():
    t = grouped(8, 128, False, (16, 512))
    mapped = carry(t, Q8_0)
    assert 0 < mapped.fidelity.kept < t.codes.size
    assert nmse(mapped, t) < 1.2e-5
    assert mapped.fidelity.error == pytest.approx(nmse(mapped, t) * mapped.fidelity.signal, rel=1e-4)
    held = unpack_codes(Q8_0, mapped.data) == stored_codes(t, Q8_0, mapped.data)
    assert mapped.fidelity.kept <= held.sum()
    # no block is further off than if it were requantized, or if the codes beyond its range were clipped
    blocks = np.square(stored(mapped) - t.dequantize()).reshape(-1, 32).sum(-1)
    requantized = np.square(stored(requantize(t, Q8_0)) - t.dequantize()).reshape(-1, 32).sum(-1)
    p = t.codes - t.zeros[:, t.groups()]
    clipped = np.square(t.scales[:, t.groups()] * (p - np.clip(p, -128, 127))).reshape(-1, 32).sum(-1)
    assert (blocks <= np.minimum(requantized, clipped) * (1 + 1e-3) + 1e-12).all()
    assert ((clipped > 0) & (clipped < requantized)).any()


@pytest.mark.parametrize(
    ("bits", "group_size", "sym", "name"),
    [
        (4, 128, True, "Q4_K"),
        (4, 128, False, "Q4_K"),
        (4, 32, False, "Q4_K"),
        (2, 64, False, "Q2_K"),
        (2, 128, True, "Q2_K"),
        (3, 128, True, "Q3_K"),
        (3, 128, False, "Q4_K"),
        (5, 128, True, "Q5_K"),
        (6, 128, True, "Q6_K"),
        (7, 128, True, "Q8_0"),
        (8, 128, True, "Q8_0"),
        (4, 16, False, "Q6_K"),
    ],
)
def test_auto_takes_the_smallest_k_quant_within_one_percent_of_the_noise(bits, group_size, sym, name):
    mapped = automatic(grouped(bits, group_size, sym))
    assert mapped.block.name == name
    assert mapped.fidelity.share <= 0.01


@pytest.mark.parametrize("make", [lambda: fractional_zeros(2, 16), lambda: grouped(6, 16, True)])
def test_codes_that_cost_more_than_one_percent_are_kept_where_other_codes_of_that_type_cost_no_less(make):
    t = make()
    mapped = automatic(t)
    assert mapped.fidelity.kept == t.codes.size
    assert 0.01 < mapped.fidelity.share <= requantize(t, mapped.block).fidelity.share
    assert mapped.reason == ""


def test_codes_that_no_type_holds_well_are_given_up_for_closer_ones_and_it_is_said_why():
    t = fractional_zeros(4, 16)
    mapped = automatic(t)
    assert (mapped.block, mapped.fidelity.kept) == (Q6_K, 0)
    assert mapped.fidelity.share < 0.15 < carry(t, Q6_K).fidelity.share
    assert carry_or_requantize(t, Q6_K, carried=False)[1] == "Q6_K has no place for fractional zero points"
    t = fractional_zeros(3, 16)
    assert carry_or_requantize(t, automatic(t).block)[1] == "groups of 16 do not hold whole sub-blocks of 32"


def test_auto_takes_a_plain_type_where_rows_do_not_hold_superblocks():
    assert automatic(grouped(4, 32, True, (8, 288))).block is Q4_0
    assert automatic(grouped(4, 32, False, (8, 288))).block is Q4_1


def test_exact_takes_the_smallest_type_without_error():
    assert exactly(grouped(4, 128, True)).block is Q4_0
    assert exactly(grouped(4, 128, False)).block is Q5_0
    assert exactly(grouped(4, 512, False)).block is Q4_K
    assert choice(grouped(8, 128, False), "exact").limit != 0
    assert exact_type(grouped(4, 128, True)) is Q4_0
    assert exact_type(grouped(4, 128, False)) is Q5_0


def act_order(t: GroupedTensor, seed=5) -> GroupedTensor:
    order = np.random.default_rng(seed).permutation(t.shape[1])
    return t.take_columns(order)


def test_act_order_is_requantized_within_fifteen_percent_of_the_noise():
    t = act_order(grouped(4, 128, False, (32, 1024)))
    assert not t.sequential
    assert choice(t).reason.startswith("act-order")
    mapped = automatic(t)
    assert mapped.block is Q5_K
    assert mapped.fidelity.share <= 0.15
    assert mapped.fidelity.kept == 0
    w = t.dequantize().astype(np.float64)
    assert mapped.fidelity.error == pytest.approx(((stored(mapped) - w) ** 2).sum(), rel=1e-4)


def test_act_order_columns_put_in_group_order_are_carried():
    t = act_order(grouped(4, 128, True))
    back = t.take_columns(np.argsort(t.groups(), kind="stable"))
    assert back.sequential
    assert automatic(back).block is Q4_K


def test_a_forced_type_that_cannot_hold_the_codes_requantizes():
    t = grouped(4, 128, False, (16, 512))
    assert map_to(t, Q3_K).fidelity.kept == 0
    assert map_to(t, Q6_K).fidelity.kept in (0, t.codes.size)
    assert map_to(t, Q4_K).fidelity.kept == t.codes.size


def test_rows_of_odd_length_are_rounded_to_plain_types():
    t = act_order(grouped(4, 32, True, (16, 288)))
    assert not automatic(t).block.is_k


def test_halves_round_as_numpy_rounds_them():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(20000) * 10.0 ** rng.uniform(-9, 4.5, 20000)).astype(np.float32)
    x = x[np.abs(x) < 65504]
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    for value, half in zip(x, expected, strict=True):
        assert round_half.py_func(value) == np.float32(half)


def test_bits_of_every_finite_half():
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = bits.view(np.float16).astype(np.float32)
    finite = np.isfinite(halves)
    assert np.array_equal(half_bits(halves[finite]), bits[finite])


def test_every_type_has_a_float_route():
    t = grouped(4, 128, False, (8, 512))
    for block in BLOCKS.values():
        mapped = map_to(t, block)
        assert mapped.data.shape == (8, 512 // block.size * block.nbytes)
