"""What docs/http-api.md says of this server beside others is what it does."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.conftest import ROOT

SAY = [{"role": "user", "content": "Speak."}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]}]
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red"]}}, "required": ["colour"]}
TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": COLOUR}}]
FLAT = [{"type": "function", "name": "paint", "parameters": COLOUR}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}}
REGEX = {"type": "regex", "regex": "yes|no"}


def chat(**fields: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {"messages": SAY, "max_tokens": 60, **fields}


def text(**fields: Any) -> tuple[str, Any]:
    return "/v1/completions", {"prompt": "a", "max_tokens": 2, **fields}


def responses(**fields: Any) -> tuple[str, Any]:
    return "/v1/responses", {"input": "a", "max_output_tokens": 2, **fields}


def ollama(path: str, **fields: Any) -> tuple[str, Any]:
    return f"/api/{path}", {"model": "small", **fields}


# by what the row of the table begins with, what is asked: each with a path, and a body where it is posted
REQUESTS: dict[str, list[tuple[str, Any]]] = {
    "`/v1/chat/completions`": [chat(), text(), ("/v1/models", None)],
    "`/v1/responses`": [responses(), responses(stream=True), responses(tools=FLAT)],
    "`previous_response_id`": [responses(previous_response_id="resp_1")],
    "`/v1/embeddings`": [("/v1/embeddings", {"input": "a"})],
    "`dimensions`": [("/v1/embeddings", {"input": "a", "dimensions": 5})],
    "`/v1/messages`": [("/v1/messages", {"messages": SAY, "max_tokens": 2})],
    "`/api/chat`": [ollama("chat", messages=SAY), ollama("generate", prompt="a"), ollama("embed", input="a")],
    "`/api/tags`": [("/api/tags", None), ollama("show"), ("/api/ps", None), ("/api/version", None)],
    "`/api/pull`": [ollama("pull"), ollama("create"), ollama("delete")],
    "`/tokenize`": [("/tokenize", {"content": "a"}), ("/detokenize", {"tokens": [1]}),
                    ("/apply-template", {"messages": SAY})],
    "`/props`": [("/props", None), ("/slots", None)],
    "`/completion`": [("/completion", {"prompt": "a"}), ("/infill", {})],
    "`tools`": [chat(tools=TOOLS)],
    "`tool_choice`: `required`": [chat(tools=TOOLS, tool_choice="required")],
    "`tool_choice`: one": [chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "paint"}})],
    "`response_format` with a JSON": [chat(response_format=SCHEMA)],
    "`response_format` with a regular": [chat(response_format=REGEX)],
    "`grammar`": [chat(grammar='root ::= "yes"')],
    "`logprobs`": [chat(logprobs=True, top_logprobs=2)],
    "`echo`": [text(echo=True, logprobs=1)],
    "`logit_bias`": [chat(logit_bias={"5": -100})],
    "`n`": [chat(n=2)],
    "`best_of`": [text(best_of=2), text(suffix="b")],
    "prompts": [text(prompt=[1, 2]), text(prompt=["a", "b"]), text(prompt=[[1], [2]])],
    "`frequency_penalty`": [chat(frequency_penalty=0.5), chat(presence_penalty=0.5)],
    "`top_k`": [chat(top_k=5, min_p=0.1, repeat_penalty=1.1)],
    "`mirostat`": [chat(mirostat=2), chat(dry_multiplier=0.8), chat(xtc_probability=0.5), chat(typical_p=0.5)],
    "`reasoning_effort`": [chat(reasoning_effort="low")],
    "images": [chat(messages=IMAGE)],
    "another": [chat(model="gpt-4o")],
}  # fmt: skip
TABLE = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8").partition("## Compared with")[2]
ROWS = [line.strip("| ").split(" | ") for line in re.findall(r"^\| .*", TABLE.partition("\n## ")[0], re.MULTILINE)][1:]


def test_every_row_is_tried() -> None:
    begun = [[begin for begin in REQUESTS if cells[0].startswith(begin)] for cells in ROWS]
    assert [begins[0] for begins in begun if len(begins) == 1] == list(REQUESTS)
    assert len(ROWS) == len(REQUESTS)
    for (begin, *_), cells in zip(begun, ROWS, strict=True):  # and every path that a row names
        asked = {path for path, _ in REQUESTS[begin]}
        assert {name for name in re.findall("`(/[^`]*)`", cells[0]) if name not in asked} == set()


@pytest.mark.parametrize(("cells", "begin"), list(zip(ROWS, REQUESTS, strict=False)), ids=list(REQUESTS))
def test_a_row_of_the_table_is_true(cells: list[str], begin: str, client: Any) -> None:
    if "response_format" in begin or "tool_choice" in begin:
        pytest.importorskip("llguidance")
    for path, body in REQUESTS[begin]:
        answer = client.get(path) if body is None else client.post(path, json=body)
        works = cells[1] != "no"
        assert (answer.status_code == 200) == works, answer.text
        assert works or answer.status_code in (400, 404)
