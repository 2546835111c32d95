"""Which files make a checkpoint, and what kind of thing an argument names."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.checkpoint.files.hub import kind_of, model_name, resolve
from bridge.checkpoint.files.weight_files import checkpoint_files
from bridge.errors import BridgeError


@pytest.mark.parametrize(
    ("name", "config", "kind"),
    [
        (".", None, "checkpoint"),
        ("a.pt", None, "checkpoint"),
        ("a.safetensors", None, "part"),
        ("a.safetensors", ".", "checkpoint"),
        ("a.json", ".", "part"),
        ("a.gguf", None, "gguf"),
        ("sha256-123", None, "gguf"),  # as Ollama names them
        ("none.gguf", None, "gguf"),
        ("org/name@branch", None, "hub"),
        ("org/name.safetensors", None, "none"),
        ("name", None, "none"),
    ],
)
def test_an_argument_is_told_by_what_exists_then_by_its_name(tmp_path, monkeypatch, name, config, kind):
    monkeypatch.chdir(tmp_path)
    for file in ("a.pt", "a.safetensors", "a.json", "a.gguf", "sha256-123"):
        Path(file).touch()
    assert kind_of(name, config) == kind
    if kind == "hub":
        assert kind_of(Path(name)) == "none"


@pytest.mark.parametrize("argument", ["~nobody-of-that-name/x", "~nobody-of-that-name/x.gguf"])
def test_the_folder_of_a_user_who_does_not_exist_is_named(tmp_path, argument):
    for call in (lambda: kind_of(argument), lambda: resolve(argument), lambda: resolve(tmp_path, argument)):
        with pytest.raises(BridgeError, match=r"~nobody-of-that-name.*: there is no such user's folder"):
            call()


def test_of_a_repositorys_files_one_kind_of_weights_is_taken():
    rest = ["config.json", "README.md"]
    both = ["model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "onnx/model.safetensors", *rest]
    assert checkpoint_files(both) == ["model.safetensors", *rest]
    assert checkpoint_files(["training_args.bin", "pytorch_model.bin", "a.pt", *rest]) == ["pytorch_model.bin", *rest]
    assert checkpoint_files(["adapter_model.safetensors", *rest]) == ["adapter_model.safetensors", *rest]


def test_a_link_to_a_checkpoint_has_its_own_name(tmp_path, monkeypatch):
    (tmp_path / "target" / "inside").mkdir(parents=True)
    (tmp_path / "model-gptq").symlink_to(tmp_path / "target")
    assert model_name(str(tmp_path / "model-gptq")) == "model-gptq"
    assert model_name(str(tmp_path / "target" / "inside" / "..")) == "target"
    monkeypatch.chdir(tmp_path / "target")
    assert model_name(".") == "target"
