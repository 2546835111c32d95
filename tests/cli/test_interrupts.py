"""Ctrl-C in `quantize`, at each stage: one line, no half-written file, and the same command goes on from there."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.cli import main
from bridge.system.storage.folder_locks import temporary_beside
from tests.support.command_line import bridge_process
from tests.support.tiny_models import save_model

pytestmark = pytest.mark.xdist_group("interrupts")  # whole runs are compared with

CALIBRATE = ["--samples", "4", "--sequence-length", "32", "--sweeps", "0"]
GGUF = ["--type", "Q4_K"]
GPTQ = ["--format", "gptq_v2"]
AWQ = ["--format", "awq", "--method", "awq"]
SIZE = ["--bpw", "4.5", "--swaps", "1"]
# what is being done, its call that is interrupted, and whether layers are stored by then
STAGES: list[tuple[list[str], str, int, bool]] = [
    (GGUF, "bridge.quantize.text.texts:_tokenize", 1, False),
    (GGUF, "bridge.quantize.layer_store:write_text", 1, False),
    (GGUF, "bridge.quantize.run.worker:first_inputs", 1, False),
    (GGUF, "bridge.quantize.method:solve", 1, False),
    ([*GGUF, "--method", "gptaq"], "bridge.quantize.method:solve", 3, True),
    (GGUF, "bridge.quantize.layer_store:save_file", 2, True),
    (GGUF, "bridge.quantize.run.worker:head_hessian", 1, True),
    (GGUF, "bridge.conversion.writing.executor:Executor.make", 5, True),
    (GGUF, "bridge.conversion.writing.gguf_writer:GGUFOutput.finish", 1, True),
    (GGUF, "bridge.quantize.solve.two_sided:_Block._refine", 99, True),
    (GPTQ, "bridge.checkpoint.write.writer:CheckpointWriter.add", 2, True),
    (GPTQ, "bridge.checkpoint.write.writer:CheckpointWriter.finish", 1, True),
    (AWQ, "bridge.quantize.awq:smoothing", 2, False),
    (SIZE, "bridge.quantize.model.forward_passes:Passes.output_products", 1, False),
    (SIZE, "bridge.quantize.budget.divergence:nearest_blocks", 3, False),
]

PROVED = (0, 4, 8, 11)  # of them; the others are exhaustive


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "LlamaConfig", num_hidden_layers=1, vocab_size=2048)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.npy"
    np.save(path, np.random.default_rng(0).integers(0, 300, (4, 32)))
    return path


def contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return {file.name: file.read_bytes() for file in files if file.is_file()}


@pytest.fixture(scope="module")
def whole(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], dict[str, bytes]]:
    """What a run that is not interrupted writes."""
    made: dict[str, dict[str, bytes]] = {}

    def of(options: list[str]) -> dict[str, bytes]:
        if str(options) not in made:
            out = tmp_path_factory.mktemp("whole") / "out"
            assert main(["quantize", str(model), str(out), "--calibrate", str(text), *CALIBRATE, *options]) == 0
            made[str(options)] = contents(out)
        return made[str(options)]

    return of


@pytest.mark.parametrize(
    ("options", "place", "call", "stored"),
    [
        pytest.param(
            *stage,
            id=f"{stage[1].rpartition(':')[2]}-{stage[2]}",
            marks=[] if i in PROVED else [pytest.mark.exhaustive],
        )
        for i, stage in enumerate(STAGES)
    ],
)
def test_ctrl_c_leaves_finished_layers_and_nothing_else(
    options: list[str],
    place: str,
    call: int,
    stored: bool,
    model: Path,
    text: Path,
    whole: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = whole(options)
    module, _, name = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    own, calls = getattr(owner, name), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and name == "save_file":
            args[1].write_bytes(b"half")
        if calls == call:
            raise KeyboardInterrupt
        return own(*args, **kwargs)

    out, layers = tmp_path / "out", tmp_path / "out.layers"
    if name == "_tokenize":  # of a text, which is not a list of tokens
        text = tmp_path.parent / f"{tmp_path.name}.txt"
        text.write_text("The quick brown fox jumps over the lazy dog. " * 100)
    command = ["quantize", str(model), str(out), "--calibrate", str(text), *CALIBRATE, *options]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        assert main(command) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "stopped" or said.startswith("stopped; ")
    assert said == "stopped" or "are stored in" in said or "nothing half-written" in said
    left = {path.name for path in tmp_path.rglob("*")}
    assert not any("unfinished" in name or name.startswith(".") for name in left)
    files = (".safetensors", ".scales", ".gradients", ".norms")
    records = {"job.json", "inputs.json", "gradients.json"}
    assert left <= {"out.layers", *records} | {n for n in left if n.endswith(files)}
    assert any(name.endswith(".safetensors") for name in left) == stored
    assert layers.exists() >= stored
    assert main(command) == 0
    assert not layers.exists()
    if name != "_tokenize":
        assert contents(out) == expected


EARLY = """
import importlib.abc, os

class Interrupt(importlib.abc.MetaPathFinder):  # as Ctrl-C while bridge.cli imports the commands
    def find_spec(self, name, path, target=None):
        if name == NAME:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
run()
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(
    ("module", "command"), [("argparse", "--version"), ("numpy", "run"), ("bridge.cli.cache", "cache")]
)
def test_ctrl_c_while_modules_are_imported_is_one_word(module: str, command: str) -> None:
    process = bridge_process(EARLY.replace("NAME", repr(module)), command)
    assert process.communicate(timeout=60) == ("", "stopped\n")
    assert process.returncode == 130


@pytest.mark.parametrize("command", [["inspect"], ["run", "-p", "hi"], ["serve", "--port", "0"]])
def test_nothing_is_said_of_files_where_none_was_being_written(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bridge.gguf_file.reader.read_header", interrupted)
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    assert main([command[0], str(tmp_path / "model.gguf"), *command[1:]]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_an_interrupt_that_stops_writing_says_what_is_left(tmp_path: Path) -> None:
    for message, closed in (("nothing half-written", False), ("nothing half-written", True)):
        with pytest.raises(KeyboardInterrupt, match=message), ExitStack() as stack:  # noqa: PT012
            folder = temporary_beside(tmp_path / "out")
            if closed:  # by an object's own __exit__
                inner = ExitStack()
                inner.enter_context(folder)
                stack.callback(inner.close)
            else:
                stack.enter_context(folder)
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
