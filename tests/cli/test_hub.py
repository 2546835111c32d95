"""Checkpoints by their Hub ids: what is downloaded, how it is named, and what happens without a network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from bridge.cli import main
from tests.conftest import CHECKPOINT, PATIENCE
from tests.support.command_line import bridge_process, one_line


@pytest.mark.parametrize(
    "extra", [[], ["pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx", "x/a.json"]]
)
def test_a_hub_id_is_downloaded_weights_once(tmp_path, monkeypatch, capsys, extra):
    files = [p.name for p in CHECKPOINT.iterdir()]
    asked: list[Any] = []

    def model_info(_api: object, name: str, **_: object) -> SimpleNamespace:
        assert name == "org/name"
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=f, size=10**6) for f in [*files, *extra]])

    def snapshot_download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(CHECKPOINT)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "org/name"]) == 0
    assert capsys.readouterr().err == f"downloading org/name: {len(files)} files, {len(files)}.0 MB\n"
    assert sorted(asked) == sorted(files)
    assert [p.name for p in tmp_path.iterdir()] == ["name-Q4_K.gguf"]


def test_a_branch_of_a_repository_is_downloaded_and_named(tmp_path, monkeypatch, capsys):
    asked: list[tuple[str, str]] = []

    def model_info(_api: object, name: str, revision: str, **_: object) -> SimpleNamespace:
        if revision == "none":
            raise huggingface_hub.errors.RevisionNotFoundError(
                "404", response=SimpleNamespace(headers={}, request=None)
            )
        asked.append((name, revision))
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=p.name) for p in CHECKPOINT.iterdir()])

    def snapshot_download(name: str, revision: str, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(CHECKPOINT)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: "in the cache")
    assert main(["convert", "org/name@gptq-4bit-32g-actorder_True"]) == 0
    assert capsys.readouterr().err == ""  # nothing to download
    assert asked == [("org/name", "gptq-4bit-32g-actorder_True")] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["name-gptq-4bit-32g-actorder_True-Q4_K.gguf"]
    assert main(["convert", "org/name@none"]) == 2
    assert "org/name: has no branch, tag or commit 'none' on the Hub" in capsys.readouterr().err


def test_bin_files_are_downloaded_where_there_is_nothing_else_and_pt_files_last():
    from bridge.checkpoint.files.weight_files import checkpoint_files

    assert checkpoint_files(["pytorch_model.bin", "config.json", "model.onnx", "a.pt"]) == [
        "pytorch_model.bin",
        "config.json",
    ]
    assert checkpoint_files(["llama-7b-4bit.pt", "config.json", "model.onnx"]) == ["llama-7b-4bit.pt", "config.json"]


def test_a_downloaded_model_is_found_without_a_network(run, tmp_path, monkeypatch):
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    def snapshot_download(name: str, revision: str | None, local_files_only: bool) -> str:
        return str(CHECKPOINT)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert "qwen3, 4 layers" in run("inspect", "org/name")


@pytest.mark.parametrize("how", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_a_hub_id_without_a_network_is_one_clear_line_at_once(tmp_path, how, command):
    process = bridge_process("run()", command, "org/no-such-model", HF_HOME=str(tmp_path), **how)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "org/no-such-model: no such folder here, and the Hub cannot be reached" in one_line(error)
