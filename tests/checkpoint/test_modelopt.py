"""ModelOpt's integers, its blocks of 8-bit floats, and microscaled 8-bit floats come out as they were stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.conversion.writing.report import CARRIED
from bridge.conversion.writing.verify import failures, verify
from scripts.peers.gguf_file import gguf_weights
from tests.support.described import describe
from tests.support.encode import LINEAR, write_folder, write_model
from tests.support.encode_compressed import config, float8_tensors, scheme
from tests.support.encode_modelopt import Arrays, int4_tensors, int8_tensors, mxfp8_tensors
from tests.support.raw import Raw, edit_raw
from tests.support.refusal import refusal
from tests.support.tiny_models import save_model

NAME = "model.layers.0.mlp.down_proj"
ROWS = np.array([1, 2, 5, 14])


def weights(out: int = 16, columns: int = 256) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.05, (out, columns)).astype(np.float32)


def write(folder: Path, tensors: Arrays, algorithm: str | None, **said: Any) -> Path:
    """A folder with these tensors; the algorithm as ModelOpt names it, or `said` alone."""
    label = {"quant_method": "modelopt", "quant_algo": algorithm} if algorithm else {}
    return write_folder(folder, tensors, label | said)


def label_floats(folder: Path) -> None:
    """The module's codes become F8_E4M3, a dtype that numpy lacks."""

    def relabel(tensors: Raw) -> None:
        tensors[f"{NAME}.weight"][0]["dtype"] = "F8_E4M3"

    edit_raw(folder / "model.safetensors", relabel)


@pytest.mark.parametrize("size", [32, 96, 192])
@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "W4A8_AWQ", "INT4_AWQ", "INT4_BLOCKWISE"])
def test_4_bit_integers_are_codes_two_rows_a_byte(tmp_path, algorithm, size):
    tensors, meant = int4_tensors(NAME, weights(16, 192), size)
    if algorithm == "W4A8_AWQ":  # the second scale, of FP8 products, and that of activations are no part of the weight
        tensors |= {f"{NAME}.weight_scale_2": np.float32([0.01]), f"{NAME}.input_scale": np.float32([0.5])}
    bias = np.arange(16, dtype=np.float32)
    with open_checkpoint(write(tmp_path, tensors | {f"{NAME}.bias": bias}, algorithm, group_size=size)) as checkpoint:
        assert checkpoint.format == f"ModelOpt {algorithm}"
        t = checkpoint.read_module(NAME)
        assert (t.bits, t.group_size, t.sequential) == (4, size, True)
        assert np.array_equal(t.dequantize(), meant)
        assert np.array_equal(t.bias, bias)
        assert np.array_equal(checkpoint.read_module(NAME, ROWS).dequantize(), meant[ROWS])


@pytest.mark.parametrize("algorithm", ["W8A16", "W8A8_SQ_PER_CHANNEL", "INT8"])
def test_8_bit_integers_are_codes_with_a_scale_a_row(tmp_path, algorithm):
    tensors, meant = int8_tensors(NAME, weights())
    with open_checkpoint(write(tmp_path, tensors, algorithm)) as checkpoint:
        t = checkpoint.read_module(NAME)
        assert (t.bits, t.scales.shape) == (8, (16, 1))
        assert np.array_equal(t.dequantize(), meant)
        assert np.array_equal(checkpoint.read_module(NAME, ROWS).dequantize(), meant[ROWS])


@pytest.mark.parametrize("source", ["config.json", "hf_quant_config.json"])
def test_a_layer_whose_input_is_multiplied_is_read_as_floats(tmp_path, source):
    factor = np.random.default_rng(1).uniform(0.5, 2, 256)
    tensors, meant = int4_tensors(NAME, weights(), 128, factor)
    write(tmp_path, tensors, "W4A16_AWQ")
    if source == "hf_quant_config.json":
        (tmp_path / "config.json").write_text("{}")
        said = {"quantization": {"quant_algo": "W4A16_AWQ", "group_size": 128, "pre_quant_scale": True}}
        (tmp_path / source).write_text(json.dumps(said))
    with open_checkpoint(tmp_path) as checkpoint:
        assert not checkpoint.modules
        assert set(checkpoint.tensors) == {f"{NAME}.weight"}
        assert np.array_equal(checkpoint.read_float(f"{NAME}.weight"), meant)
        assert np.array_equal(checkpoint.read_float(f"{NAME}.weight", (3, 9)), meant[3:9])
        assert any("multiplied by pre_quant_scale" in note for note in checkpoint.notes)


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "fp8_pb_wo"])
@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_inv"])
def test_blocks_of_8_bit_floats_may_have_their_scales_in_four_dimensions(tmp_path, algorithm, part):
    tensors, meant = float8_tensors(NAME, weights(256, 384), (128, 128), part)
    tensors[f"{NAME}.{part}"] = tensors[f"{NAME}.{part}"].reshape(2, 1, 3, 1)
    write(tmp_path, tensors, algorithm)
    label_floats(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.stored_as(f"{NAME}.weight") == "F8_E4M3, blocks of 128x128"
        assert np.array_equal(checkpoint.read_float(f"{NAME}.weight"), meant)
        assert np.array_equal(checkpoint.read_float(f"{NAME}.weight", (100, 200)), meant[100:200])


MX = scheme(8, "group", 32, type="float", scale_dtype="torch.uint8", format="mxfp8-quantized")
ACTS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True}


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (None, config(MX, form="mxfp8-quantized")),
        (None, config(MX | {"input_activations": ACTS}, form="mxfp8-quantized")),
        ("MXFP8", {}),
    ],
    ids=["MXFP8A16", "MXFP8", "ModelOpt"],
)
def test_microscaled_8_bit_floats_have_a_power_of_two_for_every_32(tmp_path, algorithm, said):
    tensors, meant = mxfp8_tensors(NAME, weights())
    write(tmp_path, tensors, algorithm, **said)
    label_floats(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.stored_as(f"{NAME}.weight") == "F8_E4M3, groups of 32"
        assert np.array_equal(checkpoint.read_float(f"{NAME}.weight"), meant)
        assert np.array_equal(checkpoint.read_float(f"{NAME}.weight", (3, 9)), meant[3:9])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight_scale": np.ones((16, 3), np.float32)}, "the shapes contradict each other"),
        ({"weight_scale": np.ones((8, 2), np.float32)}, "the shapes contradict each other"),
        ({"weight_scale": np.ones(1, np.float32)}, "the shapes contradict each other"),
        ({"weight_scale": np.full((16, 2), np.nan, np.float32)}, "32 of 32 values"),
        ({"weight": np.zeros((8, 256), np.int32)}, "its weight is I32"),
        ({"weight": np.zeros(256, np.uint8)}, "the shapes contradict each other"),
        ({"pre_quant_scale": np.ones(255, np.float32)}, "the shapes contradict each other"),
        ({"pre_quant_scale": np.full(256, np.inf, np.float32)}, "256 of 256 values"),
        ({"bias": np.zeros(8, np.float32)}, "the shapes contradict each other"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, change, said):
    tensors = int4_tensors(NAME, weights(), 128)[0] | {f"{NAME}.{part}": x for part, x in change.items()}
    message = refusal(write(tmp_path, {name: x for name, x in tensors.items() if x is not None}, "W4A16_AWQ"))
    assert said in message
    assert NAME in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"a": None}, "but no _svdquant_lora_a"),
        ({"a": np.ones((3, 256), np.float32)}, "the shapes contradict each other"),
        ({"b": np.ones((15, 4), np.float32)}, "the shapes contradict each other"),
        ({"b": np.full((16, 4), np.nan, np.float32)}, "64 of 64 values"),
    ],
)
def test_damage_of_the_product_that_svdquant_adds_is_named(tmp_path, change, said):
    factors: dict[str, Any] = {"a": np.ones((4, 256), np.float32), "b": np.ones((16, 4), np.float32)} | change
    tensors = int4_tensors(NAME, weights(), 128, np.ones(256))[0]
    tensors |= {f"{NAME}.weight_quantizer._svdquant_lora_{x}": f for x, f in factors.items() if f is not None}
    assert said in refusal(write(tmp_path, tensors, "MIXED_PRECISION", group_size=128))


def test_exponents_of_no_number_and_bytes_for_other_groups_are_refused(tmp_path):
    tensors, _ = mxfp8_tensors(NAME, weights())
    tensors[f"{NAME}.weight_scale"][3, 1] = 255
    write(tmp_path / "nan", tensors, None, **config(MX, form="mxfp8-quantized"))
    label_floats(tmp_path / "nan")
    assert "1 of 128 values" in refusal(tmp_path / "nan")
    tensors[f"{NAME}.weight_scale"] = np.ones((16, 4), np.uint8)
    write(tmp_path / "other", tensors, None, **config(MX, form="mxfp8-quantized"))
    label_floats(tmp_path / "other")
    assert "the shapes contradict each other" in refusal(tmp_path / "other")


def test_integers_are_carried_and_the_gguf_holds_their_weights(tmp_path):
    """AWQ's: down_proj is multiplied by what no layer before it could take in."""
    model = save_model(tmp_path / "float", "LlamaConfig", num_hidden_layers=1)
    meant: Arrays = {}

    def quantized(name: str, weight: np.ndarray) -> Arrays | None:
        if not LINEAR.match(name):
            return None
        factor = np.linspace(0.5, 2, weight.shape[1]) if name.endswith("down_proj") else None
        tensors, meant[name] = int4_tensors(name, weight, 64, factor)
        return tensors

    said = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 64}
    write_model(tmp_path / "m", model, quantized, said, None, 1)
    report = bridge.convert(tmp_path / "m", tmp_path / "m.gguf", type="exact")
    made = gguf_weights(tmp_path / "m.gguf")
    assert {str(t.source).removesuffix(".weight") for t in report.tensors if t.outcome == CARRIED} == {
        name for name in meant if not name.endswith("down_proj")
    }
    for name, w in meant.items():
        assert np.square(made[f"{name}.weight"] - w).mean() < 1e-4 * np.square(w).mean()
    assert failures(verify(tmp_path / "m.gguf", tmp_path / "m")) == []
    assert "ModelOpt W4A16_AWQ, 4 bits, groups of 64, symmetric" in describe(tmp_path / "m")
