"""`gguf-bridge completion`: its scripts, asked as the shells ask them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.cli.commands import COMMANDS
from tests.conftest import PATIENCE

# what a shell is told with {words} of a line, the last of which is to be completed; it prints the completions in lines
ASKING = {
    "bash": "source {script}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _gguf_bridge; "
    "printf '%s\\n' \"${{COMPREPLY[@]}}\"",
    "zsh": "autoload -U compinit bashcompinit && compinit -u -D && bashcompinit && source {script}; "
    "words=({words}); CURRENT=$#words; COMP_WORDS=($words); COMP_CWORD=$((CURRENT - 1)); "
    "compgen -F _gguf_bridge -- ${{words[-1]}}",
    "fish": "source {script}; complete -C {line}",
}


@pytest.fixture(params=ASKING)
def completions(request: pytest.FixtureRequest, run: Callable[..., str], tmp_path: Path) -> Callable[..., list[str]]:
    """completions(*words): what a shell offers for the last of these words after the program's name."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    script = tmp_path / "script"
    script.write_text(run("completion", shell))

    def ask(*words: str) -> list[str]:
        line = " ".join(["gguf-bridge", *words])
        quoted = " ".join(f"'{word}'" for word in ["gguf-bridge", *words])
        code = ASKING[shell].format(script=script, words=quoted, line=f"'{line}'")
        options = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
        done = subprocess.run(
            [shell, *options, "-c", code], capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path
        )
        assert done.stderr == ""
        offered = [line.split("\t")[0] for line in done.stdout.splitlines() if line]
        return [word for word in offered if word.startswith(words[-1])]  # which zsh leaves to its compadd

    return ask


def test_commands_options_and_choices_are_completed(completions: Callable[..., list[str]]) -> None:
    assert sorted(completions("")) == sorted(COMMANDS)
    assert completions("qua") == ["quantize"]
    assert completions("convert", "model", "--split") == ["--split-max-size"]
    assert {"--temp", "--temperature", "--template-option"} == set(completions("run", "model", "--temp"))
    assert completions("run", "model", "--kv", "q") == ["q8_0"]
    assert sorted(completions("convert", "model", "--type", "Q4_K")) == ["Q4_K", "Q4_K_M", "Q4_K_S"]
    assert completions("completion", "f") == ["fish"]


def test_files_are_left_to_the_shell(completions: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert set(completions("run", "a.g")) <= {"a.gguf"}


def test_another_shell_is_refused(refused: Callable[..., str]) -> None:
    assert "invalid choice: 'tcsh'" in refused("completion", "tcsh")
