"""--template: any architecture, with the names, metadata and row order of a GGUF that llama.cpp's converter made."""

from __future__ import annotations

import json
import lzma
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from bridge.checkpoint.files.hub import find_template
from bridge.cli import main
from bridge.cli.inspect import describe
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.importance import Importance
from bridge.conversion.planner import outline_of
from bridge.conversion.verify import failures, verify
from bridge.errors import BridgeError
from bridge.gguf_file.rope_rows import interleaved_rows
from bridge.models.template.match import Matrix, find_in_several, find_rows
from bridge.models.template.names import candidates
from scripts.peers import ggml
from scripts.peers.llama_cpp import LlamaCpp
from scripts.peers.reference import mean_kl
from tests.conftest import CHECKPOINT, shared
from tests.support.encode import load_floats, write_awq, write_gptq
from tests.support.encode_compressed import write_float8
from tests.support.family_models import TEMPLATES
from tests.support.make_families import GOLDENS, save_checkpoint
from tests.support.template import write_template

pytest.importorskip("transformers")
from tests.support.tiny_models import dequantized, predict, save_model

TOKENS = np.random.default_rng(1).integers(0, 320, 48).tolist()
FLOAT32 = [(".*", "F32")]
LLAMA = {
    "attention__layer_norm_rms_epsilon": 1e-6,
    "rope__dimension_count": 64,
    "rope__freq_base": 10000.0,
    "vocab_size": 320,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """model(config class, **fields): a float model of random weights."""

    @cache
    def make(config_class: str, **fields: Any) -> Path:
        return save_model(tmp_path_factory.mktemp(config_class) / "float", config_class, **fields)

    return make


def tensors(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def values_of(path: Path, name: str) -> np.ndarray:
    tensor = tensors(path)[name]
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def interleave(heads: int, kv_heads: int) -> Callable[[str, np.ndarray], dict[str, np.ndarray]]:
    """What the converter does to q and k of a llama."""

    def change(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        for part, n in (("attn_q.", heads), ("attn_k.", kv_heads)):
            if part in name:
                return {name: values[interleaved_rows(n, len(values) // n)]}
        return {name: values}

    return change


def rewritten(source: Path, folder: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Path:
    """A copy of a float model with its tensors changed."""
    shutil.copytree(source, folder)
    made = {name: np.ascontiguousarray(v, np.float32) for name, v in change(load_floats(source)).items()}
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    return folder


# --- what is known natively comes out the same ---


@pytest.mark.parametrize(
    ("name", "type_"),
    [
        ("llama-gptq-4bit-g128-asym-actorder", "F16"),
        ("qwen3-awq-4bit-g128-gemm", "Q8_0"),
        ("qwen3-awq-4bit-g128-gemm", "Q4_K"),
        ("qwen3-gptq-2bit-g64-asym-v2", "BF16"),
    ],
)
def test_real_checkpoints_become_the_same_tensors_as_without_a_template(name, type_, tmp_path):
    """The template is of the unquantized model, in whatever type; AWQ's norms differ from it, and are found."""
    template = tmp_path / "template.gguf"
    bridge.convert(shared(f"models/tiny-{name.partition('-')[0]}"), template, tensor_types=[(".*", type_)])
    bridge.convert(shared(f"checkpoints/{name}"), tmp_path / "native.gguf")
    report = bridge.convert(shared(f"checkpoints/{name}"), tmp_path / "m.gguf", template=template)
    assert not [note for note in report.notes if "taken from the template" in note]
    native, made = tensors(tmp_path / "native.gguf"), tensors(tmp_path / "m.gguf")
    assert list(made) == list(native)
    assert [n for n in native if not np.array_equal(made[n].data, native[n].data)] == []
    assert failures(verify(tmp_path / "m.gguf", shared(f"checkpoints/{name}"), template=template)) == []


@pytest.mark.parametrize("act_order", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2moe"])
def test_experts_are_stacked_as_without_a_template(kind, act_order, model, tmp_path):
    fields: dict[str, Any] = {"num_experts_per_tok": 2}
    if kind == "mixtral":
        floats = model("MixtralConfig", num_local_experts=4, sliding_window=None, **fields)
    else:
        sizes = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512}
        floats = model("Qwen2MoeConfig", num_experts=4, **sizes, **fields)
    write_gptq(tmp_path / "gptq", floats, desc_act=act_order)
    bridge.convert(floats, tmp_path / "template.gguf", tensor_types=[(".*", "F16")])
    bridge.convert(tmp_path / "gptq", tmp_path / "native.gguf")
    bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=tmp_path / "template.gguf")
    native, made = tensors(tmp_path / "native.gguf"), tensors(tmp_path / "m.gguf")
    assert list(made) == list(native)
    assert [n for n in native if not np.array_equal(made[n].data, native[n].data)] == []


def test_metadata_and_tokenizer_are_the_templates_to_the_type_of_each_value(model, tmp_path):
    floats = model("LlamaConfig")
    template = write_template(tmp_path / "t.gguf", floats, "llama", interleave(4, 2), **LLAMA)
    write_gptq(tmp_path / "gptq", floats)
    bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    wanted, found = gguf.GGUFReader(template).fields, gguf.GGUFReader(tmp_path / "m.gguf").fields
    own = {"general.file_type", "GGUF.kv_count", "GGUF.tensor_count", "GGUF.version"}
    assert set(found) == set(wanted)
    for key in set(wanted) - own:
        assert found[key].types == wanted[key].types, key
        assert found[key].contents() == wanted[key].contents(), key
    assert found["general.name"].contents() == "The template's own name"
    assert found["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M


def test_the_checkpoint_needs_neither_config_nor_tokenizer(model, tmp_path, capsys):
    floats = model("LlamaConfig")
    template = write_template(tmp_path / "t.gguf", floats, "llama", interleave(4, 2), **LLAMA)
    write_gptq(tmp_path / "gptq", floats)
    whole = bridge.convert(tmp_path / "gptq", tmp_path / "whole.gguf", template=template)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / "gptq" / file).unlink()
    with pytest.raises(BridgeError, match=r"config.json: not found"):
        bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf")
    assert main(["convert", str(tmp_path / "gptq"), str(tmp_path / "m.gguf"), "--template", str(template)]) == 0
    assert "codes kept" in capsys.readouterr().out
    assert (tmp_path / "m.gguf").read_bytes() == whole.outputs[0].read_bytes()
    arguments = ["verify", str(tmp_path / "m.gguf"), str(tmp_path / "gptq"), "--template", str(template)]
    assert main(arguments) == 0
    with LlamaCpp(tmp_path / "m.gguf") as loaded:
        assert len(loaded.generate_greedy(TOKENS[:8], 8)) == 8


def test_8_bit_floats_are_known_again_in_a_template_of_the_model_before_them(model, tmp_path):
    floats = model("LlamaConfig")
    template = write_template(tmp_path / "t.gguf", floats, "llama", interleave(4, 2), **LLAMA)
    write_float8(tmp_path / "fp8", floats, (128, 128))
    report = bridge.convert(tmp_path / "fp8", tmp_path / "m.gguf", template=template)
    assert not [note for note in report.notes if "taken from the template" in note]
    bridge.convert(tmp_path / "fp8", tmp_path / "native.gguf")
    native, made = tensors(tmp_path / "native.gguf"), tensors(tmp_path / "m.gguf")
    assert [n for n in native if not np.array_equal(made[n].data, native[n].data)] == []


def test_a_template_in_shards_is_read_whole(model, tmp_path):
    floats = model("LlamaConfig")
    write_gptq(tmp_path / "gptq", floats)
    for split, name in ((0, "one"), (700_000, "several")):
        write_template(tmp_path / f"{name}.gguf", floats, "llama", interleave(4, 2), split=split, **LLAMA)
    shard = min(tmp_path.glob("several-00001-of-*.gguf"))
    assert len(list(tmp_path.glob("several-*.gguf"))) > 2
    bridge.convert(tmp_path / "gptq", tmp_path / "a.gguf", template=tmp_path / "one.gguf")
    bridge.convert(tmp_path / "gptq", tmp_path / "b.gguf", template=shard)
    one, other = tensors(tmp_path / "a.gguf"), tensors(tmp_path / "b.gguf")
    assert all(np.array_equal(one[name].data, other[name].data) for name in one)
    assert not [key for key in gguf.GGUFReader(tmp_path / "b.gguf").fields if key.startswith("split.")]


def test_a_modelfile_can_be_made_from_the_templates_tokenizer(model, tmp_path):
    floats = model("LlamaConfig")
    template = write_template(tmp_path / "t.gguf", floats, "llama", interleave(4, 2), **LLAMA)
    write_gptq(tmp_path / "gptq", floats)
    bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template, modelfile=True)
    assert (tmp_path / "Modelfile").read_text().startswith("FROM ./m.gguf\n")


# --- architectures that are not known natively ---


def phi3(floats: Path, path: Path) -> Path:
    return write_template(path, floats, "phi3", **{k: v for k, v in LLAMA.items() if k != "vocab_size"})


def gemma(floats: Path, path: Path) -> Path:
    def change(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        return {name: values + 1 if "norm" in name else values}

    sizes = {"attention__key_length": 64, "attention__value_length": 64}
    return write_template(path, floats, "gemma", change, attention__layer_norm_rms_epsilon=1e-6, **sizes)


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
        assert made[f"{name}.weight"].how == expected, name
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
    assert kinds["attn_qkv"].how == kinds["ffn_up"].how == "codes carried"
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
    assert {t.how for t in report.tensors if t.kind in ("attn_q", "attn_k", "attn_v")} == {"codes carried"}
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
    assert (fused.how, fused.shape, fused.type) == ("codes carried", (4, 512, 256), "Q4_K")
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
    assert {t.how for t in report.tensors if t.kind == "attn_q"} == {"codes carried"}
    kept = " ".join(note for note in report.notes if "taken" in note)
    assert "ffn_norm" in kept
    assert "attn_norm" not in kept
    lost = rewritten(scaled, tmp_path / "lost", lambda w: w | {"model.layers.0.input_layernorm.weight": -factors})
    write_awq(tmp_path / "wrong", lost)
    with pytest.raises(BridgeError, match=r"blk.0.attn_norm.weight is not .*, and the matrices after it differ by"):
        bridge.convert(tmp_path / "wrong", tmp_path / "w.gguf", template=template)


# --- multi-head latent attention ---

HEADS, KEY, ROPE, VALUE, RANK = 4, 32, 16, 64, 256
LATENT: dict[str, Any] = {
    "num_key_value_heads": HEADS, "qk_nope_head_dim": KEY, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE,
    "kv_lora_rank": RANK, "q_lora_rank": 256, "head_dim": ROPE, "first_k_dense_replace": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip


def deepseek(floats: Path, path: Path) -> Path:
    """As the converter splits kv_b_proj: of each head k's rows, transposed, and v's."""

    def change(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        if "attn_kv_b" not in name:
            return {name: values}
        k, v = np.split(values.reshape(HEADS, KEY + VALUE, RANK), [KEY], axis=1)
        return {name.replace("kv_b", "k_b"): k.swapaxes(1, 2), name.replace("kv_b", "v_b"): v}

    keys = {
        "attention__head_count_kv": 1, "attention__q_lora_rank": 256, "attention__kv_lora_rank": RANK,
        "attention__key_length": RANK + ROPE, "attention__value_length": RANK, "attention__key_length_mla": KEY + ROPE,
        "attention__value_length_mla": VALUE, "attention__layer_norm_rms_epsilon": 1e-6, "rope__dimension_count": ROPE,
        "rope__freq_base": 10000.0, "leading_dense_block_count": 2, "expert_count": 0, "expert_used_count": 0,
        "expert_feed_forward_length": 256, "expert_shared_count": 1, "expert_weights_scale": 1.0,
        "expert_gating_func": 2, "vocab_size": 320,
    }  # fmt: skip
    return write_template(path, floats, "deepseek2", change, **keys)


@pytest.mark.parametrize("act_order", [False, True])
def test_latent_attention_keeps_the_codes_of_its_values_and_takes_its_keys_from_the_template(
    act_order, model, tmp_path
):
    floats = model("DeepseekV3Config", **LATENT)
    stored = write_gptq(tmp_path / "gptq", floats, desc_act=act_order)
    template = deepseek(floats, tmp_path / "template.gguf")
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    kinds = {t.kind: t for t in report.tensors}
    assert (kinds["attn_v_b"].shape, kinds["attn_k_b"].shape) == ((HEADS, VALUE, RANK), (HEADS, RANK, KEY))
    assert kinds["attn_v_b"].how == ("requantized" if act_order else "codes carried")
    kept = [note for note in report.notes if "the template as" in note]
    assert len(kept) == 2
    for note, layer in zip(kept, range(2), strict=True):
        assert note.startswith(f"blk.{layer}.attn_k_b.weight: ")
        assert note.endswith(f"the checkpoint has it transposed, in model.layers.{layer}.self_attn.kv_b_proj.weight")
        weights = stored[f"model.layers.{layer}.self_attn.kv_b_proj"].dequantize()
        values = weights.reshape(HEADS, KEY + VALUE, RANK)[:, KEY:]
        made = values_of(tmp_path / "m.gguf", f"blk.{layer}.attn_v_b.weight")
        assert np.abs(made - values).max() < (2e-2 if act_order else 1e-3)
    assert failures(verify(tmp_path / "m.gguf", tmp_path / "gptq", template=template)) == []

    bridge.convert(tmp_path / "gptq", tmp_path / "f32.gguf", template=template, tensor_types=FLOAT32)
    reference = dequantized(tmp_path / "reference", floats, stored)

    def with_its_keys(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name, v in load_floats(floats).items():
            if "kv_b_proj" in name:
                weights[name] = weights[name].copy()
                weights[name].reshape(HEADS, KEY + VALUE, RANK)[:, :KEY] = v.reshape(HEADS, -1, RANK)[:, :KEY]
        return weights

    expected = predict(rewritten(reference, tmp_path / "mixed", with_its_keys), TOKENS)
    with LlamaCpp(tmp_path / "f32.gguf") as loaded:
        assert mean_kl(expected, loaded.logits(TOKENS)) < 1e-5
    with LlamaCpp(tmp_path / "m.gguf") as loaded:
        assert loaded.generate_greedy(TOKENS[:8], 4)


def test_the_importance_of_all_heads_counts_for_values_that_are_one_tensor(model, tmp_path):
    floats = model("DeepseekV3Config", **LATENT)
    write_gptq(tmp_path / "gptq", floats)
    importance = {"blk.1.attn_v_b.weight": np.random.default_rng(3).random((HEADS, RANK), np.float32)}
    with bridge.open_checkpoint(tmp_path / "gptq") as opened:
        outline = outline_of(opened, template=deepseek(floats, tmp_path / "template.gguf"))
        (tensor,) = [t for t in outline.tensors if t.name in importance]
        np.testing.assert_array_equal(Importance(importance).of(tensor), importance[tensor.name].mean(0))


def test_latent_attention_whose_norm_awq_has_divided_is_refused(model, tmp_path):
    """The template's keys would lack the factors that AWQ took out of the norm before them."""
    floats = model("DeepseekV3Config", **LATENT)
    factors = np.exp(0.4 * np.random.default_rng(5).standard_normal(RANK)).astype(np.float32)

    def scale(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made = dict(weights)
        for name, v in weights.items():
            if "kv_b_proj" in name:
                made[name] = v * factors
            elif "kv_a_layernorm" in name:
                made[name] = v / factors
        return made

    write_awq(tmp_path / "awq", rewritten(floats, tmp_path / "scaled", scale))
    template = deepseek(floats, tmp_path / "template.gguf")
    with pytest.raises(BridgeError, match=r"attn_kv_a_norm.weight is not .*AWQ .* blk.0.attn_k_b.weight, which stays"):
        bridge.convert(tmp_path / "awq", tmp_path / "m.gguf", template=template)


# --- what cannot be matched ---


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
    downs = {t.name: t.how for t in report.tensors if t.kind == "ffn_down"}
    assert downs == {"blk.0.ffn_down.weight": "requantized", "blk.1.ffn_down.weight": "codes carried"}
    assert not [note for note in report.notes if "left out" in note]
    verify(tmp_path / "m.gguf", tmp_path / "gptq", template=template)
    other = write_template(tmp_path / "other.gguf", floats, "llama", change, **LLAMA)  # draws other random numbers
    with pytest.raises(BridgeError, match=r"blk.0.ffn_up.weight: is not the template's"):
        verify(tmp_path / "m.gguf", tmp_path / "gptq", template=other)


def test_only_what_is_nowhere_in_the_template_is_left_out(model, tmp_path):
    """Not what the converter makes something else of (A_log), shapes otherwise (conv1d) or renames (dt_bias)."""
    floats = model("LlamaConfig")
    rng = np.random.default_rng(0)
    prefix = "model.layers.0.mamba."
    own = {f"{prefix}A_log": rng.random(8), f"{prefix}dt_bias": rng.random(8), f"{prefix}odd": rng.random(8),
           f"{prefix}conv1d.weight": rng.random((64, 1, 4))}  # fmt: skip
    own = {name: values.astype(np.float32) for name, values in own.items()}

    def change(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        made = {name: values + 1 if name.endswith("_norm.weight") else values}
        if name == "output_norm.weight":
            made |= {"blk.0.ssm_a": -np.exp(own[f"{prefix}A_log"]), "blk.0.ssm_dt.bias": own[f"{prefix}dt_bias"]}
            made["blk.0.ssm_conv1d.weight"] = own[f"{prefix}conv1d.weight"][:, 0]
        return made

    template = write_template(tmp_path / "t.gguf", floats, "jamba", change)
    write_gptq(tmp_path / "gptq", floats)
    weights = load_file(tmp_path / "gptq" / "model.safetensors")
    save_file(weights | own, tmp_path / "gptq" / "model.safetensors", {"format": "pt"})
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    assert [n for n in report.notes if "left out" in n] == [f"found nowhere in the template and left out: {prefix}odd"]
    taken = {n.partition(":")[0]: n for n in report.notes if "taken from the template" in n}
    norms = {f"blk.{i}.{name}_norm.weight" for i in range(2) for name in ("attn", "ffn")}
    assert set(taken) == {"blk.0.ssm_a", "blk.0.ssm_conv1d.weight", "output_norm.weight"} | norms
    assert taken["blk.0.ssm_a"].endswith(f"its values are not those of {prefix}A_log")
    assert taken["output_norm.weight"].endswith("its values are 1 more than those of model.norm.weight")
    (bias,) = [t for t in report.tensors if t.name == "blk.0.ssm_dt.bias"]
    assert bias.source == f"{prefix}dt_bias"


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


def test_inspect_says_what_convert_would_make_with_the_template(model, tmp_path, capsys):
    floats = model("GemmaConfig", **ARCHITECTURES["gemma"][1])
    write_gptq(tmp_path / "gptq", floats)
    assert main(["inspect", str(tmp_path / "gptq")]) == 0
    assert "convert would stop: " in capsys.readouterr().out

    template = gemma(floats, tmp_path / "t.gguf")
    assert main(["inspect", str(tmp_path / "gptq"), "--template", str(template)]) == 0
    said = capsys.readouterr().out
    assert f"architecture    gemma, 2 layers, as {template} has them" in said
    assert "blk.0.attn_norm.weight and 1 more: taken from the template as F32" in said
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    rows = {line.split()[0]: line for line in said.splitlines() if "codes carried" in line}
    assert rows.keys() == {t.kind for t in report.tensors if t.how == "codes carried"}
    assert all(t.type in rows[t.kind].split() for t in report.tensors if t.how == "codes carried")


def test_inspect_says_which_matrices_would_stay_the_templates(model, tmp_path):
    floats = model("LlamaConfig")

    def change(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        return interleave(4, 2)(name, values[::-1] ** 3 if name == "blk.0.ffn_up.weight" else values)

    template = write_template(tmp_path / "t.gguf", floats, "llama", change, **LLAMA)
    write_gptq(tmp_path / "gptq", floats)
    row = next(line for line in describe(tmp_path / "gptq", template=template).splitlines() if line[:6] == "ffn_up")
    assert "taken from the template / 4 bits, groups of 128" in row
    assert "F16 / Q4_K" in row


def test_inspect_wants_a_checkpoint_beside_a_template(model, tmp_path):
    template = write_template(tmp_path / "t.gguf", model("LlamaConfig"), "llama", interleave(4, 2), **LLAMA)
    with pytest.raises(BridgeError, match="is no checkpoint; --template says what a checkpoint would become"):
        describe(template, template=template)


def test_another_models_template_is_refused(model, tmp_path):
    floats = model("LlamaConfig")
    other = model("LlamaConfig", seed=8)
    template = write_template(tmp_path / "t.gguf", other, "llama", interleave(4, 2), **LLAMA)
    write_gptq(tmp_path / "gptq", floats)
    with pytest.raises(BridgeError, match=r"14 of 14 matrices of .* are not in this template .* of another model$"):
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
    with pytest.raises(BridgeError, match=r"blk.1.ffn_down.weight is missing, which model.layers.1.mlp.down_proj"):
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
        ("imatrix", "a GGUF of type 'imatrix' is no template"),
        ("empty", "a GGUF without token_embd.weight is no template"),
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
    with pytest.raises(BridgeError, match="--pre and --template"):
        bridge.convert(CHECKPOINT, tmp_path / "m.gguf", template=tmp_path / "t.gguf", pre="qwen2")


def test_an_unknown_architecture_is_told_of_the_template(tmp_path):
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"architectures": ["OlmoForCausalLM"]}))
    with pytest.raises(BridgeError, match=r"the architecture is OlmoForCausalLM; .* or --template model-f16.gguf"):
        bridge.convert(tmp_path / "model", tmp_path / "m.gguf")


# --- rows ---


def matrix(values: np.ndarray, noise: float = 0.0) -> Matrix:
    return Matrix((len(values), values.shape[1]), lambda a, b: values[a:b], noise=noise)


def test_any_permutation_of_rows_is_found_through_quantization_noise():
    rng = np.random.default_rng(2)
    weights = rng.standard_normal((300, 64)).astype(np.float32)
    order = rng.permutation(300)
    noisy = weights + 0.3 * rng.standard_normal(weights.shape).astype(np.float32)  # about 2 bits' worth
    found = find_rows(matrix(weights[order]), matrix(noisy, 0.09))
    assert found is not None
    assert np.array_equal(found.order, order)
    assert not found.scaled
    assert find_rows(matrix(rng.standard_normal((300, 64)).astype(np.float32)), matrix(noisy, 0.09)) is None
    assert find_rows(matrix(weights), matrix(noisy)) is None  # no quantization that could explain the noise


def test_one_wrong_row_in_many_is_noticed():
    weights = np.random.default_rng(2).standard_normal((256, 64)).astype(np.float32)
    wrong = weights.copy()
    wrong[17] *= -1
    assert find_rows(matrix(wrong), matrix(weights)) is None


def test_a_row_that_would_serve_twice_is_no_permutation():
    weights = np.random.default_rng(2).standard_normal((64, 64)).astype(np.float32)
    assert find_rows(matrix(weights[[0, 0, *range(2, 64)]]), matrix(weights)) is None


def test_rows_dealt_from_several_matrices_are_found_in_runs():
    """GPT-NeoX-like: the heads of q, k and v by turns."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((64, 96)).astype(np.float32) for _ in range(3))
    fused = np.concatenate([part[head * 16 : head * 16 + 16] for head in range(4) for part in (q, k, v)])
    runs = find_in_several(matrix(fused), [matrix(k), matrix(v), matrix(q)])
    assert runs is not None
    assert [which for which, _ in runs] == [2, 0, 1] * 4
    assert [rows[0] for _, rows in runs] == [0, 0, 0, 16, 16, 16, 32, 32, 32, 48, 48, 48]
    assert find_in_several(matrix(fused), [matrix(k), matrix(v)]) is None


# --- from the Hub ---


class Hub:
    """A repository of GGUFs of made-up sizes; what is downloaded is one file of the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, sizes: dict[str, int]) -> None:
        self.folder, self.asked = folder, list[str]()
        files = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=files))
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.download)

    def download(self, name: str, revision: str | None = None, allow_patterns: Any = None, **_: Any) -> str:
        self.asked += [name, revision, *(allow_patterns or [])]
        return str(self.folder)


def test_of_a_repository_the_smallest_gguf_that_will_do_is_the_template_and_named(tmp_path, monkeypatch):
    folder = tmp_path / "hub"
    folder.mkdir()
    bridge.convert(CHECKPOINT, folder / "m-Q4_K_M.gguf", type="Q4_K_M")
    sizes = {
        "m-Q2_K.gguf": 10, "m-IQ4_XS.gguf": 15, "mmproj-m-F16.gguf": 5, "m-imatrix-F32.gguf": 3, "README.md": 1,
        "m-Q4_K_M.gguf": 20_000_000, "Q8_0/m-Q8_0-00001-of-00002.gguf": 15_000_000,
        "Q8_0/m-Q8_0-00002-of-00002.gguf": 15_000_000, "m-BF16.gguf": 90_000_000,
    }  # fmt: skip
    hub = Hub(monkeypatch, folder, sizes)
    report = bridge.convert(CHECKPOINT, tmp_path / "m.gguf", template="org/m-GGUF@v1")
    assert hub.asked == ["org/m-GGUF", "v1", "m-Q4_K_M.gguf"]
    said = "the template is m-Q4_K_M.gguf of org/m-GGUF (20 MB), its smallest suitable file"
    assert said in report.notes
    plan = plan_checkpoint(CHECKPOINT, template="org/m-GGUF", out=tmp_path / "plan.json")
    assert plan.template == "org/m-GGUF"
    again = bridge.convert(plan=tmp_path / "plan.json", out=tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    assert again.notes == report.notes


def test_of_shards_all_are_downloaded(tmp_path, monkeypatch):
    shards = {f"m-Q8_0-0000{i}-of-00002.gguf": 5 for i in (1, 2)}
    hub = Hub(monkeypatch, tmp_path, {**shards, "m-F16.gguf": 50})
    assert find_template("org/m-GGUF")[0] == tmp_path / "m-Q8_0-00001-of-00002.gguf"
    assert hub.asked == ["org/m-GGUF", None, *shards]


def test_a_repository_without_a_gguf_that_will_do_is_refused(tmp_path, monkeypatch):
    Hub(monkeypatch, tmp_path, {"m-Q2_K.gguf": 10, "m-IQ3_XXS.gguf": 12})
    with pytest.raises(BridgeError, match=r"org/m-GGUF: has no GGUF of 4 bits a weight or more; give one that has"):
        bridge.convert(CHECKPOINT, tmp_path / "m.gguf", template="org/m-GGUF")


def test_a_template_that_was_downloaded_is_found_without_a_network(tmp_path, monkeypatch):
    hub = Hub(monkeypatch, tmp_path, {})
    (tmp_path / "m-Q6_K.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: 1 // 0)
    assert find_template("org/m-GGUF")[0] == tmp_path / "m-Q6_K.gguf"
    assert hub.asked
