"""--type F16, BF16 and F32; the names and the metadata of an output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.writing.report import CODED
from bridge.errors import BridgeError
from bridge.quantize.settings import Calibration
from tests.conftest import CHECKPOINT
from tests.support.tiny_models import save_model


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "Tiny-1B", "LlamaConfig", num_hidden_layers=1)


@pytest.mark.parametrize("name", ["F32", "F16", "bf16"])
@pytest.mark.parametrize("command", ["convert", "quantize"])
def test_a_float_folder_is_written_as_floats(floats: Path, tmp_path: Path, name: str, command: str) -> None:
    assert main([command, str(floats), str(tmp_path / "out.gguf"), "--type", name]) == 0
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert {t.tensor_type.name for t in reader.tensors if len(t.shape) > 1} == {name.upper()}
    file_type = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}[name.upper()]
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType[file_type]


def test_codes_are_written_as_the_floats_that_they_mean(tmp_path: Path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "out.gguf", type="F32")
    with bridge.open_checkpoint(CHECKPOINT) as ckpt:
        expected = ckpt.read_module("model.layers.0.mlp.up_proj").dequantize()
    np.testing.assert_array_equal(bridge.open_gguf(tmp_path / "out.gguf")["blk.0.ffn_up.weight"].dequantize(), expected)


def test_the_reports_bits_per_weight_are_the_files(tmp_path: Path) -> None:
    report = bridge.convert(CHECKPOINT, tmp_path / "out.gguf")
    tensors = gguf.GGUFReader(tmp_path / "out.gguf").tensors
    bits = 8 * sum(int(t.n_bytes) for t in tensors) / sum(int(t.n_elements) for t in tensors)
    assert report.bpw() == pytest.approx(bits)
    assert report.bpw(CODED) == 4.5


def test_floats_are_not_calibrated() -> None:
    with pytest.raises(BridgeError, match="type='F16': nothing is quantized; leave out calibrate"):
        bridge.convert(CHECKPOINT, type="F16", calibrate=Calibration("text.txt"))


def test_a_note_tells_that_floats_become_q8_0(floats: Path) -> None:
    told = [note for note in plan_checkpoint(floats).notes if "Q8_0" in note]
    assert len(told) == 1
    assert "gguf-bridge quantize" in told[0]
    assert "type='Q4_K_M'" in told[0]
    assert not any("Q8_0" in note for note in plan_checkpoint(floats, type="Q8_0").notes)
    assert not any("Q8_0" in note for note in plan_checkpoint(CHECKPOINT).notes)


@pytest.mark.parametrize(("options", "name"), [
    ({}, "Tiny-1B-Q8_0.gguf"),
    ({"type": "q4_k_m"}, "Tiny-1B-Q4_K_M.gguf"),
    ({"type": "F16"}, "Tiny-1B-F16.gguf"),
    ({"type": "exact"}, "Tiny-1B-Q8_0.gguf"),
])  # fmt: skip
def test_an_output_without_a_name_gets_the_models_and_its_type(
    floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bridge.convert(floats, **options).outputs == [Path(name)]
    with pytest.raises(BridgeError, match=f"{name}: exists; force=True replaces it"):
        bridge.convert(floats, **options)


def test_a_plan_names_its_output_too(floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan_checkpoint(floats, out="plan.json", type="Q6_K")
    assert bridge.convert(plan="plan.json").outputs == [Path("Tiny-1B-Q6_K.gguf")]


ENTRIES = ["general.version=2", "x.count=7", "x.on=true", "llama.context_length=64", "general.url=a=b"]
GIVEN = ["--name", "My Model", "--author", "J. Doe", *(word for e in ENTRIES for word in ("--metadata", e))]


def test_metadata_that_is_given_is_in_the_file(floats: Path, tmp_path: Path) -> None:
    assert main(["convert", str(floats), str(tmp_path / "mine.gguf"), *GIVEN]) == 0
    fields = gguf.GGUFReader(tmp_path / "mine.gguf").fields
    found = {key: (fields[key].types[0].name, fields[key].contents()) for key in fields}
    assert found["general.name"] == ("STRING", "My Model")
    assert found["general.author"] == ("STRING", "J. Doe")
    assert found["general.version"] == ("STRING", "2")
    assert found["general.url"] == ("STRING", "a=b")
    assert found["x.count"] == ("UINT32", 7)
    assert found["x.on"] == ("BOOL", True)
    assert found["llama.context_length"] == ("UINT32", 64)
    given = {"general.version": "2", "x.count": 7, "x.on": True, "llama.context_length": 64, "general.url": "a=b"}
    bridge.convert(floats, tmp_path / "theirs.gguf", name="My Model", author="J. Doe", metadata=given)
    assert (tmp_path / "mine.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


@pytest.mark.parametrize(("metadata", "fact"), [
    ({"general.architecture": "gpt2"}, "describes the file"),
    ({"split.count": 3}, "describes the file"),
    ({"tokenizer.ggml.tokens": "a"}, "a list like"),
    ({"llama.context_length": "long"}, "must be uint32"),
    ({"llama.context_length": -1}, "must be uint32"),
    ({"general.name": 3}, "must be string"),
    ({"x": None}, "must be text, a number, true, false or a list of one kind of these"),
    ({"x": 1 << 40}, "must be"),
    ({"two words": 1}, "must be a key and its value"),
    (["abc"], "must be a key and its value"),
])  # fmt: skip
def test_metadata_that_no_file_can_have_is_refused(floats: Path, metadata: Any, fact: str) -> None:
    with pytest.raises(BridgeError, match=fact):
        plan_checkpoint(floats, metadata=metadata)


@pytest.mark.parametrize(("options", "fact"), [
    ({"type": 5}, "type is of type int; must be a text"),
    ({"threads": "2"}, "threads is of type str; must be an integer or None"),
    ({"split_max_size": "4G"}, "split_max_size is of type str; must be an integer or None"),
    ({"calibrate": "text.txt"}, "calibrate is of type str; must be Calibration or None"),
    ({"budget": 4}, "budget is of type int; must be Budget or None"),
    ({"imatrix": 3}, "imatrix is of type int; must be a path or None"),
    ({"force": "no"}, "force is of type str; must be True or False"),
    ({"target": 5}, "target is of type int; must be a text or None"),
    ({"name": 5}, "name is of type int; must be a text or None"),
    ({"tensor_types": 5}, "tensor_types=5: must be a list"),
    ({"metadata": 5}, "metadata=5: must be a dict"),
])  # fmt: skip
def test_an_argument_of_a_wrong_type_is_told_in_a_sentence(options: dict[str, Any], fact: str) -> None:
    with pytest.raises(BridgeError, match=fact):
        bridge.convert(CHECKPOINT, **options)
    with pytest.raises(BridgeError, match="bpw='4': must be a number"):
        bridge.Budget(bpw="4")  # type: ignore[arg-type]


def test_a_plan_has_the_metadata_already(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match="a plan defines types, tokenizer, metadata"):
        bridge.convert(CHECKPOINT, plan=tmp_path / "plan.json", name="x")
