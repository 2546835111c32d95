"""gguf-bridge inspect: what a checkpoint holds and what convert would make of it; what a GGUF holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import bridge
from bridge.cli import main
from tests.conftest import CHECKPOINT
from tests.support.command_line import GATE, KINDS, types
from tests.support.raw import Raw, edit_raw


def test_inspect_tells_what_convert_would_do(run, auto):
    out = run("inspect", CHECKPOINT)
    assert "2.7 MB in 1 file" in out
    assert "architecture    qwen3, 4 layers" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    for name, found in types(auto).items():
        if name.startswith("blk.0.") and (kind := name.split(".")[2]) in KINDS:
            assert f" {found} " in lines[kind]
            assert "4 bits, groups of 128" in lines[kind]
    assert lines["token_embd"].split()[-1] == "Q8_0"


def test_inspect_sets_the_label_beside_the_data(run, mislabelled):
    out = run("inspect", mislabelled)
    assert "the label says  GPTQ, checkpoint_format gptq_v2, 4 bits, groups of 128, symmetric, act-order" in out
    assert "the data says   28 quantized modules, 4 bits, groups of 128, no act-order, 18 float tensors" in out
    assert "they differ     the label says act-order, but all groups are consecutive" in out
    assert "more: qzeros are symmetric v1 (0x77777777) but checkpoint_format says gptq_v2; read as v1" in out
    assert "they agree" in run("inspect", CHECKPOINT)


def test_inspect_describes_a_gguf(run, auto):
    out = run("inspect", auto)
    assert "architecture    qwen3, 4 layers, context 1024" in out
    assert "tokenizer       gpt2, pre qwen2, 2048 tokens" in out
    assert "weights         3.7 M in 46 tensors" in out
    assert [line.split()[:2] for line in out.splitlines()[-3:]] == [["Q4_K", "28"], ["Q8_0", "1"], ["F32", "17"]]


def test_inspect_shows_the_license_and_the_keys_of_a_gguf(
    run: Callable[..., str], auto: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "m.gguf"
    bridge.edit(auto, path, metadata={"general.license": "mit", "general.description": "long " * 50})
    assert "license         mit\n" in run("inspect", path)
    out = run("inspect", path, "--metadata")
    assert run("inspect", "--metadata", path) == out
    lines = {line.split()[0]: line for line in out.splitlines()}
    keys = bridge.open_gguf(path).metadata
    assert list(lines) == list(keys)
    assert max(map(len, lines.values())) <= 80
    assert lines["general.license"].endswith('  "mit"')
    assert lines["general.description"].endswith("long l...")
    assert lines["tokenizer.ggml.tokens"].endswith("... 2048 items")
    assert json.loads(run("inspect", path, "--metadata", "--json")) == dict(keys)


def test_inspect_prints_one_key_whole(run: Callable[..., str], auto: Path, refused: Callable[..., str]) -> None:
    tokens = bridge.open_gguf(auto).metadata["tokenizer.ggml.tokens"]
    assert json.loads(run("inspect", auto, "--metadata", "tokenizer.ggml.tokens")) == tokens
    assert run("inspect", auto, "--metadata", "general.architecture") == "qwen3\n"
    said = refused("inspect", auto, "--metadata", "general.architectur")
    assert "has no key general.architectur; did you mean general.architecture?" in said
    assert "has no key zzz; --metadata alone lists all" in refused("inspect", auto, "--metadata", "zzz")
    assert "is a folder, not a GGUF file" in refused("inspect", CHECKPOINT, "--metadata")


def test_inspect_prints_the_chat_template_of_a_gguf_or_a_checkpoint(
    run: Callable[..., str], auto: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    template = "{{ messages[0].content }}\x1b\n{# a second line #}"
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(template)
    assert main(["convert", str(folder), str(tmp_path / "m.gguf")]) == 0
    run("inspect", CHECKPOINT)  # what convert printed is read off
    for path in (folder, tmp_path / "m.gguf"):
        assert run("inspect", path, "--template") == run("inspect", "--template", path) == template + "\n"
        assert json.loads(run("inspect", path, "--template", "--json")) == {"chat_template": template}
    assert "has no chat template" in refused("inspect", auto, "--template")
    assert "print different things" in refused("inspect", auto, "--template", "--metadata")
    assert "give the checkpoint or GGUF to describe" in refused("inspect")


def test_inspect_checks_the_weights_where_it_is_asked_to(run: Callable[..., str], model: Path) -> None:
    plain = run("inspect", model)
    assert "weight check" not in plain
    checked = plain + "\nweight check    3.7 M weights in 46 tensors and modules: nothing found\n"
    assert run("inspect", model, "--check") == run("inspect", model, "--strict") == checked
    edit_raw(model / "model.safetensors", lambda tensors: copy_layer(tensors, 1, 2))
    lines = run("inspect", model, "--check").splitlines()
    assert lines[-2:] == [
        "weight check    3.7 M weights in 46 tensors and modules: 1 finding",
        f"FOUND {GATE}.qweight: has the same bytes as {GATE.replace('.2.', '.1.')}.qweight",
    ]
    assert run("inspect", model, "--strict", code=1).splitlines() == lines


def test_findings_are_in_the_json_of_inspect(run: Callable[..., str], model: Path, auto: Path) -> None:
    record = json.loads(run("inspect", auto, "--check", "--json"))
    assert (record["kind"], record["passed"], record["findings"], record["weight_notes"]) == ("gguf", True, [], [])
    edit_raw(model / "model.safetensors", lambda tensors: copy_layer(tensors, 1, 2))
    record = json.loads(run("inspect", model, "--strict", "--json", code=1))
    assert record["passed"] is False
    assert [finding["kind"] for finding in record["findings"]] == ["duplicate"]
    assert record["findings"][0]["numbers"] == {"count": 1, "original": f"{GATE.replace('.2.', '.1.')}.qweight"}
    assert "findings" not in json.loads(run("inspect", model, "--json"))


def test_inspect_refuses_a_weight_check_of_keys(refused: Callable[..., str], auto: Path) -> None:
    for option in ("--metadata", "--template"):
        assert "read the weights; leave out" in refused("inspect", auto, "--strict", option)


def copy_layer(tensors: Raw, source: int, target: int) -> None:
    """Copy a matrix of one layer over that of another."""
    for name in list(tensors):
        if name.startswith(f"model.layers.{target}.mlp.gate_proj."):
            tensors[name] = tensors[name.replace(f".{target}.", f".{source}.")]
