"""Conversations as tokens, by the chat template of a GGUF; with tools, also by one that has no place for them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.runtime.chat.formats import HARMONY, JSON, CallFormat, call_format, written_calls
from bridge.runtime.chat.parser import HarmonyParser
from bridge.runtime.tokenizer import Tokenizer

_TOOLS = """\
You can call functions. To call one, answer with nothing but a JSON object of its name and its arguments, as in
{"name": "the function", "arguments": {"a parameter": "its value"}}
Answer without a call where none is needed. These are the functions, each with the JSON schema of its parameters:
"""


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
    def call_format(self) -> CallFormat:
        """How its models write calls."""
        return call_format(self._for_tools or self.text or "", self.takes_tools)

    def tokens(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None,
        most: int | None = None,
    ) -> list[int]:  # fmt: skip
        """See `Model.chat_tokens`."""
        text, bos = self.render(tokenizer, messages, options), tokenizer.text(tokenizer.bos)
        special = not (bos and text.startswith(bos))
        return tokenizer.encode(text, special) if most is None else tokenizer.encode_within(text, most, special)

    def render(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None
    ) -> str:
        """See `Model.chat_text`."""
        from bridge.gguf_file.chat_template import TemplateFailed, check_template_options, render_chats

        plain = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
        if not plain or not all(isinstance(message, Mapping) for message in messages):
            raise BridgeError('the messages of a chat must be a list: [{"role": "user", "content": "..."}, ...]')
        for number, message in enumerate(messages):
            calls = message.get("role") == "assistant" and message.get("tool_calls")
            for key in ("role",) if calls else ("role", "content"):
                if message.get(key) is None:
                    raise BridgeError(f'message {number} has no {key}; it must be {{"role": ..., "content": ...}}')
        extra = check_template_options({} if options is None else options)
        template = self._for_tools if extra.get("tools") and self._for_tools else self.text
        if template is None:
            raise BridgeError(
                f"{self._path}: the file has no chat template; give the whole prompt as a text, to `gguf-bridge run "
                "-p` without --chat or to Model.generate"
            )
        if self.call_format is HARMONY:
            messages = [_without_channels(message) for message in messages]
        conversations = [list(messages)]
        if extra.get("tools"):
            extra["tools"] = [_with_all_keys(tool) for tool in extra["tools"]]
        if not self.takes_tools and (tools := extra.pop("tools", None)):
            conversations = [_described(messages, tools)]
        elif "tool_calls" not in template:
            conversations = [[_with_calls_in_content(message, self.call_format) for message in messages]]
        elif any(message.get("tool_calls") for message in messages):
            conversations.insert(0, [_with_objects(message) for message in messages])
            if any(len(message.get("tool_calls") or ()) > 1 for message in messages):
                conversations += [_one_call_each(conversation) for conversation in conversations]
        bos, eos = tokenizer.text(tokenizer.bos), tokenizer.text(tokenizer.eos)
        texts = render_chats(
            template, [(conversation, True) for conversation in conversations], {"bos_token": bos, "eos_token": eos},
            options=extra,
        )  # fmt: skip
        rendered = [(text, talk) for text, talk in zip(texts, conversations, strict=True) if isinstance(text, str)]
        text = next((text for text, talk in rendered if not _has_python(text, talk)), texts[0])
        if isinstance(text, TemplateFailed):
            raise BridgeError(f"{self._path}: the chat template cannot be used: {text}") from text
        return text


def _without_channels(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose reasoning is under "thinking", where gpt-oss's template takes it."""
    if message.get("role") != "assistant":
        return message
    changed = dict(message)
    if isinstance(reasoning := changed.pop("reasoning_content", None), str):
        changed.setdefault("thinking", reasoning)
        if changed.get("tool_calls"):
            changed.pop("content", None)  # the template takes one of the two
    if isinstance(content := changed.get("content"), str) and "<|channel|>" in content:
        parts = HarmonyParser(tools=False).add(content, last=True)
        changed["content"] = parts.content
        if parts.reasoning:
            changed.setdefault("thinking", parts.reasoning)
    return changed


def _with_all_keys(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool whose function has a description and parameters, which templates ask for and requests may leave out."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    given = {key: value for key, value in function.items() if value is not None}
    parameters = {"type": "object", "properties": {}, **given.get("parameters", {})}
    return {**tool, "function": {"description": "", **given, "parameters": parameters}}


def _one_call_each(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A conversation whose messages have one call at most, each before its result, as some templates want it."""
    results = {message.get("tool_call_id"): message for message in messages if message.get("role") == "tool"}
    turns: list[Mapping[str, Any]] = []
    moved: list[Mapping[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            turns += [] if any(message is result for result in moved) else [message]
            continue
        for number, call in enumerate(calls):
            turns.append({**message, "content": message.get("content") if not number else "", "tool_calls": [call]})
            if isinstance(call, Mapping) and (result := results.get(call.get("id"))) is not None:
                turns.append(result)
                moved.append(result)
    return turns


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose calls have objects as arguments, which most templates take, instead of their texts."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    try:
        function = dict(call["function"])
        function["arguments"] = json.loads(function["arguments"] or "{}")
    except (KeyError, TypeError, ValueError):  # the template says what it wants
        return call
    return {**call, "function": function} if isinstance(function["arguments"], dict) else call


def _has_python(text: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a template printed the arguments of calls as Python does: it takes texts then."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    arguments = [call["function"].get("arguments") for call in calls if isinstance(call.get("function"), dict)]
    return any(isinstance(value, dict) and value and str(value) in text for value in arguments)


def _with_calls_in_content(message: Mapping[str, Any], form: CallFormat) -> Mapping[str, Any]:
    """A message whose calls are in its text, for a template that has no place for them."""
    if not message.get("tool_calls"):
        return message
    functions = [_with_object(call).get("function") for call in message["tool_calls"]]
    if not all(isinstance(f, dict) and "name" in f and isinstance(f.get("arguments"), dict) for f in functions):
        form_of_calls = '[{"function": {"name": ..., "arguments": "{...}"}}, ...]'
        raise BridgeError(f"the tool_calls of a message must be {form_of_calls}")
    calls = written_calls(functions, form)
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": "\n".join(filter(None, [message.get("content"), calls]))}


def _described(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A conversation with tools for a template that has no place for them: as texts."""
    told: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            told.append({"role": "user", "content": f"The function's result: {message.get('content')}"})
        else:
            told.append(_with_calls_in_content(message, JSON))
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    first = told[0] if told else {"role": "user", "content": ""}
    return [{**first, "content": f"{_TOOLS}{listed}\n\n{first.get('content', '')}".rstrip()}, *told[1:]]
