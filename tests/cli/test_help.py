"""What `--help` and `--help-all` show, and how a mistyped command or option is answered."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from bridge.cli import main
from bridge.cli.commands import COMMANDS
from bridge.cli.program import _parser
from bridge.system.text import nearest


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """shown(*arguments): what a command that asks for help prints, on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as done:
            main(arguments)
        assert done.value.code == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_terminal(command: str, shown: Callable[..., str]) -> None:
    words = [command] if command else []
    lines = shown(*words, "--help").splitlines()
    assert len(lines) <= 45
    assert max(map(len, [*lines, *shown(*words, "--help-all").splitlines()])) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_all_options_are_listed_by_help_all_and_the_usual_ones_by_help(command: str, shown: Callable[..., str]) -> None:
    parser = _parser([command])._subparsers._group_actions[0].choices[command]  # type: ignore[union-attr, index, call-overload]
    usual, everything = shown(command, "--help"), shown(command, "--help-all")
    options = {option for action in parser._actions for option in action.option_strings}
    assert options == {option for option in options if re.search(rf"(?<![\w-]){option}(?![\w-])", everything)}
    left_out = len(parser._actions) - sum(len(group._group_actions) for group in parser._action_groups[:2])
    assert f"{left_out} further option{'s' * (left_out != 1)}: gguf-bridge {command} --help-all" in usual
    assert "--debug" not in usual
    assert usual.splitlines()[0].startswith(f"usage: gguf-bridge {command} [options]")


def test_the_programs_help_lists_each_command_in_a_line(shown: Callable[..., str]) -> None:
    lines = shown("--help").splitlines()
    assert shown() == shown("--help") == shown("--help-all") == "".join(f"{line}\n" for line in lines)
    for name, (_, help) in COMMANDS.items():
        assert any(line.split() == [name, *help.split()] for line in lines)


def test_a_mistyped_command_or_choice_is_answered_with_the_one_meant(refused: Callable[..., str]) -> None:
    assert refused("converrt", "model") == "error: no command 'converrt'; did you mean convert?\n"
    assert refused("xyzzy") == "error: no command 'xyzzy'; see gguf-bridge --help\n"
    assert refused("chat", "model.gguf", "--kv", "q8").endswith("; did you mean q8_0?\n")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["--verison"], "--verison; did you mean --version?"),
        (["convert", "model", "--tpye", "Q4_K"], "--tpye; did you mean --type?"),
        (["convert", "model", "--split-max-sice=4G"], "--split-max-sice; did you mean --split-max-size?"),
        (["quantize", "model", "--calibrat-text", "a.txt"], "--calibrat-text; did you mean --calibrate?"),
        (["run", "model", "--promt", "a"], "--promt; did you mean --prompt?"),
        (["repack", "model", "out", "--clmap"], "--clmap; did you mean --clamp?"),
        (["cache", "--claer"], "--claer; did you mean --clear?"),
        (["convert", "model", "--zzzz"], "--zzzz; see gguf-bridge convert --help"),
        (["convert", "model", "-Z"], "-Z; see gguf-bridge convert --help"),
    ],
)
def test_a_mistyped_option_is_answered_with_the_one_meant_or_the_help(
    arguments: list[str], meant: str, refused: Callable[..., str]
) -> None:
    assert refused(*arguments) == f"error: unknown option {meant}\n"


def test_texts_that_look_like_options_and_abbreviations_are_left_to_argparse(refused: Callable[..., str]) -> None:
    assert "no such file" in refused("run", "none.gguf", "--prompt=--promt")
    assert "no such file" in refused("run", "none.gguf", "--prom", "a")


def test_words_may_stand_between_options(refused: Callable[..., str]) -> None:
    assert "none: no such folder" in refused("convert", "--type", "Q4_K", "none", "--force", "out.gguf")
    said = refused("convert", "none", "--force", "out.gguf", "more")
    assert said == "error: one argument too many: more; see gguf-bridge convert --help\n"


@pytest.mark.parametrize(
    ("word", "meant"),
    [("Q4K", "Q4_K"), ("q4km", "Q4_K_M"), ("iq4xs", "IQ4_XS"), ("Q5_KM", None), ("q8", "Q8_0"), ("Q9_K", None)],
)
def test_near_names_agree_in_their_digits(word: str, meant: str | None) -> None:
    assert nearest(word, ["Q2_K", "Q4_K", "Q4_K_M", "IQ4_XS", "Q8_0"]) == ([meant] if meant else [])
