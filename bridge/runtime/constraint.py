"""Replies that a JSON schema or a regular expression allows, token by token, with llguidance's parser.

Before each draw, llguidance computes which tokens the grammar allows next: one bit for each token of the vocabulary,
tens of microseconds. The logits of all others become -inf, so that whatever the sampler draws fits. When the grammar
allows nothing more, the reply is complete without an end token.

A number in a reply to a schema ends after 16 digits in a row, unless the schema asks for more: a model that is unsure
would go on with them until its context is full.
"""

import copy
import json
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.runtime.tokenizer import Tokenizer

_LONGEST = 1 << 20  # characters of a schema or an expression
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # none but after these
_VALUES = {"const", "enum", "default", "examples"}  # of schemas; what is in them is none
_NAMED = {"properties", "$defs", "definitions"}  # whose keys are names
# of objects that several schemas describe
_JOINED = re.compile(r'"(allOf|not|if|patternProperties|dependentSchemas|unevaluatedProperties)": ')
_OPEN = {"anyOf", "oneOf", "$ref"}  # beside properties, which several schemas then describe
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)  # with what is escaped already
_MOST_DIGITS = 16  # as many as a float64 holds
_known: weakref.WeakKeyDictionary[Tokenizer, Any] = weakref.WeakKeyDictionary()  # each with what `_tokens_of` returns

# words of what llguidance says -> what it means
_MEANINGS = {
    "NoExtensionBias": "nothing fits it",
    "oneOf constraints are not supported": "a oneOf whose alternatives may overlap is not supported; use anyOf",
    "ParserTooComplex": "it is too complex",
}


class GrammarRefused(BridgeError):
    """A schema or an expression that cannot be followed; `reason`: why, in words that name no argument."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{parameter(name)} cannot be followed: {reason}")
        self.reason = reason


class Constraint:
    """What a grammar allows after the tokens so far.

    schema  a JSON schema, as a dict or as its text
    regex   a regular expression (Rust's syntax, without look-around) that the whole reply matches
    around  the grammar, in llguidance's Lark, of a whole reply, for the rule of what fits the schema or expression,
            or for "" where neither is given

    Raises BridgeError where both are given, llguidance is not installed, or it does not know a part of the grammar.
    """

    def __init__(
        self, tokenizer: Tokenizer, schema: Mapping[str, Any] | str | None = None, regex: str | None = None,
        around: Callable[[str], str] | None = None,
    ):  # fmt: skip
        if schema is not None and regex is not None:
            raise BridgeError(f"{parameter('schema')} and {parameter('regex')} exclude each other; give one")
        self._name = "schema" if schema is not None else "regex" if regex is not None else "tools"
        try:
            from llguidance import LLMatcher
        except ImportError as problem:
            raise BridgeError(
                f"{parameter(self._name)} needs llguidance, of the extra `schema`: pip install llguidance"
            ) from problem
        if regex is not None:
            if not isinstance(regex, str):
                raise BridgeError(f"{parameter('regex', regex)}: must be a text")
            text = regex
        else:
            text = "" if schema is None else _schema_text(schema)
        if len(text) > _LONGEST:
            raise BridgeError(f"{parameter(self._name)} has {len(text)} characters; the most is {_LONGEST}")
        self.vocab = len(tokenizer)
        self._tokenizer, self._digits = tokenizer, None if regex is not None else 0
        try:
            if around is not None:
                rule = "" if not text else json_rule(text) if regex is None else f"/{_SLASH.sub(_escaped, text)}/"
                grammar = LLMatcher.grammar_from_lark(around(rule))
            else:
                grammar = _json_grammar(text) if regex is None else LLMatcher.grammar_from_regex(text)
            vocabulary, self._starts_with_digit = _tokens_of(tokenizer)
            self._matcher = LLMatcher(vocabulary, grammar, log_level=0)
        except ValueError as problem:
            raise self._failed(str(problem)) from problem
        if not self._matcher.is_error() and not self.complete:
            self._matcher.compute_bitmask()  # or a schema that nothing fits is refused at the first token
        if self._matcher.is_error():
            raise self._failed(self._matcher.get_error())

    def copy(self) -> Self:
        """What may follow the same tokens, for a reply of its own; the grammar is compiled once for all."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> np.ndarray:
        """uint8, a bit for each of `vocab` tokens, the lowest first: whether it may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise self._failed(self._matcher.get_error())
        if self._digits is not None and self._digits >= _MOST_DIGITS:
            others = bits & ~self._starts_with_digit
            if others.any() and np.unpackbits(others).sum() < self.vocab // 2:  # not in a text, where all may come
                return others
        return bits

    def accept(self, token: int) -> None:
        """Add the token that was drawn."""
        if not self._matcher.consume_token(token):
            raise self._failed(self._matcher.get_error())
        if self._digits is not None:
            piece = self._tokenizer.piece(token)
            digits = len(piece) - len(piece.rstrip(b"0123456789"))
            self._digits = digits + (self._digits if digits == len(piece) else 0)

    def _failed(self, said: str) -> BridgeError:
        return GrammarRefused(self._name, _reason(said))


def _reason(said: str) -> str:
    """What llguidance says, in one sentence, without its state and the grammar that it has made."""
    said = said.partition("<state>")[0]
    if found := re.search(r"^ *error: (.+)", said, re.MULTILINE):  # of the regular expression, below a copy of it
        return found[1]
    if found := re.search(r"Unimplemented keys: (\[.*\])", said):
        return f"it has keywords that are not supported: {', '.join(json.loads(found[1]))}"
    said = re.sub(r"^at .*?: (failed to compile JSON schema: )?", "", said.strip().partition("\n")[0])  # the place
    return next((meaning for words, meaning in _MEANINGS.items() if words in said), said)


def _schema_text(schema: Any) -> str:
    """A schema as JSON; BridgeError where it is none."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
        if not isinstance(parsed, dict):
            raise TypeError(f"it is a {type(parsed).__name__}")
        text = json.dumps(parsed)
        return text if _JOINED.search(text) else json.dumps(_closed(parsed))
    except (TypeError, ValueError, RecursionError) as problem:
        raise BridgeError(f"{parameter('schema')} is not a JSON object: {problem}") from None


def _closed(schema: Any) -> Any:
    """A schema whose objects have no other properties than it names, unless it says so: a model would invent some."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: part if key in _VALUES or ("properties" in schema and key in _OPEN)
        else {name: _closed(inner) for name, inner in part.items()} if key in _NAMED and isinstance(part, dict)
        else _closed(part)
        for key, part in schema.items()
    }  # fmt: skip
    if "properties" in schema and not _OPEN & schema.keys():
        closed.setdefault("additionalProperties", False)
    return closed


def _json_grammar(text: str) -> str:
    """The grammar of a schema."""
    from llguidance import LLMatcher

    options: Any = _SPACES
    return str(LLMatcher.grammar_from_json_schema(text, overrides=options))


def json_rule(schema: Mapping[str, Any] | str) -> str:
    """A schema in a Lark grammar."""
    return f"%json {json.dumps({**json.loads(_schema_text(schema)), 'x-guidance': _SPACES})}"


def _escaped(part: re.Match[str]) -> str:
    """A part of an expression as one stands between slashes."""
    return {"/": r"\/", "\n": r"\n"}.get(part[0], part[0])


class _Vocabulary:
    """A tokenizer as llguidance wants it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self.eos_token_id = min(tokenizer.stops)
        self.special_token_ids = [token for token in range(len(tokenizer)) if not tokenizer.piece(token)]
        special = set(self.special_token_ids)
        self.tokens = [tokenizer.piece(token, token in special) for token in range(len(tokenizer))]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode(plain, add_special=False, parse_special=False)


def _tokens_of(tokenizer: Tokenizer) -> tuple[Any, np.ndarray]:
    """llguidance's tree of a vocabulary, made once: a second for 150,000 tokens; and a bit for each of its tokens, as
    in `Constraint.allowed`: whether it starts with a digit."""
    from llguidance import LLTokenizer

    if tokenizer not in _known:
        if not tokenizer.stops:
            raise BridgeError("the model has no end token, which a schema or a regular expression needs")
        vocabulary: Any = _Vocabulary(tokenizer)
        starts = np.zeros((len(tokenizer) // 32 + 1) * 32, bool)  # as many as llguidance has
        starts[: len(tokenizer)] = [piece[:1].isdigit() for piece in vocabulary.tokens]
        tree = LLTokenizer(vocabulary, eos_token=sorted(tokenizer.stops))
        _known[tokenizer] = tree, np.packbits(starts, bitorder="little")
    return _known[tokenizer]
