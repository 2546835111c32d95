"""A request's JSON as what to generate. Every field is used, or known to change nothing, or refused by its name.

What a request multiplies is counted before it is made, and a text is looked at only as far as a context could hold it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import BridgeError
from bridge.gguf_file.chat_template import check_template_options, thinking_switches
from bridge.runtime.chat.reading import Functions
from bridge.runtime.constraint import GrammarRefused
from bridge.runtime.model import Model
from bridge.runtime.replies.pooling import POOLINGS
from bridge.runtime.sampling import NUMBERS, Sampling
from bridge.system.fields import FieldError, Fields, Kind, anything, flag, object_, of_type

MOST_CHOICES = 16  # n
MOST_TEXTS = 256  # of a request for embeddings
MOST_STOPS = 16
LONGEST_STOP = 256  # characters: every token is compared with every beginning of a stop text
MOST_TOP = 20  # most likely tokens that are listed
_COMPLETION_TOKENS = 16  # of /v1/completions, where the request does not say
_FUNCTION_NAME = re.compile(r"[\w./-]{1,128}")
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class BadRequest(Exception):
    """What is wrong with a request: the status, the message, the field, and OpenAI's code."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.field, self.code, self.status = field, code, status


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Have what is refused here be about this field of the request."""
    try:
        yield
    except GrammarRefused as refused:
        raise BadRequest(f"{name}: {refused.reason}", name) from None
    except BridgeError as refused:
        raise BadRequest(str(refused), name) from None


def json_of(data: bytes | bytearray) -> Any:
    """The JSON of a request's body."""
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


class RequestFields(Fields):
    """The fields of a request, each taken once; null is none. `end` refuses those that were not taken."""

    def __init__(self, body: Any, where: str = ""):
        if not isinstance(body, dict):
            raise BadRequest(f"{where or 'the body'} must be a JSON object", where or None)
        super().__init__({name: value for name, value in body.items() if value is not None}, where)
        self._prefix = f"{where}." if where else ""

    def take(self, key: str, kind: Kind, default: Any = None, name: str = "") -> Any:
        """As in Fields, but a field may always be missing, and a wrong one raises BadRequest."""
        try:
            return super().take(key, kind, default, name or self._prefix + key)
        except FieldError as wrong:
            raise BadRequest(f"{wrong.name} must be {wrong.must_be}", wrong.name) from None

    def needed(self, key: str, kind: Kind) -> Any:
        """As `take`, of a field that must be there."""
        if key not in self:
            raise BadRequest(f"{self._prefix}{key} is missing", self._prefix + key)
        return self.take(key, kind)

    def unchanged(self, key: str, *neutral: Any) -> None:
        """A field that only values without an effect are taken for."""
        if self.take(key, anything, neutral[0]) not in neutral:
            name = self._prefix + key
            raise BadRequest(f"{name} is not supported; leave it out", name, "unsupported_parameter")

    def end(self) -> None:
        """Raise BadRequest where a field was not taken."""
        for key in self.left:
            name = self._prefix + key
            raise BadRequest(f"{name} is not supported; leave it out", name, "unsupported_parameter")


_TEXT, _NUMBER, _INTEGER = of_type(str, "a text"), of_type((int, float), "a number"), of_type(int, "an integer")

# fields that say something about a request, and nothing about its answer
_WITHOUT_EFFECT = {
    "user": _TEXT, "safety_identifier": _TEXT, "prompt_cache_key": _TEXT, "prompt_cache_retention": _TEXT,
    "service_tier": _TEXT, "metadata": object_, "store": flag,
}  # fmt: skip


def between(least: int, most: int) -> Kind:
    """An integer of a range."""

    def kind(value: Any, name: str) -> int:
        if not least <= _INTEGER(value, name) <= most:
            raise BadRequest(f"{name} is {value}; must be between {least} and {most}", name)
        return int(value)

    return kind


def _one_of(*names: str) -> Kind:
    """One of a few names."""

    def kind(value: Any, name: str) -> str:
        if value not in names:
            raise BadRequest(f"{name} must be {' or '.join(names)}", name)
        return str(value)

    return kind


def token_ids(value: Any, name: str) -> list[int]:
    """A list of integers."""
    if not _is_ids(value):
        raise BadRequest(f"{name} must be a list of token ids", name)
    return list(value)


@dataclass(frozen=True)
class Tools:
    """What a reply may call.

    functions  the JSON schema of each function's parameters, by its name
    required   whether it must call one
    several    whether it may call more than one
    """

    functions: Functions
    required: bool = False
    several: bool = True


@dataclass
class ReplyRequest:
    """The checked fields of a request for text."""

    max_tokens: int | None
    stop: list[str]
    n: int
    seed: int | None
    logprobs: int | None
    stream: bool
    usage: bool  # in an event of its own at the end of a stream
    sampling: dict[str, Any]
    grammar: dict[str, Any]
    grammar_field: str = "response_format"  # that asks for it
    prompt_field: str = "prompt"
    echo: bool = False
    prompts: list[Any] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)  # of the chat template, besides the messages
    tools: Tools = field(default_factory=lambda: Tools({}))
    repeated: dict[str, Any] = field(default_factory=dict)  # what the answer says of the request


def _common(fields: RequestFields, defaults: Mapping[str, Any]) -> ReplyRequest:
    """The fields that texts and chats share."""
    fields.take("model", _TEXT)  # there is one, whatever a client calls it
    sampling = dict(defaults)
    for key, kind in NUMBERS.items():
        if (value := fields.take(key, _INTEGER if kind is int else _NUMBER)) is not None:
            with naming(key):
                Sampling(**{key: value})
            sampling[key] = value
    biases = fields.take("logit_bias", of_type(dict, "an object of token ids and numbers"), {})
    if biases:
        if not all(map(_TOKEN_ID.fullmatch, biases)):
            raise BadRequest("logit_bias must be an object of token ids and numbers", "logit_bias")
        sampling["logit_bias"] = {int(token): bias for token, bias in biases.items()}
        with naming("logit_bias"):
            Sampling(logit_bias=sampling["logit_bias"])
    stop = fields.take("stop", of_type((str, list), "a text or a list of texts"), [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > MOST_STOPS or not all(isinstance(text, str) and len(text) <= LONGEST_STOP for text in stop):
        texts = f"a text or a list of at most {MOST_STOPS} texts, of at most {LONGEST_STOP} characters each"
        raise BadRequest(f"stop must be {texts}", "stop")
    options = RequestFields(fields.take("stream_options", object_, {}), "stream_options")
    usage = options.take("include_usage", flag, False)
    options.take("include_obfuscation", flag)
    options.end()
    for key, kind in _WITHOUT_EFFECT.items():
        fields.take(key, kind)
    return ReplyRequest(
        max_tokens=fields.take("max_tokens", between(0, 1 << 31)), stop=stop,
        n=fields.take("n", between(1, MOST_CHOICES), 1),
        seed=fields.take("seed", between(0, (1 << 63) - 1), defaults.get("seed")), logprobs=None,
        stream=fields.take("stream", flag, False), usage=usage, sampling=sampling, grammar={},
    )  # fmt: skip


def completion(body: Any, model: Model, defaults: Mapping[str, Any]) -> ReplyRequest:
    """The body of /v1/completions."""
    fields = RequestFields(body)
    asked = _common(fields, defaults)
    asked.prompts = _prompts("prompt", fields.take("prompt", of_type((str, list), _PROMPT)))
    if asked.max_tokens is None:
        asked.max_tokens = _COMPLETION_TOKENS
    asked.logprobs = fields.take("logprobs", between(0, MOST_TOP))
    asked.echo = fields.take("echo", flag, False)
    if asked.echo and asked.stream:
        raise BadRequest("echo is not supported in a stream; leave one of the two out", "echo", "unsupported_parameter")
    fields.unchanged("suffix", "")
    fields.unchanged("best_of", 1, asked.n)
    asked.grammar, asked.grammar_field = _grammar(fields)
    fields.end()
    return asked


_SCHEMA = of_type(dict, "a JSON schema")
_PROMPT = "a text, a list of texts, a list of token ids, or a list of such lists"


def _prompts(name: str, prompt: Any) -> list[Any]:
    """The prompts of a request, each a text or token ids."""
    if prompt is None:
        raise BadRequest(f"{name} is missing", name)
    prompts = [prompt] if isinstance(prompt, str) or (prompt and _is_ids(prompt)) else prompt
    if not prompts or not all(isinstance(one, str) or _is_ids(one) for one in prompts):
        raise BadRequest(f"{name} must be {_PROMPT}, and not empty", name)
    return list(prompts)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)


def _grammar(fields: RequestFields) -> tuple[dict[str, Any], str]:
    """What `response_format` asks for, as arguments of `Constraint`, and the field that has the grammar."""
    response_format, name = fields.take("response_format", object_), "response_format"
    if response_format is None:
        return {}, name
    form = RequestFields(response_format, "response_format")
    kind = form.take("type", _TEXT)
    grammar: dict[str, Any] = {}
    if kind == "json_object":
        grammar["schema"], name = form.take("schema", _SCHEMA, {"type": "object"}), "response_format.schema"
    elif kind == "json_schema":
        inner = RequestFields(form.take("json_schema", object_, {}), "response_format.json_schema")
        grammar["schema"], name = inner.take("schema", _SCHEMA), "response_format.json_schema.schema"
        for key in ("name", "description"):
            inner.take(key, _TEXT)
        inner.take("strict", flag)
        inner.end()
    elif kind == "regex":
        grammar["regex"] = form.take("regex", of_type(str, "a regular expression"), "")
        name = "response_format.regex"
    elif kind != "text":
        raise BadRequest("response_format.type must be text, json_object, json_schema or regex", "response_format")
    form.end()
    if None in grammar.values():
        raise BadRequest(f"{name} is missing", name)
    return grammar, name


def chat(body: Any, model: Model, defaults: Mapping[str, Any], prompt_field: str = "messages") -> ReplyRequest:
    """The body of /v1/chat/completions; `prompt_field`: what another interface calls the messages."""
    model.check_continues()
    if model.chat_template is None:
        raise BadRequest("the model has no chat template, so that it takes no messages; send a prompt to "
                         "/v1/completions", prompt_field, "unsupported_parameter")  # fmt: skip
    fields = RequestFields(body)
    newer = fields.take("max_completion_tokens", between(0, 1 << 31))
    asked = _common(fields, defaults)
    if newer is not None:
        asked.max_tokens = newer
    asked.prompt_field = prompt_field
    asked.messages = _messages(fields.take("messages", of_type(list, "a list of messages")))
    wants = fields.take("logprobs", flag, False)
    top = fields.take("top_logprobs", between(0, MOST_TOP))
    if top is not None and not wants:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    asked.logprobs = (top or 0) if wants else None
    asked.grammar, asked.grammar_field = _grammar(fields)
    with naming("chat_template_kwargs"):
        asked.variables = check_template_options(fields.take("chat_template_kwargs", object_, {}))
    effort = fields.take("reasoning_effort", _TEXT)
    if effort == "none":
        asked.variables = {**thinking_switches(model.chat_template), **asked.variables}
    elif effort is not None and "reasoning_effort" in model.chat_template:
        asked.variables.setdefault("reasoning_effort", effort)
    fields.take("verbosity", _TEXT)
    tools = fields.take("tools", of_type(list, "a list of tools"), [])
    choice = fields.take("tool_choice", of_type((str, dict), _CHOICES), "auto")
    several = fields.take("parallel_tool_calls", flag, True)
    asked.tools = tools_of(tools, choice, several)
    if asked.tools.functions:
        asked.variables["tools"] = tools
    fields.unchanged("modalities", ["text"])
    fields.end()
    return asked


_CHOICES = 'none, auto, required, or {"type": "function", "function": {"name": ...}} of one of the tools'


def tools_of(tools: Sequence[Any], choice: Any, several: bool) -> Tools:
    """What a chat's `tools`, `tool_choice` and `parallel_tool_calls` let a reply call."""
    functions = {}
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise BadRequest(f'{where} must be {{"type": "function", "function": {{...}}}}', where)
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
            raise BadRequest(f"{where}.function.name must be of letters, digits and _ . / -", f"{where}.function.name")
        if not isinstance(schema, dict | None) or (schema and schema.get("type", "object") != "object"):
            inner = f"{where}.function.parameters"
            raise BadRequest(f"{inner} must be the JSON schema of an object", inner)
        functions[name] = {"type": "object", **(schema or {"properties": {}})}
    if choice in ("none", "auto", "required"):
        if choice == "required" and not functions:
            raise BadRequest("tool_choice is required, but there are no tools", "tool_choice")
        return Tools({} if choice == "none" else functions, choice == "required", several)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in functions:
        raise BadRequest(f"tool_choice must be {_CHOICES}", "tool_choice")
    return Tools({name: functions[name]}, True, False)


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Messages whose content is a text; parts of text are joined."""
    if not messages:
        raise BadRequest("messages must be a list of at least one message", "messages")
    texts_only: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise BadRequest(f"{where} must be an object whose role is one of {', '.join(_ROLES)}", where)
        content = message.get("content")
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, dict) and part.get("type") in ("text", "refusal")]
            texts = [text for part in parts if isinstance(text := part.get(part["type"]), str)]
            if len(texts) < len(content):
                raise BadRequest(f"{where}.content has parts that are not texts; this model takes texts only", where)
            content = "".join(texts)
        says = message["role"] == "assistant" and (message.get("tool_calls") or message.get("reasoning_content"))
        if content is None and not says:
            raise BadRequest(f"{where}.content is missing", where)
        if not isinstance(content, str | None):
            raise BadRequest(f"{where}.content must be a text or a list of parts", where)
        _check_calls(message.get("tool_calls"), f"{where}.tool_calls")
        role = "system" if message["role"] == "developer" else message["role"]
        if role == "system" and texts_only and all(before["role"] == "system" for before in texts_only):
            texts_only[0]["content"] += f"\n\n{content}"  # templates take one
        else:
            texts_only.append({**message, "role": role, "content": content or ""})
    return texts_only


def _check_calls(calls: Any, where: str) -> None:
    """Raise BadRequest unless these are the calls of an earlier message, or none."""
    for call in calls if isinstance(calls, list) else [] if calls is None else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        texts = [function.get(key) for key in ("name", "arguments")] if isinstance(function, dict) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise BadRequest(f'{where} must be [{{"id": ..., "function": {{"name": ..., "arguments": "..."}}}}]', where)


@dataclass
class EmbeddingRequest:
    """The checked fields of a request for vectors."""

    texts: list[Any]
    pooling: str | None  # None: the file's own
    size: int | None  # numbers of a vector, where not all are wanted
    in_base64: bool
    cut: bool = False  # whether of a text that is too long the begin is enough


def embeddings(body: Any, model: Model, pooling: str | None) -> EmbeddingRequest:
    """The body of /v1/embeddings."""
    fields = RequestFields(body)
    fields.take("model", _TEXT)
    texts = _prompts("input", fields.take("input", of_type((str, list), _PROMPT)))
    form = fields.take("encoding_format", _one_of("float", "base64"), "float")
    pooling = fields.take("pooling", _one_of(*POOLINGS), pooling)
    fields.take("user", _TEXT)
    size = fields.take("dimensions", between(1, model.embedding_size))
    fields.end()
    return EmbeddingRequest(texts, pooling, size, form == "base64")
