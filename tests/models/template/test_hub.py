"""A template by its Hub id: which file is downloaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bridge
from bridge.checkpoint.files.hub import find_template
from bridge.conversion.converter import plan_checkpoint
from bridge.errors import BridgeError
from tests.conftest import CHECKPOINT


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
    with pytest.raises(
        BridgeError, match=r"org/m-GGUF: has no GGUF of 4 bits a weight or more; give another repository"
    ):
        bridge.convert(CHECKPOINT, tmp_path / "m.gguf", template="org/m-GGUF")


def test_a_template_that_was_downloaded_is_found_without_a_network(tmp_path, monkeypatch):
    hub = Hub(monkeypatch, tmp_path, {})
    (tmp_path / "m-Q6_K.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: 1 // 0)
    assert find_template("org/m-GGUF")[0] == tmp_path / "m-Q6_K.gguf"
    assert hub.asked
