"""What comes out of files cannot steer the terminal: control characters are shown."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from bridge.cli import main
from tests.conftest import CHECKPOINT
from tests.support.command_line import edit_json

EVIL = "\x1b]0;mine\x07\x1b[2J\x08\x9b31m\u202e"
SHOWN = r"\x1b]0;mine\x07\x1b[2J\x08\x9b31m\u202e"


def controls(text: str) -> set[str]:
    return {c for c in text if (ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e") and c not in "\n\t"}


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint in a folder of that name, which its chat template and its config say too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / f"a{EVIL}"))
    edit_json(folder / "tokenizer_config.json", chat_template=f"{{{{ raise_exception({json.dumps(EVIL)}) }}}}")
    return folder


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["inspect", "EVIL"], 0),
        (["plan", "EVIL", "-o", "OUT"], 0),
        (["convert", "EVIL", "OUT"], 0),
        (["run", "EVIL", "-p", "KING", "-n", "1"], 0),
        (["run", "EVIL", "-p", "KING", "--chat"], 2),
        (["chat", "EVIL", "--debug"], 2),
        (["inspect", f"no{EVIL}"], 2),
        (["run", f"no{EVIL}", "-p", "x"], 2),
        (["convert", "EVIL", "OUT", "--type", EVIL], 2),
        ([EVIL], 2),
        (["cache", "--clear", EVIL], 2),
    ],
)
def test_names_and_texts_of_files_do_not_reach_the_terminal(arguments, code, evil, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    names = {"EVIL": str(evil), "OUT": str(tmp_path / f"{EVIL}.gguf")}
    assert main([names.get(a, a) for a in arguments]) == code
    out, error = capsys.readouterr()
    assert controls(out) == controls(error) == set()
    assert SHOWN in out + error


def test_a_config_and_an_architecture_do_not_either(evil, capsys):
    edit_json(evil / "config.json", architectures=[EVIL], model_type=EVIL)
    assert main(["inspect", str(evil)]) == 0
    out = capsys.readouterr().out
    assert controls(out) == set()
    assert out.count(SHOWN) >= 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_generated_text_is_exact_but_on_a_terminal(evil, capsys, monkeypatch):
    run = ["run", str(evil), "-p", EVIL, "-n", "1", "--temp", "0"]
    assert main(run) == 0
    exact = capsys.readouterr().out
    assert exact.startswith(EVIL)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(run) == 0
    assert terminal.getvalue().startswith(SHOWN)
    assert controls(terminal.getvalue()) == set()
