"""AWQ checkpoints in all three layouts come back as what was stored."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bridge.checkpoint import open_checkpoint
from bridge.errors import BridgeError
from tests.support.encode import awq_tensors, pack_stream, quantize, write_awq, write_folder

NAME = "model.layers.0.self_attn.q_proj"
VERSIONS = ["gemm", "gemv", "gemv_fast", "llm-awq"]


def weights(out: int = 64, columns: int = 256) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.05, (out, columns)).astype(np.float32)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_what_was_stored_comes_back(tmp_path, version, group_size):
    q = quantize(weights(), 4, group_size, sym=False)
    q.zeros[:5, 0] = 0
    q.zeros[5:9, 0] = 15
    quant = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": version}
    with open_checkpoint(write_folder(tmp_path, awq_tensors(NAME, q, group_size, version), quant)) as checkpoint:
        assert checkpoint.format == "awq-" + version.replace("llm-awq", "gemv_fast")
        assert checkpoint.modules[NAME].shape == (64, 256)
        tensor = checkpoint.read_module(NAME)
        assert checkpoint.group_order(NAME) is None
    assert np.array_equal(tensor.codes, q.codes)
    assert np.array_equal(tensor.zeros, q.zeros)
    assert np.array_equal(tensor.dequantize(), q.dequantize())
    assert tensor.codes.flags.c_contiguous
    assert tensor.scales.flags.c_contiguous
    assert tensor.zeros.flags.c_contiguous
    assert tensor.notes == ()


def test_gemv_fast_codes_are_unshuffled_as_the_formula_says(tmp_path):
    out, columns = 8, 128
    words = np.random.default_rng(1).integers(0, 2**16, (out // 4, columns), dtype=np.uint16).view(np.int16)
    ones = np.ones((8, out), np.float16)
    tensors = {f"{NAME}.qweight": words, f"{NAME}.scales": ones, f"{NAME}.qzeros": -ones}
    quant = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv_fast"}
    with open_checkpoint(write_folder(tmp_path, tensors, quant)) as checkpoint:
        tensor = checkpoint.read_module(NAME)
    nibbles = np.stack([words.view(np.uint16) >> 4 * i & 15 for i in range(4)], -1)
    codes = nibbles.reshape(out // 4, columns // 64, 4, 64).transpose(0, 2, 1, 3).reshape(out, columns)
    codes = codes.reshape(out, columns // 32, 4, 2, 4).transpose(0, 1, 2, 4, 3)
    codes = codes.reshape(out, columns // 32, 4, 4, 2).transpose(0, 1, 3, 2, 4).reshape(out, columns)
    assert np.array_equal(tensor.codes, codes)
    assert (tensor.zeros == 1).all()


@pytest.mark.parametrize("stored", ["gemm", "gemv", "gemv_fast"])
def test_the_layout_is_seen_in_the_tensors_whatever_the_version_says(tmp_path, stored):
    q = quantize(weights(), 4, 64, sym=False)
    claimed = "gemv" if stored == "gemm" else "gemm"
    quant = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": claimed}
    with open_checkpoint(write_folder(tmp_path, awq_tensors(NAME, q, 64, stored), quant)) as checkpoint:
        tensor = checkpoint.read_module(NAME)
    assert np.array_equal(tensor.dequantize(), q.dequantize())
    assert f"stored in the {stored} layout but version says {claimed}" in tensor.notes[0]


def test_an_old_quant_config_is_understood(tmp_path):
    q = quantize(weights(), 4, 64, sym=False)
    write_folder(tmp_path, awq_tensors(NAME, q, 64), None)
    (tmp_path / "quant_config.json").write_text(
        '{"w_bit": 4, "q_group_size": 64, "zero_point": true, "version": "GEMM"}'
    )
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.quant.method == "awq"
        assert checkpoint.quant.group_size == 64
        assert np.array_equal(checkpoint.read_module(NAME).codes, q.codes)


def test_a_group_size_that_the_scales_contradict_is_overruled(tmp_path):
    q = quantize(weights(), 4, 64, sym=False)
    quant = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    with open_checkpoint(write_folder(tmp_path, awq_tensors(NAME, q, 64), quant)) as checkpoint:
        tensor = checkpoint.read_module(NAME)
    assert tensor.group_size == 64
    assert "groups of 64 but group_size says 128" in tensor.notes[0]


def scaled_activation(name: str = "transformer.h.0.mlp", act: str = "act") -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A layer fed by a scaled activation, as Falcon has it; and what the two amount to."""
    q = quantize(weights(), 4, 64, sym=False)
    scales = np.random.default_rng(2).uniform(0.5, 2, 256).astype(np.float16)
    tensors = awq_tensors(f"{name}.dense_4h_to_h", q, 64) | {f"{name}.{act}.scales": scales}
    tensors[f"{name}.dense_4h_to_h.bias"] = np.ones(64, np.float16)
    return tensors | awq_tensors(NAME, q, 64), q.dequantize().astype(np.float32) / scales.astype(np.float32)


@pytest.mark.parametrize("act", ["act", "gelu_impl"])
def test_a_layer_fed_by_a_scaled_activation_comes_as_floats_with_its_columns_divided(tmp_path, act):
    tensors, expected = scaled_activation(act=act)
    quant = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    name = "transformer.h.0.mlp.dense_4h_to_h"
    with open_checkpoint(write_folder(tmp_path, tensors, quant)) as checkpoint:
        assert list(checkpoint.modules) == [NAME]
        assert set(checkpoint.tensors) == {f"{name}.weight", f"{name}.bias"}
        assert checkpoint.tensors[f"{name}.weight"].shape == (64, 256)
        assert np.array_equal(checkpoint.read_float(f"{name}.weight"), expected)
        assert np.array_equal(checkpoint.read_float(f"{name}.weight", (8, 24)), expected[8:24])
        assert f"{name}: its input is divided by transformer.h.0.mlp.{act}.scales" in checkpoint.notes[0]


def test_a_float_layer_fed_by_a_scaled_activation_is_divided_too(tmp_path):
    tensors, _ = scaled_activation()
    name = "transformer.h.0.mlp.dense_4h_to_h"
    tensors = {n: t for n, t in tensors.items() if not n.startswith(name)} | {f"{name}.weight": weights()}
    quant = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    expected = weights() / tensors["transformer.h.0.mlp.act.scales"].astype(np.float32)
    with open_checkpoint(write_folder(tmp_path, tensors, quant)) as checkpoint:
        assert np.array_equal(checkpoint.read_float(f"{name}.weight"), expected)


@pytest.mark.parametrize("change", ["narrow", "two", "zero"])
def test_scales_of_an_activation_that_feeds_no_known_layer_are_refused(tmp_path, change):
    tensors, _ = scaled_activation()
    scales = tensors["transformer.h.0.mlp.act.scales"]
    if change == "narrow":
        tensors["transformer.h.0.mlp.act.scales"] = scales[:128].copy()
    elif change == "two":
        tensors["transformer.h.0.mlp.other.weight"] = weights()
    else:
        scales[3] = 0
    quant = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    folder = write_folder(tmp_path, tensors, quant)
    with pytest.raises(BridgeError, match=r"mlp\.act\.scales") as caught, open_checkpoint(folder) as checkpoint:
        checkpoint.read_float("transformer.h.0.mlp.dense_4h_to_h.weight")
    assert "quantize the model again" in str(caught.value)


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast"])
def test_a_whole_model_comes_back_with_its_skipped_layers_plain(tmp_path, small_model, version):
    stored = write_awq(tmp_path, small_model, version, 64, skip=("down_proj",), shards=2)
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.modules) == set(stored)
        assert "model.layers.0.mlp.down_proj.weight" in checkpoint.tensors
        for name, q in stored.items():
            assert np.array_equal(checkpoint.read_module(name).dequantize(), q.dequantize())


def test_gemv_words_are_in_natural_order(tmp_path):
    codes = np.arange(64 * 16, dtype=np.uint8).reshape(16, 64) % 16
    scales = np.ones((16, 32), np.float16)
    tensors = {
        f"{NAME}.qweight": pack_stream(codes, 4),
        f"{NAME}.qzeros": np.zeros((16, 4), np.int32),
        f"{NAME}.scales": scales,
    }
    quant = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}
    with open_checkpoint(write_folder(tmp_path, tensors, quant)) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).dequantize(), codes)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_a_pt_file_of_llm_awq_needs_no_label(tmp_path, group_size):
    torch = pytest.importorskip("torch")
    q = quantize(weights(), 4, group_size, sym=False)
    stored = {name: torch.from_numpy(part) for name, part in awq_tensors(NAME, q, group_size, "llm-awq").items()}
    torch.save(stored, tmp_path / "model-w4-awq-v2.pt")
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "model-w4-awq-v2.pt"):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.format == "awq-gemv_fast"
            tensor = checkpoint.read_module(NAME)
        assert np.array_equal(tensor.dequantize(), q.dequantize())
        assert tensor.notes == ()


@pytest.mark.parametrize("part", ["text_config", "language_config"])
def test_a_config_that_speaks_of_quantization_in_its_language_part_is_understood(part, tmp_path):
    q = quantize(weights(), 4, 128, sym=False)
    write_folder(tmp_path, awq_tensors(NAME, q, 128), None)
    said = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps({part: {"quantization_config": said}}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "awq-gemm"
        assert np.array_equal(checkpoint.read_module(NAME).codes, q.codes)
