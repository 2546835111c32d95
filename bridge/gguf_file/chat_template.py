"""Jinja chat templates, rendered as transformers does, in a process with limits: see `chat_renderer`."""

import atexit
import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.gguf_file.chat_renderer import CPU_SECONDS, MEMORY

OWN = ("messages", "add_generation_prompt", "bos_token", "eos_token")  # what templates get that is no option
# the switches that templates have for thinking, so that a reply comes without
NO_THINKING = {"enable_thinking": False, "thinking": False, "thinking_mode": "disabled", "thinking_budget": 0}
_SECONDS = 60  # of a process that the system gives no limit of its own

Conversation = tuple[
    Sequence[Mapping[str, Any]], bool
]  # messages as {"role", "content"}; whether to prompt for a reply


class TemplateFailed(Exception):
    """The template cannot be read, does not accept the conversation, or runs into a limit."""


def render_chats(
    template: str,
    conversations: Sequence[Conversation],
    tokens: Mapping[str, str],
    dated: bool = True,
    options: Mapping[str, Any] | None = None,
) -> list[str | TemplateFailed]:
    """The text of each conversation, or why there is none; one process, about 0.1 s, renders them all.

    tokens   texts of the special tokens that templates refer to: {"bos_token": "<s>", "eos_token": "</s>"}
    dated    whether templates may ask for today's date; those that can do without then have one of their own
    options  further variables of the template, plain data: "tools" (a list of functions as JSON Schema), "documents",
             "enable_thinking" ...; see `check_template_options`
    """
    request = {
        "template": template,
        "variables": {**(options or {}), **tokens},
        "dated": dated,
        "conversations": [[[dict(message) for message in messages], prompt] for messages, prompt in conversations],
    }
    try:
        answers = json.loads(_answer(json.dumps(request).encode()))
    except TemplateFailed as failure:
        return [failure] * len(conversations)
    except (TypeError, ValueError, RecursionError) as problem:
        return [TemplateFailed(f"the messages are not plain data: {problem}")] * len(conversations)
    return [text if rendered else TemplateFailed(text) for rendered, text in answers]


def prepare_renderer() -> None:
    """Start a process for the next call of `render_chats`, which then takes a hundredth of the time; and so on."""
    global _keeps
    _keeps = True
    _keep_one()


_keeps = False
_ready: list[subprocess.Popen[bytes]] = []  # at most one


def _keep_one() -> None:
    if not _ready:
        with suppress(TemplateFailed):
            _ready.append(_started())


@atexit.register
def _end() -> None:
    while _ready:
        process = _ready.pop()
        process.kill()
        process.communicate()


def check_template_options(options: Any) -> dict[str, Any]:
    """The options of a chat template, as {"enable_thinking": False}; BridgeError where they are none."""
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise BridgeError('template_options: must be a dict of names and values: {"enable_thinking": False}')
    own = next((name for name in OWN if name in options), None)
    if own is not None:
        raise BridgeError(f"template_options: {own} is given to the template by the program; leave it out")
    for name in ("tools", "documents"):
        value = options.get(name)
        if value is not None and not (isinstance(value, list | tuple) and all(isinstance(v, Mapping) for v in value)):
            raise BridgeError(f"template_options: {name} must be a list of objects, as in the OpenAI API")
    return dict(options)


def thinking_switches(template: str) -> dict[str, Any]:
    """The template's own switches for thinking, set so that the reply comes without: {"enable_thinking": False}."""
    code = " ".join(re.findall(r"\{[{%].*?[}%]\}", template, re.DOTALL))
    return {name: off for name, off in NO_THINKING.items() if re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", code)}


def _started() -> subprocess.Popen[bytes]:
    """A process that waits for a request."""
    script = Path(__file__).with_name("chat_renderer.py")
    command = [sys.executable or "python3", "-I", "-S", str(script)]  # it gets this process's path
    settings = json.dumps({"path": sys.path, "limits": [CPU_SECONDS, MEMORY]}).encode() + b"\n"
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
    except OSError as problem:
        raise TemplateFailed(f"the process that renders it cannot be started: {problem.strerror}") from problem
    with suppress(BrokenPipeError):
        process.stdin.write(settings)  # type: ignore[union-attr]
    return process


def _answer(request: bytes) -> bytes:
    """What the process that renders writes."""
    try:
        process = _ready.pop()
    except IndexError:
        process = _started()
    try:
        output, _ = process.communicate(request, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise TemplateFailed(f"it runs for more than {_SECONDS} seconds") from None
    finally:
        process.kill()
        process.wait()
        if _keeps:
            _keep_one()
    if hasattr(signal, "SIGXCPU") and process.returncode == -signal.SIGXCPU:
        raise TemplateFailed(f"it runs for more than {CPU_SECONDS} seconds")
    if process.returncode:
        raise TemplateFailed(f"the process that renders it ended with {process.returncode}")
    return output
