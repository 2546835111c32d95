"""--json: one JSON value alone on standard output, with the keys that docs/commands.md lists, numbers as numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import main
from bridge.cli.json_output import print_json
from tests.conftest import CHECKPOINT, ROOT
from tests.support.command_line import edit_json


def keys_in_docs(title: str) -> set[str]:
    """The keys that a row of the table in docs/commands.md names."""
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {re.escape(title)} \| (.*) \|$", text, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", row)))


def nested_keys_in_docs(title: str, name: str) -> set[str]:
    """The keys of the objects below a key, which the row has in parentheses."""
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    (inside,) = re.findall(rf"^\| {re.escape(title)} \| .*`{name}` \(([^)]*)\)", text, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", inside))


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], run: Callable[..., str]) -> Callable[..., Any]:
    """told(*arguments, code=0): what a command prints with --json."""
    return lambda *arguments, code=0: json.loads(run(*arguments, "--json", code=code))


def test_inspect(told: Callable[..., Any], auto: Path) -> None:
    gguf = told("inspect", auto)
    assert set(gguf) == keys_in_docs("`inspect` of a GGUF")
    assert set(gguf["types"][0]) == nested_keys_in_docs("`inspect` of a GGUF", "types")
    assert (gguf["kind"], gguf["layers"], gguf["bytes"]) == ("gguf", 4, auto.stat().st_size)
    assert {t["type"]: t["tensors"] for t in gguf["types"]} == {"Q4_K": 28, "Q8_0": 1, "F32": 17}
    checkpoint = told("inspect", CHECKPOINT)
    assert set(checkpoint) == keys_in_docs("`inspect` of a checkpoint")
    assert set(checkpoint["tensors"][0]) == nested_keys_in_docs("`inspect` of a checkpoint", "tensors")
    assert (checkpoint["layers"], checkpoint["agrees"], checkpoint["stops"]) == (4, True, None)
    assert [t["becomes"] for t in checkpoint["tensors"]] == ["Q8_0", *["Q4_K"] * 7]


def test_inspect_of_a_checkpoint_that_cannot_be_converted(told: Callable[..., Any], model: Path) -> None:
    edit_json(model / "config.json", architectures=["XyzForCausalLM"], model_type="xyz")
    found = told("inspect", model)
    assert "xyz" in found["stops"].lower()
    assert set(found) == keys_in_docs("`inspect` of a checkpoint")


def test_plan(told: Callable[..., Any]) -> None:
    plan = told("plan", CHECKPOINT, "--type", "Q8_0", "--split-max-size", "1M")
    assert set(plan) == keys_in_docs("`plan`")
    assert set(plan["tensors"][0]) == nested_keys_in_docs("`plan`", "tensors")
    assert plan["shards"] > 1
    assert sum(t["bytes"] for t in plan["tensors"]) == plan["bytes"]
    assert {t["type"] for t in plan["tensors"] if len(t["shape"]) > 1} == {"Q8_0"}


def test_verify_with_its_exit_code(told: Callable[..., Any], auto: Path) -> None:
    found = told("verify", auto, CHECKPOINT)
    assert set(found) == keys_in_docs("`verify`")
    assert (found["passed"], found["failures"]) == (True, [])
    assert all(isinstance(t["bpw"], float) for t in found["tensors"])
    failed = told("verify", auto, CHECKPOINT, "--max-nmse", "0", code=1)
    assert not failed["passed"]
    assert "token_embd.weight" in failed["failures"][0]


def test_perplexity(auto: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("KING RICHARD: Now is the winter of our discontent. " * 30)
    command = ["perplexity", auto, "-f", tmp_path / "text.txt", "--windows", "1", "--length", "32", "--json"]
    for more, compared in (([], False), (["--reference", auto], True)):
        assert main([*map(str, command), *map(str, more)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert set(found) == keys_in_docs("`perplexity`")
        assert found["perplexity"] > 1
        assert (found["divergence"] is not None) is compared
        if compared:
            assert set(found["divergence"]) == nested_keys_in_docs("`perplexity`", "divergence")


def test_bench(told: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_ROUNDS": 1, "LARGE": (512, 256), "SMALL": (256, 256)}.items():
        monkeypatch.setattr(f"bridge.runtime.bench.{name}", value)
    found = told("bench", "Q4_0", "--threads", "1")
    assert set(found) == keys_in_docs("`bench`")
    assert [product["shape"] for product in found["products"]] == [[512, 256], [256, 256]]
    assert set(found["products"][0]) == nested_keys_in_docs("`bench`", "products")
    assert found["products"][0]["seconds"] > 0


def test_cache(told: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    entry = tmp_path / "gguf-bridge" / "models" / "m-0123456789ab"
    entry.mkdir(parents=True)
    (entry / "m.gguf").write_bytes(bytes(1000))
    listed = told("cache")
    assert set(listed) == keys_in_docs("`cache`")
    assert set(listed["entries"][0]) == nested_keys_in_docs("`cache`", "entries")
    assert (listed["entries"][0]["name"], listed["entries"][0]["bytes"]) == (entry.name, 1000)
    cleared = told("cache", "--clear")
    assert set(cleared) == keys_in_docs("`cache --clear`")
    assert (cleared["removed_bytes"], cleared["in_use"], entry.exists()) == (1000, [], False)


def test_what_json_cannot_hold_is_null_and_text_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [float("inf")], "c": "\x7f\x1bé", "d": Path("x"), "e": (True, None)})
    found = json.loads(capsys.readouterr().out)
    assert found == {"a": None, "b": [None], "c": "\x7f\x1bé", "d": "x", "e": [True, None]}
