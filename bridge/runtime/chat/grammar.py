"""Grammars, in llguidance's Lark, of replies that must call tools, or fit a schema after what the model thinks."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from bridge.runtime.chat.formats import ELEMENT, GEMMA_QUOTE, HARMONY, CallFormat, Thinking
from bridge.runtime.chat.reading import PLACEHOLDER, Functions, is_text
from bridge.runtime.chat.schemas import Schema, alternatives, is_free, properties_of, schema_of
from bridge.runtime.constraint import json_rule

_GAP = r"/[ \n]{0,4}/"
_ANYTHING = r"/(?s:.*)/"


class ReplyGrammar:
    """
    tokens    the control tokens that marks consist of, by their texts
    others    further ones that a reply may have
    thinking  the marks of what the model thinks; None where it does not
    thinks    whether the prompt ends with the first of them
    harmony   whether replies have channels
    """

    def __init__(
        self, tokens: Mapping[str, int], others: Collection[int], thinking: Thinking | None, thinks: bool, harmony: bool
    ):
        self._tokens, self._others = tokens, set(others)
        self._thinking, self._thinks, self._harmony = thinking, thinks, harmony
        self._rules: list[str] = []
        self._shared: dict[str, str] = {}  # rules of which there is one
        self._root: Schema = {}  # of the function whose call is written
        self._references: dict[str, str] = {}  # to parts of it, and their rules

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
        return self._joined(start)

    def _joined(self, start: str) -> str:
        shared = [f"{name}: {body}" for name, body in self._shared.items()]
        return "\n".join([f"start: {start}", *shared, *self._rules]) + "\n"

    def _free(self, form: CallFormat, functions: Functions, several: bool) -> str:
        calls = self._calls(replace(form, begin=""), functions, several)
        begin = self._literal(form.begin)
        self._shared["TEXT"] = "/(?s:.*)/"
        others = sorted(self._others - set(self._tokens.values()))
        if "<[" not in begin:  # the begin is text as any other
            self._shared["TEXT"] += f" & ~/(?s:.*){_escaped(form.begin)}(?s:.*)/"
        text = "TEXT"
        if others:
            self._shared["other"] = f"<[{','.join(map(str, others))}]>"
            text = self._rule("TEXT (other TEXT)*")
        section = f"{self._until(form.begin)} {calls}"
        if others:
            section = f"(TEXT other)* {section}"
        rest = f"{text}?" if form.end else ""  # without an end, text would be part of the last call
        more = several and (form.end or form.between is None)  # else what follows a call is another, or nothing
        calling = f"({section})+" if more else section
        return self._joined(f"{self._thought()} ({text} | {calling} {rest})")

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

    def _call(self, form: CallFormat, name: str, root: Schema) -> str:
        self._root, self._references = root, {}
        parameters = partial(self._parameters, form.parameter)
        writers: dict[str, Callable[[Schema], str]] = {
            "arguments": json_rule, "elements": self._elements, "gemma": self._gemma, "keywords": self._keywords,
            "parameters": lambda schema: self._each(schema, parameters),
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
                written += [json.dumps(begin), json_rule(root), '"}"']
            else:
                written.append(writers[part](root))
        return " ".join(filter(None, written))

    def _json(self, schema: Schema) -> str:
        """A part of the function's schema as JSON, with what its references name."""
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return json_rule({**shared, **schema})

    def _each(self, schema: Schema, write: Callable[[Schema], str]) -> str:
        """What is written of a schema: of each of the alternatives that it has."""
        return f"({' | '.join(write(kind) or chr(34) * 2 for kind in alternatives(schema, self._root))})"

    def _referred(self, schema: Schema, write: Callable[[Schema], str]) -> str:
        """A rule for a schema, the same one where it is referred to again: schemas of trees contain themselves."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or len(schema) > 1:
            return self._each(schema, write)
        if reference not in self._references:
            name = self._references[reference] = f"reference_{len(self._rules)}_{len(self._references)}"
            self._rules.append(f"{name}: {self._each(schema, write)}")
        return self._references[reference]

    def _parameters(self, parameter: str, schema: Schema) -> str:
        """Each property, those that need not be there perhaps."""
        before, end = parameter.split("{value}")
        written = []
        for key, of_key, required in properties_of(schema):
            values = []
            for kind in alternatives(of_key, self._root):
                begin = before.replace("{key}", key).replace("{text}", "true" if is_text(kind) else "false")
                values.append(f"{self._literal(begin)} {self._value(kind, end)}")
            written.append(f"({' | '.join(values)}){'' if required else '?'}")
        if is_free(schema):
            begin, middle = before.replace("{text}", "true").split("{key}")
            key = r"/[\w.-]{1,64}/"
            written.append(f"({self._literal(begin)} {key} {self._literal(middle)} {self._until(end)})*")
        return " ".join(written)

    def _value(self, kind: Schema, end: str) -> str:
        """A value of one type, texts without quotes, and what follows it."""
        if "const" in kind:
            constant = kind["const"]
            return self._literal((constant if isinstance(constant, str) else json.dumps(constant)) + end)
        return self._until(end) if is_text(kind) else f"{self._json(kind)} {self._literal(end)}"

    def _keywords(self, schema: Schema) -> str:
        def pair(key: str, inner: Schema) -> str:
            return f"{json.dumps(key + '=')} {self._json(inner)}"

        def write(kind: Schema) -> str:
            anything = r'(FREE_KEY %json {} (", " FREE_KEY %json {})*)?'
            return self._pairs(kind, pair, ", ") if not is_free(kind) else anything

        self._shared["FREE_KEY"] = r"/[a-zA-Z_]\w{0,63}=/"
        return self._each(schema, write)

    def _elements(self, schema: Schema) -> str:
        return self._referred(schema, self._element_of_kind)

    def _element_of_kind(self, kind: Schema) -> str:
        def element(key: str, inner: Schema) -> str:
            begin, end = self._literal(f"{ELEMENT}<{key}>"), f"{ELEMENT}</{key}>"
            kinds = alternatives(inner, self._root)
            if all(one.get("type") not in ("array", "object") for one in kinds):
                return f"{begin} ({' | '.join(self._value(one, end) for one in kinds)})"
            return f"{begin} {self._elements(inner)} {self._literal(end)}"

        if kind.get("type") == "array":
            item = self._rule(element("item", schema_of(kind.get("items")) or {"type": "string"}))
            return f"{item}{'+' if kind.get('minItems') else '*'}"
        if kind.get("type") == "object":
            pairs = properties_of(kind)
            return " ".join(f"({element(key, inner)}){'' if required else '?'}" for key, inner, required in pairs)
        return self._json(kind)

    def _gemma(self, schema: Schema) -> str:
        return self._referred(schema, self._gemma_of_kind)

    def _gemma_of_kind(self, kind: Schema) -> str:
        quote = self._literal(GEMMA_QUOTE)
        if is_text(kind):
            return f"{quote} {self._value(kind, GEMMA_QUOTE)}"
        if "const" in kind:
            return json_rule(kind)
        if kind.get("type") == "array":
            item = self._rule(self._gemma(schema_of(kind.get("items")) or {"type": "string"}))
            return f'"[" {item} ("," {item})* "]"' if kind.get("minItems") else f'"[" ({item} ("," {item})*)? "]"'
        if kind.get("type") == "object" and not is_free(kind):
            pairs = self._pairs(kind, lambda key, inner: f"{json.dumps(key + ':')} {self._gemma(inner)}", ",")
            return f'"{{" {pairs} "}}"'
        if kind.get("type") in ("number", "integer", "boolean", "null"):
            return self._json(kind)
        plain = json_rule({"type": ["number", "boolean", "null"]})
        pair = r"/\w{1,64}:/ gemma_any"
        self._shared["gemma_object"] = f'"{{" ({pair} ("," {pair})*)? "}}"'
        self._shared["gemma_any"] = (
            f'{quote} {self._until(GEMMA_QUOTE)} | {plain} | "[" (gemma_any ("," gemma_any)*)? "]" | gemma_object'
        )
        return "gemma_object" if kind.get("type") == "object" else "gemma_any"

    def _pairs(self, schema: Schema, pair: Callable[[str, Schema], str], comma: str) -> str:
        """Pairs of keys and values with commas between them, some of which need not be there."""
        first, later = "", ""  # what may follow no pair, and what may follow one
        for key, of_key, required in reversed(properties_of(schema)):
            written = self._rule(pair(key, of_key))
            alone = f"{written} {later}"
            after = f"{json.dumps(comma)} {alone}"
            first = f"({alone})" if required else f"({alone} | {first})" if first else f"({alone})?"
            later = self._rule(after if required else f"({after} | {later})" if later else f"({after})?")
        return first


def _escaped(text: str) -> str:
    """A text as an expression between slashes."""
    return re.sub(r"([.+*?()|\[\]{}^$/\\])", r"\\\1", text).replace("\n", "\\n")
