"""Checkpoints whose class or whose tensors have names that a training tool gave them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoint import open_checkpoint
from bridge.conversion.planning.checkpoint_outline import outline_of
from bridge.errors import BridgeError
from tests.conftest import CHECKPOINT
from tests.support.command_line import edit_json
from tests.support.raw import edit_raw

Q = "model.layers.0.self_attn.q_proj"
NORM = "model.layers.0.input_layernorm.weight"


def renamed(folder: Path, new: Callable[[str], str]) -> Path:
    """A copy of the project's checkpoint with other names of tensors."""
    shutil.copytree(CHECKPOINT, folder)

    def rename(tensors: dict) -> None:
        items = list(tensors.items())
        tensors.clear()
        tensors.update({new(name): value for name, value in items})

    edit_raw(folder / "model.safetensors", rename)
    return folder


def notes_of(folder: Path) -> list[str]:
    """The notes of an outline that is the same, tensor by tensor, as of the checkpoint with its usual names."""
    with open_checkpoint(CHECKPOINT) as usual, open_checkpoint(folder) as ckpt:
        outline, expected = outline_of(ckpt), outline_of(usual)
        assert [(t.name, t.shape) for t in outline.tensors] == [(t.name, t.shape) for t in expected.tensors]
        for name in ("blk.0.attn_norm.weight", "blk.3.ffn_norm.weight"):
            (own,), (theirs,) = (next(t.parts for t in o.tensors if t.name == name) for o in (outline, expected))
            assert np.array_equal(ckpt.read_float(own.source), usual.read_float(theirs.source))
        return [note for note in [*ckpt.notes, *outline.notes] if note not in [*usual.notes, *expected.notes]]


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (lambda name: f"_orig_mod.{name}", "_orig_mod.model.embed_tokens.weight is read as model.embed_tokens.weight"),
        (lambda name: f"module.{name}", "module.model.embed_tokens.weight is read as model.embed_tokens.weight"),
        (lambda name: f"module._orig_mod.{name}", "module._orig_mod.model.embed_tokens.weight is read as model.embed"),
        (lambda name: f"base_model.model.{name}", "base_model.model.model.embed_tokens.weight is read as model.embed"),
        (lambda name: f"model.{name}", "model.model.embed_tokens.weight is read as model.embed_tokens.weight"),
        (lambda name: name.replace(".q_proj.", ".q_proj.base_layer."), f"{Q}.base_layer"),
        (lambda name: name.replace(".layers.0.", ".layers.0._orig_mod."), "model.layers.0._orig_mod."),
        (
            lambda name: name.removeprefix("model."),
            "the names of tensors lack 'model.': embed_tokens.weight is read as",
        ),
    ],
)
def test_what_training_tools_put_around_names_is_taken_off_with_a_note(tmp_path, new, said):
    (note,) = notes_of(renamed(tmp_path / "model", new))
    assert said in note


def test_an_adapter_beside_its_base_is_refused(tmp_path):
    def peft(name: str) -> str:
        name = name.replace(NORM, f"{Q}.lora_A.default.weight")
        return f"base_model.model.{name}".replace(".q_proj.", ".q_proj.base_layer.", 1)

    with pytest.raises(BridgeError, match=r"lora_A\.default\.weight belongs to an adapter that is not merged"):
        open_checkpoint(renamed(tmp_path / "model", peft))


def test_two_tensors_do_not_get_one_name(tmp_path):
    folder = renamed(tmp_path / "model", lambda name: name.replace(NORM, f"_orig_mod.{NORM}"))
    edit_raw(folder / "model.safetensors", lambda tensors: tensors.update({NORM: tensors[f"_orig_mod.{NORM}"]}))
    with pytest.raises(BridgeError, match=f"holds both .*{NORM}"):
        open_checkpoint(folder)


def test_pickled_tensors_are_renamed_too(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    shutil.copytree(CHECKPOINT, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({f"module.{name}": tensor for name, tensor in weights.items()}, tmp_path / "model" / "pytorch_model.bin")
    (note,) = notes_of(tmp_path / "model")
    assert "module.model." in note


@pytest.mark.parametrize("name", ["Qwen3Encoder", "PeftModelForCausalLM", "MyQwen3"])
def test_an_unknown_architecture_of_a_known_model_type_is_loaded_with_a_note(tmp_path, name):
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", architectures=[name])
    (note,) = notes_of(tmp_path / "model")
    assert note == f"unknown architecture {name}: the model is read as its model_type, qwen3"


def test_a_class_without_a_head_gets_none(tmp_path):
    folder = renamed(tmp_path / "model", lambda name: name.removeprefix("model."))
    edit_json(folder / "config.json", architectures=["Qwen3Model"], tie_word_embeddings=False)
    edit_raw(folder / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight", None))
    with open_checkpoint(folder) as ckpt:
        outline = outline_of(ckpt)
    assert "output.weight" not in {t.name for t in outline.tensors}
    assert "Qwen3Model has no output head: the embeddings take its place, as in llama.cpp" in outline.notes
    edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    with open_checkpoint(folder) as ckpt, pytest.raises(BridgeError, match=r"lm_head\.weight is missing"):
        outline_of(ckpt)
    (folder / "1_Pooling").mkdir()  # of Qwen3-Embedding 8B
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in
               (("Transformer", ""), ("Pooling", "1_Pooling"))]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}')
    with open_checkpoint(folder) as ckpt:
        outline = outline_of(ckpt)
    assert "output.weight" not in {t.name for t in outline.tensors}
    assert any("has no output head" in note for note in outline.notes)


def test_an_architecture_of_an_unknown_model_type_is_refused_with_both_names(tmp_path):
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", architectures=["OlmoForCausalLM"], model_type="olmo")
    with (
        open_checkpoint(tmp_path / "model") as ckpt,
        pytest.raises(BridgeError, match=r"unknown architecture OlmoForCausalLM and model_type olmo; "),
    ):
        outline_of(ckpt)
