"""Checkpoints whose layers are padded with zeros beyond the model's true width, as Qwen2-72B's are."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from scripts.peers.gguf_file import gguf_weights
from tests.support.encode import write_gptq

WIDTH, PADDED = 768, 1024


def padded_model(folder, source):
    """A model with MLP layers that are 256 zeros wider than its config says."""
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    for name, w in weights.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            weights[name] = np.pad(w, ((0, PADDED - WIDTH), (0, 0)))
        elif name.endswith("down_proj.weight"):
            weights[name] = np.pad(w, ((0, 0), (0, PADDED - WIDTH)))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["intermediate_size"] == WIDTH
    return folder


@pytest.mark.parametrize("desc_act", [False, True])
def test_zero_padding_is_dropped_and_the_model_is_unchanged(tmp_path, small_model, desc_act):
    checkpoint = tmp_path / "checkpoint"
    stored = write_gptq(checkpoint, padded_model(tmp_path / "float", small_model), desc_act=desc_act)
    report = bridge.convert(checkpoint, tmp_path / "m.gguf")
    by_kind = {t.kind: t for t in report.tensors}
    assert by_kind["ffn_down"].shape == (256, WIDTH)
    assert by_kind["ffn_up"].shape == (WIDTH, 256)
    assert {t.fidelity.kept for t in report.tensors if t.kind == "ffn_down"} == {256 * WIDTH}
    weights = gguf_weights(tmp_path / "m.gguf")
    layer = "model.layers.1.mlp."
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)

    def mlp(gate, up, down):
        g = x @ gate.T
        return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T

    parts = ("gate_proj", "up_proj", "down_proj")
    with bridge.open_checkpoint(checkpoint) as opened:
        expected = mlp(*(opened.read_module(layer + part).dequantize() for part in parts))
    assert stored
    found = mlp(*(weights[f"{layer}{part}.weight"] for part in parts))
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
