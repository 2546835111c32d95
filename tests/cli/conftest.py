"""The command line: run on the project's checkpoint, and refusing a damaged copy of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import bridge
from bridge.cli import main
from tests.conftest import CHECKPOINT
from tests.support.command_line import contents, one_line


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """run(*arguments, code=0): what the program prints; nothing may go to standard error."""

    def call(*arguments: object, code: int = 0) -> str:
        assert main([str(a) for a in arguments]) == code
        out, error = capsys.readouterr()
        assert error == ""
        return out

    return call


@pytest.fixture(scope="session")
def auto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint converted without any option."""
    path = tmp_path_factory.mktemp("auto") / "auto.gguf"
    bridge.convert(CHECKPOINT, path)
    return path


@pytest.fixture
def mislabelled(tmp_path: Path) -> Path:
    """The checkpoint, labelled as GPTQ v2 with act-order, neither of which it has."""
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "mislabelled"))
    changes = {"checkpoint_format": "gptq_v2", "desc_act": True}
    file = folder / "quantize_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the project's checkpoint, to damage."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refused(*arguments): the one line on standard error, from a run that changes no file in tmp_path."""

    def run(*arguments: object) -> str:
        before = contents(tmp_path)
        code = main([str(a) for a in arguments])
        out, error = capsys.readouterr()
        assert code == 2
        assert out == ""
        assert contents(tmp_path) == before
        return one_line(error)

    return run


@pytest.fixture
def convert(tmp_path: Path, refused: Callable[..., str]) -> Callable[..., str]:
    """convert(*options): `refused` for the conversion of tmp_path/model."""
    return lambda *options: refused("convert", tmp_path / "model", tmp_path / "out.gguf", *options)
