"""Codebooks, transforms and bit streams of trellis-coded weights, and products with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import BridgeError
from bridge.system.cpu import targets
from bridge.trellis import BitshiftCodebook, bitshift_codebook, bitshift_gemm
from bridge.trellis.gemm import layer_of
from bridge.trellis.hadamard import ORDERS, Rotation, had
from bridge.trellis.packed import exl3_layer, qtip_layer
from tests.support.encode_trellis import (
    Coding,
    exl3_tensors,
    gaussian_table,
    plain_tensors,
    qtip_tensors,
    random_states,
    stream_bits,
    transform,
)
from tests.support.pairs import in_pairs
from tests.support.viterbi import viterbi

STATES = [0, 1, 2, 12345, 65535]
VALUES = {
    "1mad": [-1.2516869, -0.8389685, -0.4262501, 0.0202976, 0.4127184],
    "2mad": [-0.1082540, -0.3247620, -0.5345042, -0.9878178, 0.1962104],
    "3inst": [0.76806641, -0.91943359, 0.93164063, 1.08691406, -0.15820313],
    "mcg": [1.84375, 0.13452148, -0.75927734, -0.40673828, 0.85009766],
    "mul1": [-3.453125, 0.64111328, -0.44848633, -1.40917969, -0.65136719],
}
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
HYB = {"V": 2, "width": 9, "tlut": gaussian_table(9, 2)}


def book_of(coding: Coding) -> BitshiftCodebook:
    return BitshiftCodebook(
        coding.L, coding.K, coding.V, coding.width, coding.mode, coding.tlut, coding.multiplier or None, name="layer"
    )


def product(layer, meant: np.ndarray, tokens: int = 3) -> float:
    """How far a product is from that of the matrix, relative to its largest number."""
    x = np.random.default_rng(9).normal(size=(tokens, meant.shape[1])).astype(np.float32)
    exact = x.astype(float) @ meant.T
    return float(np.abs(layer.matmul(x) - exact).max() / np.abs(exact).max())


# codebooks


@pytest.mark.parametrize("mode", VALUES)
def test_states_have_the_values_that_the_formats_paper_gives(mode):
    book = BitshiftCodebook(decode_mode=mode)
    np.testing.assert_allclose(book.values(STATES)[:, 0], VALUES[mode], atol=5e-8, rtol=1e-7)


@pytest.mark.parametrize("mode", [*VALUES, "lut", "quantlut", "quantlut_sym"])
def test_all_states_have_the_values_of_one_computed_by_hand(mode):
    width, values = {"lut": (16, 1), "quantlut": (10, 2), "quantlut_sym": (9, 2)}.get(mode, (0, 1))
    table = gaussian_table(width, values) if width else None
    coding = Coding(mode, 2, values, 16, width, table, MULTIPLIERS.get(mode, 0))
    assert np.array_equal(book_of(coding).lut, coding.table())


def test_hyb_is_quantlut_sym_and_looks_up_as_published():
    table = np.arange(1024, dtype=np.float32).reshape(512, 2) + 1
    book = bitshift_codebook(16, 2, 2, 9, "hyb", table)
    assert book.values([255, 12345]).tolist() == [[-(508 * 2 + 1), 508 * 2 + 2], [-(115 * 2 + 1), 115 * 2 + 2]]
    assert book.recons([[255, 12345, 0]]).shape == (2, 1, 3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"decode_mode": "4mad"}, "unknown decode mode '4mad': choose one of"),
        ({"decode_mode": "quantlut_sym", "V": 2, "tlut_bits": 9}, "quantlut_sym needs tlut"),
        (
            {"decode_mode": "quantlut", "tlut_bits": 9, "tlut": np.ones((512, 2))},
            "tlut is [512, 2] where quantlut wants",
        ),
        ({"decode_mode": "lut", "tlut_bits": 9, "tlut": np.ones(512)}, "tlut_bits = 9 does not fit lut"),
        ({"decode_mode": "quantlut", "tlut_bits": 2, "tlut": np.full(4, np.nan)}, "tlut holds NaN"),
        ({"V": 2}, "V = 2 does not fit 1mad"),
        ({"L": 17}, "L = 17"),
        ({"K": 9}, "K = 9"),
    ],
)
def test_codebooks_that_cannot_be_are_refused(fields, said):
    with pytest.raises(BridgeError) as caught:
        BitshiftCodebook(**fields, name="model.layers.0.mlp.up_proj")
    assert said in str(caught.value)
    assert str(caught.value).startswith("model.layers.0.mlp.up_proj: ")


def test_states_out_of_range_are_refused():
    book = BitshiftCodebook(L=10)
    for states in ([0, 1024], [-1, 3]):
        with pytest.raises(BridgeError, match=r"state (1024|-1) is out of range"):
            book.recons([states])


# streams


@settings(max_examples=20)
@given(st.integers(1, 8), st.integers(1, 2), st.integers(4, 16), st.integers(0, 99))
def test_a_path_comes_back_from_its_bits(k, v, bits, seed):
    if k * v > bits:
        return
    width = bits if v == 2 else 0
    coding = Coding("lut" if v == 2 else "1mad", k, v, bits, width, gaussian_table(bits, 2) if v == 2 else None)
    states = random_states(3, 256 // v, coding, seed)
    words = np.packbits(stream_bits(states, coding, ends=False), axis=-1).view(">u2").astype(np.int16)
    assert np.array_equal(book_of(coding).unpack_trellis(words, 256), states)


def test_words_of_another_size_are_refused():
    with pytest.raises(BridgeError, match=r"take config\.json and weights of one checkpoint"):
        BitshiftCodebook().unpack_trellis(np.zeros((2, 31), np.int16), 256)


# transforms


@pytest.mark.parametrize("order", ORDERS)
def test_rows_of_a_hadamard_matrix_are_orthogonal(order):
    matrix = had(order)
    assert set(np.unique(matrix)) == {-1, 1}
    assert np.array_equal(matrix @ matrix.T, order * np.eye(order))
    assert np.array_equal(matrix, matrix.T) == (order in (28, 36))


@pytest.mark.parametrize("order", [order for order in ORDERS if order not in (20, 124)])
def test_hadamard_matrices_are_those_of_compressed_tensors(order):
    folder = pytest.importorskip("compressed_tensors")
    from safetensors.numpy import load_file

    [path] = folder.__path__
    matrices = load_file(f"{path}/transform/utils/hadamards.safetensors")
    assert np.array_equal(matrices[str(order)], had(order))


@pytest.mark.parametrize(("size", "blocks"), [(1, 1), (4, 1), (512, 1), (172 * 2, 1), (12 * 64, 4), (1024, 8)])
def test_fast_transforms_are_the_matrices_written_out(size, blocks):
    rotation = Rotation.of(size, "layer", blocks)
    matrix = transform(size, blocks)
    x = np.random.default_rng(0).normal(size=(3, size)).astype(np.float32)
    np.testing.assert_allclose(rotation.rotate(x.copy()), x @ matrix.T, atol=2e-6)
    np.testing.assert_allclose(rotation.rotate(x.copy(), transposed=True), x @ matrix, atol=2e-6)
    np.testing.assert_allclose(rotation.rotate_columns(np.ascontiguousarray(x.T)), matrix @ x.T, atol=2e-6)


@pytest.mark.parametrize(
    ("size", "blocks", "said"), [(1000, 1, "no Hadamard matrix is known for 1000"), (24, 8, "tp_rank 8")]
)
def test_dimensions_without_a_hadamard_matrix_are_refused(size, blocks, said):
    with pytest.raises(BridgeError, match=said):
        Rotation.of(size, "layer", blocks)


# layers


CODINGS = {
    "1mad": Coding("1mad"),
    "1mad, 3 bits": Coding("1mad", 3),
    "2mad": Coding("2mad"),
    "3inst": Coding("3inst"),
    "3inst, 4 bits": Coding("3inst", 4),
    "lut": Coding("lut", 2, 1, 12, 12, gaussian_table(12, 1)),
    "quantlut": Coding("quantlut", 2, 2, 16, 10, np.float32(1.1) * gaussian_table(10, 2)),  # beyond halves
    "hyb, not as usual": Coding("quantlut_sym", 2, 2, 14, 9, HYB["tlut"]),
    "hyb, 2 bits": Coding("quantlut_sym", 2, **HYB),
    "hyb, 3 bits": Coding("quantlut_sym", 3, **HYB),
    "hyb, 4 bits": Coding("quantlut_sym", 4, **HYB),
}


# the same functions and tables with other numbers of bits, which are compiled for each
OTHER_BITS = ("1mad, 3 bits", "3inst, 4 bits", "hyb, 2 bits", "hyb, 4 bits")


@pytest.mark.parametrize(
    "which",
    [pytest.param(which, marks=[pytest.mark.exhaustive] if which in OTHER_BITS else []) for which in CODINGS],
)
def test_a_qtip_layer_is_the_matrix_that_was_coded_and_multiplies_as_it(which):
    coding = CODINGS[which]
    layout = "swizzled" if coding.width == 9 and coding.L == 16 else "row-major"
    weight = np.random.default_rng(1).normal(size=(12 * 32, 64))
    tensors, meant = qtip_tensors(
        "m", weight, coding, layout=layout, tuned=True, search=False, flat=layout != "swizzled"
    )
    layer = qtip_layer("m", tensors["m.trellis"], book_of(coding), (16, 16), tensors["m.SU"], tensors["m.SV"])
    assert np.abs(layer.dequantize() - meant).max() < 3e-6 * np.abs(meant).max()
    for tokens in (1, 3, 70) if which == "1mad" else (3,):
        assert product(layer, meant, tokens) < 3e-6


@pytest.mark.parametrize(("rcp", "shape"), [(1, (64, 256)), (2, (256, 64)), (0, (64, 256))])
def test_transforms_dealt_out_to_ranks_are_block_diagonal(rcp, shape):
    tensors, meant = qtip_tensors(
        "m", np.random.default_rng(2).normal(size=shape), Coding("1mad"), rcp=rcp, search=False
    )
    blocks = (8 if rcp == 1 else 1, 8 if rcp == 2 else 1)
    layer = qtip_layer(
        "m", tensors["m.trellis"], book_of(Coding("1mad")), (16, 16), tensors["m.SU"], tensors["m.SV"], blocks
    )
    assert np.abs(layer.dequantize() - meant).max() < 3e-6 * np.abs(meant).max()


@pytest.mark.parametrize(("mode", "bits"), [("3inst", 1), ("mcg", 3), ("mul1", 8)])
def test_an_exl3_layer_is_the_matrix_that_was_coded_and_multiplies_as_it(mode, bits):
    coding = Coding(mode, bits, multiplier=MULTIPLIERS.get(mode, 0))
    tensors, meant = exl3_tensors("m", np.random.default_rng(3).normal(size=(256, 128)), coding, search=False)
    layer = exl3_layer(
        "m", tensors["m.trellis"], book_of(coding), *(tensors[f"m.{p}"].astype(np.float32) for p in ("suh", "svh"))
    )
    assert np.abs(layer.dequantize() - meant).max() < 3e-6 * np.abs(meant).max()
    assert product(layer, meant) < 3e-6


@pytest.mark.parametrize("tile", [(16, 16), (8, 32), (4, 4)])
@pytest.mark.parametrize("which", ["1mad", "quantlut"])
def test_plain_states_are_multiplied_as_they_are_read(which, tile):
    coding = CODINGS[which]
    tensors, meant = plain_tensors("m", (96, 64), coding, tile)
    book = book_of(coding)
    layer = layer_of(tensors["m.trellis"], book, *tile, 32.0, tensors["m.SU"], tensors["m.SV"])
    assert np.abs(layer.dequantize() - meant).max() < 1e-6 * np.abs(meant).max()
    x = np.random.default_rng(4).normal(size=(3, 64)).astype(np.float32)
    y = bitshift_gemm(x, tensors["m.trellis"], book, *tile, 32.0, tensors["m.SU"], tensors["m.SV"])
    assert np.abs(y - x @ meant.T).max() < 1e-5 * np.abs(y).max()


@pytest.mark.parametrize(
    ("which", "hidden", "out"), in_pairs(["1mad", "3inst", "quantlut"], [2048, 4096], [4096, 11008])
)
def test_the_guides_grid_of_products_is_exact(which, hidden, out):
    """Batches of 1 and 4, float and half; compared on three columns of tiles."""
    coding = CODINGS[which]
    rng = np.random.default_rng(8)
    blocks = hidden // 16 * (out // 16)
    states = np.resize(rng.integers(0, 65536, (4099, 256 // coding.V)).astype(np.int32), (blocks, 256 // coding.V))
    su, sv = (rng.choice([-1, 1], n).astype(np.float32) for n in (hidden, out))
    book = book_of(coding)
    for batch, kind in ((1, np.float32), (4, np.float16)):
        x = rng.normal(size=(batch, hidden)).astype(kind)
        y = bitshift_gemm(x, states, book, 16, 16, 32.0, su, sv)
        assert y.shape == (batch, out)
        assert y.dtype == kind
        for column in (0, out // 32, out // 16 - 1):
            tiles = coding.table()[states[column :: out // 16]].reshape(hidden, 16)
            exact = (x.astype(float) * su) @ tiles * sv[16 * column : 16 * column + 16] * 32.0
            error = np.abs(y[:, 16 * column : 16 * column + 16] - exact).max() / np.abs(exact).max()
            assert error < (1e-5 if kind is np.float32 else 1e-3)


def test_packed_tiles_are_multiplied_as_they_are():
    tensors, meant = qtip_tensors("m", np.random.default_rng(1).normal(size=(64, 32)), Coding("1mad"), search=False)
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float16)
    parts = [torch.from_numpy(tensors[f"m.{part}"]) for part in ("trellis", "SU", "SV")]
    y = bitshift_gemm(x, parts[0], book_of(Coding("1mad")), 16, 16, 32.0, *parts[1:])
    exact = x.double().numpy() @ meant.T
    assert y.dtype == torch.float16
    assert np.abs(y.double().numpy() - exact).max() < 1e-3 * np.abs(exact).max()


@pytest.mark.parametrize("target", [name for name in targets.available() if name != "avxvnni"])  # as avx2 here
def test_every_target_of_this_machine_gives_the_same_product(target, monkeypatch):
    monkeypatch.setenv("BRIDGE_CPU", target)
    for mode in ("1mad", "3inst", "mul1"):
        coding = Coding(mode, multiplier=MULTIPLIERS.get(mode, 0))
        tensors, meant = qtip_tensors("m", np.random.default_rng(5).normal(size=(48, 32)), coding, search=False)
        layer = qtip_layer("m", tensors["m.trellis"], book_of(coding), (16, 16), tensors["m.SU"], tensors["m.SV"])
        assert np.abs(layer.dequantize() - meant).max() < 3e-6 * np.abs(meant).max()
        assert product(layer, meant, 1) < 3e-6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a | {"trellis": a["trellis"][:3]}, "trellis is [3, 256]"),
        (lambda a: a | {"trellis": a["trellis"] + 65536}, "the state 131071, out of range for 16 bits"),
        (lambda a: a | {"trellis": a["trellis"] - 1}, "the state -1, out of range"),
        (lambda a: a | {"trellis": np.zeros((1, 64), np.int32)}, "packed words [1, 64], which cannot hold states"),
        (lambda a: a | {"trellis": a["trellis"].astype(float)}, "int16 streams or int32 states"),
        (lambda a: a | {"trellis": np.zeros((64, 31), np.int16)}, "1.938 bits for each of 64 x 256 weights"),
        (lambda a: a | {"td_x": 48}, "are not whole"),
        (lambda a: a | {"SV": a["SV"] * np.nan}, "SV holds NaN"),
        (lambda a: a | {"input": np.zeros((2, 255), np.float32)}, "x has shape [2, 255]"),
        (lambda a: a | {"input": np.zeros((2, 256), int)}, "must be an array of floats"),
    ],
)
def test_products_of_what_does_not_fit_are_refused_in_one_line(change, said):
    rng = np.random.default_rng(6)
    good = {
        "input": rng.normal(size=(2, 256)).astype(np.float32),
        "trellis": rng.integers(0, 65536, (64, 256)).astype(np.int32),
        "codebook": BitshiftCodebook(),
        "td_x": 16,
        "td_y": 16,
        "scale": 32.0,
        "SU": np.ones(256, np.float32),
        "SV": np.ones(64, np.float32),
    }
    good["trellis"][0, 0], good["trellis"][0, 1] = 0, 65535
    bitshift_gemm(**good)
    with pytest.raises(BridgeError) as caught:
        bitshift_gemm(**change(good))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# the search that encoders share


def test_gaussian_weights_are_coded_as_well_as_a_trellis_of_1024_states_can():
    """At L = 16 the distortion is 0.070; a trellis of 10 bits costs 0.077."""
    coding = Coding("1mad", L=10)
    table = coding.table().astype(float)
    x = np.random.default_rng(7).normal(size=(48, 256, 1)) * 0.9 * np.sqrt(np.square(table).mean())
    states = viterbi(x, coding.table(), coding.step)
    distortion = np.square(table[states] - x).mean() / np.square(x).mean()
    assert 0.07 < distortion < 0.085
    assert np.array_equal(states[:, :-1] & 255, states[:, 1:] >> 2)
    assert np.array_equal(states[:, -1] & 255, states[:, 0] >> 2)
