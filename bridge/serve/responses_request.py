"""A request of OpenAI's Responses API as one of /v1/chat/completions with the same meaning.

Its own fields are checked here under their own names; what they mean is decided by `request_json`, once for all.
"""

import re
from collections.abc import Mapping
from typing import Any

from bridge.runtime.model import Model
from bridge.runtime.sampling import Sampling
from bridge.serve import request_json
from bridge.serve.request_json import MOST_TOP, BadRequest, ReplyRequest, RequestFields, between
from bridge.system.fields import anything, flag, object_, of_type

_TEXT, _LIST = of_type(str, "a text"), of_type(list, "a list")
_PARTS = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"
_AS_THEY_ARE = (  # fields that chats have by the same name
    "model", "stream", "temperature", "top_p", "user", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "service_tier", "metadata", "store", "parallel_tool_calls", "stream_options",
)  # fmt: skip
_REMEMBERED = ("previous_response_id", "conversation", "prompt")  # by a server that keeps what it answered


def responses(body: Any, model: Model, defaults: Mapping[str, Any]) -> ReplyRequest:
    """The body of /v1/responses."""
    fields = RequestFields(body)
    given = dict(fields.left)
    asked = {key: fields.take(key, anything) for key in _AS_THEY_ARE}
    for key in _REMEMBERED:
        if key in fields:
            raise BadRequest(f"{key} is not supported, as nothing is kept: send all of the conversation as input", key,
                             "unsupported_parameter")  # fmt: skip
    asked["max_completion_tokens"] = fields.take("max_output_tokens", between(0, 1 << 31))
    asked["messages"] = _messages(fields.take("instructions", _TEXT), fields.take("input", anything))
    asked["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.take("tools", _LIST, []))] or None
    asked["tool_choice"] = _choice(fields.take("tool_choice", of_type((str, dict), "a text or an object")))
    text = RequestFields(fields.take("text", object_, {}), "text")
    asked["verbosity"] = text.take("verbosity", anything)
    asked["response_format"] = _format(text.take("format", object_))
    text.end()
    reasoning = RequestFields(fields.take("reasoning", object_, {}), "reasoning")
    asked["reasoning_effort"] = reasoning.take("effort", _TEXT)
    for key in ("summary", "generate_summary"):  # all of the reasoning is given, which serves as well
        reasoning.take(key, _TEXT)
    reasoning.end()
    included = fields.take("include", _LIST, [])
    if unknown := [name for name in included if name not in (_LOGPROBS, "reasoning.encrypted_content")]:
        raise BadRequest(f"include {unknown[0]!r} is not supported; leave it out", "include", "unsupported_parameter")
    top = fields.take("top_logprobs", between(0, MOST_TOP), 0)
    if _LOGPROBS in included or top:
        asked |= {"logprobs": True, "top_logprobs": top}
    fields.take("max_tool_calls", between(0, 1 << 31))  # of tools that the server itself has: there are none
    fields.unchanged("truncation", "disabled")
    fields.unchanged("background", False)
    fields.end()
    try:
        request = request_json.chat(asked, model, defaults, "input")
    except BadRequest as refused:
        raise BadRequest(_own(str(refused)), _own(refused.field or "") or None, refused.code) from None
    request.repeated = _repeated(given, Sampling(**request.sampling))
    request.grammar_field = "text.format.schema"
    return request


def _own(text: str) -> str:
    """What is said of a chat's fields, of the fields that they are made of here."""
    of_tools = text.replace(".function.", ".").replace(
        '"function", "function": {"name": ...}}', '"function", "name": ...}'
    )
    return re.sub(r"messages\[\d+\]", "input", of_tools)


def _repeated(given: Mapping[str, Any], how: Sampling) -> dict[str, Any]:
    """The fields that the answer says again, with what they are where the request does not say."""
    defaults: dict[str, Any] = {
        "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
        "parallel_tool_calls": True, "prompt_cache_key": None, "safety_identifier": None, "service_tier": "default",
        "store": False, "tool_choice": "auto", "tools": [], "top_logprobs": 0, "truncation": "disabled", "user": None,
    }  # fmt: skip
    return {
        **{name: given.get(name, default) for name, default in defaults.items()},
        "temperature": how.temperature, "top_p": how.top_p,
        "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
        "text": {"format": {"type": "text"}, **given.get("text", {})},
    }  # fmt: skip


def _messages(instructions: str | None, given: Any) -> list[dict[str, Any]]:
    """The messages of `instructions` and `input`; the items of one turn of the model become one message."""
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadRequest("input must be a text or a list of items, and not empty", "input")
    turn: dict[str, Any] | None = None  # of the model, which further items may belong to
    for i, item in enumerate(given):
        where = f"input[{i}]"
        message = _item(RequestFields(item, where), where)
        if i == 0 and messages and message["role"] in ("system", "developer"):  # templates take one
            messages[0]["content"] += f"\n\n{message['content']}"
            continue
        if message["role"] != "assistant":
            turn = None
        elif turn is not None and not (turn["content"] and message["content"]):
            turn["content"] += message["content"]
            for key in ("reasoning_content", "tool_calls"):
                if key in message:
                    turn[key] = turn[key] + message[key] if key in turn else message[key]
            continue
        else:
            turn = message
        messages.append(message)
    return messages


def _item(fields: RequestFields, where: str) -> dict[str, Any]:
    """A message in the form of chats."""
    kind = fields.take("type", _TEXT, "message")
    for key in ("id", "status"):
        fields.take(key, _TEXT)
    message: dict[str, Any]
    if kind == "message":
        message = {"role": fields.needed("role", _TEXT), "content": _text(fields.needed("content", anything), where)}
        fields.take("phase", _TEXT)
    elif kind == "function_call":
        function = {"name": fields.needed("name", _TEXT), "arguments": fields.take("arguments", _TEXT, "")}
        call = {"id": fields.needed("call_id", _TEXT), "type": "function", "function": function}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
    elif kind == "function_call_output":
        message = {"role": "tool", "tool_call_id": fields.needed("call_id", _TEXT),
                   "content": _text(fields.needed("output", anything), where)}  # fmt: skip
    elif kind == "reasoning":
        parts = fields.take("content", _LIST, []) or fields.take("summary", _LIST, [])
        reasoning = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        for key in ("summary", "encrypted_content"):
            fields.take(key, anything)
        message = {"role": "assistant", "content": "", "reasoning_content": reasoning}
    else:
        raise BadRequest(f"{where}.type {kind!r} is not supported; leave the item out", f"{where}.type",
                         "unsupported_parameter")  # fmt: skip
    fields.end()
    return message


def _text(content: Any, where: str) -> str:
    """A text, or the texts of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") in _PARTS]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise BadRequest(f"{where} must have a text, or parts that are texts; this model takes texts only", where)
    return "".join(map(str, texts))


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """A function in the form of chats."""
    fields = RequestFields(tool, where)
    kind = fields.take("type", _TEXT, "function")
    if kind != "function":
        raise BadRequest(f"{where}.type {kind!r} is not supported: this server has no tools of its own, and takes "
                         "functions alone", f"{where}.type", "unsupported_parameter")  # fmt: skip
    return {"type": "function", "function": fields.left}


def _choice(choice: Any) -> Any:
    """`tool_choice` in the form of chats."""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(form: Any) -> Any:
    """`text.format` in the form of chats."""
    if form is None:
        return None
    fields = RequestFields(form, "text.format")
    kind = fields.take("type", _TEXT)
    if kind not in ("text", "json_object", "json_schema"):
        raise BadRequest("text.format.type must be text, json_object or json_schema", "text.format.type")
    if kind != "json_schema":
        fields.end()
        return {"type": kind}
    inner = {key: fields.take(key, take) for key, take in (("name", _TEXT), ("description", _TEXT), ("strict", flag))}
    inner["schema"] = fields.needed("schema", object_)
    fields.end()
    return {"type": "json_schema", "json_schema": inner}
