"""llama-server's own paths answer in its forms."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bridge.runtime.model import Model
from bridge.runtime.sampling import Sampling
from tests.serve.conftest import TEMPLATE, client_of

SAY = [{"role": "user", "content": "Speak."}]


def posted(client: Any, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_texts_become_tokens_and_tokens_texts(client: Any, reference: Model) -> None:
    tokenizer = reference.tokenizer
    text = f"KING{tokenizer.text(min(tokenizer.stops))} RICHARD é"
    for add, parse in ((False, True), (True, True), (False, False)):
        found = posted(client, "/tokenize", content=text, add_special=add, parse_special=parse)
        assert found == {"tokens": tokenizer.encode(text, add, parse)}
    ids = posted(client, "/tokenize", content=text)["tokens"]
    assert ids == tokenizer.encode(text, False, True) != tokenizer.encode(text, False, False)
    assert posted(client, "/detokenize", tokens=ids) == {"content": text}
    pieces = posted(client, "/tokenize", content="KING \U0001f600", with_pieces=True)["tokens"]
    as_bytes = [p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces]
    assert b"".join(as_bytes).decode() == "KING \U0001f600"
    assert {str, list} == {type(p["piece"]) for p in pieces}  # no token of this vocabulary is all of the last character
    assert [p["id"] for p in pieces] == tokenizer.encode("KING \U0001f600", False)


def test_a_conversation_becomes_one_text(client: Any) -> None:
    assert posted(client, "/apply-template", messages=SAY) == {"prompt": "user: Speak.\nassistant: "}
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert posted(client, "/apply-template", messages=SAY, tools=tools)["prompt"].startswith("tools: [")


def test_properties_are_the_models_and_the_defaults_of_the_server(model: Model) -> None:
    with client_of(model, sequences=3, sampling={"temperature": 0.5, "seed": 7}) as client:
        found = client.get("/props").json()
        (first, *others) = client.get("/slots").json()
    settings = found["default_generation_settings"]
    assert settings["n_ctx"] == 500
    own = Sampling()
    expected = {"temperature": 0.5, "seed": 7, "top_k": own.top_k, "min_p": own.min_p, "presence_penalty": 0.0}
    assert {name: settings["params"][name] for name in expected} == expected
    assert (found["total_slots"], found["model_alias"], found["model_path"]) == (3, "small", "small.gguf")
    assert found["chat_template"] == TEMPLATE
    assert found["eos_token"] == model.tokenizer.text(model.tokenizer.eos)
    assert found["modalities"] == {"vision": False, "audio": False}
    assert first == {"id": 0, "n_ctx": 500, "speculative": False, "is_processing": False}
    assert [slot["id"] for slot in others] == [1, 2]


def test_health_and_models_have_llama_servers_paths_too(client: Any) -> None:
    assert client.get("/v1/health").json() == client.get("/health").json() == {"status": "ok"}
    assert client.get("/models").json() == client.get("/v1/models").json()


@pytest.mark.parametrize(
    ("url", "body", "field", "message"),
    [
        ("/tokenize", {}, "content", "content is missing"),
        ("/tokenize", {"content": 3}, "content", "content must be a text"),
        ("/tokenize", {"content": "\ud800"}, "content", "not UTF-8"),
        ("/tokenize", {"content": "a", "x": 1}, "x", "x is not supported"),
        ("/detokenize", {"tokens": "a"}, "tokens", "tokens must be a list of token ids"),
        ("/detokenize", {"tokens": [999999]}, "tokens", "the vocabulary has"),
        ("/apply-template", {}, "messages", "messages must be a list"),
    ],
)
def test_what_makes_no_sense_is_refused(url: str, body: Any, field: str, message: str, client: Any) -> None:
    answer = client.post(url, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["param"] == field


def test_all_but_health_need_the_key(model: Model) -> None:
    with client_of(model, key="secret") as client:
        for path in ("/props", "/slots", "/models"):
            assert client.get(path).status_code == 401
        for path in ("/tokenize", "/detokenize", "/apply-template"):
            assert client.post(path, json={}).status_code == 401
        assert client.get("/v1/health").status_code == 200
