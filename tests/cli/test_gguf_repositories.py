"""A GGUF by the name of its repository on the Hub, and a tag: which file is taken, and by which commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.checkpoint.files.hub import kind_of, model_name, resolve, resolve_gguf, resolve_model
from bridge.cli import main
from bridge.errors import BridgeError
from tests.conftest import CHECKPOINT
from tests.models.template.test_hub import Hub

NAMES = [
    "m-IQ4_XS.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "mmproj-m-Q8_0.gguf", "m-imatrix-Q6_K.gguf", "README.md",
    "BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf", "UD/m-UD-Q2_K_XL.gguf",
]  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A repository of GGUFs, which are never opened."""
    return Hub(monkeypatch, tmp_path / "hub", dict.fromkeys(NAMES, 10**6))


@pytest.mark.parametrize(
    ("id", "files"),
    [
        ("org/m-GGUF", ["m-Q4_K_M.gguf"]),
        ("org/m-GGUF:Q4_K_S", ["m-Q4_K_S.gguf"]),
        ("org/m-GGUF:iq4_xs", ["m-IQ4_XS.gguf"]),
        ("org/m-GGUF:UD-Q2_K_XL", ["UD/m-UD-Q2_K_XL.gguf"]),
        ("org/m-GGUF@v2:BF16", [f"BF16/m-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]),
    ],
)
def test_a_tag_names_a_gguf_all_shards_of_it(hub: Hub, id: str, files: list[str], capsys: Any) -> None:
    assert kind_of(id) == "hub"
    assert resolve_gguf(id) == hub.folder / files[0]
    assert hub.asked == ["org/m-GGUF", "v2" if "@" in id else None, *files]
    more = " and 1 more" if len(files) > 1 else ""
    said = f"org/m-GGUF: takes {files[0]}{more}, {len(files)}.0 MB\n"
    assert capsys.readouterr().err.startswith(said)
    assert model_name(id) == ("m-v2" if "@" in id else "m")


def test_without_a_tag_q4_k_m_is_taken_else_q8_0_else_the_first(tmp_path: Path, monkeypatch: Any) -> None:
    for names, taken in ((["a-Q2_K.gguf", "a-Q8_0.gguf"], "a-Q8_0.gguf"), (["b.gguf", "a.gguf"], "a.gguf")):
        Hub(monkeypatch, tmp_path, dict.fromkeys(names, 1))
        assert resolve_gguf("org/m") == tmp_path / taken


def test_a_repository_with_a_checkpoint_too_is_one_unless_a_tag_is_given(tmp_path: Path, monkeypatch: Any) -> None:
    Hub(monkeypatch, tmp_path, dict.fromkeys(["config.json", "model.safetensors", "m-Q8_0.gguf"], 1))
    assert resolve_model("org/m") == resolve("org/m") == tmp_path
    assert resolve_model("org/m:Q8_0") == tmp_path / "m-Q8_0.gguf"
    with pytest.raises(BridgeError, match="org/m: is a checkpoint; `gguf-bridge convert` makes a GGUF of it"):
        resolve_gguf("org/m")


@pytest.mark.parametrize(
    ("id", "said"),
    [
        ("org/m:Q4KM", "has no GGUF Q4KM; it has BF16, IQ4_XS, Q4_K_M, Q4_K_S, UD-Q2_K_XL; did you mean Q4_K_M?"),
        ("org/m:Q8_0", "org/m: has no GGUF Q8_0; it has BF16, "),  # but a tower
        ("org/m:Q6_K", "org/m: has no GGUF Q6_K; it has BF16, "),  # but an importance matrix
    ],
)
def test_a_tag_that_is_not_there_is_answered_with_those_that_are(hub: Hub, id: str, said: str) -> None:
    with pytest.raises(BridgeError) as error:
        resolve_gguf(id)
    assert said in str(error.value)
    assert hub.asked == []


def test_a_gguf_where_a_checkpoint_is_asked_for_is_refused(hub: Hub, refused: Callable[..., str]) -> None:
    for id in ("org/m:Q4_K_M", "org/m"):
        assert f"{id}: is a GGUF, not a checkpoint; `gguf-bridge export`" in refused("repack", id, "out")


def test_a_gguf_that_was_downloaded_is_found_without_a_network(tmp_path: Path, monkeypatch: Any) -> None:
    hub = Hub(monkeypatch, tmp_path, {})
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: 1 // 0)
    (tmp_path / "m-Q5_K_M.gguf").write_bytes(b"GGUF")
    assert resolve_gguf("org/m") == tmp_path / "m-Q5_K_M.gguf"
    assert hub.asked


def test_each_command_that_takes_a_gguf_takes_its_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    bridge.convert(CHECKPOINT, folder / "m-Q4_K_M.gguf")
    Hub(monkeypatch, folder, {"m-Q4_K_M.gguf": 2 * 10**6})
    monkeypatch.chdir(tmp_path)
    name = "org/m-GGUF:Q4_K_M"
    (tmp_path / "text.txt").write_text("KING RICHARD: " * 200)
    for command in (
        ["run", name, "-p", "KING", "-n", "1", "--draft", name],
        ["inspect", name],
        ["convert", name, "--type", "Q8_0"],
        ["verify", name, str(CHECKPOINT)],
        ["export", name, "floats"],
        ["edit", name, "--set", "general.name=New", "-o", "new.gguf"],
        ["perplexity", name, "-f", "text.txt", "--reference", name, "--windows", "1"],
        ["warmup", name],
    ):
        assert main(command) == 0, capsys.readouterr().err
        assert "takes m-Q4_K_M.gguf, 2.0 MB" in capsys.readouterr().err
    assert (tmp_path / "m-Q8_0.gguf").is_file()
    assert bridge.Model.load(name).path == folder / "m-Q4_K_M.gguf"
