"""Replies fit the schema or the expression that they are asked for, whatever the model would say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.errors import BridgeError
from bridge.runtime.constraint import Constraint
from bridge.runtime.model import Model
from tests.conftest import CHECKPOINT

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


WORD = {"type": "string", "maxLength": 8}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": closed(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "enum": closed(colour={"enum": ["red", "green", "blue", 7, None, True]}),
    "const": {"const": {"a": [1, 2, {"b": "c"}]}},
    "array": {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4},
    "nested": closed(who=closed(first=WORD, last=WORD), tags={"type": "array", "items": WORD, "maxItems": 2}),
    "any of": {"anyOf": [closed(a=DIGIT), closed(b={"type": "boolean"}), {"type": "null"}]},
    "references": {
        "$defs": {"point": closed(x=DIGIT, y=DIGIT)},
        "type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 2,
    },
    "pattern": closed(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "formats": closed(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    "numbers": closed(share={"type": "number", "minimum": 0, "maximum": 1}, minus={"type": "integer", "maximum": -5,
                                                                                  "minimum": -10}),
    "optional": {"type": "object", "properties": {"a": DIGIT, "b": WORD}, "additionalProperties": False},
    "unicode": closed(**{"größe": {"enum": ["klein", "groß", "日本"]}}),
    "tuple": {"type": "array", "prefixItems": [DIGIT, {"type": "boolean"}], "items": False, "minItems": 2},
}  # fmt: skip


OPEN = {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]}  # other properties may be there
NESTED = {
    "$defs": {"open": OPEN}, "type": "object", "properties": {"inner": {"$ref": "#/$defs/open"}}, "required": ["inner"],
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("constraint") / "model.gguf"
    bridge.convert(CHECKPOINT, out)
    return out


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return bridge.Model.load(path)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_reply_parses_and_validates(name: str, model: Model) -> None:
    """Greedy, drawn, and drawn from all tokens alike: also from those that this model finds nearly impossible."""
    schema = SCHEMAS[name]
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 1}]
    ways += [{"seed": seed, "temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} for seed in range(4)]
    for way in ways:
        text = "".join(model.generate("GREMIO:", 900, schema=schema, **way))
        jsonschema.validate(json.loads(text), schema)
    (text,) = model.generate_batch(["GREMIO:"], 900, schema=json.dumps(schema), seed=9)
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("regex", ["[a-z]{3} [0-9]{2}\\.", "(yes|no)", "", "é{2}日", "\\d{4}-\\d{2}"])
def test_a_reply_matches_the_whole_expression(regex: str, model: Model) -> None:
    for seed in range(3):
        text = "".join(model.generate("KING:", 50, regex=regex, seed=seed, temperature=3.0, top_k=0))
        assert re.fullmatch(regex, text), text


def test_the_reply_ends_where_the_grammar_does_and_its_probabilities_are_the_models_own(model: Model) -> None:
    scored = list(model.generate_scored("KING:", 50, logprobs=1, schema={"const": "yes"}, temperature=0))
    assert "".join(token.text for token in scored) == '"yes"'
    ids = model.tokenizer.encode("KING:")
    rows = model.logits([*ids, *(token.token for token in scored)], last=len(scored) + 1)[:-1].astype(np.float64)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    own = rows[np.arange(len(scored)), [token.token for token in scored]]
    np.testing.assert_allclose([token.logprob for token in scored], own, atol=0.02)
    assert scored[0].top[0][0] != scored[0].token


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schema": "no JSON"}, "schema is not a JSON object: "),
        ({"schema": [1]}, "schema is not a JSON object"),
        ({"schema": "[1]"}, "schema is not a JSON object: it is a list"),
        ({"schema": {"type": "house"}}, "schema cannot be followed: .*house"),
        ({"schema": {"not": {"type": "string"}}}, "cannot be followed: it has keywords that are not supported: not$"),
        ({"schema": {"$ref": "#"}}, "schema cannot be followed: nothing fits it$"),
        ({"schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "alternatives may overlap is not supported"),
        ({"schema": {"type": "string", "pattern": "("}}, "schema cannot be followed: unclosed group$"),
        ({"schema": {"a": 1j}}, "schema is not a JSON object"),
        ({"regex": "("}, "regex cannot be followed: unclosed group$"),
        ({"regex": "(?=a)"}, "regex cannot be followed: look-around, .* is not supported$"),
        ({"regex": 5}, "regex=5: must be a text"),
        ({"regex": "a" * (1 << 20) + "b"}, "regex has 1048577 characters"),
        ({"regex": "a", "schema": {}}, "exclude each other"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused(options: dict[str, Any], message: str, model: Model) -> None:
    with pytest.raises(BridgeError, match=message) as error:
        model.generate("KING:", 5, **options)
    assert "\n" not in str(error.value)


def test_a_number_ends_where_the_model_would_add_digits_for_ever(model: Model) -> None:
    """After 16 in a row, of the integer, the fraction and the exponent each; and quoted digits are a text."""
    more = {token: 50.0 for token in range(2048) if model.tokenizer.piece(token).isdigit()}
    how: dict[str, Any] = {"temperature": 0, "logit_bias": more}
    text = "".join(model.generate("A", 300, schema=closed(a={"type": "integer"}, b={"type": "number"}), **how))
    assert set(json.loads(text)) == {"a", "b"}
    assert all(16 <= len(digits) < 20 for digits in re.findall("[0-9]+", text))
    quoted = "".join(model.generate("A", 60, schema={"type": "string"}, **how))
    assert len(quoted) >= 60
    assert quoted[1:].isdigit()
    asked = {"type": "integer", "minimum": 10**17, "maximum": 10**18}
    assert json.loads("".join(model.generate("A", 60, schema=asked, temperature=0))) >= 10**17


def test_a_bias_that_forbids_all_that_the_schema_allows_says_so(model: Model) -> None:
    forbidden = dict.fromkeys((token for token in range(2048) if b'"' in model.tokenizer.piece(token)), -np.inf)
    with pytest.raises(BridgeError, match="logit_bias forbids all tokens that the schema allows"):
        list(model.generate("KING:", 5, schema={"type": "string"}, logit_bias=forbidden))


def test_run_takes_a_schema_from_a_file(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMAS["object"]))
    assert main(["run", str(path), "-p", "Name: ", "--schema", str(file), "--temp", "0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Name: {")
    jsonschema.validate(json.loads(out.removeprefix("Name: ")), SCHEMAS["object"])
    assert main(["run", str(path), "-p", "Name: ", "--regex", "(yes|no)"]) == 0
    assert capsys.readouterr().out in ("Name: yes\n", "Name: no\n")
    file.write_bytes(b"\xff")
    for wrong, message in ((file, "not UTF-8"), (tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        assert main(["run", str(path), "-p", "x", "--schema", str(wrong)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "schema",
    [OPEN, {"type": "array", "items": OPEN, "minItems": 1, "maxItems": 1}, {"anyOf": [OPEN]}, NESTED],
)  # fmt: skip
def test_a_model_invents_no_properties(schema: dict[str, Any], model: Model) -> None:
    for seed in range(3):
        text = "".join(model.generate("KING:", 200, schema=schema, temperature=5.0, top_k=0, min_p=0.0, seed=seed))
        assert re.findall('"[a-z]+"', text) in (['"a"'], ['"inner"', '"a"'])


@pytest.mark.parametrize(
    ("schema", "text"),
    [({**OPEN, "additionalProperties": {"type": "boolean"}}, '{"a": 1, "other": true}'),
     ({"allOf": [OPEN, {"properties": {"b": DIGIT}, "required": ["b"]}]}, '{"a": 1, "b": 2}'),
     ({**OPEN, "anyOf": [{"properties": {"b": DIGIT}, "required": ["b"]}]}, '{"a": 1, "b": 2}'),
     ({"properties": {"properties": OPEN, "enum": OPEN}}, '{"properties": {"a": 1}, "enum": {"a": 2}}')],
)  # fmt: skip
def test_what_a_schema_allows_stays_allowed(schema: dict[str, Any], text: str, model: Model) -> None:
    constraint = Constraint(model.tokenizer, schema)
    for token in model.tokenizer.encode(text, add_special=False):
        constraint.accept(token)  # raises where it may not come
    jsonschema.validate(json.loads(text), schema)
