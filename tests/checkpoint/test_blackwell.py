"""NVFP4 of transformers' kernel and Four Over Six: scales in tiles, words packed by hand, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.formats.blackwell import row_major
from tests.support.encode import write_folder, write_model
from tests.support.encode_fp4 import nvfp4
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.down_proj"
LABEL = {"quant_method": "nvfp4", "modules_to_not_convert": None}
FOUR = {"quant_method": "fouroversix", "dtype": "nvfp4", "scale_rule": "static_6"}


def tiled(scales: np.ndarray) -> np.ndarray:
    """Bytes in tiles of 128 rows and 4 columns, one by one: row r of a tile has 4 at 16 (r % 32) + 4 (r // 32)."""
    rows, columns = scales.shape
    high, wide = -(-rows // 128) * 128, -(-columns // 4) * 4
    stored = np.zeros(high * wide, np.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = r // 128 * (wide // 4) + c // 4
            stored[512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = scales[r, c]
    return stored


def layer(weight: np.ndarray, name: str = NAME, only_tiles: bool = False) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A layer as transformers stores it, and its weights."""
    codes, scales, whole, values = nvfp4(weight)
    out, groups = scales.shape
    tensors = {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_sf": tiled(scales).view(np.int32).reshape(-(-out // 128) * 128, -(-groups // 4)),
        "weight_sf_rowmajor": scales,
        "weight_global_scale": np.array([1 / whole], np.float32),
    }
    if only_tiles:
        del tensors["weight_sf_rowmajor"]
    return {f"{name}.{part}": np.ascontiguousarray(v) for part, v in tensors.items()}, values


def weight() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.05, (136, 160)).astype(np.float32)


def test_scales_come_out_of_tiles():
    scales = np.random.default_rng(0).integers(0, 255, (300, 10)).astype(np.uint8)
    assert np.array_equal(row_major(tiled(scales), 300, 10), scales)


@pytest.mark.parametrize("only_tiles", [False, True])
def test_transformers_layout_is_read(tmp_path, only_tiles):
    tensors, values = layer(weight(), only_tiles=only_tiles)
    with open_checkpoint(write_folder(tmp_path, tensors, LABEL)) as checkpoint:
        read = checkpoint.read_module(NAME).dequantize()
        assert np.abs(read - values).max() <= 1e-6 * np.abs(values).max()
        rows = np.array([130, 2])
        assert np.array_equal(checkpoint.read_module(NAME, rows).dequantize(), read[rows])
        assert checkpoint.settings() == "NVFP4 in blocks of 16"
        assert checkpoint.quant.describe() == "NVFP4 of transformers, 4-bit floats, groups of 16"


def test_a_block_packed_by_hand(tmp_path):
    """The byte 0x7A is -1, then 6; 0x38 is 1, and the global scale divides."""
    tensors = {
        "weight": np.full((1, 8), 0x7A, np.uint8),
        "weight_sf_rowmajor": np.array([[0x38]], np.uint8),
        "weight_global_scale": np.array([2], np.float32),
    }
    folder = write_folder(tmp_path, {f"{NAME}.{part}": values for part, values in tensors.items()}, LABEL)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.read_module(NAME).dequantize()[0, :4].tolist() == [-0.5, 3, -0.5, 3]


def test_a_block_of_four_over_six_packed_by_hand(tmp_path):
    """amax is 6 * 448 = 2688 times the scale of the tensor."""
    tensors = {
        "values": np.full((128, 32), 0x7A, np.uint8),
        "scale_factors": np.full(128 * 4, 0x38, np.uint8),
        "amax": np.array([1344], np.float32),
        "metadata": np.array([2, 16, 128, 64, 1, 1], np.int32),
    }
    stored = {f"{NAME}.quantized_weight_{part}": values for part, values in tensors.items()}
    with open_checkpoint(write_folder(tmp_path, stored, FOUR)) as checkpoint:
        read = checkpoint.read_module(NAME).dequantize()
        assert read.shape == (2, 16)
        assert read[1, :4].tolist() == [-0.5, 3, -0.5, 3]
        assert checkpoint.quant.describe() == "Four Over Six, NVFP4, scales by static_6"
    with open_checkpoint(write_folder(tmp_path, stored, {**FOUR, "scale_rule": "mse"})) as checkpoint:
        assert checkpoint.read_module(NAME).dequantize()[0, 1] == np.float32(6 * 1344 / (6 * 256))


def test_codes_are_carried(tmp_path, small_model):
    write_model(tmp_path / "c", small_model, lambda n, w: layer(w, n)[0] if ".layers." in n else None, LABEL, None, 1)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    assert len(coded) > 0
    assert {(t.type, t.outcome) for t in coded} == {("NVFP4", "codes carried")}


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("weight_global_scale", None, "but no weight_global_scale"),
        ("weight_global_scale", np.zeros(1, np.float32), "not a scale"),
        ("weight_sf_rowmajor", np.full((136, 10), 255, np.uint8), "NaN or negative"),
        ("weight_sf_rowmajor", np.ones((136, 11), np.uint8), "contradict"),
        ("weight", np.ones((136, 80), np.int16), "contradict"),
    ],
)
def test_damage_is_named(tmp_path, part, value, said):
    tensors, _ = layer(weight())
    if value is None:
        del tensors[f"{NAME}.{part}"]
    else:
        tensors[f"{NAME}.{part}"] = value
    assert said in refusal(write_folder(tmp_path, tensors, LABEL))


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        ({"dtype": "if4"}, f"{NAME}.quantized_weight_values", "'if4' by the rule 'static_6'"),
        ({}, "model.layers.0.mlp.experts.quantized_down_proj_values", "are experts of Four Over Six"),
    ],
)
def test_other_kinds_of_four_over_six_are_refused(tmp_path, change, name, said):
    folder = write_folder(tmp_path, {name: np.ones((4, 4), np.uint8)}, FOUR | change | {"keep_master_weights": True})
    assert said in refusal(folder)
