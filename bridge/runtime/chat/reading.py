"""The calls in a section of a reply, as its format writes them. What is no call raises ValueError."""

import ast
import json
import re
import secrets
import string
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bridge.runtime.chat.formats import ELEMENT, GEMMA_QUOTE, CallFormat
from bridge.runtime.chat.schemas import Schema, alternatives, property_of, schema_of

Functions = Mapping[str, Schema]  # the JSON schema of each function's parameters, by its name

PLACEHOLDER = re.compile(r"\{(name|number|id|arguments|json|parameters|elements|gemma|keywords|key|value|text)\}")
_LARGEST = sys.float_info.max
_NAME = re.compile(r"[\w./-]+")
_ID = re.compile(r"[^\s<\[]+")
_NUMBER = re.compile(r"[0-9]+")
_NAMES, _ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")
_IDS = string.ascii_letters + string.digits


def _finite(text: str) -> float:
    """A number as JSON has it; one that float64 does not hold, as the largest that it does."""
    return max(-_LARGEST, min(_LARGEST, float(text)))


_DECODER = json.JSONDecoder(parse_float=_finite)


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
    calls, rest = first_calls(section, form, functions)
    if rest:
        raise ValueError("there is more than calls")
    return calls


def first_calls(section: str, form: CallFormat, functions: Functions) -> tuple[list[Call], str]:
    """The calls with which a section begins, at least one, and the text after them. Raises ValueError."""
    try:
        return _Section(section, form, functions).calls()
    except (RecursionError, MemoryError, SyntaxError, TypeError) as problem:
        raise ValueError(f"nested too deeply, or not of this syntax: {type(problem).__name__}") from None


def _call_of(value: Any, functions: Functions) -> Call:
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
        self._root: Schema = {}  # of the function whose arguments are read
        self._call_parts = PLACEHOLDER.split(form.call)
        self._parameter = _pattern_of(form) if form.parameter else None

    def calls(self) -> tuple[list[Call], str]:
        """See `first_calls`."""
        calls: list[Call] = []
        while self._match(r"[\s,;]*\Z") is None:
            before = self._at
            try:
                self._match(r"[\s,;]*")
                calls += self._next()
            except (ValueError, SyntaxError):
                if not calls:
                    raise
                return calls, self._text[before:].strip()
        if not calls:
            raise ValueError("there is no call")
        return calls, ""

    def _next(self) -> list[Call]:
        name, id = "", ""
        arguments: Any = None
        for number, part in enumerate(self._call_parts):
            if number % 2 == 0:
                if self._match(_spaced(part)) is None:
                    raise ValueError(f"{part.strip()} is missing")
            elif part == "json":
                value = self._json()
                return [_call_of(one, self._functions) for one in (value if isinstance(value, list) else [value])]
            elif part == "name":
                name = self._read(_NAME)
                self._root = self._functions.get(name, {})
            elif part == "id":
                id = self._read(_ID)
            elif part == "number":
                self._read(_NUMBER)
            else:  # the method of the same name reads the arguments
                arguments = getattr(self, f"_{part}")(self._root)
        return [_call(name, arguments, id)]

    def _match(self, pattern: str) -> re.Match[str] | None:
        """Go past what matches here."""
        match = re.compile(pattern).match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def _read(self, pattern: re.Pattern[str]) -> str:
        """The text that must match here."""
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError("a name is missing")
        self._at = match.end()
        return match[0]

    def _json(self) -> Any:
        self._match(r"\s*")
        value, self._at = _DECODER.raw_decode(self._text, self._at)
        return value

    def _arguments(self, schema: Schema) -> Any:
        return self._json()

    def _parameters(self, schema: Schema) -> dict[str, Any]:
        assert self._parameter is not None
        values = {}
        while (match := self._parameter.match(self._text, self._at)) is not None:
            self._at = match.end()
            key, value = match["key"], match["value"]
            if value.startswith("<![CDATA[") and value.endswith("]]>"):
                values[key] = value[9:-3]
            elif match.groupdict().get("text") == "true":
                values[key] = value
            else:
                values[key] = self._typed(value, property_of(schema, key, self._root))
        return values

    def _keywords(self, schema: Schema) -> dict[str, Any]:
        values = {}
        while (key := self._match(r"\s*([^=()]+?)\s*=\s*")) is not None:
            try:
                before = self._at
                values[key[1]] = self._json()
                if re.compile(r"\s*[,)]").match(self._text, self._at) is None:
                    raise ValueError("a value is not JSON")
            except ValueError:
                self._at = before
                values[key[1]] = ast.literal_eval(self._python_text())
            self._match(r"\s*,")
        return values

    def _python_text(self) -> str:
        """A literal of Python, up to the comma or parenthesis after it."""
        depth, begin = 0, self._at
        while (part := self._match(r"(?s)'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|[^'\"]")) is not None:
            if part[0] in "([{":
                depth += 1
            elif part[0] in ",)]}" and not depth:
                self._at -= 1
                break
            elif part[0] in ")]}":
                depth -= 1
        return self._text[begin : self._at].strip()

    def _elements(self, schema: Schema) -> Any:
        """MiniMax M3's elements, or the text between two marks."""
        kinds = alternatives(schema, self._root)
        listed = any(kind.get("type") == "array" for kind in kinds)
        begin = re.compile(rf"\s*{re.escape(ELEMENT)}<([^<>/\s]+)>")
        entries: list[tuple[str, Any]] = []
        while (match := begin.match(self._text, self._at)) is not None:
            self._at = match.end()
            key = match[1]
            items = next((schema_of(kind.get("items")) for kind in kinds if kind.get("type") == "array"), {})
            entries.append((key, self._elements(items if listed else property_of(schema, key, self._root))))
            if self._match(rf"\s*{re.escape(ELEMENT)}</{re.escape(key)}>") is None:
                raise ValueError(f"<{key}> has no end")
        if entries:
            if listed or (not schema and {key for key, _ in entries} == {"item"}):
                return [value for _, value in entries]
            return dict(entries)
        end = self._text.find(ELEMENT, self._at)
        text, self._at = self._text[self._at : end], end
        if end < 0:
            raise ValueError("an element has no end")
        if not text.strip() and not any(is_text(kind) for kind in kinds):
            return [] if listed else {}
        return self._typed(text, schema)

    def _gemma(self, schema: Schema) -> Any:
        """Gemma 4's object, list, text or other value."""
        if self._match(r"\s*\{") is not None:
            values = {}
            while self._match(r"\s*\}") is None:
                key = self._gemma_key()
                values[key] = self._gemma({})
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
            return self._gemma_text()
        if self._match(r"\s*(?=\")") is not None:
            return self._json()
        word = self._match(r"\s*([^\s,{}\[\]]+)")
        if word is None:
            raise ValueError("a value is missing")
        return self._typed(word[1], {})

    def _gemma_key(self) -> str:
        if self._match(rf"\s*{re.escape(GEMMA_QUOTE)}") is not None:
            key = self._gemma_text()
        elif self._match(r"\s*(?=\")") is not None:
            key = str(self._json())
        else:
            match = self._match(r"\s*([^:{},]+?)(?=\s*:)")
            if match is None:
                raise ValueError("a key is missing")
            key = match[1]
        if self._match(r"\s*:") is None:
            raise ValueError("a value is missing")
        return key

    def _gemma_text(self) -> str:
        """What precedes the next quote."""
        text, mark, _ = self._text[self._at :].partition(GEMMA_QUOTE)
        if not mark:
            raise ValueError("a text has no end")
        self._at += len(text) + len(mark)
        return text

    def _typed(self, text: str, schema: Schema) -> Any:
        """A value that is written as text or as JSON, by its schema."""
        kinds = alternatives(schema, self._root)
        constants = [kind["const"] for kind in kinds if "const" in kind]
        if text in constants or all(is_text(kind) for kind in kinds):
            return text
        value = _value_of(text)
        types = {
            "number" if kind.get("type") == "integer" else kind.get("type") for kind in kinds if "const" not in kind
        }
        types |= {_type_of(constant) for constant in constants}
        if "string" in types and value not in constants and not {_type_of(value), None} & types:
            return text
        return value


def _value_of(text: str) -> Any:
    """The value that a text is as JSON, or as Python, as some templates write it; else the text."""
    words = {"True": True, "False": False, "None": None}
    if text.strip() in words:
        return words[text.strip()]
    for read in (_DECODER.decode, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            value = read(text.strip())
            return value if isinstance(value, str | int | float | list | dict | None) else text
    return text


def _type_of(value: Any) -> str:
    """The type of a value in a schema; integers are numbers."""
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _spaced(literal: str) -> str:
    """A pattern of a text, with any white space where it has some."""
    words = r"\s*".join(map(re.escape, literal.split()))
    return rf"\s*{words}\s*" if literal != literal.strip() or not literal else words


def _pattern_of(form: CallFormat) -> re.Pattern[str]:
    """A pattern of a parameter, with groups for its key, its value, and whether that is a text.

    A value may have the text after it within, unless the next parameter or the end of the call follows that.
    """
    groups = {"key": "(?P<key>.+?)", "value": "(?P<value>(?s:.*?))", "text": "(?P<text>true|false)"}
    parts = PLACEHOLDER.split(form.parameter)
    pattern = [groups[part] if n % 2 else re.escape(part).replace("\\\n", "\n?") for n, part in enumerate(parts)]
    after = form.call.partition("{parameters}")[2].strip()
    follows = "|".join(map(re.escape, filter(None, [parts[0].strip(), after]))) + r"|\Z"
    return re.compile(rf"\s*{''.join(pattern)}(?=\s*(?:{follows}))")


def is_text(schema: Schema) -> bool:
    """Whether values of a schema of one type are texts."""
    return schema.get("type") == "string" or isinstance(schema.get("const"), str)
