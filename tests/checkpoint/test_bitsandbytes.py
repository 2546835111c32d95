"""bitsandbytes: 4-bit codes of unequal levels, and rows of integers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.decoded import level_noise
from bridge.checkpoint.grouped import GroupedTensor
from tests.support.described import describe
from tests.support.encode import write_folder, write_model
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.down_proj"
LEVELS = np.linspace(-1, 1, 16, dtype=np.float32) ** 3
STATE = "weight.quant_state.bitsandbytes__nf4"


def label(**said: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **said}


def text(**said: Any) -> np.ndarray:
    return np.frombuffer(json.dumps({"blocksize": 64, "shape": [2, 64], **said}).encode(), np.uint8)


def by_hand() -> dict[str, np.ndarray]:
    """Two rows of 64: codes 0, 1, .. 15 again and again, with the largest magnitudes 2 and 3."""
    packed = np.array([[0x01], [0x23], [0x45], [0x67], [0x89], [0xAB], [0xCD], [0xEF]] * 8, np.uint8)
    absmax = np.array([2, 3], np.float32)
    return {"weight": packed, "weight.absmax": absmax, "weight.quant_map": LEVELS, STATE: text()}


def write(folder: Path, tensors: dict[str, np.ndarray], **said: Any) -> Path:
    return write_folder(folder, {f"{NAME}.{part}": values for part, values in tensors.items()}, label(**said))


def test_the_first_code_of_a_byte_is_in_its_high_nibble(tmp_path):
    with open_checkpoint(write(tmp_path, by_hand())) as checkpoint:
        weights = checkpoint.read_module(NAME).dequantize()
        assert np.array_equal(weights, np.outer([2, 3], np.tile(LEVELS, 4)).astype(np.float32))
        assert np.array_equal(checkpoint.read_module(NAME, np.array([1])).dequantize(), weights[1:])


def test_bytes_that_are_stored_as_another_dtype_are_the_same_bytes(tmp_path):
    tensors = by_hand()
    tensors["weight"] = by_hand()["weight"].reshape(-1).view(np.float32).reshape(-1, 1)
    with open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).dequantize()[0], 2 * np.tile(LEVELS, 4))


@pytest.mark.parametrize(
    "said",
    [
        label(load_in_4bit=False, load_in_8bit=True),
        label(bnb_4bit_quant_type="fp4"),
        {"quant_method": "gptq", "bits": 8, "group_size": 64},
        None,
    ],
)
def test_a_label_that_the_quant_state_contradicts_is_overruled(tmp_path, said):
    with open_checkpoint(write(tmp_path / "right", by_hand())) as checkpoint:
        meant = checkpoint.read_module(NAME).dequantize()
    tensors = {f"{NAME}.{part}": values for part, values in by_hand().items()}
    with open_checkpoint(write_folder(tmp_path / "wrong", tensors, said)) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).dequantize(), meant)
        assert checkpoint.modules[NAME].bits == 4
        gptq = "config.json says gptq, but model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4 is"
        assert (gptq in "".join(checkpoint.notes)) == (said is not None and said["quant_method"] == "gptq")
        assert ("no config describes" in "".join(checkpoint.notes)) == (said is None)


def test_blocks_may_cross_the_ends_of_rows(tmp_path):
    tensors = by_hand() | {STATE: text(shape=[4, 32])}
    with open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        weights = checkpoint.read_module(NAME).dequantize()
        assert np.array_equal(weights[2:], np.tile(3 * LEVELS, (2, 2)))
        assert np.array_equal(checkpoint.read_module(NAME, np.array([3, 1])).dequantize(), weights[[3, 1]])


def test_the_noise_of_a_level_is_that_of_its_cell():
    noise = level_noise(np.array([0.0, -1, 1, 3, 0]))
    assert np.allclose(noise, [1 / 12, 1 / 12, (0.5**3 + 1) / (3 * 1.5), 1 / 3, 1 / 12])
    values = np.random.default_rng(0).uniform(-1, 1, 100_000)
    nearest = LEVELS[np.abs(values[:, None] - LEVELS).argmin(1)].astype(np.float64)
    at = np.searchsorted(LEVELS, nearest.astype(np.float32))
    assert np.square(values - nearest).mean() == pytest.approx(level_noise(LEVELS)[at].mean(), rel=0.02)


def quantized(folder: Path, model: Path, bits: int) -> dict[str, np.ndarray]:
    """The model's layers with 16 levels in blocks of 64, or as rows of int8; their weights."""
    stored: dict[str, np.ndarray] = {}

    def layer(module: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        if ".layers." not in module:
            return None
        if bits == 8:
            largest = np.abs(weight).max(1)
            codes = np.rint(weight * (127 / largest[:, None])).astype(np.int8)
            stored[module] = codes * (largest * np.float32(1 / 127))[:, None]
            return {
                f"{module}.weight": codes,
                f"{module}.SCB": largest,
                f"{module}.weight_format": np.array(0, np.uint8),
            }
        blocks = weight.reshape(-1, 64)
        absmax = np.abs(blocks).max(1)
        codes = np.abs(blocks[:, :, None] / absmax[:, None, None] - LEVELS).argmin(2)
        stored[module] = (LEVELS[codes] * absmax[:, None]).reshape(weight.shape)
        pairs = codes.reshape(-1, 2).astype(np.uint8)
        return {
            f"{module}.weight": pairs[:, :1] << 4 | pairs[:, 1:],
            f"{module}.weight.absmax": absmax,
            f"{module}.weight.quant_map": LEVELS,
            f"{module}.{STATE}": text(shape=list(weight.shape)),
        }

    said = {"load_in_4bit": bits == 4, "load_in_8bit": bits == 8}
    write_model(folder, model, layer, label(**said), None, 1)
    return stored


def test_rows_of_int8_are_carried_to_q8_0(tmp_path, small_model):
    stored = quantized(tmp_path / "c", small_model, 8)
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert {*checkpoint.modules} == {*stored}
        t = checkpoint.read_module(NAME)
        assert isinstance(t, GroupedTensor)
        assert np.allclose(t.dequantize(), stored[NAME], rtol=1e-6)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    assert {(t.type, t.outcome) for t in coded} == {("Q8_0", "codes carried")}
    said = describe(tmp_path / "c")
    assert "bitsandbytes LLM.int8, 8 bits, one group a row" in said
    assert "they agree" in said


def test_levels_go_to_the_smallest_type_that_adds_little_and_inspect_says_which(tmp_path, small_model):
    stored = quantized(tmp_path / "c", small_model, 4)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    assert len(coded) == len(stored)
    assert {t.outcome for t in coded} == {"requantized"}
    assert all(t.fidelity.share < 0.15 for t in coded)
    said = describe(tmp_path / "c")
    assert "bitsandbytes NF4, 4 bits" in said
    assert "NF4 in blocks of 64" in said
    assert "4 bits, NF4's levels" in said
    assert "NF4's levels have no place in GGUF" in said
    assert "they agree" in said


def test_levels_and_nested_scales_that_the_label_denies_are_reported(tmp_path, small_model):
    quantized(tmp_path / "c", small_model, 4)
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    config["quantization_config"] |= {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.reader.disagreements() == [
            "28 modules have levels of NF4, but the label says FP4",
            "28 modules have scales that are not nested, but the label says they are",
        ]


def test_an_old_config_without_a_method_is_understood(tmp_path):
    folder = write(tmp_path, by_hand())
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"load_in_4bit": True}}))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.settings() == "NF4 in blocks of 64"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("weight.absmax"), "but no weight.absmax"),
        (lambda t: t.pop(STATE), "but no weight.quant_state.bitsandbytes__nf4"),
        (lambda t: t.update({STATE: np.frombuffer(b"{", np.uint8)}), "does not give the shape and the blocks"),
        (lambda t: t.update({STATE: text(shape=[2])}), "does not give the shape and the blocks"),
        (lambda t: t.update({STATE: text(blocksize=0)}), "does not give the shape and the blocks"),
        (lambda t: t.update({STATE: text(nested_offset="x")}), "does not give the shape and the blocks"),
        (lambda t: t.update({STATE: text(shape=[2, 128])}), "contradict"),
        (lambda t: t.update({"weight.absmax": np.ones(3, np.float32)}), "contradict"),
        (lambda t: t.update({"weight.absmax": np.ones(2, np.uint8)}), "contradict"),
        (lambda t: t.update({"weight.quant_map": LEVELS[1:].copy()}), "contradict"),
        (lambda t: t.update({"weight.nested_absmax": np.ones(1, np.float32)}), "but no weight.nested_quant_map"),
        (lambda t: t["weight.absmax"].__setitem__(0, np.nan), "NaN or infinite"),
        (lambda t: t.update({"bias": np.ones(3, np.float32)}), "contradict"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, change, said):
    tensors = by_hand()
    change(tensors)
    assert said in refusal(write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update({"weight_format": np.array(1, np.uint8)}), "in a layout of one GPU"),
        (lambda t: t.update({"SCB": np.ones(5, np.float32)}), "contradict"),
        (lambda t: t.update({"weight": np.ones((2, 64), np.uint8)}), "contradict"),
        (lambda t: t.pop("SCB"), "but no SCB"),
    ],
)
def test_damage_to_rows_of_integers_is_named_in_one_line(tmp_path, change, said):
    tensors = {"weight": np.ones((2, 64), np.int8), "SCB": np.ones(2, np.float32)}
    change(tensors)
    assert said in refusal(write(tmp_path, tensors, load_in_4bit=False, load_in_8bit=True))
