"""A family that is known natively: with a template its checkpoints become the same tensors."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.conversion.writing.verify import failures, verify
from bridge.errors import BridgeError
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.conftest import shared
from tests.support.encode import write_gptq
from tests.support.encode_compressed import write_float8
from tests.support.template import (
    LLAMA,
    TOKENS,
    interleave,
    tensors,
    write_template,
)

pytest.importorskip("transformers")


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
