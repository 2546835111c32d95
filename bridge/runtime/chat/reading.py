"""The calls in a section of a reply, as its format writes them. What is no call raises ValueError."""

import ast
import json
import re
import secrets
import string
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bridge.runtime.chat.formats import ELEMENT, GEMMA_QUOTE, CallFormat

Functions = Mapping[str, Mapping[str, Any]]  # the JSON schema of each function's parameters, by its name

PLACEHOLDER = re.compile(r"\{(name|number|id|arguments|json|parameters|elements|gemma|python|key|value|text)\}")
_DECODER = json.JSONDecoder()
_NAME = re.compile(r"[\w./-]+")
_ID = re.compile(r"[^\s<\[]+")
_NUMBER = re.compile(r"[0-9]+")
_NAMES, _ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")
_IDS = string.ascii_letters + string.digits


def _new_id() -> str:
    """An id of nine letters and digits, the only ones that Mistral's templates take."""
    return "".join(secrets.choice(_IDS) for _ in range(9))


@dataclass(frozen=True)
class Call:
    """A call of a function; its arguments are the text of a JSON object."""

    name: str
    arguments: str
    id: str = field(default_factory=_new_id)


def read_calls(section: str, form: CallFormat, functions: Functions) -> list[Call]:
    """The calls of a section, without its begin and end. Raises ValueError unless all of it is calls."""
    try:
        if "{python}" in form.call:
            return [*_python_calls(section)]
        return _Section(section, form, functions).calls()
    except (RecursionError, MemoryError, SyntaxError, TypeError) as problem:
        raise ValueError(f"nested too deeply, or not of this syntax: {type(problem).__name__}") from None


def call_of(value: Any, functions: Functions) -> Call:
    """The call that a JSON object with a name and arguments is."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {**value, **value["function"]}
    if not isinstance(value, dict):
        raise ValueError("a call is no object")
    name = next((value[key] for key in _NAMES if key in value), None)
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if name is None and len(value) == 1:  # Apertus: {name: arguments}
        ((name, arguments),) = value.items()
        if name not in functions:
            raise ValueError(f"there is no function {name}")
    if not isinstance(name, str) or not name:
        raise ValueError("a call has no name")
    known = value.get("id", value.get("tool_call_id"))
    return _call(name, arguments, known if isinstance(known, str) else "")


def _call(name: str, arguments: Any, id: str = "") -> Call:
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, dict | None):
        raise ValueError("the arguments of a call are no object")
    text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    return Call(name, text, id) if id else Call(name, text)


class _Section:
    """Reads a section from its begin to its end."""

    def __init__(self, text: str, form: CallFormat, functions: Functions):
        self._text, self._at = text, 0
        self._functions = functions
        self._call_parts = PLACEHOLDER.split(form.call)
        self._parameter = _pattern_of(form.parameter) if form.parameter else None

    def calls(self) -> list[Call]:
        calls: list[Call] = []
        while self._match(r"[\s,;]*\Z") is None:
            self._match(r"[\s,;]*")
            calls += self._next()
        if not calls:
            raise ValueError("there is no call")
        return calls

    def _next(self) -> list[Call]:
        name, id = "", ""
        arguments: Any = None
        calls: list[Call] = []
        for number, part in enumerate(self._call_parts):
            if number % 2 == 0:
                if self._match(_spaced(part)) is None:
                    raise ValueError(f"{part.strip()} is missing")
            elif part == "json":
                value = self._json()
                calls = [call_of(one, self._functions) for one in (value if isinstance(value, list) else [value])]
            elif part == "name":
                name = self._read(_NAME)
            elif part == "id":
                id = self._read(_ID)
            elif part == "number":
                self._read(_NUMBER)
            else:
                arguments = getattr(self, f"_{part}")(self._functions.get(name, {}))
        return calls or [_call(name, arguments, id)]

    def _match(self, pattern: str) -> re.Match[str] | None:
        """Go past what matches here."""
        found = re.compile(pattern).match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _read(self, pattern: re.Pattern[str]) -> str:
        """The text that must match here."""
        found = pattern.match(self._text, self._at)
        if found is None:
            raise ValueError("a name is missing")
        self._at = found.end()
        return found[0]

    def _json(self) -> Any:
        self._match(r"\s*")
        value, self._at = _DECODER.raw_decode(self._text, self._at)
        return value

    def _arguments(self, schema: Mapping[str, Any]) -> Any:
        return self._json()

    def _parameters(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        assert self._parameter is not None
        values = {}
        while (found := self._parameter.match(self._text, self._at)) is not None:
            self._at = found.end()
            key, value = found["key"], found["value"]
            if value.startswith("<![CDATA[") and value.endswith("]]>"):
                values[key] = value[9:-3]
            elif found.groupdict().get("text") == "true":
                values[key] = value
            else:
                values[key] = _typed(value, _property(schema, key))
        return values

    def _elements(self, schema: Mapping[str, Any]) -> Any:
        """MiniMax M3's elements, or the text between two marks."""
        begin = re.compile(rf"\s*{re.escape(ELEMENT)}<([^<>/\s]+)>")
        entries: list[tuple[str, Any]] = []
        while (found := begin.match(self._text, self._at)) is not None:
            self._at = found.end()
            key = found[1]
            inner = schema.get("items", {}) if key == "item" else _property(schema, key)
            entries.append((key, self._elements(inner)))
            if self._match(rf"\s*{re.escape(ELEMENT)}</{re.escape(key)}>") is None:
                raise ValueError(f"<{key}> has no end")
        if entries:
            return [value for _, value in entries] if {key for key, _ in entries} == {"item"} else dict(entries)
        end = self._text.find(ELEMENT, self._at)
        text, self._at = self._text[self._at : end], end
        if end < 0:
            raise ValueError("an element has no end")
        return {} if not text.strip() and "properties" in schema else _typed(text, schema)

    def _gemma(self, schema: Mapping[str, Any]) -> Any:
        """Gemma 4's object, list, text or other value."""
        if self._match(r"\s*\{") is not None:
            values = {}
            while self._match(r"\s*\}") is None:
                key = self._match(r"\s*([^\s:{},]+)\s*:")
                if key is None:
                    raise ValueError("a key is missing")
                values[key[1].removeprefix(GEMMA_QUOTE).removesuffix(GEMMA_QUOTE)] = self._gemma({})
                if self._match(r"\s*,|(?=\s*\})") is None:
                    raise ValueError("an object has no end")
            return values
        if self._match(r"\s*\[") is not None:
            entries = []
            while self._match(r"\s*\]") is None:
                entries.append(self._gemma({}))
                if self._match(r"\s*,|(?=\s*\])") is None:
                    raise ValueError("a list has no end")
            return entries
        if self._match(rf"\s*{re.escape(GEMMA_QUOTE)}") is not None:
            text, mark, _ = self._text[self._at :].partition(GEMMA_QUOTE)
            if not mark:
                raise ValueError("a text has no end")
            self._at += len(text) + len(mark)
            return text
        word = self._match(r"\s*([^\s,{}\[\]]+)")
        if word is None:
            raise ValueError("a value is missing")
        return _typed(word[1], {})


def _spaced(literal: str) -> str:
    """A pattern of a text, with any white space where it has some."""
    words = r"\s*".join(map(re.escape, literal.split()))
    return rf"\s*{words}\s*" if literal != literal.strip() or not literal else words


def _pattern_of(parameter: str) -> re.Pattern[str]:
    """A pattern of a parameter, with groups for its key, its value, and whether that is a text."""
    groups = {"key": '(?P<key>[^<>"]+)', "value": "(?P<value>(?s:.*?))", "text": "(?P<text>true|false)"}
    parts = PLACEHOLDER.split(parameter)
    pattern = [groups[part] if n % 2 else re.escape(part).replace("\\\n", "\n?") for n, part in enumerate(parts)]
    return re.compile(r"\s*" + "".join(pattern))


def _property(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    properties = schema.get("properties")
    value = properties.get(key) if isinstance(properties, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether values of a schema are texts alone."""
    kind = schema.get("type")
    if kind is None and (choices := schema.get("enum")):
        return isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
    return kind == "string" or kind == ["string"]


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """A value that is written as text or as JSON, by its schema."""
    if is_text(schema):
        return text
    words = {"True": True, "False": False, "None": None}  # as templates write Python's
    if text.strip() in words:
        return words[text.strip()]
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            value = read(text.strip())
            return value if isinstance(value, str | int | float | list | dict | None) else text
    return text


def _python_calls(section: str) -> Iterator[Call]:
    """The calls of `f(key=1)`, one a line, or in a list."""
    for statement in ast.parse(section.strip()).body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("a statement is no call")
        value = statement.value
        for node in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
            if not isinstance(node, ast.Call) or node.args or any(pair.arg is None for pair in node.keywords):
                raise ValueError("an expression is no call with names of its arguments")
            arguments = {str(pair.arg): _python_value(pair.value) for pair in node.keywords}
            yield _call(ast.unparse(node.func), arguments)


def _python_value(node: ast.expr) -> Any:
    """The value of a literal, with JSON's words for true, false and null too."""
    words = {"true": True, "false": False, "null": None}

    class _Words(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.AST:
            return ast.Constant(words[name.id]) if name.id in words else name

    return ast.literal_eval(_Words().visit(node))
