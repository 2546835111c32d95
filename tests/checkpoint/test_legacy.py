"""What the first GPTQ tools saved: a .pt without a config, in every dialect there was, up to llama.cpp."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.cli import main
from bridge.errors import BridgeError
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import mean_kl
from scripts.peers.reference import checkpoint_weights
from tests.conftest import CHECKPOINT
from tests.support.encode import Quantized, quantize
from tests.support.encode_legacy import DIALECTS, config_folder, legacy_tensors, save_pt, write_legacy
from tests.support.float_gguf import outline_of, write_gguf

pytest.importorskip("torch")
NAME = "model.layers.0.mlp.up_proj"
HIDDEN = 256
CASES = [("quant3", 3)] + [(dialect, bits) for dialect in DIALECTS[1:] for bits in (2, 3, 4, 8)]


def quantized(bits: int = 4, dialect: str = "qzeros", out: int = 64, sym: bool = False) -> Quantized:
    weight = np.random.default_rng(bits).normal(0, 0.05, (out, HIDDEN)).astype(np.float32)
    one_group = dialect in ("quant3", "float-zeros")
    q = quantize(weight, bits, -1 if one_group else 64, sym, desc_act=dialect == "g_idx")
    if dialect in ("qzeros", "g_idx"):
        q.zeros[:] = np.maximum(q.zeros, 1)
    return q


def write(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any] | None = None) -> Path:
    """A .pt beside a config.json."""
    (folder / "config.json").write_text(json.dumps({"hidden_size": HIDDEN} if config is None else config))
    return save_pt(folder / "model-4bit.pt", tensors)


def assert_same(tensor: Any, q: Quantized) -> None:
    assert np.array_equal(tensor.codes, q.codes)
    assert np.array_equal(tensor.zeros, q.zeros)
    assert np.array_equal(tensor.scales, q.scales.astype(np.float32))
    assert np.array_equal(tensor.groups(), q.group)


def refusal(path: Path, config: Path | None = None) -> str:
    def read_all() -> None:
        with open_checkpoint(path, config) as checkpoint:
            for name in checkpoint.modules:
                checkpoint.read_module(name)

    with pytest.raises(BridgeError) as caught:
        read_all()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="session")
def model_weights() -> dict[str, np.ndarray]:
    """The project's own checkpoint in float."""
    with open_checkpoint(CHECKPOINT) as checkpoint:
        return checkpoint_weights(checkpoint)


@pytest.mark.parametrize(("dialect", "bits"), CASES)
def test_every_dialect_comes_back_without_a_word_from_any_config(tmp_path, dialect, bits):
    q = quantized(bits, dialect)
    write(tmp_path, legacy_tensors(NAME, q, bits, dialect))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.modules[NAME].bits == bits
        tensor = checkpoint.read_module(NAME)
        assert "no config describes the quantization" in checkpoint.notes[0]
        assert checkpoint.format == ("gptq" if dialect in ("qzeros", "g_idx") else "gptq with float zeros")
    assert_same(tensor, q)
    assert tensor.sequential == (dialect != "g_idx")
    assert tensor.notes == ()
    assert not tensor.bias.any()


@pytest.mark.parametrize("dialect", ["float-zeros", "qzeros"])
def test_symmetric_zero_points_come_back(tmp_path, dialect):
    q = quantized(4, dialect, sym=True)
    write(tmp_path, legacy_tensors(NAME, q, 4, dialect))
    with open_checkpoint(tmp_path) as checkpoint:
        assert_same(checkpoint.read_module(NAME), q)


def test_float_zeros_that_half_precision_rounded_are_whole_again(tmp_path):
    q = quantized(4, "float-zeros")
    tensors = legacy_tensors(NAME, q, 4, "float-zeros")
    for part in ("scales", "zeros"):
        tensors[f"{NAME}.{part}"] = tensors[f"{NAME}.{part}"].astype(np.float16)
    write(tmp_path, tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_same(checkpoint.read_module(NAME), q)


def test_a_file_a_folder_with_it_and_safetensors_of_the_same_tensors_are_one_checkpoint(tmp_path, model_weights):
    pt = tmp_path / "weights" / "llama-4bit-128g.pt"
    pt.parent.mkdir()
    stored = write_legacy(pt, model_weights, "g_idx", 4, 128)
    safetensors = pt.with_suffix(".safetensors")
    write_legacy(safetensors, model_weights, "g_idx", 4, 128)
    config = config_folder(tmp_path / "config", CHECKPOINT)
    whole = config_folder(tmp_path / "whole", CHECKPOINT)
    shutil.copyfile(pt, whole / pt.name)
    old = config_folder(tmp_path / "old", CHECKPOINT)
    shutil.copyfile(safetensors, old / safetensors.name)
    for path, home in ((pt, config), (pt.parent, config), (safetensors, config), (whole, None), (old, None)):
        with open_checkpoint(path, home) as checkpoint:
            assert checkpoint.quant.bits == 4
            assert checkpoint.quant.group_size == 128
            for name, q in stored.items():
                assert_same(checkpoint.read_module(name), q)


def test_a_config_that_comes_with_the_file_is_believed_where_the_tensors_agree(tmp_path):
    q = quantized(3, "float-zeros")
    quant = {"quant_method": "gptq", "bits": 3, "group_size": -1, "sym": False}
    write(tmp_path, legacy_tensors(NAME, q, 3, "float-zeros"), {"quantization_config": quant})
    with open_checkpoint(tmp_path) as checkpoint:
        assert_same(checkpoint.read_module(NAME), q)
        assert checkpoint.notes == []


def test_a_zero_point_that_the_tool_lost_is_noted(tmp_path):
    q = quantized()
    q.zeros[8, 1] = 0
    write(tmp_path, legacy_tensors(NAME, q, 4, "qzeros"))
    with open_checkpoint(tmp_path) as checkpoint:
        (note,) = checkpoint.read_module(NAME).notes
    assert note.startswith(f"{NAME}: 1 words of qzeros")


def test_a_table_within_the_file_is_found(tmp_path):
    import torch

    file = write(tmp_path, legacy_tensors(NAME, quantized(), 4, "qzeros"))
    torch.save({"model": torch.load(file, weights_only=True), "step": 3}, file)
    with open_checkpoint(file) as checkpoint:
        assert list(checkpoint.modules) == [NAME]


@pytest.mark.parametrize(
    ("dialect", "bits", "group_size"),
    [("quant3", 3, -1), ("float-zeros", 4, -1), ("qzeros", 4, 128), ("g_idx", 4, 128)],
)
def test_llama_cpp_says_what_the_pt_said(tmp_path, model_weights, capfd, dialect, bits, group_size):
    """The GGUF of each dialect beside one of its dequantized weights in F32: only the activations' 8 bits differ."""
    pt, out = tmp_path / "model.pt", tmp_path / "out.gguf"
    stored = write_legacy(pt, model_weights, dialect, bits, group_size)
    config = config_folder(tmp_path / "config", CHECKPOINT)
    assert main(["convert", str(pt), str(out), "--config", str(config), "--output-type", "F16"]) == 0
    assert main(["verify", str(out), str(pt), "--config", str(config)]) == 0
    assert "error" not in capfd.readouterr().err
    weights = model_weights | {f"{name}.weight": q.dequantize() for name, q in stored.items()}
    twin = write_gguf(outline_of(config, list(weights)), weights, tmp_path / "twin.gguf")
    logits = []
    for file in (out, twin):
        with LlamaCpp(file, n_ctx=128) as model:
            tokens = model.tokenize("KING RICHARD:\nNow is the winter of our discontent, made glorious summer by this")
            logits.append(model.logits(tokens))
            assert len(model.generate_greedy(tokens, 8)) == 8
    assert mean_kl(logits[1], logits[0]) < 2e-3


def test_inspect_names_what_it_is(tmp_path, model_weights, capsys):
    pt = tmp_path / "model.pt"
    write_legacy(pt, model_weights, "float-zeros", 4)
    config = config_folder(tmp_path / "config", CHECKPOINT)
    assert main(["inspect", str(pt), "--config", str(config)]) == 0
    out, _ = capsys.readouterr()
    assert "the label says  nothing about quantization" in out
    assert "its tensors show GPTQ with float zero points, 4 bits, one group a row" in out
    assert "28 quantized modules, 4 bits, one group a row" in out
    assert "they agree" not in out


def test_the_name_of_a_file_is_that_of_its_gguf(tmp_path, model_weights, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_legacy(tmp_path / "small-4bit.pt", model_weights, "qzeros", 4, 128)
    report = bridge.convert("small-4bit.pt", config=config_folder(tmp_path / "config", CHECKPOINT))
    assert report.outputs == [Path("small-4bit-Q4_K.gguf")]
    assert bridge.verify("small-4bit-Q4_K.gguf", "small-4bit.pt", config="config").total().kept == report.total().kept


# damage


class Evil:
    def __reduce__(self):
        return (os.system, ("touch evil-was-here",))


def test_code_in_a_pt_is_refused_and_not_run(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, {})
    torch.save({"a": Evil()}, file)
    assert "could run code" in refusal(file)
    assert not (tmp_path / "evil-was-here").exists()


def test_a_truncated_pt_at_every_length(tmp_path):
    file = write(tmp_path, legacy_tensors(NAME, quantized(), 4, "qzeros"))
    data = file.read_bytes()
    for length in (0, 4, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        assert "model-4bit.pt" in refusal(file)


@pytest.mark.parametrize("dialect", ["float-zeros", "qzeros"])
@pytest.mark.parametrize("part", ["qweight", "scales", "zeros"])
@pytest.mark.parametrize("axis", [0, 1])
def test_shapes_that_contradict_each_other(tmp_path, dialect, part, axis):
    if (dialect, part, axis) == ("float-zeros", "qweight", 0):
        pytest.skip("its rows alone give the layer's width; config.json's dimensions settle it")
    tensors = {
        **legacy_tensors("model.layers.0.mlp.gate_proj", quantized(4, dialect), 4, dialect),
        **legacy_tensors("model.layers.0.mlp.down_proj", quantized(4, dialect), 4, dialect),
        **legacy_tensors(NAME, quantized(4, dialect), 4, dialect),
    }
    part = "qzeros" if (part, dialect) == ("zeros", "qzeros") else part
    tensors[f"{NAME}.{part}"] = np.repeat(tensors[f"{NAME}.{part}"], 3, axis)
    if (part, axis) == ("qweight", 0):
        tensors[f"{NAME}.qweight"] = tensors[f"{NAME}.qweight"][:-1]
    assert NAME in refusal(write(tmp_path, tensors))


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_a_layer_that_lacks_a_part(tmp_path, part):
    tensors = legacy_tensors("model.layers.0.mlp.gate_proj", quantized(), 4, "qzeros")
    tensors |= legacy_tensors("model.layers.0.mlp.down_proj", quantized(), 4, "qzeros")
    tensors |= legacy_tensors(NAME, quantized(), 4, "qzeros")
    del tensors[f"{NAME}.{part}"]
    assert f"but no {part}" in refusal(write(tmp_path, tensors))


def test_zeros_of_both_kinds(tmp_path):
    tensors = legacy_tensors(NAME, quantized(), 4, "qzeros")
    tensors[f"{NAME}.zeros"] = tensors[f"{NAME}.scales"]
    assert f"{NAME} has both zeros and qzeros" in refusal(write(tmp_path, tensors))


def test_zeros_without_a_scale(tmp_path):
    tensors = legacy_tensors(NAME, quantized(4, "float-zeros"), 4, "float-zeros")
    tensors[f"{NAME}.scales"][5] = 0
    assert "groups whose scale is 0" in refusal(write(tmp_path, tensors))


@pytest.mark.parametrize("config", [{}, {"hidden_size": 300}, {"hidden_size": "256"}])
def test_bits_that_cannot_be_told(tmp_path, config):
    tensors = legacy_tensors(NAME, quantized(4, "float-zeros"), 4, "float-zeros")
    assert "hidden_size" in refusal(write(tmp_path, tensors, config))


def test_a_bare_file_says_what_it_lacks(tmp_path):
    file = save_pt(tmp_path / "model.pt", legacy_tensors(NAME, quantized(), 4, "qzeros"))
    assert "config takes config.json and tokenizer" in refusal(file)
    assert "config takes config.json and tokenizer" in refusal(file, tmp_path)
    with pytest.raises(BridgeError, match="no such folder; config must be"):
        bridge.convert(file, tmp_path / "out.gguf", config=tmp_path / "nowhere")


def test_two_files_of_the_same_model_are_for_the_user_to_choose_from(tmp_path):
    file = write(tmp_path, legacy_tensors(NAME, quantized(), 4, "qzeros"))
    shutil.copyfile(file, tmp_path / "model-4bit-128g.pt")
    assert "give the one file that is" in refusal(tmp_path)
    with open_checkpoint(file) as checkpoint:
        assert list(checkpoint.modules) == [NAME]
