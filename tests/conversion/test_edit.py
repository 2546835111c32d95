"""Editing a GGUF's keys and names leaves its weights as they are."""

from __future__ import annotations

import os
import shutil
import sys

import gguf
import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.errors import BridgeError
from bridge.gguf_file.reader import read_gguf


@pytest.fixture
def path(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_name("First")
    writer.add_context_length(100)
    writer.add_token_list(["a", "b", "c"])
    writer.add_languages(["en", "de"])
    writer.add_tensor("token_embd.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.add_tensor("blk.0.attn_q.weight", np.arange(96, dtype=np.float16).reshape(3, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf"


def same_weights(first, second, names=None) -> None:
    a, b = (read_gguf(file).tensors for file in (first, second))
    for name, tensor in a.items():
        assert np.array_equal(tensor.raw, b[(names or {}).get(name, name)].raw), name


def test_in_place_the_new_file_takes_the_name_of_the_old_one(path, tmp_path) -> None:
    before = path.read_bytes()
    (tmp_path / "before.gguf").write_bytes(before)
    path.chmod(0o600)
    with open(path, "rb") as opened:
        done = bridge.edit(path, metadata={"general.name": "Other" * 99, "llama.context_length": "4096"}, in_place=True)
        assert done.in_place
        assert f"changed {path}" in done.summary()
        if sys.platform != "win32":  # which replaces no open file
            assert opened.read() == before
            assert path.stat().st_mode & 0o777 == 0o600
    new = read_gguf(path).metadata
    assert (new["general.name"], new["llama.context_length"]) == ("Other" * 99, 4096)
    same_weights(tmp_path / "before.gguf", path)
    assert {file.name for file in tmp_path.iterdir()} == {"m.gguf", "before.gguf"}


@pytest.mark.parametrize("length", [5, 5000])
def test_the_old_file_is_whole_until_the_new_one_is(length, path, tmp_path, monkeypatch) -> None:
    """Whenever the process is killed."""
    before, copy = path.read_bytes(), shutil.copyfileobj

    def interrupted(source, new, *size) -> None:
        copy(source, new, *size)
        assert path.read_bytes() == before
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copyfileobj", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bridge.edit(path, metadata={"general.name": "x" * length}, in_place=True)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_no_file_is_changed_without_being_asked_for(path, tmp_path) -> None:
    before, new = path.read_bytes(), {"general.name": "Other"}
    with pytest.raises(BridgeError, match=r"nothing says .*; give out for a new file, or in_place=True"):
        bridge.edit(path, metadata=new)
    with pytest.raises(BridgeError, match="nothing says which file to write"):
        bridge.edit(path, metadata=new, force=True)
    with pytest.raises(BridgeError, match="exclude each other"):
        bridge.edit(path, tmp_path / "new.gguf", metadata=new, in_place=True)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_in_place_a_file_that_has_other_names_is_refused(path, tmp_path) -> None:
    before, link, second = path.read_bytes(), tmp_path / "link.gguf", tmp_path / "second.gguf"
    link.symlink_to(path)
    with pytest.raises(BridgeError, match="links are neither followed nor replaced"):
        bridge.edit(link, metadata={"general.name": "Other"}, in_place=True)
    os.link(path, second)
    with pytest.raises(BridgeError, match="has 2 names"):
        bridge.edit(path, metadata={"general.name": "Other"}, in_place=True)
    assert path.read_bytes() == second.read_bytes() == before
    assert link.is_symlink()
    second.unlink()
    assert bridge.edit(path, metadata={"general.name": "Other"}, in_place=True).in_place


def test_a_longer_head_is_written_to_a_new_file(path, tmp_path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}" * 50)
    done = bridge.edit(path, tmp_path / "new.gguf", chat_template=template)
    assert not done.in_place
    old, new = read_gguf(path).metadata, read_gguf(tmp_path / "new.gguf").metadata
    assert dict(new) == {**old, "tokenizer.chat_template": template.read_text()}
    assert {k: new.kind(k) for k in old} == {k: old.kind(k) for k in old}
    same_weights(path, tmp_path / "new.gguf")
    reader = gguf.GGUFReader(tmp_path / "new.gguf")  # somebody else's reader finds all of it
    assert [t.name for t in reader.tensors] == ["token_embd.weight", "blk.0.attn_q.weight"]
    assert np.array_equal(reader.tensors[1].data, np.arange(96, dtype=np.float16).reshape(3, 32))


def test_keys_and_tensors_are_renamed(path, tmp_path) -> None:
    names = {"blk.0.attn_q.weight": "blk.0.attn_qkv.weight", "llama.context_length": "llama.other"}
    bridge.edit(path, tmp_path / "new.gguf", rename=names)
    same_weights(path, tmp_path / "new.gguf", names)
    new = read_gguf(tmp_path / "new.gguf")
    assert new.metadata["llama.other"] == 100
    assert "llama.context_length" not in new.metadata
    assert "blk.0.attn_q.weight" not in new.tensors


def test_new_keys_get_the_types_that_llama_cpp_reads(path, tmp_path) -> None:
    given = {
        "llama.rope.freq_base": "10000",
        "tokenizer.ggml.eos_token_id": "2",
        "tokenizer.ggml.add_bos_token": "true",
        "llama.rope.scaling.type": "linear",
        "general.languages": '["fr"]',
        "general.tags": '["chat"]',
        "llama.attention.sliding_window_pattern": "[true, false]",
        "llama.layers": "[1, -1]",
    }
    bridge.edit(path, tmp_path / "new.gguf", metadata=given)
    new = read_gguf(tmp_path / "new.gguf").metadata
    kinds = [gguf.GGUFValueType(new.kind(key)[0]).name for key in given]
    assert kinds == ["FLOAT32", "UINT32", "BOOL", "STRING", "ARRAY", "ARRAY", "ARRAY", "ARRAY"]
    kinds = [gguf.GGUFValueType(new.kind(key)[1]).name for key in list(given)[4:]]
    assert kinds == ["STRING", "STRING", "BOOL", "INT32"]
    assert [list(new[key]) for key in list(given)[4:]] == [["fr"], ["chat"], [True, False], [1, -1]]


def test_keys_are_removed(path, tmp_path) -> None:
    done = bridge.edit(path, tmp_path / "new.gguf", remove=["general.languages"])
    old, new = read_gguf(path).metadata, read_gguf(tmp_path / "new.gguf").metadata
    assert dict(new) == {key: value for key, value in old.items() if key != "general.languages"}
    assert "general.languages: ['en', 'de'] is removed" in done.summary()
    same_weights(path, tmp_path / "new.gguf")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"metadata": {"llama.context_length": "many"}}, "must be uint32"),
        ({"metadata": {"llama.rope.freq_base": "x"}}, "must be float32"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 3}}, "there are 3 tokens"),
        ({"metadata": {"general.architecture": "qwen3"}}, "describes the file"),
        ({"metadata": {"general.languages": "1"}}, "must be a list"),
        ({"metadata": {"a b": 1}}, "is no key"),
        ({"rename": {"nothing": "b"}}, "has no key or tensor nothing"),
        ({"rename": {"token_embd.weight": "blk.0.attn_q.weight"}}, "is taken"),
        ({"rename": {"token_embd.weight": "x" * 64}}, "of 1 to 63 bytes"),
        ({"rename": {"general.architecture": "b"}}, "cannot be renamed"),
        ({"metadata": {"llama.new": '[1, "a"]'}}, "a list of one kind"),
        ({"remove": ["nothing"]}, "is no key of"),
        ({"remove": ["general.architecture"]}, "cannot be removed"),
        ({"remove": ["general.name"], "metadata": {"general.name": "x"}}, "is given a value too"),
        ({"chat_template": "nowhere.jinja"}, "no such file"),
        ({}, "nothing to change"),
    ],
)
def test_what_cannot_be_changed_is_said_and_nothing_is(asked, message, path, tmp_path) -> None:
    before = path.read_bytes()
    for out in (None, tmp_path / "new.gguf"):
        with pytest.raises(BridgeError, match=message):
            bridge.edit(path, out, **asked, in_place=out is None)
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]
    assert path.read_bytes() == before


def test_the_source_and_other_files_are_not_overwritten(path, tmp_path) -> None:
    (tmp_path / "new.gguf").write_bytes(b"GGUF")
    with pytest.raises(BridgeError, match="exists"):
        bridge.edit(path, tmp_path / "new.gguf", metadata={"general.name": "Long enough to need a file"})
    with pytest.raises(BridgeError):
        bridge.edit(path, path, metadata={"general.name": "Other"}, force=True)
    with pytest.raises(BridgeError, match="damaged or truncated"):
        bridge.edit(tmp_path / "new.gguf", metadata={"general.name": "Other"}, in_place=True)
    with pytest.raises(BridgeError, match="no such file"):
        bridge.edit(tmp_path / "nowhere.gguf", metadata={"general.name": "Other"}, in_place=True)


def test_the_command_line_edits(path, tmp_path, capsys) -> None:
    new = tmp_path / "new.gguf"
    assert (
        main(
            [
                "edit",
                str(path),
                "--set",
                "general.name=A = B",
                "--rename",
                "llama.context_length=x",
                "-o",
                str(new),
                "--remove",
                "general.languages",
            ]
        )
        == 0
    )
    assert f"wrote {new}" in capsys.readouterr().out
    assert read_gguf(new).metadata["general.name"] == "A = B"
    assert "general.languages" not in read_gguf(new).metadata
    assert main(["edit", str(path), "--set", "general.name=B"]) == 2
    assert "give --out for a new file, or --in-place to replace this one" in capsys.readouterr().err
    assert main(["edit", str(path), "--set", "general.name=B", "--in-place"]) == 0
    assert read_gguf(path).metadata["general.name"] == "B"
    assert main(["edit", str(path), "--set", "llama.context_length=x", "--in-place"]) == 2
    assert "--metadata llama.context_length=x: must be uint32" in capsys.readouterr().err
