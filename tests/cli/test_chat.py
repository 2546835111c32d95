"""`gguf-bridge chat`: its commands, what a terminal adds, and templates that are refused."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.cli import main
from bridge.runtime.model import Model
from tests.conftest import CHECKPOINT, PATIENCE
from tests.support.terminal import Terminal, needs_terminal

TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}assistant: "


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's checkpoint with a chat template, converted."""
    folder = tmp_path_factory.mktemp("talker")
    shutil.copytree(CHECKPOINT, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    assert main(["convert", str(folder / "model"), str(folder / "talker.gguf"), "--name", "Talker 1M"]) == 0
    return folder / "talker.gguf"


@pytest.fixture
def chat(talker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """chat(*lines): what `chat` says on standard error to lines that come from a pipe."""

    def run(*lines: object) -> str:
        text = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert main(["chat", str(talker), "--temp", "0", "-n", "2"]) == 0
        return capsys.readouterr().err

    return run


def test_a_conversation_is_saved_with_its_system_message(chat: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    assert chat("Who?", "/system Be brief.", "Où?", f"/save {file}") == f"wrote {file}\n"
    messages = json.loads(file.read_text(encoding="utf-8"))
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert [m["content"] for m in messages[:2]] == ["Be brief.", "Où?"]
    assert chat(f"/save {file}") == f"not saved: {file}: exists\n"


@pytest.mark.parametrize("end", ["/exit", "/bye", "/quit"])
def test_a_chat_ends_as_in_other_programs(end: str, chat: Callable[..., str]) -> None:
    assert chat(end, "/hello") == ""


def test_commands_are_listed_and_unknown_ones_told(chat: Callable[..., str]) -> None:
    said = chat("/help", "/hello", "/save", "/exit", "/help").splitlines()
    assert [line.split()[0] for line in said[:5]] == ["/help", "/clear", "/save", "/system", "/exit"]
    assert said[-2:] == ["unknown command /hello: /help lists them", "/save: needs an argument"]


@needs_terminal
def test_a_terminal_greets_takes_pasted_lines_as_one_message_and_ends_at_the_second_ctrl_c(
    talker: Path, tmp_path: Path
) -> None:
    terminal = Terminal("chat", talker, "-n", "2", "--temp", "0")
    terminal.until("Talker 1M: type a message, or one of /help /clear /save /system /exit")
    terminal.half_a_line()
    terminal.type("\x03")
    terminal.until("> ")
    terminal.type("\x1b[200~first\rsecond\x1b[201~\r")
    terminal.until("tokens/s")
    terminal.until("> ")
    terminal.type(f"/save {tmp_path / 'talk.json'}\r")
    terminal.until("wrote ")
    for _ in range(2):
        terminal.half_a_line()
        terminal.type("\x03")
    assert terminal.process.wait(PATIENCE) == 0
    assert json.loads((tmp_path / "talk.json").read_text())[0]["content"] == "first\nsecond"


@needs_terminal
def test_a_signal_ends_a_chat_that_waits(talker: Path) -> None:
    terminal = Terminal("chat", talker)
    terminal.half_a_line()
    terminal.process.terminate()
    terminal.until("stopped")
    assert terminal.process.wait(PATIENCE) == 143


def test_tools_and_switches_reach_the_template(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked = []

    def chat_tokens(model: Model, messages: object, template_options: object) -> list[int]:
        asked.append(template_options)
        return [1]

    monkeypatch.setattr(Model, "chat_tokens", chat_tokens)
    template = "{{ '' if enable_thinking else '<think>' }}"
    monkeypatch.setattr(Model, "chat_template", property(lambda model: template))
    (tmp_path / "tools.json").write_text('[{"name": "f"}]')
    options = ["--tools", str(tmp_path / "tools.json"), "--no-think", "--template-option", "effort=low"]
    assert main(["run", str(talker), "-n", "1", "-p", "Hi", "--chat", *options, "--template-option", "budget=9"]) == 0
    assert asked == [{"tools": [{"name": "f"}], "enable_thinking": False, "effort": "low", "budget": 9}]
    capsys.readouterr()
    template = "{{ messages }}"
    assert "no switch for thinking" in refused("run", talker, "-p", "Hi", "--chat", "--no-think")
    (tmp_path / "tools.json").write_text("{}")
    assert "must be a list of objects" in refused("chat", talker, "--tools", tmp_path / "tools.json")
    needs = "--no-think needs a message: give the prompt as words, or --chat"
    assert needs in refused("run", talker, "-p", "Hi", "--no-think")
    assert "'low': must be a name and a value" in refused("chat", talker, "--template-option", "low")


@pytest.mark.parametrize("command", [["chat"], ["run", "--chat", "-p", "Hi"]])
@pytest.mark.parametrize(("template", "fact"), [
    (None, "the checkpoint has no chat template"),
    ("{{ raise_exception('not today') }}", "the chat template cannot be used: it fails with: not today"),
])  # fmt: skip
def test_a_checkpoint_whose_template_is_refused_is_not_converted(
    command: list[str], template: str | None, fact: str, model: Path, tmp_path: Path, refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))  # digests are kept there
    (tmp_path / "cache" / "gguf-bridge" / "models").mkdir(parents=True)
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    assert fact in refused(command[0], model, *command[1:])
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_no_message_shows_pythons_bytes(refused: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PX\x03\x04" + bytes(100))
    said = refused("inspect", file)
    assert "it starts with the bytes 50 58 03 04" in said
    assert not re.search(r"\bb['\"]", said)
