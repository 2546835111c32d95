"""Options, arguments and outputs that cannot be used: one line, exit code 2, and no file changed."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.errors import BridgeError
from bridge.models.template.template_file import expect_texts
from tests.support.command_line import OLD, edit_json
from tests.support.raw import edit_raw


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--type", "Q9_K"], "'Q9_K': choose one of auto, exact, Q2_K"),
        (["--type", "F17"], "'F17'"),
        (["--exact", "--type", "Q4_K"], "give one"),
        (["--output-type", "Q4_K_M"], "'Q4_K_M'"),
        (["--actorder-type", "F16"], "F16"),
        (["--tensor-type", "ffn_down"], "REGEX=TYPE"),
        (["--tensor-type", "(=Q4_K"], "not a regular expression"),
        (["--tensor-type", "ffn_down=Q9"], "'Q9'"),
        (["--tensor-type", "ffn_dwon=Q6_K"], "matches no tensor"),
        (["--threads", "0"], "'0'"),
        (["--split-max-size", "much"], "'much' is not a size such as 4G"),
        (["--report", "pyproject.toml/report.json"], "pyproject.toml: is not a folder"),
        (["--imatrix", "nowhere.gguf"], "nowhere.gguf"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_options_that_make_no_sense(model, convert, options, said):
    assert said in convert(*options)


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": -1}, {"split_max_size": 0}])
def test_numbers_below_one_are_refused(model, tmp_path, options):
    with pytest.raises(BridgeError, match=r"(threads|split_max_size)=-?\d: must be at least 1"):
        bridge.convert(model, tmp_path / "out.gguf", **options)


def test_a_command_that_is_none(refused):
    assert "--help" in refused("transmogrify")
    assert "checkpoint" in refused("convert")


def imatrix(path: Path, columns: dict[str, int], kind: str = "imatrix") -> Path:
    writer = gguf.GGUFWriter(path, "x")
    writer.add_type(kind)
    for name, n in columns.items():
        writer.add_tensor(f"{name}.in_sum2", np.ones((1, n), np.float32))
        writer.add_tensor(f"{name}.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_imatrix_of_another_model_or_none_at_all(model, convert, tmp_path):
    other = imatrix(tmp_path / "other.gguf", {"blk.0.attn_qkv.weight": 256})
    assert "another" in convert("--imatrix", other)
    wider = imatrix(tmp_path / "wider.gguf", {"token_embd.weight": 512})
    assert "token_embd.weight: the imatrix has 512 columns, the tensor 256" in convert("--imatrix", wider)
    no_imatrix = imatrix(tmp_path / "model.gguf", {"token_embd.weight": 256}, kind="model")
    assert "model.gguf" in convert("--imatrix", no_imatrix)
    assert "config.json" in convert("--imatrix", model / "config.json")


def test_a_checkpoint_that_is_a_file_or_not_there(model, refused, tmp_path):
    out = tmp_path / "out.gguf"
    assert "is a file" in refused("convert", model / "model.safetensors", out)
    assert "no such folder" in refused("convert", tmp_path / "nowhere", out)
    assert "give the folder" in refused("inspect", model / "model.safetensors")
    assert "no such file" in refused("inspect", "some/model.gguf")
    (tmp_path / "have.gguf").write_bytes(b"GGUF")
    assert "not a GGUF file (shorter" in refused("convert", tmp_path / "have.gguf", out)
    assert "is a GGUF, not a checkpoint" in refused("repack", tmp_path / "have.gguf", out)
    (model / "model.safetensors").rename(model / "model.gguf")
    assert "model.gguf, which is a GGUF already" in refused("convert", model, out)
    (model / "config.json").rename(model / "adapter_config.json")
    assert "convert its base model with --merge set to this folder" in refused("convert", model, out)


def test_a_gguf_that_is_none_or_cut_short(model, refused, tmp_path):
    assert "no such file" in refused("verify", tmp_path / "nowhere.gguf", model)
    assert "no such file" in refused("verify", model, tmp_path / "nowhere.gguf")
    assert "config.json: not found" in refused("run", tmp_path, "-p", "x")  # a folder is a checkpoint
    assert "neither a GGUF file nor a type (Q2_K" in refused("bench", "Q9_K")
    whole = tmp_path / "whole.gguf"
    bridge.convert(model, whole)
    size = whole.stat().st_size
    for length in (0, 3, 30, 2000, size // 2, size - 1000):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole.read_bytes()[:length])
        fact = "cut.gguf: not a GGUF file" if length < 24 else "cut.gguf: damaged or truncated"
        assert fact in refused("verify", cut, model)
        assert fact in refused("inspect", cut)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_header_that_claims_more_than_the_file_holds_takes_no_memory(model, refused, tmp_path, command):
    hostile = tmp_path / "hostile.gguf"
    hostile.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1) + bytes(1000))
    tracemalloc.start()
    try:
        error = refused(command, hostile, *[model] * (command == "verify"))
        assert f"{1 << 60} tensors and 1 keys do not fit in 1024 bytes" in error
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("command", [("run", "-p", "x"), ("inspect",)])
def test_the_name_of_a_gguf_that_was_split_leads_to_its_shards(model, refused, tmp_path, command):
    bridge.convert(model, tmp_path / "out.gguf", split_max_size=1_000_000)
    error = refused(command[0], tmp_path / "out.gguf", *command[1:])
    assert "out.gguf: no such file; it was split: give " in error
    assert "out-00001-of-0000" in error


def test_a_gguf_of_another_model(model, refused, tmp_path):
    gguf_file = tmp_path / "model.gguf"
    bridge.convert(model, gguf_file)
    edit_raw(model / "model.safetensors", lambda tensors: [tensors.pop(n) for n in list(tensors) if ".3." in n])
    edit_json(model / "config.json", num_hidden_layers=3)
    assert "model.gguf: blk.3." in refused("verify", gguf_file, model)


def test_a_template_of_more_blocks_than_tensors(model, convert, tmp_path):
    bridge.convert(model, tmp_path / "template.gguf")
    data = (tmp_path / "template.gguf").read_bytes()
    count = b"qwen3.block_count" + struct.pack("<II", gguf.GGUFValueType.UINT32, 4)
    assert data.count(count) == 1
    (tmp_path / "template.gguf").write_bytes(data.replace(count, count[:-4] + b"\xff" * 4))
    error = convert("--template", tmp_path / "template.gguf")
    assert "has 4294967295 blocks and 46 tensors; make the template again" in error


@pytest.mark.parametrize("tokens", [17, "abc", [1, 2], ["a", 2], [["a"]]])
def test_a_template_whose_tokens_are_no_texts(tokens):
    with pytest.raises(BridgeError, match="tokens is not a list of texts; make the template again"):
        expect_texts(tokens)


def test_an_output_that_exists_is_kept_without_force(model, convert, tmp_path):
    (tmp_path / "out.gguf").write_bytes(OLD)
    assert "out.gguf: exists; --force" in convert()
    assert main(["convert", str(model), str(tmp_path / "out.gguf"), "--force"]) == 0
    assert (tmp_path / "out.gguf").read_bytes()[:4] == b"GGUF"


def test_a_modelfile_or_a_shard_that_exists_is_kept_without_force(model, convert, tmp_path):
    (tmp_path / "Modelfile").write_bytes(OLD)
    assert "Modelfile: exists; --force" in convert("--modelfile")
    (tmp_path / "out-00001-of-00009.gguf").write_bytes(OLD)
    assert "out-00001-of-00009.gguf: exists; --force" in convert("--split-max-size", "1M")


def test_an_output_below_a_file_and_an_output_that_is_a_folder(model, refused, tmp_path):
    (tmp_path / "file").write_bytes(OLD)
    assert "file: is not a folder" in refused("convert", model, tmp_path / "file" / "out.gguf")
    assert "is a folder" in refused("convert", model, tmp_path)
