"""SINQ: scales of rows in groups, and of columns. Files of the tool itself are in tests/data/tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.decoded import DecodedTensor
from bridge.checkpoint.grouped import GroupedTensor
from bridge.cli.describe import describe
from tests.support.encode import write_folder, write_model
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.down_proj"
LABEL: dict[str, Any] = {"quant_method": "sinq", "nbits": 4, "group_size": 64, "tiling_mode": "1D", "method": "sinq"}
SIDECAR = "model.safetensors.index.json.meta.json"


def sinq(shape: tuple[int, int], columns: bool = True) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random codes of 4 bits in groups of 64, and the weights that they stand for."""
    random = np.random.default_rng(0)
    out, width = shape
    codes = random.integers(0, 16, (out * width // 64, 64), dtype=np.uint8)
    scales = random.uniform(0.001, 0.002, (len(codes), 1)).astype(np.float16)
    zeros = random.integers(6, 9, (len(codes), 1)).astype(np.float16)
    own = random.uniform(0.5, 2, (1, width)) if columns else np.ones((1, width))
    half = len(codes) // 2
    weights = ((codes - zeros.astype(np.float32)) * scales.astype(np.float32)).reshape(shape)
    tensors = {"W_q": codes[:half] << 4 | codes[half:], "meta.scale": scales, "meta.zero": zeros,
               "meta.scale2": own.astype(np.float16)}  # fmt: skip
    return tensors, weights * tensors["meta.scale2"].astype(np.float32)


def meta(shape: tuple[int, int], **said: Any) -> dict[str, Any]:
    return {
        "meta": {"nbits": 4, "group_size": 64, "shape": list(shape), "packing": "4bit_u8", "method": "sinq", **said}
    }


def write(folder: Path, tensors: dict[str, np.ndarray], shape: tuple[int, int] = (24, 128), **said: Any) -> Path:
    write_folder(folder, {f"{NAME}.{part}": values for part, values in tensors.items()}, LABEL)
    (folder / SIDECAR).write_text(json.dumps({NAME: meta(shape, **said)}))
    return folder


@pytest.mark.parametrize("columns", [True, False])
def test_codes_without_scales_of_columns_are_codes(tmp_path, columns):
    tensors, meant = sinq((24, 128), columns)
    with open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        t = checkpoint.read_module(NAME)
        assert isinstance(t, DecodedTensor if columns else GroupedTensor)
        assert np.array_equal(t.dequantize(), meant)
        steps = np.repeat(tensors["meta.scale"].reshape(24, 2), 64, axis=1) * tensors["meta.scale2"].astype(np.float64)
        assert t.noise() == pytest.approx(np.square(steps).sum() / 12)
        assert checkpoint.settings() == "4 bits, groups of 64, integers, scales of columns in 1"


def test_codes_may_be_stored_without_packing(tmp_path):
    tensors, meant = sinq((24, 128))
    tensors["W_q"] = np.concatenate([tensors["W_q"] >> 4, tensors["W_q"] & 15])
    with open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).dequantize(), meant)


@pytest.mark.parametrize("columns", [True, False])
def test_a_model_keeps_the_codes_that_no_column_scales(tmp_path, small_model, columns):
    sidecar: dict[str, Any] = {}

    def layer(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        if ".layers.0.mlp" not in name:
            return None
        sidecar[name] = meta(weight.shape)
        return {f"{name}.{part}": x for part, x in sinq(weight.shape, columns)[0].items()}

    write_model(tmp_path / "c", small_model, layer, LABEL, None, 1)
    (tmp_path / "c" / SIDECAR).write_text(json.dumps(sidecar))
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    assert {t.outcome for t in coded} == {"requantized" if columns else "codes carried"}
    assert all(t.fidelity.share < 0.15 for t in coded)
    said = describe(tmp_path / "c")
    assert "SINQ, 4 bits, groups of 64, sinq" in said
    assert ("codes with scales of columns have no place in GGUF" in said) == columns


def test_labels_of_the_package_are_known(tmp_path):
    tensors, _ = sinq((24, 128))
    folder = write(tmp_path, tensors)
    label = {"sinq": True, "backend": "sinq", "quantization_method": "sinq", "sinq_version": "auto"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": label}))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "SINQ"
        assert [*checkpoint.modules] == [NAME]


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("meta.scale", None, "but no meta.scale"),
        ("meta.scale", np.ones((47, 1), np.float16), "contradict"),
        ("meta.scale", np.full((48, 1), np.inf, np.float16), "NaN or infinite"),
        ("meta.scale2", np.ones((1, 64), np.float16), "contradict"),
        ("W_q", np.zeros((23, 64), np.uint8), "contradict"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, part, value, said):
    tensors, _ = sinq((24, 128))
    if value is None:
        del tensors[part]
    else:
        tensors[part] = value
    assert said in refusal(write(tmp_path, tensors))


def test_the_file_beside_the_index_is_needed(tmp_path):
    tensors, _ = sinq((24, 128))
    folder = write(tmp_path, tensors)
    (folder / SIDECAR).unlink()
    message = refusal(folder)
    assert f"{SIDECAR}: does not give the shape of {NAME}" in message
    assert "beyond 4 levels" in refusal(write(tmp_path, tensors, nbits=2))
    assert "contradict" in refusal(write(tmp_path, tensors, packing="7bit_u8"))
