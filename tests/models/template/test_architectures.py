"""--template: any architecture, with the names, metadata and row order of a GGUF made by llama.cpp's converter."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import bridge
from bridge.conversion.writing.verify import failures, verify
from bridge.errors import BridgeError
from bridge.models.config.rope import interleaved_rows
from scripts.peers.llama import ggml
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import mean_kl
from tests.support.encode import write_awq, write_gptq
from tests.support.family_models import TEMPLATES
from tests.support.make_families import GOLDENS, save_checkpoint
from tests.support.template import (
    FLOAT32,
    LLAMA,
    TOKENS,
    gemma,
    interleave,
    phi3,
    rewritten,
    tensors,
    values_of,
    write_template,
)

pytest.importorskip("transformers")
from tests.support.tiny_models import dequantized, predict


def gpt2(floats: Path, path: Path) -> Path:
    return write_template(path, floats, "gpt2", attention__layer_norm_epsilon=1e-5)


def transposed(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """GPT-2's Conv1D weights as the linear layers that GPTQ tools store them as."""
    return {n: v.T if ".c_" in n and n.endswith("weight") else v for n, v in weights.items()}


ARCHITECTURES: dict[str, tuple[str, dict[str, Any], Callable[[Path, Path], Path]]] = {
    "phi3": ("Phi3Config", {"rms_norm_eps": 1e-6, "sliding_window": None}, phi3),
    "gemma": ("GemmaConfig", {"head_dim": 64, "tie_word_embeddings": True}, gemma),
    "gpt2": (
        "GPT2Config",
        {
            "n_embd": 256,
            "n_layer": 2,
            "n_head": 4,
            "num_key_value_heads": 4,
            "n_inner": 512,
            "n_positions": 256,
            "tie_word_embeddings": True,
        },
        gpt2,
    ),
}


@pytest.mark.parametrize("act_order", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_unknown_architecture_keeps_its_codes_and_its_logits(arch, act_order, model, tmp_path):
    config_class, fields, make_template = ARCHITECTURES[arch]
    floats = model(config_class, **fields)
    linear = rewritten(floats, tmp_path / "linear", transposed if arch == "gpt2" else dict)
    stored = write_gptq(tmp_path / "gptq", linear, desc_act=act_order)
    template = make_template(linear, tmp_path / "template.gguf")

    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    made = {t.source: t for t in report.tensors}
    for name in stored:
        down = name.endswith(("down_proj", "mlp.c_proj"))
        foldable = down and arch != "phi3"  # its gate and up are one matrix
        expected = "codes carried" if foldable or not act_order else "requantized"
        assert made[f"{name}.weight"].outcome == expected, name
    kept = [note for note in report.notes if "taken from the template" in note]
    assert {note.partition(":")[0].rpartition(".")[0].rpartition(".")[2] for note in kept} == (
        {"attn_norm", "ffn_norm", "output_norm"} if arch == "gemma" else set()
    )

    bridge.convert(tmp_path / "gptq", tmp_path / "f32.gguf", template=template, tensor_types=FLOAT32)
    reference = dequantized(tmp_path / "reference", linear, stored)
    if arch == "gpt2":
        reference = rewritten(reference, tmp_path / "conv1d", transposed)
    expected_logits = predict(reference, TOKENS)
    with LlamaCpp(tmp_path / "f32.gguf") as loaded:
        assert mean_kl(expected_logits, loaded.logits(TOKENS)) < 1e-5
    with LlamaCpp(tmp_path / "m.gguf") as loaded:
        limit = 0.15 if act_order else 0.05  # requantized weights, and 8-bit activations
        assert mean_kl(expected_logits, loaded.logits(TOKENS)) < limit
        assert loaded.generate_greedy(TOKENS[:8], 4)


def in_q8_0(source: Path, path: Path) -> Path:
    """A GGUF with its matrices in Q8_0, by ggml's own quantizer."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        values = np.ascontiguousarray(tensor.data, np.float32)
        raw = ggml.quantize(values.reshape(-1, values.shape[-1]), "Q8_0").reshape(*values.shape[:-1], -1)
        writer.add_tensor(tensor.name, raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, np.ndarray]]:
    """quantized(family): a checkpoint of 4 bits, and what transformers predicts with it."""

    @cache
    def make(name: str) -> tuple[Path, np.ndarray]:
        folder = tmp_path_factory.mktemp(name)
        save_checkpoint(name, folder / "float")
        stored = write_gptq(folder / "gptq", folder / "float", group_size=32)
        reference = dequantized(folder / "reference", folder / "float", stored)
        return folder / "gptq", predict(reference, TOKENS)

    return make


@pytest.mark.parametrize(
    ("name", "type"), [*((name, type) for name in TEMPLATES for type in ("F16", "Q8_0")), ("stablelm", "Q4_K_M")]
)
def test_a_gguf_of_llama_cpps_own_converter_in_any_type_is_a_template(name, type, quantized, tmp_path):
    checkpoint, expected = quantized(name)
    template = tmp_path / "template.gguf"
    golden = f"{name}-Q4_K_M" if type == "Q4_K_M" else name  # made by llama_model_quantize, as llama-quantize does
    template.write_bytes(lzma.decompress((GOLDENS / f"{golden}.gguf.xz").read_bytes()))
    if type == "Q8_0":
        template = in_q8_0(template, tmp_path / "q8_0.gguf")
    report = bridge.convert(checkpoint, tmp_path / "m.gguf", template=template, tensor_types=FLOAT32)
    left = [note for note in report.notes if "taken from the template" in note or "nowhere" in note]
    assert not [note for note in left if "its values are 1 more than those of" not in note]
    assert {t.name for t in report.tensors} == {*tensors(template)}
    with LlamaCpp(tmp_path / "m.gguf") as loaded:
        assert mean_kl(expected, loaded.logits(TOKENS)) < 1e-5


def split_phi3(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Phi-3 with q, k, v, gate and up as modules of their own, as its Llama-like copies have them."""
    made = {}
    for name, v in weights.items():
        if "qkv_proj" in name:
            for part, rows in zip("qkv", np.split(v, [256, 384]), strict=True):
                made[name.replace("qkv_proj", f"{part}_proj")] = rows
        elif "gate_up_proj" in name:
            for part, rows in zip(("gate", "up"), np.split(v, 2), strict=True):
                made[name.replace("gate_up_proj", f"{part}_proj")] = rows
        else:
            made[name] = v
    return made


def test_modules_that_the_template_has_fused_are_put_together(model, tmp_path):
    floats = model("Phi3Config", rms_norm_eps=1e-6, sliding_window=None)
    template = phi3(floats, tmp_path / "template.gguf")
    separate = rewritten(floats, tmp_path / "separate", split_phi3)
    stored = write_gptq(tmp_path / "gptq", separate)
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    kinds = {t.kind: t for t in report.tensors}
    assert kinds["attn_qkv"].outcome == kinds["ffn_up"].outcome == "codes carried"
    assert kinds["attn_qkv"].shape == (512, 256)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        qkv = np.concatenate([stored[f"{prefix}.self_attn.{part}_proj"].dequantize() for part in "qkv"])
        assert np.abs(values_of(tmp_path / "m.gguf", f"blk.{layer}.attn_qkv.weight") - qkv).max() < 1e-3
        up = np.concatenate([stored[f"{prefix}.mlp.{part}_proj"].dequantize() for part in ("gate", "up")])
        assert np.abs(values_of(tmp_path / "m.gguf", f"blk.{layer}.ffn_up.weight") - up).max() < 1e-3
    assert failures(verify(tmp_path / "m.gguf", tmp_path / "gptq", template=template)) == []
    with LlamaCpp(tmp_path / "m.gguf") as loaded:
        assert loaded.generate_greedy(TOKENS[:8], 4)


def test_a_module_that_the_template_has_in_parts_is_taken_apart(model, tmp_path):
    """A Llama whose tool fused q, k, v: the template has them apart, q and k interleaved."""
    floats = model("LlamaConfig")
    template = write_template(tmp_path / "t.gguf", floats, "llama", interleave(4, 2), **LLAMA)

    def fuse(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made = {n: v for n, v in weights.items() if "self_attn" not in n or "o_proj" in n}
        for layer in range(2):
            prefix = f"model.layers.{layer}.self_attn"
            made[f"{prefix}.qkv_proj.weight"] = np.concatenate([weights[f"{prefix}.{p}_proj.weight"] for p in "qkv"])
        return made

    stored = write_gptq(tmp_path / "gptq", rewritten(floats, tmp_path / "fused", fuse))
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    assert {t.outcome for t in report.tensors if t.kind in ("attn_q", "attn_k", "attn_v")} == {"codes carried"}
    q, k, v = np.split(stored["model.layers.1.self_attn.qkv_proj"].dequantize(), [256, 384])
    for name, rows in (("q", q[interleaved_rows(4, 64)]), ("k", k[interleaved_rows(2, 64)]), ("v", v)):
        assert np.abs(values_of(tmp_path / "m.gguf", f"blk.1.attn_{name}.weight") - rows).max() < 1e-3


def test_experts_whose_gate_and_up_the_template_has_in_one_tensor_are_stacked_so(model, tmp_path):
    """As newer converters can write them: of each expert gate's rows, then up's."""
    floats = model("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    gates: dict[str, np.ndarray] = {}

    def fuse(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        if "ffn_gate_exps" in name:
            gates[name] = values
            return {}
        if "ffn_up_exps" in name:
            gate = gates[name.replace("_up_", "_gate_")]
            return {name.replace("_up_", "_gate_up_"): np.concatenate([gate, values], axis=1)}
        return interleave(4, 2)(name, values)

    template = write_template(tmp_path / "t.gguf", floats, "llama", fuse, expert_count=4, **LLAMA)
    stored = write_gptq(tmp_path / "gptq", floats)
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    (fused,) = [t for t in report.tensors if t.name == "blk.1.ffn_gate_up_exps.weight"]
    assert (fused.outcome, fused.shape, fused.type) == ("codes carried", (4, 512, 256), "Q4_K")
    found = values_of(tmp_path / "m.gguf", fused.name)
    for expert in range(4):
        module = f"model.layers.1.block_sparse_moe.experts.{expert}"
        rows = np.concatenate([stored[f"{module}.{part}"].dequantize() for part in ("w1", "w3")])
        assert np.abs(found[expert] - rows).max() < 1e-3
    assert failures(verify(tmp_path / "m.gguf", tmp_path / "gptq", template=template)) == []


def test_awqs_norms_are_the_checkpoints_even_where_the_converter_adds_one(model, tmp_path):
    """Gemma quantized by AWQ: columns multiplied, norms (1 + w) divided by the same."""
    floats = model("GemmaConfig", head_dim=64, tie_word_embeddings=True)
    template = gemma(floats, tmp_path / "template.gguf")
    factors = np.exp(0.4 * np.random.default_rng(5).standard_normal(256)).astype(np.float32)

    def scale(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made = dict(weights)
        for name, v in weights.items():
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                made[name] = v * factors
            elif name.endswith("input_layernorm.weight"):
                made[name] = (1 + v) / factors - 1
        return made

    scaled = rewritten(floats, tmp_path / "scaled", scale)
    write_awq(tmp_path / "awq", scaled)
    report = bridge.convert(tmp_path / "awq", tmp_path / "m.gguf", template=template)
    with bridge.open_checkpoint(tmp_path / "awq") as opened:
        wanted = 1 + opened.read_float("model.layers.1.input_layernorm.weight")
    np.testing.assert_array_equal(values_of(tmp_path / "m.gguf", "blk.1.attn_norm.weight"), wanted)
    assert {t.outcome for t in report.tensors if t.kind == "attn_q"} == {"codes carried"}
    kept = " ".join(note for note in report.notes if "taken" in note)
    assert "ffn_norm" in kept
    assert "attn_norm" not in kept
    lost = rewritten(scaled, tmp_path / "lost", lambda w: w | {"model.layers.0.input_layernorm.weight": -factors})
    write_awq(tmp_path / "wrong", lost)
    with pytest.raises(BridgeError, match=r"blk.0.attn_norm.weight is not .*, and the matrices after it differ by"):
        bridge.convert(tmp_path / "wrong", tmp_path / "w.gguf", template=template)
