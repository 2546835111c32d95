"""HQQ checkpoints: as hqq itself reads them, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.checkpoint import open_checkpoint
from tests.conftest import ROOT
from tests.support.encode import write_folder
from tests.support.encode_formats import hqq_config, hqq_tensors
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.up_proj"
FOLDER = ROOT / "tests" / "data" / "hqq"  # written by hqq 0.2.8: tests/support/make_hqq.py


def tensors(bits: int = 4, group_size: int = 64, quantized: tuple[str, ...] = ()):
    weight = np.random.default_rng(0).normal(0.01, 0.05, (24, 256)).astype(np.float32)
    return hqq_tensors(NAME, weight, bits, group_size, quantized)


@pytest.mark.parametrize("folder", [FOLDER, FOLDER / "pt"])
def test_weights_are_those_that_hqq_computes(folder):
    expected = np.load(FOLDER / "expected.npz")
    sizes = ("32", "64", "None") if folder.name == "pt" else ("32", "64")  # None, a row: only a .pt can say so
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "hqq"
        assert not [note for note in checkpoint.notes if "integers" in note]
        assert set(checkpoint.modules) == {name for name in expected if name.endswith(sizes)}
        assert set(checkpoint.tensors) == {"norm.weight", *(f"bits4.group{size}.bias" for size in sizes)}
        for name in checkpoint.modules:
            tensor = checkpoint.read_module(name)
            assert np.array_equal(tensor.dequantize(), expected[name]), name
            assert name.startswith(f"bits{1 if tensor.bits == 2 and 'point' in name else tensor.bits}")
            assert (tensor.bias is not None) == name.startswith("bits4")
            assert not np.array_equal(tensor.zeros, np.rint(tensor.zeros))


def test_scales_and_zero_points_that_are_quantized_themselves_are_those_that_hqq_computes():
    """Zeros with one pair for all, scales in groups along either axis, in bytes, nibbles and 3-bit words."""
    expected = np.load(FOLDER / "meta" / "expected.npz")
    with open_checkpoint(FOLDER / "meta") as checkpoint:
        assert set(checkpoint.modules) == set(expected) == {"zeros", "scales", "both", "narrow"}
        assert checkpoint.tensors == {}
        for name, values in expected.items():
            tensor = checkpoint.read_module(name)
            assert (tensor.bits, tensor.group_size) == (4, 64)
            assert np.array_equal(tensor.dequantize(), values), name


@pytest.mark.parametrize("quantized", [(), ("zero", "scale")])
def test_zero_points_and_scales_in_one_tensor_are_told_apart(tmp_path, quantized):
    stored, values = tensors(quantized=quantized)
    suffix = "_q" if quantized else ""
    stored[f"{NAME}.zero_scale"] = np.stack([stored.pop(f"{NAME}.{what}{suffix}") for what in ("zero", "scale")])
    with open_checkpoint(write_folder(tmp_path, stored, hqq_config())) as checkpoint:
        assert checkpoint.tensors == {}
        assert np.array_equal(checkpoint.read_module(NAME).dequantize(), values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{NAME}.meta_scale.zero"), "but no meta_scale.zero"),
        (lambda t: t.pop(f"{NAME}.meta_scale.packing"), "but no meta_scale.packing"),
        (lambda t: t.update({f"{NAME}.meta_scale.packing": np.frombuffer(b"7bit", np.uint8)}), "packed as '7bit'"),
        (lambda t: t.update({f"{NAME}.meta_scale.packing": np.frombuffer(b"3bit_32", np.uint8)}), "contradict"),
        (lambda t: t.update({f"{NAME}.meta_scale.shape": np.array([96, 2])}), "contradict"),
        (lambda t: t.update({f"{NAME}.meta_scale.shape": np.array([-96, 1])}), "contradict"),
        (lambda t: t.update({f"{NAME}.meta_scale.scale": np.ones((3, 1), np.float32)}), "contradict"),
        (lambda t: t.update({f"{NAME}.meta_scale.scale": np.array(np.inf, np.float32)}), "1 of 1 values"),
        (lambda t: t.update({f"{NAME}.scale_q": t[f"{NAME}.scale_q"][:-1].copy()}), "contradict"),
        (lambda t: t.update({f"{NAME}.scale_q": t[f"{NAME}.scale_q"].astype(np.int64)}), "contradict"),
    ],
)
def test_damage_to_quantized_scales_is_named_in_one_line(tmp_path, change, said):
    stored, _ = tensors(quantized=("scale",))
    change(stored)
    message = refusal(write_folder(tmp_path, stored, hqq_config()))
    assert said in message
    assert NAME in message


@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3, 2, 1])
@pytest.mark.parametrize("group_size", [32, 64, 256])
def test_what_was_stored_comes_back(tmp_path, bits, group_size):
    stored, values = tensors(bits, group_size)
    with open_checkpoint(write_folder(tmp_path, stored, hqq_config(bits, group_size))) as checkpoint:
        assert checkpoint.quant.describe().startswith(f"HQQ, {bits} bits, groups of {group_size}")
        tensor = checkpoint.read_module(NAME)
        assert checkpoint.tensors == {}
    assert tensor.bits == bits
    assert np.array_equal(tensor.dequantize(), values)


def test_bits_that_are_not_the_labels_are_reported(tmp_path):
    stored, _ = tensors(4, 64)
    with open_checkpoint(write_folder(tmp_path, stored, hqq_config(2, 64))) as checkpoint:
        assert checkpoint.reader.disagreements() == ["1 module has codes of 4 bits, but the label says 2"]


def test_packed_words_viewed_as_floats_are_the_same_words(tmp_path):
    stored, values = tensors()
    stored[f"{NAME}.W_q"] = stored[f"{NAME}.W_q"].view(np.float16)
    stored[f"{NAME}.view_as_float"] = np.array(1, np.uint8)
    with open_checkpoint(write_folder(tmp_path, stored, hqq_config())) as checkpoint:
        assert checkpoint.tensors == {}
        assert np.array_equal(checkpoint.read_module(NAME).dequantize(), values)


def test_a_config_of_one_table_for_each_kind_of_layer_is_understood(tmp_path):
    stored, values = tensors(3, 64)
    config = hqq_config(3)
    config["quant_config"] = {"mlp.up_proj": config["quant_config"], "mlp.down_proj": hqq_config(2)["quant_config"]}
    with open_checkpoint(write_folder(tmp_path, stored, config)) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).dequantize(), values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update({f"{NAME}.group_size": np.array(160, np.int32)}), "contradict"),
        (lambda t: t.update({f"{NAME}.shape": np.array([64, 96])}), "cross the ends of rows"),
        (lambda t: t.update({f"{NAME}.shape": np.array([24, 128])}), "contradict"),
        (lambda t: t.update({f"{NAME}.shape": np.array([24, -256])}), "contradict"),
        (lambda t: t.update({f"{NAME}.shape": np.array([24, 256, 1])}), "contradict"),
        (lambda t: t.update({f"{NAME}.nbits": np.array(8, np.int32)}), "packed as '4bit_u8' with nbits 8"),
        (lambda t: t.update({f"{NAME}.nbits": np.array([4, 4], np.int32)}), "nbits is not a number"),
        (lambda t: t.update({f"{NAME}.packing": np.frombuffer(b"9bit", np.uint8)}), "packed as '9bit'"),
        (lambda t: t.update({f"{NAME}.packing": np.frombuffer(b"8bit_u8", np.uint8)}), "contradict"),
        (lambda t: t.update({f"{NAME}.W_q": t[f"{NAME}.W_q"][:-1]}), "contradict"),
        (lambda t: t.update({f"{NAME}.zero": t[f"{NAME}.zero"][:-1]}), "contradict"),
        (lambda t: t.pop(f"{NAME}.zero"), "but no zero"),
        (lambda t: t.update({f"{NAME}.zero": t[f"{NAME}.zero"].astype(np.int8)}), "contradict"),
        (lambda t: t.pop(f"{NAME}.shape"), "but no shape"),
        (lambda t: t.pop(f"{NAME}.W_q"), "but no W_q"),
        (lambda t: t.update({f"{NAME}.scale_q": t.pop(f"{NAME}.scale")}), "but no meta_scale.scale"),
        (lambda t: t.update({f"{NAME}.bias": np.zeros(7, np.float16)}), "contradict"),
        (lambda t: t[f"{NAME}.scale"].__setitem__(3, np.nan), "1 of 96 values"),
        (lambda t: t[f"{NAME}.zero"].__setitem__(3, -np.inf), "1 of 96 values"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, change, said):
    stored, _ = tensors()
    change(stored)
    message = refusal(write_folder(tmp_path, stored, hqq_config()))
    assert said in message
    assert NAME in message


def test_codes_beyond_their_bits_are_damage(tmp_path):
    stored, _ = tensors(5)
    stored[f"{NAME}.W_q"][3, 3] = 32
    assert "has the code 32, beyond nbits 5" in refusal(write_folder(tmp_path, stored, hqq_config(5)))


def axis_0(bits: int, size: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A module of 24 x 256 whose matrix is cut into [size, 24 * 256 / size], and its values."""
    random = np.random.default_rng(0)
    runs = 24 * 256 // size
    codes = random.integers(0, 2**bits, (size, runs))
    scale = random.uniform(0.01, 0.02, (1, runs)).astype(np.float32)
    zero = random.uniform(0, 2**bits, (1, runs)).astype(np.float32)
    stored, _ = tensors(bits)
    width, lanes = {4: (4, 2), 2: (2, 4), 3: (3, 10), 8: (8, 1)}[bits]
    padded = np.pad(codes, ((0, -size % lanes), (0, 0))).reshape(lanes, -1, runs)
    words = sum(part << width * (lanes - 1 - i) for i, part in enumerate(padded))
    packed = words.astype(np.int32 if lanes == 10 else np.uint8)
    own = {"W_q": packed, "scale": scale, "zero": zero, "group_size": np.array(size), "axis": np.array(0)}
    stored |= {f"{NAME}.{part}": values for part, values in own.items()}
    return stored, ((codes - zero) * scale).reshape(24, 256)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_groups_along_axis_0_come_as_floats(tmp_path, bits):
    stored, values = axis_0(bits, 64)
    with open_checkpoint(write_folder(tmp_path, stored, hqq_config(bits))) as checkpoint:
        t = checkpoint.read_module(NAME)
        assert t.obstacle == "codes grouped along axis 0 have no place in GGUF"
        assert np.allclose(t.dequantize(), values, rtol=1e-6, atol=1e-7)
        rows = np.array([20, 3])
        assert np.array_equal(checkpoint.read_module(NAME, rows).dequantize(), t.dequantize()[rows])
        cells = np.square(stored[f"{NAME}.scale"]).sum() * 64 / 12
        assert 0.85 * cells < t.noise() < 0.93 * cells  # as tools round
        assert checkpoint.settings() == f"{bits} bits, groups of 64, along axis 0 in 1"


def test_words_that_do_not_fit_groups_along_axis_0_are_damage(tmp_path):
    stored, _ = axis_0(4, 64)
    stored[f"{NAME}.W_q"] = stored[f"{NAME}.W_q"][:-1]
    assert "contradict" in refusal(write_folder(tmp_path, stored, hqq_config()))


@pytest.mark.parametrize(("bits", "size", "groups"), [(3, 64, "groups of 64"), (4, 32, "groups of 32")])
def test_where_no_config_speaks_of_it_the_tensors_settings_are_told(tmp_path, bits, size, groups):
    with open_checkpoint(write_folder(tmp_path, tensors(bits, size)[0], None)) as checkpoint:
        assert checkpoint.notes == [
            f"no config describes the quantization; its tensors show HQQ, {bits} bits, {groups}"
        ]


def test_tables_within_tables_are_read_as_hqq_once_wrote_them(tmp_path):
    torch = pytest.importorskip("torch")
    stored, values = tensors()
    parts = {name.rpartition(".")[2]: torch.tensor(part) for name, part in stored.items()}
    meta = {"scale": parts["scale"], "zero": parts["zero"], "shape": torch.Size(values.shape), "nbits": 4}
    meta |= {"group_size": 64, "axis": 1, "packing": "4bit_u8", "view_as_float": False, "compute_dtype": torch.float16}
    torch.save({NAME: {"W_q": parts["W_q"], "bias": None, "meta": meta}}, tmp_path / "qmodel.pt")
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint(tmp_path) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).dequantize(), values)
