"""Grammars, in llguidance's Lark, of replies that must call tools, or fit a schema after what the model thinks."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bridge.runtime.chat.formats import ELEMENT, GEMMA_QUOTE, HARMONY, CallFormat, Thinking
from bridge.runtime.chat.reading import PLACEHOLDER, Functions, is_text
from bridge.runtime.constraint import json_rule

Schema = Mapping[str, Any]
_GAP = r"/[ \n]{0,4}/"
_ANYTHING = r"/(?s:.*)/"


class ReplyGrammar:
    """
    tokens    the control tokens that marks consist of, by their texts
    thinking  the marks of what the model thinks; None where it does not
    thinks    whether the prompt ends with the first of them
    harmony   whether replies have channels
    """

    def __init__(self, tokens: Mapping[str, int], thinking: Thinking | None, thinks: bool, harmony: bool):
        self._tokens, self._thinking, self._thinks, self._harmony = tokens, thinking, thinks, harmony
        self._rules: list[str] = []

    def text(self, rule: str, form: CallFormat, functions: Functions | None, several: bool, free: bool) -> str:
        """The grammar of a reply that fits a rule, or calls functions, after what the model thinks.

        rule             "": nothing but calls
        form, functions  how calls are written, and what may be called; None: nothing may
        several          whether there may be more than one call
        free             whether a call is only what follows the begin of one, in any text
        """
        if free and functions:
            return self._free(form, functions, several)
        final = self._literal("<|channel|>final<|message|>") if self._harmony else ""
        answers = [f"{final} {rule}"] if rule else []
        if functions:
            answers.append(self._calls(form, functions, several))
        start = f"{self._thought()} ({' | '.join(answers)})"
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _free(self, form: CallFormat, functions: Functions, several: bool) -> str:
        calls = self._calls(replace(form, begin=""), functions, several)
        begin = self._literal(form.begin)
        text = "TEXT: /(?s:.*)/"
        if "<[" not in begin:  # the begin is text as any other
            text += f" & ~/(?s:.*){_escaped(form.begin)}(?s:.*)/"
        start = f"{self._thought()} (TEXT | ({self._until(form.begin)} {calls})+ TEXT?)"
        return "\n".join([f"start: {start}", text, *self._rules]) + "\n"

    def _calls(self, form: CallFormat, functions: Functions, several: bool) -> str:
        call = self._rule(" | ".join(self._call(form, name, schema) for name, schema in functions.items()))
        begin, end = self._literal(form.begin), self._literal(form.end)
        if form.listed:
            calls = f'"[" {call} (", " {call})* "]"' if several else f'"[" {call} "]"'
        elif form.between is not None and several:
            calls = f"{call} ({self._literal(form.between)} {call})*"
        else:
            calls = call
        answer = f"{'' if form.answer else begin} {calls} {end}"  # with `answer`, the prompt ends with the begin
        if several and form.begin and form is not HARMONY and form.between is None and not form.listed:
            separator = self._rule(r"/\n?/") if form.end else ""
            answer += f" ({separator} {begin} {calls} {end})*"
        return answer

    def _rule(self, body: str, attributes: str = "") -> str:
        """The name of a new rule."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _literal(self, text: str) -> str:
        """A text, whose control tokens are those tokens."""
        if not text:
            return ""
        names = sorted(self._tokens, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        return " ".join(
            f"<[{self._tokens[part]}]>" if part in self._tokens else json.dumps(part) for part in parts if part
        )

    def _until(self, end: str) -> str:
        """Any text, and the end of it."""
        literal = self._literal(end)
        if "<[" in literal:  # no text has these
            return f"{self._rule(_ANYTHING)} {literal}"
        return self._rule(_ANYTHING, f"[suffix={literal}]")

    def _thought(self) -> str:
        """What the model thinks, which may be missing where the prompt has not begun it."""
        if self._harmony:
            analysis = self._literal("<|channel|>analysis<|message|>")
            return f"({analysis} {self._until('<|end|>')} {self._literal('<|start|>assistant')})?"
        if self._thinking is None:
            return ""
        thought = f"{self._until(self._thinking.end)} {self._rule(_GAP)}"
        return thought if self._thinks else f"({self._literal(self._thinking.begin)} {thought})?"

    def _call(self, form: CallFormat, name: str, schema: Schema) -> str:
        writers: dict[str, Callable[[Schema], str]] = {
            "arguments": json_rule, "elements": self._elements, "gemma": self._gemma,
            "parameters": lambda schema: self._parameters(form.parameter, schema),
        }  # fmt: skip
        written = []
        for number, part in enumerate(PLACEHOLDER.split(form.call)):
            if number % 2 == 0:
                written.append(self._literal(part))
            elif part == "name":
                written.append(self._literal(name))
            elif part == "number":
                written.append("/[0-9]{1,3}/")
            elif part == "id":
                written.append("/[a-zA-Z0-9]{9}/")
            elif part == "json":
                names, arguments = (json.dumps(key) for key in form.keys)
                begin = f"{{{names}: {json.dumps(name)}, {arguments}: "
                written += [json.dumps(begin), json_rule(schema), '"}"']
            elif part == "python":
                arguments = self._pairs(
                    schema, lambda key, of_key: f"{json.dumps(key + '=')} {json_rule(of_key)}", ", "
                )
                written.append(f'{json.dumps(name + "(")} {arguments} ")"')
            else:
                written.append(writers[part](schema))
        return " ".join(filter(None, written))

    def _parameters(self, parameter: str, schema: Schema) -> str:
        """Each property, those that need not be there perhaps."""
        before, end = parameter.split("{value}")
        written = []
        for key, of_key, required in _properties(schema):
            text = is_text(of_key)
            begin = self._literal(before.replace("{key}", key).replace("{text}", "true" if text else "false"))
            value = self._free_text(of_key, end) if text else f"{json_rule(of_key)} {self._literal(end)}"
            written.append(f"({begin} {value}){'' if required else '?'}")
        return " ".join(written)

    def _free_text(self, schema: Schema, end: str) -> str:
        """A text without quotes, and its end."""
        if isinstance(choices := schema.get("enum"), list):
            return f"({' | '.join(self._literal(choice + end) for choice in choices)})"
        return self._until(end)

    def _elements(self, schema: Schema) -> str:
        def element(key: str, inner: Schema) -> str:
            end = f"{ELEMENT}</{key}>"
            begin = self._literal(f"{ELEMENT}<{key}>")
            if is_text(inner):
                return f"{begin} {self._free_text(inner, end)}"
            return f"{begin} {self._elements(inner)} {self._literal(end)}"

        if schema.get("type") == "array":
            return f"({element('item', schema.get('items') or {'type': 'string'})})*"
        if not isinstance(schema.get("properties"), Mapping):
            return json_rule(schema)
        pairs = _properties(schema)
        return " ".join(f"({element(key, inner)}){'' if required else '?'}" for key, inner, required in pairs)

    def _gemma(self, schema: Schema) -> str:
        quote = self._literal(GEMMA_QUOTE)
        if is_text(schema):
            return f"{quote} {self._free_text(schema, GEMMA_QUOTE)}"
        if schema.get("type") == "array":
            item = self._rule(self._gemma(schema.get("items") or {"type": "string"}))
            return f'"[" ({item} ("," {item})*)? "]"'
        if not isinstance(schema.get("properties"), Mapping):
            return '"{" "}"' if schema.get("type") == "object" else json_rule(schema)
        pairs = self._pairs(schema, lambda key, inner: f"{json.dumps(key + ':')} {self._gemma(inner)}", ",")
        return f'"{{" {pairs} "}}"'

    def _pairs(self, schema: Schema, pair: Callable[[str, Schema], str], comma: str) -> str:
        """Pairs of keys and values with commas between them, some of which need not be there."""
        first, later = "", ""  # what may follow no pair, and what may follow one
        for key, of_key, required in reversed(_properties(schema)):
            written = self._rule(pair(key, of_key))
            alone = f"{written} {later}"
            after = f"{json.dumps(comma)} {alone}"
            first = f"({alone})" if required else f"({alone} | {first})" if first else f"({alone})?"
            later = self._rule(after if required else f"({after} | {later})" if later else f"({after})?")
        return first


def _escaped(text: str) -> str:
    """A text as an expression between slashes."""
    return re.sub(r"([.+*?()|\[\]{}^$/\\])", r"\\\1", text).replace("\n", "\\n")


def _properties(schema: Schema) -> list[tuple[str, Schema, bool]]:
    """The key, the schema and whether it is required, of each property."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return []
    needed = set(required) if isinstance(required, list) else set()
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [
        (key, {**(inner if isinstance(inner, Mapping) else {}), **shared}, key in needed)
        for key, inner in properties.items()
    ]
