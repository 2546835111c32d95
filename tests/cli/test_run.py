"""`gguf-bridge run`: its options are those of Python, and where its prompt comes from."""

from __future__ import annotations

import argparse
import io
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

import bridge
from bridge.cli import main
from bridge.cli.options import add_options, given
from bridge.runtime.sampling import Sampling
from tests.conftest import CHECKPOINT, PATIENCE
from tests.support.terminal import Terminal, needs_terminal

TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}assistant: "


def parsed(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_options(parser, "sampling", Sampling)
    return given(parser.parse_args(arguments), Sampling)


def test_every_field_of_sampling_has_a_flag_and_only_what_is_given_is_passed_on() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, "sampling", Sampling)
    assert {action.dest for action in parser._actions} == {"help"} | {field.name for field in fields(Sampling)}
    assert parsed() == {}
    found = parsed("--temp", "0", "--seed", "3", "--logit-bias", "5-inf", "--logit-bias=7+1.5")
    assert found == {"temperature": 0.0, "seed": 3, "logit_bias": [(5, float("-inf")), (7, 1.5)]}
    assert Sampling(**found).biases == {5: float("-inf"), 7: 1.5}  # type: ignore[arg-type]
    assert "(default: 0.95)" in parser.format_help()


def test_the_command_line_samples_as_python_does(tmp_path: Path, capsys) -> None:
    path = tmp_path / "model.gguf"
    bridge.convert(CHECKPOINT, path)
    hot = {"temperature": 1.3, "top_k": 9, "logit_bias": {5: 2}}
    for options, sampling in (([], {}), (["--temperature", "1.3", "--top-k", "9", "--logit-bias", "5+2"], hot)):
        assert main(["run", str(path), "-p", "KING", "-n", "12", "--seed", "4", *options]) == 0
        text = "".join(bridge.Model.load(path).generate("KING", 12, seed=4, **sampling))
        assert capsys.readouterr().out == f"KING{text}\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The project's checkpoint as a GGUF, with a chat template and without one."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(CHECKPOINT, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    paths = {True: folder / "talker.gguf", False: folder / "plain.gguf"}
    for template, path in paths.items():
        bridge.convert(folder / "model" if template else CHECKPOINT, path)
    return paths


@pytest.fixture
def said(models: dict[bool, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable:
    """said(chats, *arguments, piped=None): what `run` prints of a reply of two tokens."""

    def run(chats: bool, *arguments: str, piped: str | None = None) -> str:
        if piped is not None:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped.encode())))
            monkeypatch.setattr("bridge.cli.use.run._piped", lambda: True)
        assert main(["run", str(models[chats]), *arguments, "-n", "2", "--temp", "0"]) == 0
        return capsys.readouterr().out

    return run


def test_words_and_piped_text_are_a_message_where_the_model_has_a_chat_template(
    models: dict[bool, Path], said: Callable[..., str]
) -> None:
    model = bridge.Model.load(models[True])

    def reply(text: str) -> str:
        return "".join(model.chat([{"role": "user", "content": text}], 2, temperature=0)) + "\n"

    assert said(True, "hello", "there") == reply("hello there")
    assert said(True, piped="hello there\n") == reply("hello there")
    assert said(True, "Shorter:", piped="A text\nof two lines\n") == reply("A text\nof two lines\nShorter:")
    assert said(True, "-p", "hello there", "--chat") == reply("hello there")
    plain = said(True, "-p", "KING")
    assert plain.startswith("KING")
    assert said(False, "KING") == said(False, piped="KING") == said(False, "-p", "-", piped="KING") == plain


def test_a_prompt_is_given_once_and_not_empty(
    models: dict[bool, Path], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--prompt and words are two prompts; give one" in refused("run", models[True], "Hi", "-p", "Ho")
    assert "the file has no chat template" in refused("run", models[False], "Hi", "--system", "Be brief.")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    assert "the prompt is empty; give it after the model" in refused("run", models[True])


@needs_terminal
def test_without_a_prompt_a_terminal_chats(models: dict[bool, Path]) -> None:
    terminal = Terminal("run", models[True], "-n", "2", "--temp", "0")
    terminal.until("type a message, or one of /help /clear /save /system /exit")
    terminal.until("> ")
    terminal.type("hello\r")
    terminal.until("tokens/s")
    terminal.until("> ")
    terminal.type("/exit\r")
    assert terminal.process.wait(PATIENCE) == 0


def test_a_reply_that_ends_because_the_context_is_full_says_so(
    models: dict[bool, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(models[False]), "-p", "KING", "--temp", "0", "--context", "12"]
    assert main(command) == 0
    line = "the reply ends here because the context is full: 12 tokens; --context raises it, up to the 1024 that the"
    assert line in capsys.readouterr().err
    assert main([*command, "-n", "3"]) == 0
    assert "context" not in capsys.readouterr().err


def test_a_prompt_that_is_too_long_tells_the_context_that_holds_it(
    models: dict[bool, Path], refused: Callable[..., str]
) -> None:
    said = refused("run", models[False], "-p", "KING " * 20, "--context", "12")
    assert "shorten it, or raise that with --context 64: the model was trained for 1024" in said
    with pytest.raises(bridge.BridgeError, match=r"raise that with context=64: the model was trained for 1024"):
        bridge.Model.load(models[False], context=12).generate("KING " * 20)
    assert "shorten it: the model was trained for 1024" in refused("run", models[False], "-p", "KING " * 2000)
