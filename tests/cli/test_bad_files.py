"""Files of a checkpoint that are missing, cut, endless or of another kind: one line names the file; nothing changes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.cli import main
from tests.conftest import posix
from tests.support.command_line import GATE, edit_json
from tests.support.raw import shard


def test_an_endless_text_of_somebodys_file_is_cut_in_the_middle(model, convert, capsys):
    """The fact before it and the way out behind it stay."""
    edit_json(model / "config.json", hidden_act="x" * 10_000)
    error = convert()
    assert len(error) < 1100
    assert f"{model / 'config.json'}: hidden_act is 'xxx" in error
    assert "can be converted\n" in error[-100:]
    assert main(["inspect", str(model)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 1000


def test_a_missing_shard_is_named(model, convert):
    shard(model)[1].unlink()
    assert "model-00002-of-00002.safetensors" in convert()
    (model / "model.safetensors.index.json").unlink()
    assert "model-00002-of-00002.safetensors: missing" in convert()


@pytest.mark.parametrize("name", ["model.safetensors", "gptq_model-4bit-128g.safetensors"])
def test_the_unquantized_models_index_is_passed_over_where_one_file_holds_all(model, tmp_path, name):
    shutil.copyfile(model / "model.safetensors", tmp_path / "whole")
    for file in shard(model):
        file.unlink()
    shutil.move(tmp_path / "whole", model / name)
    assert bridge.convert(model, tmp_path / "out.gguf").tensors


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(model, convert, keep):
    file = model / "model.safetensors"
    os.truncate(file, int(keep * file.stat().st_size))
    assert str(file) in convert()


@pytest.mark.parametrize("place", ["../x.safetensors", "{0}/x.safetensors", "a/../../x.safetensors"])
def test_an_index_that_points_outside_its_folder_is_refused(model, convert, tmp_path, place):
    shutil.copy(model / "model.safetensors", tmp_path / "x.safetensors")
    index = {"weight_map": {f"{GATE}.qweight": place.format(tmp_path)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    error = convert()
    assert "model.safetensors.index.json" in error
    assert "outside its folder" in error


class Evil:
    """Unpickling it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("layout", ["torch", "pickle"])
def test_code_in_a_bin_file_is_not_run(model, convert, tmp_path, layout):
    (model / "model.safetensors").unlink()
    marker = tmp_path / "code-was-run"
    file = model / "pytorch_model.bin"
    if layout == "torch":
        import torch

        torch.save({"a": Evil(marker)}, file)
    else:
        file.write_bytes(pickle.dumps(Evil(marker)))
    assert "pytorch_model.bin" in convert()
    assert not marker.exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(model, convert, name):
    (model / name).unlink()
    if name == "model.safetensors":
        name = "*.safetensors"
    assert name in convert()


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "quantize_config.json"]
)
@pytest.mark.parametrize("text", ["{", "[]", "\0"])
def test_a_file_that_is_not_json_is_named(model, convert, name, text):
    (model / name).write_text(text)
    assert str(model / name) in convert()


FROM_THE_MODEL = [
    "config.json", "quantize_config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", "model.safetensors.index.json",
]  # fmt: skip


@posix
@pytest.mark.parametrize("name", [*FROM_THE_MODEL, "model.safetensors"])
@pytest.mark.parametrize("what", ["pipe", "device"])
def test_what_never_ends_is_not_read(model, convert, name, what):
    file = model / name
    file.unlink(missing_ok=True)
    os.mkfifo(file) if what == "pipe" else file.symlink_to("/dev/zero")
    assert f"{file}: is not a regular file" in convert()


@pytest.mark.parametrize("name", FROM_THE_MODEL)
def test_json_that_is_far_too_large_is_not_read_whole(model, convert, name, monkeypatch):
    monkeypatch.setattr("bridge.system.storage.files.MAX_SMALL", 1_000_000)
    (model / name).write_bytes(b" " * 1_000_001)
    assert f"{model / name}: has more than 1 MB" in convert()


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 2728\n"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("config.json", None),
        ("quantize_config.json", None),
        ("tokenizer.json", None),
        ("tokenizer.model", "tokenizer.json"),
        ("model.safetensors", None),
        ("pytorch_model.bin", "model.safetensors"),
    ],
)
def test_a_clone_without_git_lfs_is_told_how_to_get_the_files(model, convert, name, other):
    if other:
        (model / other).unlink()
    (model / name).write_text(POINTER)
    assert f"{model / name}: is a Git LFS pointer, not the file itself; run `git lfs pull`" in convert()


def test_a_byte_order_mark_before_json_does_no_harm(model, tmp_path):
    for name in ("config.json", "quantize_config.json", "tokenizer.json"):
        (model / name).write_text((model / name).read_text(), encoding="utf-8-sig")
    assert main(["convert", str(model), str(tmp_path / "out.gguf")]) == 0


def change_tokenizer(model: Path, changes: dict[str, Any]) -> None:
    """Set keys of tokenizer.json's model."""
    data = json.loads((model / "tokenizer.json").read_text())
    data["model"] |= changes
    (model / "tokenizer.json").write_text(json.dumps(data))


@pytest.mark.parametrize("vocab", [None, {}, [], {"a": "one"}])
def test_a_vocabulary_that_is_none(model, convert, vocab):
    change_tokenizer(model, {"vocab": vocab})
    assert "tokenizer.json" in convert()


@pytest.mark.parametrize("changes", [{"added_tokens_decoder": ["a"]}, {"added_tokens_decoder": {"0": "a"}}])
def test_settings_of_a_tokenizer_that_are_not_as_they_should_be(model, convert, changes):
    edit_json(model / "tokenizer_config.json", **changes)
    assert "a tokenizer file (tokenizer.json, tokenizer_config.json ...) is not as" in convert()


def test_a_tokenizer_that_is_too_small_for_the_embedding_is_reported(model, tmp_path, capsys):
    vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    change_tokenizer(model, {"vocab": {token: i for token, i in vocab.items() if i < 1000}})
    assert main(["convert", str(model), str(tmp_path / "out.gguf")]) == 0
    assert "tokens for an embedding of 2048 rows; it may belong to another model" in capsys.readouterr().out
