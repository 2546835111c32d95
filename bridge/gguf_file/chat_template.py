"""Jinja chat templates, rendered as transformers does, in a process with limits: see `chat_renderer`."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.gguf_file.chat_renderer import CPU_SECONDS, MEMORY

_SECONDS = 60  # of a process that the system gives no limit of its own

Conversation = tuple[
    Sequence[Mapping[str, Any]], bool
]  # messages as {"role", "content"}; whether to prompt for a reply


class TemplateFailed(Exception):
    """The template cannot be read, does not accept the conversation, or runs into a limit."""


def render_chats(
    template: str, conversations: Sequence[Conversation], tokens: Mapping[str, str], dated: bool = True
) -> list[str | TemplateFailed]:
    """The text of each conversation, or why there is none; one process, about 0.1 s, renders them all.

    tokens  texts of the special tokens that templates refer to: {"bos_token": "<s>", "eos_token": "</s>"}
    dated   whether templates may ask for today's date; those that can do without then have one of their own
    """
    request = {
        "path": sys.path,
        "limits": [CPU_SECONDS, MEMORY],
        "template": template,
        "variables": tokens,
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


def _answer(request: bytes) -> bytes:
    """What the process that renders writes."""
    script = Path(__file__).with_name("chat_renderer.py")
    command = [sys.executable or "python3", "-I", "-S", str(script)]  # it gets this process's path
    try:
        done = subprocess.run(
            command, input=request, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_SECONDS
        )
    except OSError as problem:
        raise TemplateFailed(f"the process that renders it cannot be started: {problem.strerror}") from problem
    except subprocess.TimeoutExpired:
        raise TemplateFailed(f"it runs for more than {_SECONDS} seconds") from None
    if hasattr(signal, "SIGXCPU") and done.returncode == -signal.SIGXCPU:
        raise TemplateFailed(f"it runs for more than {CPU_SECONDS} seconds")
    if done.returncode:
        raise TemplateFailed(f"the process that renders it ended with {done.returncode}")
    return done.stdout
