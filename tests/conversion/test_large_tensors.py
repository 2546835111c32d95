"""A tensor that memory should not hold is kept in a file until it is written: Qwen3.8's table of n-grams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from bridge.conversion.writing import executor
from bridge.errors import BridgeError
from bridge.system.storage.filed_array import FiledArray
from tests.models.test_converter import GOLDENS, write_checkpoint

TABLE = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_"
_PEAK = """
import sys, bridge
from bridge.conversion.writing import executor
executor._IN_MEMORY = 1 << 20
bridge.convert(sys.argv[1], sys.argv[2], type="F16", mmproj_type="none")
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    golden = json.loads((GOLDENS / "qwen4exp.json").read_text())
    return write_checkpoint(golden, tmp_path_factory.mktemp("table") / "model")


@pytest.mark.parametrize("type", ["F16", "Q8_0"])
def test_what_is_kept_in_a_file_is_what_memory_would_hold(
    type: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    create = FiledArray.create.__func__
    monkeypatch.setattr(FiledArray, "create", classmethod(lambda cls, *args: kept.append(1) or create(cls, *args)))
    bridge.convert(checkpoint, tmp_path / "memory.gguf", type=type, mmproj_type="none")
    assert not kept
    monkeypatch.setattr(executor, "_IN_MEMORY", 0)
    bridge.convert(checkpoint, tmp_path / "file.gguf", type=type, mmproj_type="none")
    assert kept
    assert (tmp_path / "file.gguf").read_bytes() == (tmp_path / "memory.gguf").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file.gguf", "memory.gguf"]


def test_a_disk_without_room_for_it_is_said(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(executor, "_IN_MEMORY", 0)
    monkeypatch.setattr(FiledArray, "create", full)
    with pytest.raises(BridgeError, match="writing a large tensor failed"):
        bridge.convert(checkpoint, tmp_path / "m.gguf", type="F16", mmproj_type="none")


def test_a_missing_part_of_the_table_is_said(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    del weights[f"{TABLE}2.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(BridgeError, match=r"the checkpoint has 2 of them, config\.json says 3"):
        bridge.convert(folder, tmp_path / "m.gguf", mmproj_type="none")


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells a process's peak")
def test_memory_does_not_grow_with_the_table(checkpoint: Path, tmp_path: Path) -> None:
    """Four parts of half a gigabyte each, of which a conversion holds less than two."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    rows = (1 << 29) // 16
    for part in range(4):
        weights[f"{TABLE}{part}.weight"] = np.full((rows, 8), 0.5, np.float16)
    save_file(weights, folder / "model.safetensors")
    text = (folder / "config.json").read_text().replace('"split_ngram_parts": 3', '"split_ngram_parts": 4')
    (folder / "config.json").write_text(text)
    command = [sys.executable, "-c", _PEAK, folder, tmp_path / "m.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) << 10 < 1 << 30
