"""The command line and Python are two fronts of one request: the same request gives the same file."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.cli.options import as_flag, calibration
from bridge.cli.program import _parser
from bridge.conversion.checkpoints.to_checkpoint import quantize_checkpoint
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.planning.options import Budget, ConvertOptions
from bridge.errors import BridgeError, parameter, spelled
from bridge.quantize.settings import Calibration
from tests.conftest import CHECKPOINT
from tests.support.tiny_models import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float model whose output head is a tensor of its own."""
    return save_model(tmp_path_factory.mktemp("model"), "LlamaConfig")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, 300, (4, 32)))
    return path


@pytest.mark.parametrize(("settings", "without"), [
    (ConvertOptions, {"calibrate", "budget"}),
    (Calibration, {"progress", "say", "spread"}),
    (Budget, {"tokens", "progress"}),
])  # fmt: skip
def test_every_option_has_a_flag(settings: type, without: set[str]) -> None:
    assert {f.name for f in fields(settings) if "flag" not in f.metadata} == without


def types(path: Path) -> dict[str, str]:
    return {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_a_calibrated_block_type_gives_the_same_file_head_and_all(
    model: Path, tokens: Path, tmp_path: Path, command: str
) -> None:
    mine, theirs = tmp_path / "mine.gguf", tmp_path / "theirs.gguf"
    options = ["--calibrate", str(tokens), "--sequence-length", "32", "--sweeps", "0"]
    assert main([command, str(model), str(mine), "--type", "Q4_K", *options]) == 0
    bridge.convert(model, theirs, type="Q4_K", calibrate=Calibration(tokens, length=32, sweeps=0))
    assert mine.read_bytes() == theirs.read_bytes()
    assert types(mine)["output.weight"] == "Q6_K"  # as in llama.cpp's presets
    assert types(mine)["blk.0.ffn_up.weight"] == "Q4_K"


@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_floats_that_are_calibrated_have_the_same_type_by_default(
    model: Path, tokens: Path, tmp_path: Path, command: str
) -> None:
    mine, theirs = tmp_path / "mine.gguf", tmp_path / "theirs.gguf"
    assert main([command, str(model), str(mine), "--calibrate", str(tokens), "--method", "rtn"]) == 0
    bridge.convert(model, theirs, calibrate=Calibration(tokens, method="rtn"))
    assert mine.read_bytes() == theirs.read_bytes()
    assert types(mine)["blk.0.ffn_up.weight"] == "Q4_K"


@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_codes_are_carried_where_a_text_is_given_and_no_type(tokens: Path, tmp_path: Path, command: str) -> None:
    """Of these layers, the text quantizes those whose type holds their codes no more."""
    options = ["--calibrate", str(tokens), "--method", "rtn", "--tensor-type", "blk.0.ffn_up=Q3_K"]
    assert main([command, str(CHECKPOINT), str(tmp_path / "mine.gguf"), *options]) == 0
    settings = Calibration(tokens, method="rtn")
    bridge.convert(CHECKPOINT, tmp_path / "theirs.gguf", calibrate=settings, tensor_types=[("blk.0.ffn_up", "Q3_K")])
    bridge.convert(CHECKPOINT, tmp_path / "auto.gguf", tensor_types=[("blk.0.ffn_up", "Q3_K")])
    assert (tmp_path / "mine.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()
    assert types(tmp_path / "mine.gguf") == types(tmp_path / "auto.gguf")


@pytest.mark.parametrize(("flags", "options"), [
    ([], {}),
    (["--exact"], {"type": "exact"}),
    (["--type", "q4_k_m", "--tensor-type", "ffn=Q6_K"], {"type": "Q4_K_M", "tensor_types": [("ffn", "q6_k")]}),
    (["--token-embd-type", "F16", "--output-type=Q5_K"], {"token_embd_type": "F16", "output_type": "Q5_K"}),
    (["--for", "llama.cpp@11549", "--pre", "qwen2"], {"target": "llama.cpp@11549", "pre": "qwen2"}),
])  # fmt: skip
def test_the_same_options_give_the_same_file(flags: list[str], options: dict[str, Any], tmp_path: Path) -> None:
    assert main(["convert", str(CHECKPOINT), str(tmp_path / "mine.gguf"), *flags]) == 0
    bridge.convert(CHECKPOINT, tmp_path / "theirs.gguf", **options)
    assert (tmp_path / "mine.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


@pytest.mark.parametrize("format", ["gptq_v2", "awq"])
def test_a_checkpoint_has_the_same_codes(model: Path, tokens: Path, tmp_path: Path, format: str) -> None:
    options = ["--format", format, "--method", "rtn"]
    assert main(["quantize", str(model), str(tmp_path / "mine"), *options]) == 0
    quantize_checkpoint(model, tmp_path / "theirs", format, calibrate=Calibration(None, method="rtn"))
    mine, theirs = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("mine", "theirs"))
    assert mine == theirs


def test_a_plan_may_leave_out_what_a_conversion_may(tmp_path: Path) -> None:
    options = ["--no-mtp", "--no-mmproj", "--name", "A"]
    assert main(["plan", str(CHECKPOINT), "--out", str(tmp_path / "mine.json"), *options]) == 0
    plan_checkpoint(CHECKPOINT, out=tmp_path / "theirs.json", no_mtp=True, mmproj_type="none", name="A")
    assert (tmp_path / "mine.json").read_bytes() == (tmp_path / "theirs.json").read_bytes()


def test_texts_that_are_named_one_by_one_are_all_taken() -> None:
    words = ["quantize", "model", "--calibrate", "a.txt", "b.txt:0.3", "--calibrate", "default:0.2"]
    asked = calibration(_parser().parse_args(words), None)
    assert asked is not None
    assert asked.sources == Calibration(["a.txt", "b.txt:0.3", "default:0.2"]).sources


@pytest.mark.parametrize("words", [
    ["run", "m.gguf", "-p", "a", "--lora"], ["serve", "m.gguf", "--lora"], ["convert", "m", "--merge"],
    ["convert", "m", "--imatrix"], ["quantize", "m", "--imatrix-out"],
])  # fmt: skip
def test_a_second_file_does_not_displace_the_first(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "first", words[-1], "second"]) == 2
    assert f"{words[-1]} is given twice, first and second; give one" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "said"), [
    (["--type", "Q8_0"], "--type is for a GGUF; leave it out with --format gptq"),
    (["--name", "A"], "--name is for a GGUF"),
    (["--no-mmproj"], "--mmproj-type is for a GGUF"),
    (["--split-max-size", "1G"], "--split-max-size is for a GGUF"),
    (["--imatrix-out", "i.gguf", "--calibrate", "default"], "--imatrix-out i.gguf: an importance matrix"),
    (["--imatrix-out", "i.gguf", "--method", "rtn"], "--method rtn reads no text"),
    (["--method", "imatrix"], "--method imatrix: rounds to GGUF's block types; choose gptq, awq or rtn"),
])  # fmt: skip
def test_a_checkpoint_takes_no_options_of_a_gguf(
    options: list[str], said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(model), str(tmp_path / "out"), "--format", "gptq", *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--bits 3", "--group-size 64", "--asymmetric", "--clamp"])
def test_a_gguf_takes_no_options_of_a_checkpoint(
    option: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(model), str(tmp_path / "out.gguf"), "--method", "rtn", *option.split()]) == 2
    assert f"{option.split()[0]} is for a checkpoint: give --format" in capsys.readouterr().err


def test_only_v1_is_clamped(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match="gptq_v2 holds every zero point; leave out clamp"):
        quantize_checkpoint(model, tmp_path, "gptq_v2", calibrate=Calibration(None, method="rtn"), clamp=True)
    with pytest.raises(BridgeError, match="unknown format='gguf': choose gptq, gptq_v2, awq"):
        quantize_checkpoint(model, tmp_path, "gguf", calibrate=Calibration(None, method="rtn"))


def test_a_gguf_takes_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made.gguf"
    bridge.convert(CHECKPOINT, made)
    config = ["--config", str(CHECKPOINT)]
    for words in (["run", str(made), "-p", "a"], ["inspect", str(made)], ["convert", str(made), f"{made}2"],
                  ["verify", str(made), str(made)], ["warmup", str(made)], ["warmup"]):  # fmt: skip
        assert main([*words, *config]) == 2
        assert "--config" in capsys.readouterr().err
    with pytest.raises(BridgeError, match=r"is a GGUF.*leave out config"):
        bridge.Model.load(made, config=CHECKPOINT)


def test_python_loads_weights_whose_config_is_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = shutil.copyfile(CHECKPOINT / "model.safetensors", tmp_path / "weights.safetensors")
    with bridge.Model.load(weights, context=16, config=CHECKPOINT) as model:
        assert len(model.tokenizer) > 0


def test_errors_spell_an_argument_as_its_user_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.gguf").write_bytes(b"")
    with pytest.raises(BridgeError, match=r"out.gguf: exists; force=True replaces it"):
        bridge.convert(CHECKPOINT, tmp_path / "out.gguf")
    assert main(["convert", str(CHECKPOINT), str(tmp_path / "out.gguf")]) == 2
    assert "out.gguf: exists; --force replaces it" in capsys.readouterr().err
    assert parameter("shard", (3, 12)) == "shard=(3, 12)"
    with spelled(as_flag):
        spoken = [parameter("shard", (3, 12)), parameter("length", 9), parameter("target"), parameter("text")]
        assert spoken == ["--shard 3/12", "--sequence-length 9", "--for", "--calibrate"]
        assert parameter("tensor_types", ("ffn", "Q9_K")) == "--tensor-type ffn=Q9_K"
    assert parameter("text") == "text"
