"""MLX checkpoints: as mlx itself reads them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.formats.mlx import affine_zeros
from tests.conftest import ROOT
from tests.support.encode import save_sharded
from tests.support.encode_formats import mlx_tensors
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.up_proj"
PARTS = ("weight", "scales", "biases")
FOLDER = ROOT / "tests" / "data" / "mlx"  # written by mlx 0.32.4: tests/support/make_mlx.py
FLOATS = ROOT / "tests" / "data" / "mlx-mxfp8"


def test_8_bit_floats_are_those_that_mlx_computes(tmp_path):
    """tests/data/mlx-mxfp8: a matrix, a mixture's stack, and a module in affine mode beside them."""
    expected = np.load(FLOATS / "expected.npz")
    meant = {"plain.weight": expected["plain"]}
    meant |= {f"mlp.experts.{i}.up_proj.weight": w for i, w in enumerate(expected["mlp.switch_mlp.up_proj"])}
    with open_checkpoint(FLOATS) as checkpoint:
        assert checkpoint.quant.describe() == "MLX, mxfp8, 8-bit floats, groups of 32"
        assert set(checkpoint.tensors) == set(meant)
        for name, values in meant.items():
            assert checkpoint.stored_as(name) == "F8_E4M3, groups of 32"
            assert checkpoint.tensors[name].shape == values.shape
            assert np.array_equal(checkpoint.read_float(name), values)
            assert np.array_equal(checkpoint.read_float(name, (1, 3)), values[1:3])
        assert set(checkpoint.modules) == {"affine"}
        assert np.allclose(checkpoint.read_module("affine").dequantize(), expected["affine"], rtol=0, atol=1e-6)
        alone = {n: checkpoint.store.read(n) for n in checkpoint.store.tensors if n.startswith("plain")}
    with open_checkpoint(folder_of(tmp_path, alone, {"bits": 8, "group_size": 32, "mode": "mxfp8"})) as checkpoint:
        assert np.array_equal(checkpoint.read_float("plain.weight"), expected["plain"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t["plain.scales"].__setitem__((1, 1), 255), "plain.scales has scales that are NaN"),
        (lambda t: t.update({"plain.scales": t["plain.scales"].repeat(2, 1)}), "8 groups a row, which are not mxfp8"),
        (lambda t: t.update({"plain.scales": t["plain.scales"][:4].copy()}), "contradict each other"),
        (lambda t: t.update({"plain.weight": t["plain.weight"].view(np.int32)}), "contradict each other"),
        (lambda t: t.update({"plain.weight": t["plain.weight"][None]}), "contradict each other"),
        (lambda t: t.update({"plain.bias": np.zeros(5, np.float16)}), "contradict each other"),
        (lambda t: t.update({"plain.biases": np.zeros((6, 4), np.float16)}), "contradict each other"),
        (lambda t: t.pop("plain.scales"), "has weight but no scales"),
    ],
)
def test_damaged_8_bit_floats_are_named_in_one_line(tmp_path, change, said):
    tensors = {n: v for n, v in load_file(FLOATS / "model.safetensors").items() if n.startswith("plain")}
    change(tensors)
    message = refusal(folder_of(tmp_path, tensors, {"bits": 8, "group_size": 32, "mode": "mxfp8"}))
    assert said in message
    assert "plain" in message


def folder_of(path, tensors, quantization: Any):
    save_sharded(path, tensors)
    (path / "config.json").write_text(json.dumps({"quantization": quantization, "quantization_config": quantization}))
    return path


def weights(out: int = 8, columns: int = 256) -> np.ndarray:
    return np.random.default_rng(0).normal(0.01, 0.05, (out, columns)).astype(np.float32)


def test_weights_are_those_that_mlx_computes():
    expected = np.load(FOLDER / "expected.npz")
    with open_checkpoint(FOLDER) as checkpoint:
        assert checkpoint.format == "mlx"
        assert set(checkpoint.modules) == set(expected)
        assert checkpoint.tensors == {}
        for name in checkpoint.modules:
            tensor = checkpoint.read_module(name)
            assert name == f"bits{tensor.bits}.group{tensor.group_size}"
            assert np.abs(tensor.dequantize() - expected[name]).max() <= 1e-7 * np.abs(expected[name]).max()
            assert tensor.notes == ()
            assert (tensor.scales < 0).any()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_what_was_stored_comes_back(tmp_path, bits, group_size):
    tensors, values = mlx_tensors(NAME, weights(), bits, group_size)
    bias = np.arange(8, dtype=np.float16)
    tensors |= {f"{NAME}.bias": bias, "model.norm.weight": np.ones(4, np.float16)}
    with open_checkpoint(folder_of(tmp_path, tensors, {"bits": bits, "group_size": group_size})) as checkpoint:
        tensor = checkpoint.read_module(NAME)
        assert set(checkpoint.tensors) == {f"{NAME}.bias", "model.norm.weight"}
        assert checkpoint.quant.describe().startswith("MLX, affine")
    assert tensor.bits == bits
    assert np.allclose(tensor.dequantize(), values, rtol=0, atol=1e-7)
    assert np.array_equal(tensor.bias, bias)


def test_settings_of_single_modules_count_before_the_defaults(tmp_path):
    tensors: dict[str, np.ndarray] = {}
    # the first three look alike
    for name, bits, size in (("a", 4, 64), ("b", 8, 32), ("c", 2, 128), ("e", 3, 64), ("f", 4, 32)):
        tensors |= mlx_tensors(name, weights(), bits, size)[0]
    tensors["d.weight"] = weights()
    quantization = {
        "bits": 4,
        "group_size": 64,
        "b": {"bits": 8, "group_size": 32},
        "c": {"bits": 2, "group_size": 128},
        "d": False,
        "e": {"bits": 3, "group_size": None, "mode": "affine"},  # mlx-lm writes null with its own mixtures
        "f": {"group_size": 32},
    }
    with open_checkpoint(folder_of(tmp_path, tensors, quantization)) as checkpoint:
        assert {n: (m.bits, m.group_size) for n, m in checkpoint.modules.items()} == {
            "a": (4, 64), "b": (8, 32), "c": (2, 128), "e": (3, 64), "f": (4, 32)
        }  # fmt: skip
        assert set(checkpoint.tensors) == {"d.weight"}
        assert checkpoint.reader is not None
        assert {name for name in "abcdefg" if checkpoint.reader.claimed(name)} == set("bcef")


SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


@pytest.mark.parametrize("sizes", [SIZES, {"text_config": SIZES}])
def test_widths_that_only_a_sidecar_names_follow_from_the_shapes_and_the_models_sizes(tmp_path, sizes):
    """As JANG has them: o_proj's 4 bits in groups of 32 look like 2 in groups of 64, v_proj's 8 by 64 do not like 4."""
    mixture = {"q_proj": (256, 4, 64), "o_proj": (256, 4, 32), "up_proj": (256, 2, 64), "v_proj": (256, 8, 64),
               "down_proj": (512, 2, 64), "gate_proj": (256, 8, 32)}  # fmt: skip
    tensors, meant = {}, {}
    for part, (columns, bits, size) in mixture.items():
        name = f"model.layers.0.mlp.{part}"
        own, meant[name] = mlx_tensors(name, weights(8, columns), bits, size)
        tensors |= own
    folder_of(tmp_path, tensors, {"bits": 4, "group_size": 64})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    with open_checkpoint(tmp_path) as checkpoint:
        for name, values in meant.items():
            columns, bits, size = mixture[name.rpartition(".")[2]]
            info = checkpoint.modules[name]
            assert (info.shape[1], info.bits, info.group_size) == (columns, bits, size)
            assert np.allclose(checkpoint.read_module(name).dequantize(), values, rtol=0, atol=1e-7)
        assert f"2 modules have 2 bits in groups of 64, which {path} does not say" in "\n".join(checkpoint.notes)


def test_a_label_that_fits_all_modules_is_believed_whatever_the_models_sizes(tmp_path):
    name = "model.layers.0.mlp.down_proj"
    tensors, values = mlx_tensors(name, weights(8, 1024), 4, 64)  # twice as wide as intermediate_size
    folder_of(tmp_path, tensors, {"bits": 4, "group_size": 64})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SIZES))
    with open_checkpoint(tmp_path) as checkpoint:
        assert np.allclose(checkpoint.read_module(name).dequantize(), values, rtol=0, atol=1e-7)
        assert not checkpoint.notes


def test_jangtqs_codes_are_named(tmp_path):
    tensors = mlx_tensors(NAME, weights(), 4, 64)[0] | {"a.tq_packed": np.zeros((8, 16), np.uint32)}
    assert "a.tq_packed holds JANGTQ's codebook codes" in refusal(
        folder_of(tmp_path, tensors, {"bits": 4, "group_size": 64})
    )


def test_numbers_may_be_written_as_texts_or_floats(tmp_path):
    tensors, values = mlx_tensors(NAME, weights(), 4, 32)
    said = {"bits": "8", "group_size": 64.0, NAME: {"bits": 4.0, "group_size": "32"}}
    with open_checkpoint(folder_of(tmp_path, tensors, said)) as checkpoint:
        assert np.allclose(checkpoint.read_module(NAME).dequantize(), values, rtol=0, atol=1e-7)


def test_auto_rounds_export_is_read_too(tmp_path):
    tensors, values = mlx_tensors(NAME, weights(), 4, 64)
    folder_of(tmp_path, tensors, {"bits": 4, "group_size": 64})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "auto-round", "packing_format": "mlx", "bits": 4, "group_size": 128, "sym": True
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "mlx"
        assert np.allclose(checkpoint.read_module(NAME).dequantize(), values, rtol=0, atol=1e-7)


@pytest.mark.parametrize("scale", [0.0, 1e-7, -1e-7])
def test_groups_of_one_value_keep_it(scale):
    codes = np.zeros((2, 128), np.uint8)
    codes[1] = np.arange(128) % 16
    scales = np.array([[scale, scale], [0.5, -0.5]], np.float32)
    offsets = np.array([[0.75, 0.0], [-1, 2]], np.float32)
    expected = scales.repeat(64, 1) * codes + offsets.repeat(64, 1)
    scales, zeros = affine_zeros(codes, scales, offsets, 64)
    assert np.array_equal(scales.repeat(64, 1) * (codes - zeros.repeat(64, 1)), expected)
    assert np.abs(zeros).max() < 16


def damaged(change):
    """A sound checkpoint's tensors and settings, changed."""
    tensors, _ = mlx_tensors(NAME, weights(), 4, 64)
    tensors["model.norm.weight"] = np.ones(4, np.float16)
    quantization: dict[str, Any] = {"bits": 4, "group_size": 64}
    change(tensors, quantization)
    return tensors, quantization


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t, q: q.update(bits=8, group_size=16), "are not 8 bits in groups of 16"),
        (lambda t, q: q.update(group_size=32), "are not 4 bits in groups of 32"),
        (lambda t, q: q.update({NAME: {"bits": 3, "group_size": 64}}), "are not 3 bits in groups of 64"),
        (lambda t, q: q.update({NAME: {"bits": "four"}}), "has bits 'four'"),
        (lambda t, q: q.update(mode="mxfp6"), "MLX's mode 'mxfp6' is not supported"),
        (lambda t, q: q.update({NAME: {"bits": 4, "group_size": 32, "mode": "nvfp5"}}), f"{NAME}: MLX's mode 'nvfp5'"),
        (lambda t, q: t.pop(f"{NAME}.biases"), "has scales, weight but no biases"),
        (lambda t, q: t.pop(f"{NAME}.scales"), "has biases, weight but no scales"),
        (lambda t, q: [t.pop(f"{NAME}.{p}") for p in ("scales", "biases")], "has weight but no scales"),
        (lambda t, q: t.update({f"{NAME}.biases": t[f"{NAME}.biases"][:4]}), "contradict each other"),
        (lambda t, q: t.update({f"{NAME}.scales": t[f"{NAME}.scales"].ravel()}), "contradict each other"),
        (lambda t, q: t.update({f"{NAME}.weight": t[f"{NAME}.weight"].view(np.int32)}), "contradict each other"),
        (lambda t, q: t.update({f"{NAME}.weight": t[f"{NAME}.weight"][:, :-1].copy()}), "are not 4 bits in groups"),
        (lambda t, q: t.update({f"{NAME}.scales": t[f"{NAME}.scales"][None]}), "contradict each other"),
        (lambda t, q: t.update({f"a.switch_mlp.b.{p}": t[f"{NAME}.{p}"] for p in PARTS}), "contradict each other"),
        (lambda t, q: t.update({f"{NAME}.bias": np.zeros(7, np.float16)}), "contradict each other"),
        (lambda t, q: t[f"{NAME}.scales"].__setitem__((1, 1), np.nan), "1 of 32 values of model.layers.0.mlp.up_proj"),
        (lambda t, q: t[f"{NAME}.biases"].__setitem__((1, 1), np.inf), ".biases are NaN or infinite"),
        (lambda t, q: t.update({f"{NAME}.scales": np.full((8, 4), 1e-44, np.float32)}), "far too large for its scales"),
        (lambda t, q: q.update(desc_act=False), "without quant_method; add it"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, change, said):
    assert said in refusal(folder_of(tmp_path, *damaged(change)))


def test_a_module_that_is_quantized_against_its_setting_is_read_and_noted(tmp_path):
    tensors, values = mlx_tensors(NAME, weights(), 4, 64)
    with open_checkpoint(folder_of(tmp_path, tensors, {"bits": 4, "group_size": 64, NAME: False})) as checkpoint:
        tensor = checkpoint.read_module(NAME)
    assert "says it is not quantized, but it is" in tensor.notes[0]
    assert np.allclose(tensor.dequantize(), values, rtol=0, atol=1e-7)
