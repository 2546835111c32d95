"""Conversations as tokens, by the chat template of a GGUF; and gpt-oss's replies, whose parts have channels.

Such a reply follows `<|start|>assistant` (harmony's form):

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>final<|message|>ANSWER
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS

The recipient of a call may precede its channel. A commentary without one is said to the user.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.runtime.replies.generation import overlap
from bridge.runtime.tokenizer import Tokenizer

_CHANNEL, _MESSAGE, _END, _START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
_BEFORE_BODIES = (_START, _CHANNEL, " to=")  # with which what precedes <|message|> begins


class ChatTemplate:
    """A file's own templates: one for conversations, and perhaps one for those with tools."""

    def __init__(self, metadata: Mapping[str, Any], path: Path):
        self._path = path
        plain, for_tools = (metadata.get(f"tokenizer.chat_template{kind}") for kind in ("", ".tool_use"))
        self.text: str | None = plain if isinstance(plain, str) else None  # in jinja
        self._for_tools = for_tools if isinstance(for_tools, str) else None

    @property
    def takes_tools(self) -> bool:
        """Whether it has a place for tools."""
        return self._for_tools is not None or "tools" in (self.text or "")

    @property
    def has_channels(self) -> bool:
        """Whether replies have channels, which `Channels` takes apart."""
        return _CHANNEL in (self.text or "")

    def tokens(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None,
        most: int | None = None,
    ) -> list[int]:  # fmt: skip
        """See `Model.chat_tokens`."""
        from bridge.gguf_file.chat_template import TemplateFailed, check_template_options, render_chats

        plain = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
        if not plain or not all(isinstance(message, Mapping) for message in messages):
            raise BridgeError('the messages of a chat must be a list: [{"role": "user", "content": "..."}, ...]')
        for number, message in enumerate(messages):
            calls = message.get("role") == "assistant" and message.get("tool_calls")
            needed = ("role",) if calls else ("role", "content")
            for key in needed:
                if message.get(key) is None:
                    raise BridgeError(f'message {number} has no {key}; it must be {{"role": ..., "content": ...}}')
        extra = check_template_options({} if options is None else options)
        template = self._for_tools if extra.get("tools") and self._for_tools else self.text
        if template is None:
            raise BridgeError(
                f"{self._path}: the file has no chat template; give the whole prompt as a text, to `gguf-bridge run "
                "-p` without --chat or to Model.generate"
            )
        if self.has_channels:
            messages = [_without_channels(message) for message in messages]
        bos, eos = tokenizer.text(tokenizer.bos), tokenizer.text(tokenizer.eos)
        (text,) = render_chats(template, [(messages, True)], {"bos_token": bos, "eos_token": eos}, options=extra)
        if isinstance(text, TemplateFailed):
            raise BridgeError(f"{self._path}: the chat template cannot be used: {text}") from text
        special = not (bos and text.startswith(bos))
        return tokenizer.encode(text, special) if most is None else tokenizer.encode_within(text, most, special)


class Channels:
    """A reply with channels in two parts, as its text comes: what the model reasons, and what it says.

    Calls of tools are said, as they are but for `<|start|>assistant`; so is a reply without channels.
    """

    def __init__(self) -> None:
        self._held = ""  # what may be the begin of a mark, and what precedes <|message|>
        self._reasons: bool | None = None  # of the part that is being read; None between two

    def add(self, text: str, last: bool = False) -> tuple[str, str]:
        """What came of the reasoning, and of what is said; `last`: nothing follows."""
        self._held += text
        parts = {True: "", False: ""}
        while self._held:
            if self._reasons is None and not self._begin(parts, last):
                break
            body, end, rest = self._held.partition(_END)
            held = 0 if end or last else overlap(body, _END)
            self._held = rest if end else body[len(body) - held :]
            parts[bool(self._reasons)] += body[: len(body) - held]
            if not end:
                break
            self._reasons = None
        return parts[True], parts[False]

    def _begin(self, parts: dict[bool, str], last: bool) -> bool:
        """Read what precedes a part's body; returns whether all of it has come."""
        held = self._held
        if not any(held.startswith(mark) or (mark.startswith(held) and not last) for mark in _BEFORE_BODIES):
            self._reasons = False
            return True
        if _MESSAGE not in held:
            return False
        before, _, self._held = held.partition(_MESSAGE)
        before = before.removeprefix(f"{_START}assistant")
        called = re.search(r" to=(?!assistant\b)", before)
        self._reasons = not called and before.rpartition(_CHANNEL)[2].startswith("analysis")
        if called:
            parts[False] += before + _MESSAGE
        return True


def _without_channels(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose reasoning is under "thinking", where gpt-oss's template takes it."""
    if message.get("role") != "assistant":
        return message
    changed = dict(message)
    if isinstance(reasoning := changed.pop("reasoning_content", None), str):
        changed.setdefault("thinking", reasoning)
        if changed.get("tool_calls"):
            changed.pop("content", None)  # the template takes one of the two
    if isinstance(content := changed.get("content"), str) and _CHANNEL in content:
        thinking, changed["content"] = Channels().add(content, last=True)
        if thinking:
            changed.setdefault("thinking", thinking)
    return changed
