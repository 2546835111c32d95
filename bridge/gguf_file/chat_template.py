"""Jinja chat templates, rendered as transformers does, in a process with limits: see `chat_renderer`."""

import atexit
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError, parameter
from bridge.gguf_file.chat_renderer import CPU_SECONDS, MEMORY

OWN = ("messages", "add_generation_prompt", "bos_token", "eos_token")  # what templates get that is no option
# the switches that templates have for thinking, so that a reply comes without
NO_THINKING = {"enable_thinking": False, "thinking": False, "thinking_mode": "disabled", "thinking_budget": 0}
_SECONDS = 60  # of a process that the system gives no limit of its own

# messages as {"role", "content"}; whether to prompt for a reply
Conversation = tuple[Sequence[Mapping[str, Any]], bool]


class TemplateFailed(Exception):
    """The template cannot be read, does not accept the conversation, or runs into a limit."""


def render_chats(
    template: str, conversations: Sequence[Conversation], tokens: Mapping[str, str], dated: bool | str = True,
    options: Mapping[str, Any] | None = None,
) -> list[str | TemplateFailed]:  # fmt: skip
    """The text of each conversation, or why there is none; one process, about 0.1 s, renders them all.

    tokens   texts of the special tokens that templates refer to: {"bos_token": "<s>", "eos_token": "</s>"}
    dated    whether templates may ask for today's date; those that can do without then have one of their own. A
             text: dates are their formats, with it in place of each %
    options  further variables of the template, plain data: "tools" (a list of functions as JSON Schema), "documents",
             "enable_thinking" ...; see `check_template_options`
    """
    request = {
        "template": template, "variables": {**(options or {}), **tokens}, "dated": dated,
        "conversations": [[[dict(message) for message in messages], prompt] for messages, prompt in conversations],
    }  # fmt: skip
    try:
        answers = json.loads(_answer(json.dumps(request).encode()))
    except TemplateFailed as failure:
        return [failure] * len(conversations)
    except (TypeError, ValueError, RecursionError) as problem:
        return [TemplateFailed(f"the messages are not plain data: {problem}")] * len(conversations)
    return [text if rendered else TemplateFailed(text) for rendered, text in answers]


def keep_renderer() -> None:
    """Keep the process for all calls to come, each of which then takes milliseconds; the limits are each call's."""
    global _keeps
    with _lock:
        if not _keeps:
            _keeps = True
            _renderers.append(_started())


_lock = threading.Lock()
_keeps = False
_renderers: list[subprocess.Popen[bytes]] = []  # at most one


@atexit.register
def end_renderer() -> None:
    """End the process that `keep_renderer` keeps."""
    global _keeps
    with _lock:
        _keeps = False
        while _renderers:
            _end(_renderers.pop())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def check_template_options(options: Any) -> dict[str, Any]:
    """The options of a chat template, as {"enable_thinking": False}; BridgeError where they are none."""
    asked = parameter("template_options")
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise BridgeError(f'{asked}: must be a dict of names and values: {{"enable_thinking": False}}')
    reserved = next((name for name in OWN if name in options), None)
    if reserved is not None:
        raise BridgeError(f"{asked}: {reserved} is given to the template by the program; leave it out")
    for name in ("tools", "documents"):
        value = options.get(name)
        if value is not None and not (isinstance(value, list | tuple) and all(isinstance(v, Mapping) for v in value)):
            raise BridgeError(f"{asked}: {name} must be a list of objects, as in the OpenAI API")
    return dict(options)


def thinking_switches(template: str) -> dict[str, Any]:
    """The template's own switches for thinking, set so that the reply comes without: {"enable_thinking": False}."""
    code = " ".join(re.findall(r"\{[{%].*?(?:[}%]\}|\Z)", template, re.DOTALL))  # one pass, closed or not
    return {name: off for name, off in NO_THINKING.items() if re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", code)}


def _started() -> subprocess.Popen[bytes]:
    """A process that waits for requests."""
    script = Path(__file__).with_name("chat_renderer.py")
    command = [sys.executable or "python3", "-I", "-S", str(script)]  # it gets this process's path
    settings = json.dumps({"path": sys.path, "limits": [CPU_SECONDS, MEMORY]}).encode() + b"\n"
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as problem:
        raise TemplateFailed(f"the process that renders it cannot be started: {problem.strerror}") from problem
    assert process.stdin is not None
    process.stdin.write(settings)  # into the buffer: it is sent with the first request, or below
    with suppress(BrokenPipeError):
        process.stdin.flush()
    return process


def _answer(request: bytes) -> bytes:
    """What the process that renders writes."""
    if not _keeps:
        process = _started()
        try:
            return _exchange(process, request)
        finally:
            _end(process)
    with _lock:
        if not _renderers:
            _renderers.append(_started())
        try:
            return _exchange(_renderers[0], request)
        except TemplateFailed:
            _end(_renderers.pop())
            raise


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """The answer to one request; TemplateFailed where the process ends instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(_SECONDS, stop)
    timer.start()
    try:
        with suppress(BrokenPipeError):
            process.stdin.write(request + b"\n")
            process.stdin.flush()
        if (answer := process.stdout.readline()).endswith(b"\n"):
            return answer
    finally:
        timer.cancel()
    process.wait()
    if late.is_set():
        raise TemplateFailed(f"it runs for more than {_SECONDS} seconds")
    if hasattr(signal, "SIGXCPU") and process.returncode == -signal.SIGXCPU:
        raise TemplateFailed(f"it runs for more than {CPU_SECONDS} seconds")
    raise TemplateFailed(f"the process that renders it ended with {process.returncode}")
