"""Tensors that cannot be matched, models of another kind and files that are not templates: reported or refused."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from bridge.conversion.writing.verify import verify
from bridge.errors import BridgeError
from bridge.models.template.names import candidates
from tests.conftest import CHECKPOINT
from tests.support.encode import write_gptq
from tests.support.template import (
    LLAMA,
    interleave,
    tensors,
    values_of,
    write_template,
)

pytest.importorskip("transformers")


def test_what_cannot_be_matched_is_kept_and_reported_one_by_one(model, tmp_path):
    floats = model("LlamaConfig")
    rng = np.random.default_rng(0)

    def change(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        if name in ("blk.0.ffn_up.weight", "blk.1.attn_norm.weight"):
            values = rng.standard_normal(values.shape)
        extra = {"rope_freqs.weight": np.ones(32)} if name == "output_norm.weight" else {}
        return interleave(4, 2)(name, values) | extra

    template = write_template(tmp_path / "t.gguf", floats, "llama", change, **LLAMA)
    write_gptq(tmp_path / "gptq", floats, desc_act=True)
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    kept = {n.partition(":")[0]: n for n in report.notes if "taken from the template" in n}
    assert set(kept) == {"blk.0.ffn_up.weight", "blk.1.attn_norm.weight", "rope_freqs.weight"}
    assert "as F16, its values are not those of model.layers.0.mlp.up_proj.weight (NMSE" in kept["blk.0.ffn_up.weight"]
    assert "no tensor of the checkpoint is this one" in kept["rope_freqs.weight"]
    for name in kept:
        assert np.array_equal(tensors(tmp_path / "m.gguf")[name].data, tensors(template)[name].data)
    # without ffn_up's rows ffn_down's columns cannot be put in order
    downs = {t.name: t.outcome for t in report.tensors if t.kind == "ffn_down"}
    assert downs == {"blk.0.ffn_down.weight": "requantized", "blk.1.ffn_down.weight": "codes carried"}
    assert not [note for note in report.notes if "dropped" in note]
    verify(tmp_path / "m.gguf", tmp_path / "gptq", template=template)
    other = write_template(tmp_path / "other.gguf", floats, "llama", change, **LLAMA)  # draws other random numbers
    with pytest.raises(BridgeError, match=r"blk.0.ffn_up.weight: is not the template's"):
        verify(tmp_path / "m.gguf", tmp_path / "gptq", template=other)


def test_only_what_is_nowhere_in_the_template_is_left_out(model, tmp_path):
    """Not what the converter makes something else of (A_log), shapes otherwise (conv1d, D) or renames (dt_bias)."""
    floats = model("LlamaConfig")
    rng = np.random.default_rng(0)
    prefix = "model.layers.0.mamba."
    own = {f"{prefix}A_log": rng.random(8), f"{prefix}dt_bias": rng.random(8), f"{prefix}odd": rng.random(8),
           f"{prefix}D": rng.random(8), f"{prefix}conv1d.weight": rng.random((64, 1, 4))}  # fmt: skip
    own = {name: values.astype(np.float32) for name, values in own.items()}

    def change(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        made = {name: values + 1 if name.endswith("_norm.weight") else values}
        if name == "output_norm.weight":
            made |= {"blk.0.ssm_a": -np.exp(own[f"{prefix}A_log"]), "blk.0.ssm_dt.bias": own[f"{prefix}dt_bias"]}
            made |= {
                "blk.0.ssm_conv1d.weight": own[f"{prefix}conv1d.weight"][:, 0],
                "blk.0.ssm_d": own[f"{prefix}D"][:, None],
            }
        return made

    template = write_template(tmp_path / "t.gguf", floats, "jamba", change)
    write_gptq(tmp_path / "gptq", floats)
    weights = load_file(tmp_path / "gptq" / "model.safetensors")
    save_file(weights | own, tmp_path / "gptq" / "model.safetensors", {"format": "pt"})
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    assert [n for n in report.notes if "dropped" in n] == [f"not found in the template and dropped: {prefix}odd"]
    taken = {n.partition(":")[0]: n for n in report.notes if "taken from the template" in n}
    norms = {f"blk.{i}.{name}_norm.weight" for i in range(2) for name in ("attn", "ffn")}
    assert set(taken) == {"output_norm.weight"} | norms
    assert taken["output_norm.weight"].endswith("its values are 1 more than those of model.norm.weight")
    made = {t.name: t for t in report.tensors}
    for name, source in (("dt.bias", "dt_bias"), ("a", "A_log"), ("d", "D"), ("conv1d.weight", "conv1d.weight")):
        assert made[f"blk.0.ssm_{name}"].source == f"{prefix}{source}"
        expected = values_of(template, f"blk.0.ssm_{name}")
        np.testing.assert_allclose(values_of(tmp_path / "m.gguf", f"blk.0.ssm_{name}"), expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("arch", "source", "name"),
    [
        ("gpt-oss", "self_attn.sinks", "attn_sinks.weight"),
        ("deepseek2", "mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
        ("jamba", "mamba.dt_bias", "ssm_dt.bias"),
        ("jamba", "mamba.A_log", "ssm_a"),
    ],
)
def test_names_that_the_converter_changes_are_known(arch, source, name):
    info = SimpleNamespace(shape=(8,))
    ckpt: Any = SimpleNamespace(modules={}, tensors={f"model.layers.1.{source}": info})
    assert candidates(ckpt, arch, 2, {f"blk.1.{name}"})[0].name == f"blk.1.{name}"


def test_another_models_template_is_refused(model, tmp_path):
    floats = model("LlamaConfig")
    other = model("LlamaConfig", seed=8)
    template = write_template(tmp_path / "t.gguf", other, "llama", interleave(4, 2), **LLAMA)
    write_gptq(tmp_path / "gptq", floats)
    with pytest.raises(
        BridgeError, match=r"14 of 14 matrices of .* are not in this template .* give a GGUF of the same model$"
    ):
        bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    assert not (tmp_path / "m.gguf").exists()


def test_another_vocabulary_is_refused(model, tmp_path):
    template = write_template(tmp_path / "t.gguf", model("LlamaConfig", vocab_size=352), "llama", **LLAMA)
    write_gptq(tmp_path / "gptq", model("LlamaConfig"))
    with pytest.raises(BridgeError, match=r"token_embd.weight is \[352, 256\], but model.embed_tokens.weight \[320"):
        bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)


def test_a_tensor_that_the_template_lacks_is_named(model, tmp_path):
    def change(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        return {} if name == "blk.1.ffn_down.weight" else interleave(4, 2)(name, values)

    template = write_template(tmp_path / "t.gguf", model("LlamaConfig"), "llama", change, **LLAMA)
    write_gptq(tmp_path / "gptq", model("LlamaConfig"))
    with pytest.raises(BridgeError, match=r"ffn_down.weight, the counterpart of model.layers.1.mlp.down_proj.weight,"):
        bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)


def test_a_bias_that_the_template_has_no_place_for_must_be_zero(model, tmp_path):
    template = write_template(tmp_path / "t.gguf", model("LlamaConfig"), "llama", interleave(4, 2), **LLAMA)
    write_gptq(tmp_path / "gptq", model("LlamaConfig"))
    weights = load_file(tmp_path / "gptq" / "model.safetensors")
    for bias in (0, 1):
        weights["model.layers.0.mlp.up_proj.bias"] = np.full(256, bias, np.float16)
        save_file(weights, tmp_path / "gptq" / "model.safetensors", {"format": "pt"})
        if not bias:
            bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    with pytest.raises(BridgeError, match=r"up_proj.bias: llama.cpp's llama has no such tensor, and it is not zero"):
        bridge.convert(tmp_path / "gptq", tmp_path / "n.gguf", template=template)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"not a GGUF at all, but long enough", "not a GGUF file"),
        ("cut", "damaged or truncated"),
        ("imatrix", "a GGUF of type 'imatrix' is not a template"),
        ("empty", "a GGUF without token_embd.weight is not a template"),
    ],
)
def test_a_file_that_is_no_template_is_refused_in_one_line(content, message, model, tmp_path):
    path = tmp_path / "t.gguf"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "cut":
        write_template(path, model("LlamaConfig"), "llama", **LLAMA)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif content:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_string("general.type", "imatrix" if content == "imatrix" else "model")
        writer.add_tensor("x", np.zeros(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    with pytest.raises(BridgeError, match=message) as refusal:
        bridge.convert(CHECKPOINT, tmp_path / "m.gguf", template=path)
    assert "\n" not in str(refusal.value)


def test_pre_and_template_exclude_each_other(tmp_path):
    with pytest.raises(BridgeError, match="pre and template: the tokenizer is"):
        bridge.convert(CHECKPOINT, tmp_path / "m.gguf", template=tmp_path / "t.gguf", pre="qwen2")


def test_an_unknown_architecture_is_told_of_the_template(tmp_path):
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(
        json.dumps(config | {"architectures": ["OlmoForCausalLM"], "model_type": "olmo"})
    )
    with pytest.raises(
        BridgeError, match=r"unknown architecture OlmoForCausalLM and model_type olmo; .* or template='model-f16.gguf'"
    ):
        bridge.convert(tmp_path / "model", tmp_path / "m.gguf")


def test_a_language_model_that_only_a_template_serves_is_told_so(tmp_path):
    """Mistral 3's wrapper around another language model."""
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    inside = {**config, "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    inside["text_config"] = {**config, "model_type": "mistral5"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(inside))
    said = r"model_type is 'mistral5'; this language model is not in the table: only 'mistral'.* without template"
    with pytest.raises(BridgeError, match=said):
        bridge.convert(tmp_path / "model", tmp_path / "m.gguf")
