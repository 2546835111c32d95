"""Experts that a quantized checkpoint has as layers, or as stacks of codes, become the family's float tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.conversion.planning.checkpoint_outline import outline_of
from bridge.conversion.planning.part_reader import PartReader
from bridge.errors import BridgeError
from tests.conftest import ROOT
from tests.models.test_gpt_oss import write_mxfp4
from tests.support.encode_compressed import config, scheme
from tests.support.family_models import new_model, randomized
from tests.support.make_families import save_checkpoint

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.23")

STACKED = ["gemma4-moe", "gpt-oss", "granite-moe-swa", "hy-v4", "llama4", "mistral4", "qwen3-vl-moe"]
PARTS = {"ffn_gate_exps": ["gate_proj"], "ffn_up_exps": ["up_proj"], "ffn_down_exps": ["down_proj"]}


def write_layers(floats: Path, folder: Path, joined: bool) -> None:
    """The experts of a checkpoint's stacks as layers of signed bytes, which hold its multiples of 1/64.

    joined  whether gate and up stay one layer where the family's GGUF has them in one
    """
    shutil.copytree(floats, folder)
    tensors = load_file(floats / "model.safetensors")
    with open_checkpoint(floats) as ckpt:
        reader = PartReader(ckpt)
        for tensor in outline_of(ckpt, "default").tensors:
            for part in tensor.parts:
                if part.matrix is None or len(part.shape) != 2:
                    continue
                tensors.pop(part.source, None)
                both = ["gate_up_proj"] if joined else ["gate_proj", "up_proj"]
                names = PARTS.get(tensor.kind, both)
                weights = np.concatenate([*reader.floats(part)])
                for name, values in zip(names, np.split(weights, len(names)), strict=True):
                    layer = f"{part.source.rpartition('.')[0]}.{part.matrix}.{name}"
                    tensors[f"{layer}.weight"] = np.rint(values * 64).astype(np.int8)
                    tensors[f"{layer}.weight_scale"] = np.full((len(values), 1), 1 / 64, np.float32)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, folder / "model.safetensors")
    layers = scheme(8, "channel", None, targets=("re:.*experts.*",))
    label(folder, config(layers, form="int-quantized"))


def label(folder: Path, quantization: dict) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))


def assert_same(floats: Path, folder: Path) -> None:
    expected, found = (load_file(path / "model.safetensors") for path in (floats, folder))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].shape == values.shape, name
        assert np.array_equal(found[name], values), name


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("name", STACKED)
def test_layers_become_the_stacks_of_the_familys_float_checkpoint(tmp_path, name, joined):
    save_checkpoint(name, tmp_path / "floats")
    write_layers(tmp_path / "floats", tmp_path / "layers", joined)
    done = bridge.repack(tmp_path / "layers", tmp_path / "out", "floats", dtype="F32")
    assert not [note for note in done.notes if "experts" in note]
    assert_same(tmp_path / "floats", tmp_path / "out")


def test_layers_whose_names_are_in_the_file_keep_their_codes_in_other_formats(tmp_path):
    save_checkpoint("llama4", tmp_path / "floats")
    write_layers(tmp_path / "floats", tmp_path / "layers", False)
    done = bridge.repack(tmp_path / "layers", tmp_path / "out", "gptq")
    how = {t.name: t.how for t in done.tensors if ".experts." in t.name}
    assert {name.rpartition(".experts.")[2] for name in how} >= {"0.gate_proj.weight", "3.down_proj.weight"}
    assert {*how.values()} == {"exact"}


def test_the_floats_of_gpt_oss_are_those_that_transformers_dequantizes(tmp_path):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    write_mxfp4(randomized(new_model("gpt-oss")), tmp_path / "model")
    bridge.repack(tmp_path / "model", tmp_path / "out", "floats", dtype="F32")
    load = AutoModelForCausalLM.from_pretrained
    found = load(tmp_path / "out", dtype=torch.float32).state_dict()
    options = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.float32}
    expected = load(tmp_path / "model", **options).state_dict()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values.float()), name


@pytest.mark.parametrize("format", ["gptq", "awq", "compressed-tensors", "hqq", "modelopt", "fp8"])
def test_stacks_of_gpt_oss_are_refused_where_no_program_reads_their_codes(tmp_path, format):
    write_mxfp4(randomized(new_model("gpt-oss")), tmp_path / "model")
    with pytest.raises(BridgeError, match=rf"has no layer that {format} holds; choose format='floats'$"):
        bridge.repack(tmp_path / "model", tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


def test_stacks_of_mlx_become_layers_of_floats(tmp_path):
    bridge.repack(ROOT / "tests/data/mlx-moe", tmp_path / "out", "floats", dtype="F32")
    with open_checkpoint(ROOT / "tests/data/mlx-moe") as before, open_checkpoint(tmp_path / "out") as after:
        experts = [name for name in before.modules if ".experts." in name]
        assert len(experts) == 12
        for name in experts:
            assert np.array_equal(after.read_float(f"{name}.weight"), before.read_module(name).dequantize())


def test_experts_of_an_unknown_family_keep_their_names_with_a_note(tmp_path):
    save_checkpoint("llama4", tmp_path / "floats")
    write_layers(tmp_path / "floats", tmp_path / "layers", False)
    file = tmp_path / "layers/config.json"
    values = json.loads(file.read_text())
    values |= {"architectures": ["UnknownForCausalLM"], "model_type": "unknown"}
    file.write_text(json.dumps(values))
    done = bridge.repack(tmp_path / "layers", tmp_path / "out", "floats")
    assert [note for note in done.notes if note.startswith("the names of experts are those that they have here")]
    with open_checkpoint(tmp_path / "out") as ckpt:
        assert any(name.endswith(".experts.0.gate_proj.weight") for name in ckpt.tensors)
