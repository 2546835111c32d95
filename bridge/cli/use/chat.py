"""`gguf-bridge chat`, a conversation on a terminal or line by line from standard input, and `gguf-bridge run`, which is
one where there is no prompt."""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from bridge.cli.use import run
from bridge.cli.use.terminal import Terminated, generated
from bridge.errors import BridgeError
from bridge.system.status_line import LINE
from bridge.system.storage.files import write_text
from bridge.system.storage.outputs import check_outputs
from bridge.system.text import tell

_COMMANDS = """\
/help         lists these commands
/clear        starts over
/save FILE    writes the conversation as JSON
/system TEXT  sets the system message and starts over
/exit         ends
A backslash at the end of a line continues it in the next. Ctrl-C stops a reply or clears the line; twice, it ends."""

_NAMES = re.findall(r"^/[a-z]+", _COMMANDS, re.MULTILINE)


def add_parser(commands: Any) -> None:
    p = run.model_parser(commands, "chat", chat)
    run.take_checkpoints(p)
    p.add_argument("--system", metavar="TEXT", help="system message")
    run.add_template_options(p)
    run.add_sampling(p)
    run.add_run_parser(commands, run_or_chat)


def run_or_chat(a: argparse.Namespace) -> int:
    """Answer the prompt that there is; without one, a terminal is asked."""
    prompt = run.prompt_of(a)
    if prompt is not None:
        return run.run(a, prompt)
    if a.logprobs is not None:
        raise BridgeError("--logprobs needs a prompt; give it after the model")
    return chat(a)


def chat(a: argparse.Namespace) -> int:
    """Answer the lines of standard input, which are one conversation; the speeds go to standard error."""
    extra = run.template_options(a)
    path = run.gguf_of(a, Conversation(None, a.system).probe)
    model = run.load(a, path, a.context, a.lora)
    extra = {**run.without_thinking(a, model.chat_template), **extra}
    options = {**run.reply_options(a), "template_options": extra}
    talk = Conversation(model, a.system)
    model.chat_tokens(talk.probe, extra)  # raises BridgeError if there is no usable chat template
    asks = sys.stdin.isatty()
    if asks:
        tell(f"{model.name}: type a message, or one of /help /clear /save /system /exit")
    for line in lines():
        try:
            if (word := re.match(r"/[a-z]+(?=\s|$)", line)) and (word[0] in _NAMES or word[0] == line.strip()):
                if not command(talk, word[0], line[word.end() :].strip()):
                    break
                continue
            for piece in run.without_pauses(talk.reply(line, **options), model):
                print(piece, end="", flush=True, file=generated())
        except Terminated:
            raise
        except KeyboardInterrupt:  # the reply so far is kept
            pass
        except BridgeError as problem:
            if not asks:
                raise
            tell(f"error: {problem}; /clear starts over")
            continue
        print(flush=True)
        if asks:
            tell(run.speeds(model))
        run.tell_full_context(a, model)
    return 0


def command(talk: "Conversation", name: str, argument: str) -> bool:
    """Do what a line with a command asks for; returns whether the conversation goes on."""
    if name in ("/exit", "/bye", "/quit"):  # as other programs call it
        return False
    if name == "/clear":
        talk.clear()
    elif name == "/system" and argument:
        talk.clear(argument)
    elif name == "/save" and argument:
        _save(talk, Path(argument).expanduser())
    elif name == "/help":
        tell(_COMMANDS)
    else:
        tell(f"{name}: needs an argument" if name in _NAMES else f"unknown command {name}: /help lists them")
    return True


def _save(talk: "Conversation", path: Path) -> None:
    try:
        check_outputs([path], force=False)
        write_text(path, json.dumps(talk.messages, ensure_ascii=False, indent=1) + "\n")
    except (BridgeError, OSError) as problem:
        why = str(problem).partition("; ")[0] if isinstance(problem, BridgeError) else f"{path}: {problem.strerror}"
        tell(f"not saved: {why}")
    else:
        tell(f"wrote {path}")


class Conversation:
    """`messages` of system, user and assistant in turn; the model keeps keys and values from one reply to the next."""

    def __init__(self, model: Any, system: str | None = None):
        self.model = model
        self._first: list[dict[str, str]] = []
        self.messages: list[dict[str, str]] = []
        self.clear(system)

    @property
    def probe(self) -> list[dict[str, str]]:
        """The messages of a first turn, to try the chat template with."""
        return [*self._first, {"role": "user", "content": "?"}]

    def clear(self, system: str | None = None) -> None:
        """Start over, with another system message if one is given."""
        if system is not None:
            self._first = [{"role": "system", "content": system}]
        self.messages = list(self._first)

    def reply(self, text: str, **options: Any) -> Iterator[str]:
        """The model's reply to a text, piece by piece; `options` as in Model.generate.

        The conversation keeps the part of a reply that was read. Raises BridgeError if the conversation no longer fits
        the context; the text is then not part of it.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            pieces = self.model.chat(self.messages, **options)
        except BaseException:
            self.messages.pop()
            raise
        read: list[str] = []
        try:
            for piece in pieces:
                read.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(read)})


def lines() -> Iterator[str]:
    """The messages on standard input, one a line; a backslash at the end of a line continues it in the next.

    On a terminal, lines that are pasted together are one message, and Ctrl-C clears the line; twice, it ends.
    """
    asks = sys.stdin.isatty()
    if asks:
        with suppress(ImportError):
            import readline  # input() then edits lines and remembers them

            readline.parse_and_bind("set enable-bracketed-paste on")
    held, stopped = "", False
    while True:
        LINE.hide()
        try:
            line = input(("... " if held else "> ") if asks else "")
        except EOFError:
            return
        except UnicodeDecodeError as problem:
            raise BridgeError(f"standard input is not UTF-8 (byte {problem.start}); convert it first") from None
        except KeyboardInterrupt as problem:
            if not asks or isinstance(problem, Terminated):
                raise
            tell("")
            if stopped:
                return
            held, stopped = "", True
            continue
        stopped = False
        held += line
        if held.endswith("\\"):
            held = held[:-1] + "\n"
            continue
        if held.strip():
            yield held
        held = ""
