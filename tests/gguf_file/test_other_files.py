"""Files that are something else than the GGUF or checkpoint they were taken for: the refusal says what they are."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.errors import BridgeError
from bridge.gguf_file.imatrix import read_imatrix, write_imatrix
from bridge.gguf_file.reader import read_gguf
from tests.conftest import CHECKPOINT
from tests.support.command_line import one_line
from tests.support.described import describe

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 123456\n"
PAGE = b"\n<!DOCTYPE html><html><body>Access to model x is restricted</body></html>"
SAFETENSORS = struct.pack("<Q", 20) + b'{"a":{"dtype":"F32"}}'
CONTENTS = {
    "is a Git LFS pointer": POINTER,
    "is an HTML page": PAGE,
    "is a GGML file (ggjt), llama.cpp's format before GGUF": b"tjgg"
    + struct.pack("<I7i", 3, 352, 256, 256, 4, 2, 64, 2),
    "is a GGML file (ggml)": b"lmgg" + bytes(60),
    "is a safetensors file": SAFETENSORS,
    "is a file of torch or a zip archive": b"PK\3\4" + bytes(60),
}


@pytest.mark.parametrize("said", CONTENTS)
@pytest.mark.parametrize("name", ["model.gguf", "model.bin", "blob"])
@pytest.mark.parametrize("command", ["inspect", "convert", "run", "verify", "edit", "export", "perplexity"])
def test_every_command_says_what_a_file_is(tmp_path, capsys, said, name, command):
    file = tmp_path / name
    file.write_bytes(CONTENTS[said])
    if name == "model.bin" and "GGML" not in said and command in ("inspect", "convert", "verify"):
        said = said if "LFS" in said or "HTML" in said else "give the folder"
    text = tmp_path / "text.txt"
    text.write_text("a text")
    more = {
        "run": ["-p", "x"], "convert": ["out.gguf"], "verify": [CHECKPOINT], "export": ["out", "--format", "gptq"],
        "edit": ["--in-place", "--set", "general.name=x"], "perplexity": ["-f", text],
    }  # fmt: skip
    options = more.get(command, [])
    assert main([command, str(file), *map(str, options)]) == 2
    assert said in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(("content", "said"), [(POINTER, "is a Git LFS pointer"), (PAGE, "is an HTML page")])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_checkpoints_file_that_is_a_pointer_or_a_page_is_named(tmp_path, name, content, said):
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))
    (folder / name).write_bytes(content)
    with pytest.raises(BridgeError, match=rf"{name}: {said}"):
        bridge.convert(folder, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", b"GGUF" + bytes(60), "is not safetensors: it is a GGUF"),
        ("model.safetensors", struct.pack("<Q", 999) + SAFETENSORS[8:], "not a complete safetensors file"),
        ("pytorch_model.bin", SAFETENSORS, "is not a file of torch: it is a safetensors file"),
        ("pytorch_model.bin", b"GGUF" + bytes(60), "is not a file of torch: it is a GGUF"),
    ],
)
def test_weights_in_another_format_than_their_name_says_are_named(tmp_path, name, content, said):
    pytest.importorskip("torch")
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(BridgeError, match=rf"{name}: {said}"):
        bridge.convert(folder, tmp_path / "m.gguf")


def test_an_imatrix_that_is_a_pointer_is_not_taken_for_the_old_format(tmp_path):
    (tmp_path / "imatrix.dat").write_bytes(POINTER)
    with pytest.raises(BridgeError, match="is a Git LFS pointer"):
        read_imatrix(tmp_path / "imatrix.dat")


def other_kind(path: Path, kind: str) -> Path:
    """A GGUF that is an adapter, an importance matrix or a tower."""
    if kind == "imatrix":
        write_imatrix(path, {"blk.0.ffn_up.weight": (np.ones((1, 8)), np.ones(1, np.int64))}, 8, ["text"])
        return path
    writer = gguf.GGUFWriter(path, "clip" if kind == "clip" else "llama")
    if kind != "clip":
        writer.add_type(kind)
    writer.add_tensor("a.weight.lora_a", np.ones((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


KINDS = {
    "adapter": "is an adapter (LoRA), not a model",
    "imatrix": "is an importance matrix, not a model",
    "mmproj": "is a tower for images or sound (mmproj)",
    "clip": "is a tower for images or sound (mmproj)",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", ["convert", "run", "verify", "export", "quantize"])
def test_a_gguf_of_another_kind_than_a_model_is_refused_by_what_it_is(tmp_path, capsys, kind, command):
    file = other_kind(tmp_path / "x.gguf", kind)
    more = {"run": ["-p", "x"], "verify": [CHECKPOINT], "export": ["out", "--format", "gptq"]}
    assert main([command, str(file), *map(str, more.get(command, [tmp_path / "out.gguf"]))]) == 2
    assert KINDS[kind] in one_line(capsys.readouterr().err)


def test_a_template_that_is_no_model_is_refused_by_what_it_is(tmp_path):
    with pytest.raises(BridgeError, match="a GGUF of type 'adapter' is not a template"):
        bridge.convert(CHECKPOINT, tmp_path / "m.gguf", template=other_kind(tmp_path / "x.gguf", "adapter"))


def test_inspect_says_what_kind_of_gguf_it_is(tmp_path):
    assert "kind            adapter, not a model; of architecture llama" in describe(
        other_kind(tmp_path / "x", "adapter")
    )
    assert "kind            imatrix, not a model" in describe(other_kind(tmp_path / "i", "imatrix"))


@pytest.mark.parametrize(
    ("arch", "said"),
    [("mpt", "cannot run here; llama.cpp has it"), ("frob9", "is not among those of llama.cpp that gguf")],
)
def test_llama_cpp_is_named_for_architectures_that_it_has(tmp_path, arch, said):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    writer.add_tensor("token_embd.weight", np.ones((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf(tmp_path / "m.gguf").metadata["general.architecture"] == arch
    with pytest.raises(BridgeError, match=said):
        bridge.Model.load(tmp_path / "m.gguf")
