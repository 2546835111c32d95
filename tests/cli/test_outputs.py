"""What the commands write, and what they must never write over: every output of every command against every input."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.cli import main
from bridge.conversion.converter import plan_checkpoint
from bridge.errors import BridgeError
from bridge.system.storage.folder_locks import temporary_beside
from tests.conftest import CHECKPOINT
from tests.support.command_line import one_line

# every file that a command writes under a name of the user's: the arguments, where OUT stands for the file
CALIBRATED = ["--calibrate", "TEXT", "--sequence-length", "64"]
BUDGET = ["--size", "2.5M"]
OUTPUTS = {
    "convert": ["convert", "MODEL", "OUT", "--imatrix", "IMATRIX"],
    "convert --template": ["convert", "MODEL", "OUT", "--template", "TEMPLATE"],
    "convert --plan": ["convert", "MODEL", "OUT", "--plan", "PLAN"],
    "convert --calibrate": ["convert", "MODEL", "OUT", *CALIBRATED],
    "convert --report": ["convert", "MODEL", "new.gguf", *CALIBRATED, "--report", "OUT"],
    "convert --imatrix-out": ["convert", "MODEL", "new.gguf", *CALIBRATED, "--imatrix-out", "OUT"],
    "convert --plan-out": ["convert", "MODEL", "new.gguf", *CALIBRATED, *BUDGET, "--plan-out", "OUT"],
    "convert --tensor-types-out": ["convert", "MODEL", "new.gguf", *CALIBRATED, *BUDGET, "--tensor-types-out", "OUT"],
    "quantize": ["quantize", "MODEL", "OUT", *CALIBRATED],
    "quantize --report": ["quantize", "MODEL", "new.gguf", *CALIBRATED, "--report", "OUT"],
    "quantize --imatrix-out": ["quantize", "MODEL", "new.gguf", *CALIBRATED, "--imatrix-out", "OUT"],
    "quantize --plan-out": ["quantize", "MODEL", "new.gguf", *CALIBRATED, *BUDGET, "--plan-out", "OUT"],
    "quantize --tensor-types-out": ["quantize", "MODEL", "new.gguf", *CALIBRATED, *BUDGET, "--tensor-types-out", "OUT"],
    "plan": ["plan", "MODEL", "-o", "OUT", "--imatrix", "IMATRIX"],
    "plan --template": ["plan", "MODEL", "-o", "OUT", "--template", "TEMPLATE"],
    "verify --report": ["verify", "TEMPLATE", "MODEL", "--report", "OUT"],
}
READ = "this run reads or writes that file already"
WITHOUT_FORCE = ("verify",)
IN_MODEL = ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "tokenizer.model", "notes.md"]


@pytest.fixture
def inputs(auto: Path, tmp_path: Path) -> dict[str, Path]:
    """A checkpoint's folder and files of every kind that commands read, by their names in OUTPUTS."""
    model = Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))
    for name in ("chat_template.jinja", "tokenizer.model"):
        (model / name).write_text("{{ messages }}")
    (model / "notes.md").touch()  # empty, which a report would replace elsewhere
    found = {"MODEL": model, "TEXT": tmp_path / "text.txt", "TEMPLATE": tmp_path / "template.gguf"}
    found |= {"PLAN": tmp_path / "plan.json", "IMATRIX": tmp_path / "imatrix.gguf"}
    found["TEXT"].write_text("To be, or not to be. " * 100)
    shutil.copyfile(auto, found["TEMPLATE"])
    shutil.copyfile(auto, found["IMATRIX"])  # refused before it is opened
    plan_checkpoint(CHECKPOINT, out=found["PLAN"])
    return found


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refused(command, out, inputs): the one line of an error, from a run that changes nothing in tmp_path."""

    def run(command: str, out: Path, inputs: dict[str, Path]) -> str:
        before = everything(tmp_path)
        code = main(arguments(command, out, inputs))
        assert everything(tmp_path) == before
        assert code == 2
        return one_line(capsys.readouterr().err)

    return run


def arguments(command: str, out: Path, inputs: dict[str, Path]) -> list[str]:
    names = {**inputs, "OUT": out, "new.gguf": inputs["TEXT"].parent / "new.gguf"}
    force = [] if command.startswith(WITHOUT_FORCE) else ["--force"]
    return [str(names.get(argument, argument)) for argument in OUTPUTS[command]] + force


def everything(folder: Path) -> dict[Path, tuple[int, bytes | None]]:
    return {p: (p.lstat().st_ino, p.read_bytes() if p.is_file() else None) for p in folder.rglob("*")}


def read_by(command: str, inputs: dict[str, Path]) -> list[Path]:
    """The files that a command reads."""
    named = [inputs[argument] for argument in OUTPUTS[command] if argument in inputs and argument != "MODEL"]
    return [*named, *(inputs["MODEL"] / name for name in IN_MODEL)]


@pytest.mark.parametrize("command", OUTPUTS)
def test_no_output_is_a_file_that_the_run_reads(command, inputs, refused, tmp_path):
    for file in read_by(command, inputs):
        again = tmp_path / "again.gguf"
        os.link(file, again)
        for out in (file, again, file.parent / ".." / file.parent.name / file.name):
            error = refused(command, out, inputs).removeprefix(f"error: {out}: ")
            if not ("--report" in command and file.stat().st_size and error.startswith("exists and is not a report")):
                assert error.startswith("is in the checkpoint's folder" if "model" in out.parts else READ)
        again.unlink()


@pytest.mark.parametrize("command", OUTPUTS)
def test_no_output_is_a_link(command, inputs, refused, tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"")  # an empty file, which even a report would replace
    for target in (precious, Path("nowhere"), Path(os.devnull), inputs["MODEL"] / "config.json"):
        link = tmp_path / "link.gguf"
        link.symlink_to(target)
        assert f"{link}: is a link to {target}" in refused(command, link, inputs)
        link.unlink()


@pytest.mark.parametrize("command", OUTPUTS)
def test_only_ggufs_are_written_into_a_checkpoints_folder(command, inputs, refused):
    model = inputs["MODEL"]
    (model / "weights.gguf").write_bytes(b"")
    for name in ("merges.txt", "new.json", "weights.gguf"):
        assert f"{model / name}: is in the checkpoint's folder {model}" in refused(command, model / name, inputs)


def test_a_gguf_in_the_checkpoints_folder_is_made_and_replaced_with_force(model, capsys):
    out = model / "model.gguf"
    assert main(["convert", str(model), str(out)]) == 0
    assert main(["convert", str(model), str(out), "--type", "Q8_0"]) == 2
    assert "exists; --force replaces it" in capsys.readouterr().err
    before = out.read_bytes()
    assert main(["convert", str(model), str(out), "--type", "Q8_0", "--force"]) == 0
    assert out.read_bytes() != before


@pytest.mark.parametrize("option", ["--report", "--imatrix-out", "--plan-out"])
def test_no_two_outputs_are_one_file(option, inputs, refused, tmp_path, capsys):
    out = tmp_path / "new.gguf"
    for command in ("convert", "quantize"):
        for same in (out, tmp_path / "model" / ".." / "new.gguf"):
            assert READ in refused(f"{command} {option}", same, inputs)
    assert main(["convert", str(inputs["MODEL"]), str(tmp_path / "Modelfile"), "--modelfile"]) == 2
    assert f"Modelfile: {READ}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "MODEL", "OUT", "--modelfile", "--report", "REPORT"],
        ["plan", "MODEL", "-o", "OUT"],
        ["repack", "MODEL", "OUT", "--checkpoint-format", "gptq_v2"],
        ["export", "TEMPLATE", "OUT", "--config", "MODEL"],
        ["verify", "TEMPLATE", "MODEL", "--report", "OUT"],
        ["quantize", "FLOATS", "OUT", *CALIBRATED, "--samples", "4", "--imatrix-out", "REPORT"],
    ],
    ids=lambda command: command[0],
)
def test_a_missing_folder_of_an_output_is_made(command, inputs, small_model, tmp_path):
    names = {
        **inputs,
        "FLOATS": small_model,
        "OUT": tmp_path / "new" / "deep" / "out",
        "REPORT": tmp_path / "other" / "report",
    }
    assert main([str(names.get(word, word)) for word in command]) == 0
    for word in {"OUT", "REPORT"} & set(command):
        assert names[word].exists()
        assert not [file for file in names[word].parent.iterdir() if file.name.startswith(".")]


def test_a_folder_made_for_an_output_that_was_not_written_is_removed(tmp_path):
    with temporary_beside(tmp_path / "new" / "deep" / "out.gguf"):
        assert (tmp_path / "new" / "deep").is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_modelfile_is_not_written_into_a_checkpoints_folder(model, refused_in):
    (model / "Modelfile").write_text("of the publisher")
    error = refused_in("convert", model, model / "model.gguf", "--modelfile", "--force")
    assert f"{model / 'Modelfile'}: is in the checkpoint's folder" in error


@pytest.fixture
def refused_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: object) -> str:
        before = everything(tmp_path)
        assert main([str(a) for a in arguments]) == 2
        assert everything(tmp_path) == before
        return one_line(capsys.readouterr().err)

    return run


def test_a_picture_is_neither_its_report_nor_a_link(tmp_path, refused_in):
    source, out = tmp_path / "report.svg", tmp_path / "out.svg"
    source.write_text(json.dumps({"tensors": []}))
    os.link(source, out)
    for path in (source, out):
        assert READ in refused_in("plot", source, "-o", path, "--force")
    out.unlink()
    out.symlink_to(tmp_path / "elsewhere")
    assert "is a link" in refused_in("plot", source, "-o", out, "--force")


@pytest.mark.parametrize("where", ["", "sub"])
def test_a_folder_is_not_replaced_where_it_holds_the_text(where, small_model, tmp_path, refused_in):
    out = tmp_path / "out"
    (out / where).mkdir(parents=True)
    shutil.copyfile(small_model / "config.json", out / "config.json")
    text = out / where / "vocab.txt"
    text.write_text("To be, or not to be. " * 100)
    error = refused_in("quantize", small_model, out, "--format", "gptq", "--calibrate", text, "--force")
    assert f"{out}: holds vocab.txt, which this run reads" in error


def test_quantize_refuses_a_folder_that_exists_before_it_starts(small_model, tmp_path, refused_in):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    text = tmp_path / "text.txt"
    text.write_text("short")  # nothing is read of it
    assert "exists; --force" in refused_in("quantize", small_model, out, "--format", "gptq", "--calibrate", text)
    (out / "thesis.tex").write_text("of years")
    error = refused_in("quantize", small_model, out, "--format", "gptq", "--calibrate", text, "--force")
    assert f"{out / 'thesis.tex'}: is not a checkpoint's file" in error


@pytest.mark.parametrize("stray", ["thesis.tex", "notes.safetensors", "job.json"])
def test_force_removes_no_file_that_is_not_a_layer(tmp_path, stray):
    from bridge.quantize.layer_store import LayerStore

    folder = tmp_path / "out.gguf.layers"
    LayerStore(folder, {"seed": 1})
    (folder / f"{'0' * 24}.safetensors").write_bytes(b"a layer")
    (folder / stray).write_text('{"of": "another program"}')
    before = everything(tmp_path)
    with pytest.raises(BridgeError, match=f"{stray}: is not a"):
        LayerStore(folder, {"seed": 2}, force=True)
    assert everything(tmp_path) == before
    if stray != "job.json":
        LayerStore(folder, {"seed": 1}).remove()
        assert [p.name for p in folder.iterdir()] == [stray]
