"""optimum-quanto's checkpoints: shapes that no tensor holds, and what is refused; test_tools.py has its own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from tests.support.described import describe
from tests.support.encode import write_folder, write_model
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.up_proj"


def quanto(
    bits: int = 4, shape: tuple[int, int] = (10, 256), size: int = 128, name: str = NAME
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A module with zero points that are integers, and its values; the groups fill no whole number of bytes."""
    random = np.random.default_rng(0)
    count, lanes = shape[0] * shape[1] // size, 8 // bits
    codes = random.integers(0, 2**bits, (count, size), dtype=np.uint8)
    scale = random.uniform(0.01, 0.02, (count, 1)).astype(np.float32)
    shift = random.integers(0, 2**bits, (count, 1), dtype=np.uint8)
    rows = -(-count // lanes)
    packed = np.zeros((rows, size), np.uint8)
    for i, row in enumerate(codes):
        packed[i % rows] |= row << np.uint8(i // rows * bits)
    tensors = {"_data._data": packed, "_scale": scale, "_shift": shift}
    values = ((codes.astype(np.float32) - shift) * scale).reshape(shape)
    return {f"{name}.weight.{part}": value for part, value in tensors.items()}, values


def write(folder: Path, tensors: dict[str, np.ndarray], weights: str = "qint4", hidden: Any = 256) -> Path:
    write_folder(folder, tensors, None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": hidden}))
    (folder / "quanto_qmap.json").write_text(json.dumps({NAME: {"weights": weights, "activations": "none"}}))
    return folder


def test_a_byte_packed_by_hand(tmp_path):
    """Of 0xA3 the first half of the groups has 3, the second 10; the zero point is 2."""
    tensors = {
        "_data._data": np.full((1, 64), 0xA3, np.uint8),
        "_scale": np.full((2, 1), 0.5, np.float32),
        "_shift": np.full((2, 1), 2, np.uint8),
    }
    stored = {f"{NAME}.weight.{part}": value for part, value in tensors.items()}
    with open_checkpoint(write(tmp_path, stored, hidden=64)) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).dequantize(), np.repeat([[0.5], [4.0]], 64, 1))


@pytest.mark.parametrize(("bits", "shape", "size"), [(4, (10, 256), 128), (2, (11, 256), 128), (4, (5, 64), 64)])
def test_rows_are_cut_at_the_models_width(tmp_path, bits, shape, size):
    tensors, meant = quanto(bits, shape, size)
    with open_checkpoint(write(tmp_path, tensors, f"qint{bits}", shape[1])) as checkpoint:
        t = checkpoint.read_module(NAME)
        assert (t.bits, t.group_size) == (bits, size)
        assert np.array_equal(t.dequantize(), meant)
        assert checkpoint.reader.disagreements() == []


@pytest.mark.parametrize(("last", "shape"), [("w1", (512, 256)), ("w2", (256, 512)), ("fc2", (256, 1024))])
def test_the_models_width_gives_the_shape_of_other_names(tmp_path, last, shape):
    name = f"model.layers.0.{last}"
    tensors, meant = quanto(4, shape, name=name)
    with open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        assert np.array_equal(checkpoint.read_module(name).dequantize(), meant)


def test_the_label_of_transformers_is_understood_and_a_wrong_one_reported(tmp_path):
    tensors, meant = quanto()
    write(tmp_path, tensors)
    (tmp_path / "quanto_qmap.json").unlink()
    label = {"quant_method": "quanto", "weights": "int2"}
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 256, "quantization_config": label}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).dequantize(), meant)
        assert checkpoint.reader.disagreements() == ["1 module has codes of 4 bits, but the label says 2"]


@pytest.mark.parametrize(("bits", "to"), [(2, "Q2_K"), (4, "Q4_K")])
def test_a_models_codes_are_carried(tmp_path, small_model, bits, to):
    def layer(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        columns = weight.shape[1]
        size = next(n for n in (128, 96, 64, 32, columns) if columns % n == 0)
        return quanto(bits, weight.shape, size if columns > 128 else columns, name)[0] if "_proj" in name else None

    write_model(tmp_path / "c", small_model, layer, {"quant_method": "quanto", "weights": f"int{bits}"}, None, 1)
    coded = [t for t in bridge.convert(tmp_path / "c", tmp_path / "m.gguf").tensors if t.has_codes]
    assert len(coded) == 28
    assert {(t.outcome, t.type) for t in coded} == {("codes carried", to)}
    assert f"quanto, int{bits}" in describe(tmp_path / "c")


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("_scale", None, "but no weight._scale"),
        ("_shift", None, "but no weight._shift"),
        ("_data._data", None, "but no weight._data._data"),
        ("_data._data", np.zeros((3, 128), np.uint8), "contradict"),
        ("_data._data", np.zeros((10, 128), np.int8), "contradict"),
        ("_data._data", np.zeros((10, 96), np.uint8), "contradict"),
        ("_scale", np.full((20, 1), np.nan, np.float32), "NaN or infinite"),
        ("_scale", np.ones((20, 1), np.int8), "contradict"),
        ("_shift", np.zeros((19, 1), np.uint8), "contradict"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, part, value, said):
    tensors, _ = quanto()
    if value is None:
        del tensors[f"{NAME}.weight.{part}"]
    else:
        tensors[f"{NAME}.weight.{part}"] = value
    assert said in refusal(write(tmp_path, tensors))


def test_groups_with_a_shift_but_no_scale_are_damage(tmp_path):
    tensors, _ = quanto()
    tensors[f"{NAME}.weight._shift"] = np.ones((20, 1), np.float32)
    tensors[f"{NAME}.weight._scale"][3] = 0
    assert "a shift but no scale" in refusal(write(tmp_path, tensors))


@pytest.mark.parametrize("hidden", [None, "wide", 0])
def test_a_matrix_whose_shape_is_nowhere_is_refused(tmp_path, hidden):
    assert "dequantize the model with optimum-quanto" in refusal(write(tmp_path, quanto()[0], hidden=hidden))


def test_a_width_that_does_not_fit_is_refused(tmp_path):
    assert "contradict" in refusal(write(tmp_path, quanto()[0], hidden=192))


@pytest.mark.parametrize("data", [np.zeros((4, 256), np.int32), np.zeros((5, 256), np.int8)])
def test_rows_of_bytes_that_do_not_fit_are_damage(tmp_path, data):
    tensors = {f"{NAME}.weight._data": data, f"{NAME}.weight._scale": np.ones((4, 1), np.float32)}
    assert "contradict" in refusal(write(tmp_path, tensors, "qint8"))
