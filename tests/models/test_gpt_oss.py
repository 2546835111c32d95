"""gpt-oss as it is published, with experts of 4-bit floats; the float model is among those of test_models_converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from bridge.conversion.writing.report import CALIBRATED
from bridge.conversion.writing.verify import verify
from bridge.errors import BridgeError
from bridge.models import describe_model
from bridge.quantize.settings import Calibration
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.models.test_logits import LENGTH, divergence, reference_logits
from tests.support.encode import load_floats
from tests.support.encode_fp4 import gpt_oss_tensors
from tests.support.family_models import copy_tokenizer, new_model, randomized
from tests.support.make_families import GOLDENS

torch = pytest.importorskip("torch")


def write_mxfp4(model: Any, folder: Path) -> dict[str, np.ndarray]:
    """The model with its experts in MXFP4, changed to what the codes mean; returns that, [experts, out, in]."""
    model.save_pretrained(folder)
    weights, stacks = load_floats(folder), {}
    parameters = dict(model.named_parameters())
    for layer in range(model.config.num_hidden_layers):
        experts = f"model.layers.{layer}.mlp.experts"
        names = [f"{experts}.{what}" for what in ("gate_up_proj", "down_proj")]
        tensors, meant = gpt_oss_tensors(experts, *(weights.pop(name).transpose(0, 2, 1) for name in names))
        weights |= tensors
        for name in names:
            stacks[name] = meant[name.rpartition(".")[2]]
            parameters[name].data = torch.from_numpy(np.ascontiguousarray(stacks[name].transpose(0, 2, 1)))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    copy_tokenizer(folder)
    return stacks


def test_mxfp4_experts_are_carried_and_give_the_logits_of_transformers_in_llama_cpp(tmp_path: Path) -> None:
    model = randomized(new_model("gpt-oss"))
    stacks = write_mxfp4(model, tmp_path / "model")
    tokens = np.random.default_rng(1).integers(0, 2048, LENGTH).tolist()
    reference = reference_logits(model, tokens)

    report = bridge.convert(tmp_path / "model", tmp_path / "m.gguf", type="exact")
    experts = {t.name: t for t in report.tensors if "_exps.weight" in t.name}
    assert len(experts) == 9
    assert {(t.type, t.outcome) for t in experts.values()} == {("MXFP4", "codes carried")}
    assert verify(tmp_path / "m.gguf", tmp_path / "model").total() is not None
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for source, stack in stacks.items():
        block = f"blk.{source.split('.')[2]}.ffn"
        parted = {"gate": stack[:, ::2], "up": stack[:, 1::2]} if "gate_up" in source else {"down": stack}
        for name, values in parted.items():
            tensor = tensors[f"{block}_{name}_exps.weight"]
            np.testing.assert_array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), values)
    with LlamaCpp(tmp_path / "m.gguf", n_ctx=256) as loaded:  # which rounds activations to 8 bits
        assert divergence(reference, loaded.logits(tokens)) < 4e-3

    bridge.convert(tmp_path / "model", tmp_path / "f.gguf", tensor_types=[(".*", "F32")])
    with LlamaCpp(tmp_path / "f.gguf", n_ctx=256) as loaded:
        assert divergence(reference, loaded.logits(tokens)) < 1e-6


def test_mxfp4_experts_that_cannot_be_carried_are_calibrated(tmp_path: Path) -> None:
    stacks = write_mxfp4(randomized(new_model("gpt-oss")), tmp_path / "model")
    np.save(tmp_path / "tokens.npy", np.random.default_rng(1).integers(0, 2048, (8, 64)))
    calibrate = Calibration(tmp_path / "tokens.npy", samples=8, length=64, sweeps=0)
    types = [("_exps.weight", "Q5_1")]
    report = bridge.convert(tmp_path / "model", tmp_path / "m.gguf", tensor_types=types, calibrate=calibrate)
    outcomes = [t.outcome for t in report.tensors if "_exps.weight" in t.name]
    assert outcomes == [CALIBRATED] * 9
    assert not any("not seen" in note for note in report.notes)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    up = tensors["blk.1.ffn_up_exps.weight"]
    expected = stacks["model.layers.1.mlp.experts.gate_up_proj"][:, 1::2]
    error = np.square(gguf.quants.dequantize(up.data, up.tensor_type) - expected).sum() / np.square(expected).sum()
    assert error < 5e-3


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def outline(folder: Path, **fields: Any) -> Any:
    golden = json.loads((GOLDENS / "gpt-oss.json").read_text())
    folder.mkdir()
    return describe_model(golden["config"] | fields, copy_tokenizer(folder), golden["checkpoint"])


def test_that_llama_cpp_rounds_the_ends_of_yarns_ramp_is_said(tmp_path: Path) -> None:
    assert not [n for n in outline(tmp_path / "a", rope_parameters=YARN).notes if "yarn" in n]
    notes = outline(tmp_path / "b", rope_parameters=YARN | {"truncate": False}).notes
    assert [n for n in notes if "yarn" in n] == [
        "yarn with truncate false; llama.cpp rounds the ramp's ends to dimensions"
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0; llama.cpp's graph for this architecture has no other"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0; llama.cpp's graph"),
        ({"attention_bias": False}, "attention_bias is False; llama.cpp's graph"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types is .*, must be full or sliding, for every layer"),
        ({"sliding_window": 0}, "sliding_window is 0, must be a positive integer"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4, but there are 3 experts"),
        ({"rope_parameters": YARN | {"beta_fast": 16.0}}, "yarn with beta_fast 16"),
    ],
)
def test_what_llama_cpps_graph_has_no_place_for_is_refused(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=said):
        outline(tmp_path / "model", **fields)
