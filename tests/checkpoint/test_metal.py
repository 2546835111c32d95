"""transformers' layout for Metal; its own functions wrote tests/data/tools/metal-*."""

from __future__ import annotations

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from tests.support.encode import write_folder, write_model
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.down_proj"


def label(bits: int = 4, size: int = 64) -> dict[str, object]:
    return {"quant_method": "metal", "bits": bits, "group_size": size, "modules_to_not_convert": None}


def layer(weight: np.ndarray, name: str = NAME, bits: int = 4, size: int = 64) -> dict[str, np.ndarray]:
    out = len(weight)
    groups = weight.reshape(out, -1, size)
    low, high = groups.min(2, keepdims=True), groups.max(2, keepdims=True)
    scale = np.maximum((high - low) / (2**bits - 1), 1e-8).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint((groups - low) / scale), 0, 2**bits - 1).astype(np.uint32).reshape(out, -1)
    lanes = codes.reshape(out, -1, 32 // bits) << np.arange(0, 32, bits, dtype=np.uint32)
    parts = {"weight": lanes.sum(2, dtype=np.uint32), "scales": scale[:, :, 0], "qbiases": low[:, :, 0]}
    return {f"{name}.{part}": v if v.dtype == np.uint32 else v.astype(np.float16) for part, v in parts.items()}


def test_a_word_packed_by_hand(tmp_path):
    tensors = {
        "weight": np.full((1, 4), 0x76543210, np.uint32),
        "scales": np.array([[0.5]], np.float16),
        "qbiases": np.array([[-1]], np.float16),
    }
    folder = write_folder(tmp_path, {f"{NAME}.{part}": v for part, v in tensors.items()}, label(size=32))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.read_module(NAME).dequantize()[0, :8].tolist() == [-1, -0.5, 0, 0.5, 1, 1.5, 2, 2.5]
        assert checkpoint.quant.describe().startswith("Metal (transformers), 4 bits, groups of 32, asymmetric")


@pytest.mark.parametrize(("bits", "type"), [(2, "Q2_K"), (4, "Q4_K")])
def test_codes_are_carried(tmp_path, small_model, bits, type):
    def of(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        return layer(weight, name, bits) if ".layers." in name else None

    write_model(tmp_path / "c", small_model, of, label(bits), None, 1)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    assert {t.outcome for t in coded} == {"codes carried"}
    assert {t.type for t in coded if "ffn" in t.name} == {type}


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("qbiases", None, "but no qbiases"),
        ("scales", np.ones((2, 2), np.float16), "contradict"),
        ("weight", np.ones((2, 33), np.uint32), "not 4 bits in groups of 64"),
        ("scales", np.full((2, 4), np.nan, np.float16), "NaN or infinite"),
    ],
)
def test_damage_is_named(tmp_path, part, value, said):
    tensors = layer(np.random.default_rng(0).normal(0, 0.05, (2, 256)).astype(np.float32))
    if value is None:
        del tensors[f"{NAME}.{part}"]
    else:
        tensors[f"{NAME}.{part}"] = value
    assert said in refusal(write_folder(tmp_path, tensors, label()))
