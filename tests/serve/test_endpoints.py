"""The answers are OpenAI's in form, and the model's own in content; what is not supported is refused by name."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import bridge
from bridge.errors import BridgeError
from bridge.gguf_file import chat_template
from bridge.runtime.chat.formats import HARMONY
from bridge.runtime.chat.reply_form import ReplyForm
from bridge.runtime.decoder.decoder import Decoder
from bridge.runtime.model import Model
from bridge.runtime.tokenizer import Tokenizer
from bridge.serve import app, jobs, request_json
from bridge.serve.app import Limits, make_app
from bridge.serve.engine import Engine, Stream
from tests.conftest import PATIENCE
from tests.runtime.test_model import changed
from tests.serve.conftest import client_of

GREEDY: dict[str, Any] = {"temperature": 0}
SAY = [{"role": "user", "content": "Speak."}]


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream that ended well."""
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def completion(client: Any, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={**GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(client: Any, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"messages": SAY, **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def alone(model: Model, prompt: Any, limit: int, **options: Any) -> str:
    return "".join(model.generate(prompt, limit, **GREEDY | options))


def test_a_completion_is_the_models(client: Any, reference: Model) -> None:
    found = completion(client, prompt="KING", max_tokens=12, model="small")
    (choice,) = found["choices"]
    assert choice == {"index": 0, "text": alone(reference, "KING", 12), "logprobs": None, "finish_reason": "length"}
    assert (found["object"], found["model"]) == ("text_completion", "small")
    prompt = len(reference.tokenizer.encode("KING"))
    counts = [found["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    assert counts == [prompt, 12, prompt + 12]
    assert len(reference.tokenizer.encode(completion(client, prompt="KING")["choices"][0]["text"])) <= 16


def test_several_prompts_and_choices_come_in_order(client: Any, reference: Model) -> None:
    ids = reference.tokenizer.encode("ROMEO:")
    found = completion(client, prompt=["KING", "GREMIO:"], max_tokens=6, n=2)["choices"]
    own = [alone(reference, prompt, 6) for prompt in ("KING", "KING", "GREMIO:", "GREMIO:")]
    assert [choice["text"] for choice in found] == own
    assert [choice["index"] for choice in found] == [0, 1, 2, 3]
    assert completion(client, prompt=[ids, ids], max_tokens=4)["choices"][1]["text"] == alone(reference, ids, 4)
    seeded = completion(client, prompt="KING", max_tokens=8, n=3, seed=5, temperature=1.5)["choices"]
    expected = [alone(reference, "KING", 8, seed=5 + i, temperature=1.5) for i in range(3)]
    assert [choice["text"] for choice in seeded] == expected
    assert len(set(expected)) == 3


def test_stop_texts_are_no_part_of_the_reply(client: Any, reference: Model) -> None:
    whole = alone(reference, "KING", 30)
    end = whole[10:13]
    (choice,) = completion(client, prompt="KING", max_tokens=30, stop=[end, "never"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(end)], "stop")


def test_echo_and_probabilities_are_those_of_the_text(client: Any, reference: Model) -> None:
    """As programs ask that score texts: no token is made."""
    text = "The history of the city"
    (choice,) = completion(client, prompt=text, max_tokens=0, echo=True, logprobs=2)["choices"]
    own = reference.logprobs(text, 2)
    assert choice["text"] == text
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None
    np.testing.assert_allclose(found["token_logprobs"][1:], [token.logprob for token in own], atol=1e-4)
    assert "".join(found["tokens"]) == text
    assert [len(top) for top in found["top_logprobs"][1:]] == [2] * len(own)
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert text[offset:].startswith(token)
    (both,) = completion(client, prompt=text, max_tokens=4, echo=True, logprobs=0)["choices"]
    assert both["text"] == text + alone(reference, text, 4)
    assert len(both["logprobs"]["tokens"]) == len(own) + 5
    assert completion(client, prompt=text, max_tokens=3, echo=True)["choices"][0]["text"].startswith(text)


def test_a_streamed_completion_is_the_whole_one(client: Any) -> None:
    whole = completion(client, prompt="KING", max_tokens=20, n=2, logprobs=1, seed=3, temperature=1)
    body = {"prompt": "KING", "max_tokens": 20, "n": 2, "logprobs": 1, "seed": 3, "temperature": 1, "stream": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    for index, choice in enumerate(whole["choices"]):
        own = [c for event in events(answer.text) for c in event["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]
        for name in ("text_offset", "tokens", "token_logprobs"):
            assert [value for c in own for value in c["logprobs"][name]] == choice["logprobs"][name]


def test_a_chat_is_rendered_by_the_models_template(client: Any, reference: Model) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Spe"}, {"type": "text", "text": "ak."}]},
    ]
    found = chat(client, messages=messages, max_completion_tokens=9, logprobs=True, top_logprobs=2)
    prompt = "system: Be brief.\nuser: Speak.\nassistant: "
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": alone(reference, prompt, 9), "refusal": None}
    content = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == choice["message"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == choice["message"]["content"]
    assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]
    assert found["object"] == "chat.completion"


def test_a_streamed_chat_is_the_whole_one_and_ends_with_its_usage(client: Any) -> None:
    whole = chat(client, max_tokens=15)
    body = {"messages": SAY, "max_tokens": 15, "stream": True, "stream_options": {"include_usage": True}, **GREEDY}
    found = events(client.post("/v1/chat/completions", json=body).text)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["delta"].get("content", "") for event in found for c in event["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 15
    assert len({event["id"] for event in found}) == 1


def test_the_second_turn_takes_over_the_first(client: Any) -> None:
    first = chat(client, max_tokens=20, temperature=1.2, seed=1)
    more = [*SAY, first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    second = chat(client, messages=[{k: v for k, v in m.items() if k != "refusal"} for m in more], max_tokens=2)
    kept = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert kept >= first["usage"]["total_tokens"] - 1


def test_a_reply_with_channels_is_reasoning_and_content(
    client: Any, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    reply = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    grammar = {"type": "regex", "regex": re.escape(reply)}
    body = {"max_tokens": 200, "response_format": grammar, "n": 2}
    assert {c["message"]["content"] for c in chat(client, **body)["choices"]} == {reply}
    monkeypatch.setitem(model.__dict__, "reply_form", ReplyForm("<|channel|>", HARMONY, model.tokenizer))
    monkeypatch.setattr(ReplyForm, "grammar", lambda self, prompt, rule, *_: f"start: {rule}")
    for choice in chat(client, **body)["choices"]:
        assert choice["message"] == {
            "role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "refusal": None
        }  # fmt: skip
    found = events(client.post("/v1/chat/completions", json={"messages": SAY, "stream": True, **GREEDY, **body}).text)
    for index in range(2):
        deltas = [c["delta"] for event in found for c in event["choices"] if c["index"] == index]
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."


def test_tools_reach_the_template(client: Any, reference: Model) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    prompt = "tools: " + json.dumps(tools) + "\nuser: Speak.\nassistant: "
    assert chat(client, tools=tools, max_tokens=5)["choices"][0]["message"]["content"] == alone(reference, prompt, 5)
    without = chat(client, tools=tools, tool_choice="none", max_tokens=5)["choices"][0]["message"]["content"]
    assert without == alone(reference, "user: Speak.\nassistant: ", 5)


def test_a_reply_fits_the_response_format(client: Any) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "age", "strict": True, "schema": schema}}
    (choice,) = chat(client, response_format=form, temperature=2, n=1)["choices"]
    assert 1 <= json.loads(choice["message"]["content"])["age"] <= 99
    assert choice["finish_reason"] == "stop"
    regex = completion(client, prompt="KING", response_format={"type": "regex", "regex": "yes|no"})
    assert regex["choices"][0]["text"] in ("yes", "no")


def test_embeddings_are_the_models(client: Any, reference: Model) -> None:
    texts = [f"text {i}" for i in range(11)]
    found = client.post("/v1/embeddings", json={"input": texts, "model": "small"}).json()
    np.testing.assert_allclose([row["embedding"] for row in found["data"]], reference.embed(texts), atol=1e-5)
    packed = client.post("/v1/embeddings", json={"input": "a", "encoding_format": "base64", "pooling": "last"}).json()
    vector = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, reference.embed("a", "last")[0], atol=1e-5)


def test_embeddings_of_fewer_dimensions_are_the_first_ones_at_length_one(client: Any, reference: Model) -> None:
    found = client.post("/v1/embeddings", json={"input": "a", "dimensions": 5}).json()["data"][0]["embedding"]
    first = reference.embed("a")[0, :5]
    np.testing.assert_allclose(found, first / np.linalg.norm(first), atol=1e-5)


def test_a_reply_to_a_grammar_has_a_limit_where_the_request_gives_none(client: Any, monkeypatch: Any) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(jobs, "_GRAMMAR_TOKENS", 6)
    form = {"type": "regex", "regex": "[a-z ]{20,100}x"}
    (cut,) = chat(client, response_format=form)["choices"]
    assert cut["finish_reason"] == "length"
    found = chat(client, response_format=form, max_tokens=9)
    assert found["usage"]["completion_tokens"] == 9
    assert chat(client, response_format=form)["usage"]["completion_tokens"] == 6


def test_fields_that_say_nothing_about_the_answer_change_nothing(client: Any) -> None:
    plain = chat(client, max_tokens=8)["choices"]
    nothing = {
        "user": "me", "safety_identifier": "x", "prompt_cache_key": "x", "prompt_cache_retention": "24h",
        "service_tier": "auto", "metadata": {"a": "b"}, "store": True, "verbosity": "low", "reasoning_effort": "low",
        "parallel_tool_calls": False, "prediction": None, "modalities": ["text"], "model": "gpt-4o",
        "stream_options": {"include_obfuscation": False}, "frequency_penalty": 0, "presence_penalty": 0,
    }  # fmt: skip
    found = chat(client, max_tokens=8, **nothing)
    assert found["choices"] == plain
    assert found["model"] == "small"


def test_penalties_are_those_of_the_sampler(client: Any, reference: Model) -> None:
    how: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    text = completion(client, prompt="KING", max_tokens=30, **how)["choices"][0]["text"]
    assert text == alone(reference, "KING", 30, **how) != alone(reference, "KING", 30)


def test_the_effort_of_reasoning_reaches_a_template_that_asks_for_it(path: Path, reference: Model) -> None:
    template = "{{ reasoning_effort }}: {{ messages[0].content }}"
    other = bridge.Model.load(changed(path, path.with_name("effort.gguf"), chat_template=template), context=500)
    with client_of(other) as client:
        found = chat(client, max_tokens=5, reasoning_effort="high")["choices"][0]["message"]["content"]
    assert found == alone(reference, "high: Speak.", 5)


def test_no_effort_of_reasoning_turns_off_what_the_template_can(path: Path, reference: Model) -> None:
    template = "{{ messages[0].content }}<think>{% if enable_thinking is false %}</think>{% endif %}"
    other = bridge.Model.load(changed(path, path.with_name("switch.gguf"), chat_template=template), context=500)
    with client_of(other) as client:
        thinks = chat(client, max_tokens=5)["choices"][0]["message"]
        found = chat(client, max_tokens=5, reasoning_effort="none")["choices"][0]["message"]
    assert thinks["reasoning_content"]
    assert "reasoning_content" not in found
    assert found["content"] == alone(reference, "Speak.<think></think>", 5).lstrip()


def test_an_object_of_a_schema_is_asked_for_as_of_llama_server(client: Any) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_object", "schema": {"const": {"a": 1}}}
    assert chat(client, response_format=form)["choices"][0]["message"]["content"] == '{"a": 1}'


def test_a_model_without_a_chat_template_says_where_prompts_go(path: Path, model: Model) -> None:
    with client_of(bridge.Model.load(path.with_name("plain.gguf"), context=500)) as client:
        answer = client.post("/v1/chat/completions", json={"messages": SAY})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "send a prompt to /v1/completions" in answer.json()["error"]["message"]


def test_errors_do_not_say_where_the_file_is(path: Path) -> None:
    template = "{{ raise_exception('no') }}"
    with client_of(bridge.Model.load(changed(path, path.with_name("raises.gguf"), chat_template=template))) as client:
        error = client.post("/v1/chat/completions", json={"messages": SAY}).json()["error"]
    assert error["param"] == "messages"
    assert error["message"].startswith("raises: the chat template cannot be used: ")


def test_models_health_and_metrics(client: Any) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["context_length"]) == ("small", "model", 500)
    assert client.get("/v1/models/small").json() == model
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/health").json() == {"status": "ok"}
    before = counts(client)
    completion(client, prompt="KING", max_tokens=7)
    after = counts(client)
    assert after["gguf_bridge_generated_tokens_total"] - before["gguf_bridge_generated_tokens_total"] == 7
    name = 'gguf_bridge_requests_total{path="/v1/completions",status="200"}'
    assert after[name] == before.get(name, 0) + 1
    assert after["gguf_bridge_first_token_seconds_count"] == before["gguf_bridge_first_token_seconds_count"] + 1


def counts(client: Any) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}


def test_the_page_is_one_file_that_asks_no_other_server(client: Any) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert "<title>small · chat</title>" in answer.text
    loaded = re.findall(r"""\b(?:(?:src|srcset|href)=|fetch\(|url\(|@?import\b)\s*["']?([^"'\s)]*)""", answer.text)
    assert loaded == ["data:image/svg+xml,%3Csvg", "/props", "/v1/chat/completions"]
    for rule in ("default-src", "frame-ancestors", "base-uri", "form-action"):  # three that have no default
        assert f"{rule} 'none'" in answer.headers["content-security-policy"]


def test_the_page_shows_a_models_name_as_text(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "path", Path("a<b>&.gguf"))
    with TestClient(make_app(model, Limits(), Engine(model, 1, 1)), base_url="http://127.0.0.1") as client:
        assert "<h1>a&lt;b&gt;&amp;</h1>" in client.get("/").text


COMPLETIONS, CHATS, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"


@pytest.mark.parametrize(
    ("url", "body", "field", "message"),
    [
        (COMPLETIONS, {}, "prompt", "prompt is missing"),
        (COMPLETIONS, {"prompt": 3}, "prompt", "prompt must be a text"),
        (COMPLETIONS, {"prompt": []}, "prompt", "not empty"),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt", "prompt must be"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "the prompt is empty"),
        (COMPLETIONS, {"prompt": [999999]}, "prompt", "token 999999"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "token -1"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt", "not UTF-8"),
        (COMPLETIONS, {"prompt": "word " * 800}, "prompt", "the context holds 500"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens", "must be between 0"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "x"}, "max_tokens", "must be an integer"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "max_tokens", "must be an integer"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1e9}, "max_tokens", "must be an integer"),
        (COMPLETIONS, {"prompt": "a", "n": 17}, "n", "between 1 and 16"),
        (COMPLETIONS, {"prompt": ["a"] * 10, "n": 16}, "n", "160 replies are asked for"),
        (COMPLETIONS, {"prompt": ["a"] * 300}, "prompt", "300 replies are asked for; the most is 72"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature", "must be a number"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "temperature -1: must be at least 0"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "top_p 0: must be above 0"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "token ids and numbers"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1_0": 1}}, "logit_bias", "token ids and numbers"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"\u0663": 1}}, "logit_bias", "token ids and numbers"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {" 5": 1}}, "logit_bias", "token ids and numbers"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1" * 5000: 1}}, "logit_bias", "token ids and numbers"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias", "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias", "logit_bias of token 999999"),
        (COMPLETIONS, {"prompt": "a", "stop": 3}, "stop", "stop must be"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, "stop", "at most 16"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x", "x" * 257]}, "stop", "at most 256 characters"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "between 0 and 20"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of", "best_of is not supported"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "suffix is not supported"),
        (COMPLETIONS, {"prompt": "a", "frequency_penalty": 101}, "frequency_penalty", "between -100"),
        (COMPLETIONS, {"prompt": "a", "echo": True, "stream": True}, "echo", "not supported in a stream"),
        (COMPLETIONS, {"prompt": "a", "nonsense": 1}, "nonsense", "nonsense is not supported; leave it out"),
        (COMPLETIONS, {"prompt": "a", "\ud800": 1}, "\ud800", "\ud800 is not supported; leave it out"),
        (COMPLETIONS, {"prompt": "a", "model": 5}, "model", "must be a text"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 5}, "min_tokens", "min_tokens is not supported"),
        (
            COMPLETIONS,
            {"prompt": "a", "response_format": {"type": "regex", "regex": "("}},
            "response_format.regex",
            "response_format.regex: unclosed group",
        ),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"x": 1}}, "stream_options.x", "not supported"),
        (COMPLETIONS, [], None, "the body must be a JSON object"),
        (CHATS, {}, "messages", "messages must be a list"),
        (CHATS, {"messages": [{"role": "user"}]}, "messages[0]", "content is missing"),
        (CHATS, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0]", "role is one of"),
        (CHATS, {"messages": ["x"]}, "messages[0]", "must be an object"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", "texts only"),
        (CHATS, {"messages": SAY, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (CHATS, {"messages": SAY, "logprobs": 2}, "logprobs", "true or false"),
        (CHATS, {"messages": SAY, "tool_choice": "required"}, "tool_choice", "there are no tools"),
        (CHATS, {"messages": SAY, "reasoning_effort": 1}, "reasoning_effort", "must be a text"),
        (CHATS, {"messages": SAY, "prediction": {}}, "prediction", "not supported"),
        (CHATS, {"messages": SAY, "temperature": float("nan")}, "temperature", "must be at least 0"),
        (CHATS, {"messages": [{"role": "user", "content": "word " * 800}]}, "messages", "the context holds 500"),
        (CHATS, {"messages": SAY, "chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs", "by the program"),
        (
            CHATS,
            {"messages": SAY, "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            "json_schema.schema: it has keywords that are not supported: not",
        ),
        (CHATS, {"messages": SAY, "response_format": {"type": "x"}}, "response_format", "must be text"),
        (
            CHATS,
            {"messages": SAY, "response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "schema is missing",
        ),
        (EMBEDDINGS, {"input": []}, "input", "not empty"),
        (EMBEDDINGS, {"input": ["a"] * 257}, "input", "the most is 256"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format", "float or base64"),
        (EMBEDDINGS, {"input": "a", "dimensions": 3000}, "dimensions", "must be between 1 and"),
        (EMBEDDINGS, {"input": "a", "pooling": "max"}, "pooling", "must be mean or cls or last"),
        (EMBEDDINGS, {"input": "a", "pooling": "\ud800"}, "pooling", "must be mean or cls or last"),
        (EMBEDDINGS, {"input": "word " * 800}, "input", "the context holds 500"),
    ],
)
def test_what_makes_no_sense_is_refused(url: str, body: Any, field: Any, message: str, client: Any) -> None:
    answer = client.post(url, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert message in error["message"]
    assert error["param"] == field
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "kind", "status", "message"),
    [
        (b"{", "application/json", 400, "not JSON"),
        (b"\xff\xfe", "application/json", 400, "not JSON"),
        (b"[" * 100_000, "application/json", 400, "not JSON"),
        (b"{}", "text/plain", 415, "Content-Type must be application/json"),
        (b" " * 2_000_000, "application/json", 413, "larger than 1048576 bytes"),
    ],
)
def test_bodies_that_are_no_requests_are_refused(
    content: bytes, kind: str, status: int, message: str, model: Model
) -> None:
    with client_of(model, body=1 << 20) as client:
        headers = {"Content-Type": kind, "Origin": "http://elsewhere.example"}
        answer = client.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
def test_what_is_no_page_may_leave_out_the_content_type(kind: str, client: Any) -> None:
    """curl's -d says that it is a form."""
    answer = client.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers={"Content-Type": kind})
    assert answer.status_code == 200


def test_a_body_without_a_length_is_read_no_further_than_the_limit(model: Model, monkeypatch: Any) -> None:
    headers = {"Content-Type": "application/json"}
    with client_of(model, body=1 << 20) as client:
        answer = client.post("/v1/completions", content=iter([b" " * 600_000] * 2), headers=headers)
        assert answer.status_code == 413
        with monkeypatch.context() as patch:
            patch.setattr(app, "_BODIES", 0)  # others have sent that much
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 429
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_replies_are_counted_before_anything_is_made_for_them(client: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(jobs.Sampler, "of", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: 1 / 0)
    answer = client.post("/v1/completions", json={"prompt": ["a"] * 100_000, "n": 16})
    assert "1600000 replies are asked for; the most is 72" in answer.json()["error"]["message"]


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
def test_a_text_is_tokenized_no_further_than_a_context_could_hold_it(url: str, client: Any, monkeypatch: Any) -> None:
    characters: list[int] = []
    encode = Tokenizer.encode

    def counted(tokenizer: Tokenizer, text: str, *options: bool) -> list[int]:
        characters.append(len(text))
        return encode(tokenizer, text, *options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    text = "1234567890" * 50_000
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in url else {"prompt": text}
    answer = client.post(url, json={"input": text} if "embeddings" in url else body)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert characters == [1 << 14]


def test_a_text_that_fits_is_encoded_whole_and_of_others_a_beginning_that_does_not(reference: Model) -> None:
    tokenizer, text = reference.tokenizer, "The history of the city is long. \n" * 2000
    ids = tokenizer.encode(text)
    assert tokenizer.encode_within(text, len(ids)) == ids
    assert tokenizer.encode_within(text, len(ids) - 1) == ids  # not far too long: all are counted
    assert 2000 < len(tokenizer.encode_within(text, 1000)) < len(ids)
    assert tokenizer.encode_within("x" * 10, 1) == tokenizer.encode("x" * 10)
    assert ids == tokenizer.encode(text[: len(text) // 2000]) * 2000  # short texts are encoded in another way


def test_all_replies_to_a_request_share_a_compiled_schema_and_a_scored_prompt(client: Any, monkeypatch: Any) -> None:
    llguidance = pytest.importorskip("llguidance")
    compiled, scored = list[Any](), list[Any]()
    grammar, scorer = llguidance.LLMatcher.grammar_from_regex, Model.token_scorer
    counted = staticmethod(lambda regex: compiled.append(regex) or grammar(regex))
    monkeypatch.setattr(llguidance.LLMatcher, "grammar_from_regex", counted)
    found = completion(
        client, prompt=["a", "b"], n=8, seed=1, temperature=1, response_format={"type": "regex", "regex": "(yes|no)*"}
    )
    assert all(re.fullmatch("(yes|no)*(y|ye|n)?", choice["text"]) for choice in found["choices"])  # the last is cut
    assert len({choice["text"] for choice in found["choices"]}) > 1
    assert len(compiled) == 1
    monkeypatch.setattr(Model, "token_scorer", lambda *given: scored.append(1) or scorer(*given))
    both = completion(client, prompt=["The history", "KING"], n=3, echo=True, logprobs=1, max_tokens=2)["choices"]
    assert len(scored) == 2
    assert all(both[i]["logprobs"] == both[i + 1]["logprobs"] for i in (0, 1, 3, 4))


def test_other_paths_and_methods_are_named(client: Any) -> None:
    assert client.get("/v1/completions").status_code == 405
    answer = client.get("/v1/nothing")
    assert answer.status_code == 404
    assert "/v1/chat/completions" in answer.json()["error"]["message"]


def test_a_key_is_asked_for(model: Model) -> None:
    with client_of(model, key="secret") as client:
        for headers in (
            {}, {"Authorization": "Bearer no"}, {"Authorization": "secretly"}, {"Authorization": "secret"},
            {"Authorization": "Basic secret"}, {"Authorization": "Bearer"},
        ):  # fmt: skip
            answer = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        for scheme in ("Bearer", "bearer", "BEARER "):
            good = {"Authorization": f"{scheme} secret"}
            assert client.get("/v1/models", headers=good).status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/health").status_code == client.get("/").status_code == 200


def test_what_waits_beyond_the_limit_is_refused(model: Model) -> None:
    engine = Engine(model, 1, 1)
    with TestClient(make_app(model, Limits(), engine), base_url="http://127.0.0.1") as client:
        others = {Stream(), Stream()}
        engine.open |= others
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "2 replies are being made or waited for; the most is 2" in refused.json()["error"]["message"]
        engine.open -= others
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert engine.open == set()
        engine.stopping = True
        assert client.get("/health").status_code == 503
        stopping = client.post("/v1/completions", json={"prompt": "a"})
        assert stopping.status_code == 503
        assert "the server is stopping" in stopping.json()["error"]["message"]


def test_a_model_that_fails_fails_its_replies_and_not_the_server(model: Model, monkeypatch: Any) -> None:
    with client_of(model) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "run", lambda *_: 1 / 0)
            failed = client.post("/v1/completions", json={"prompt": "a"})
            assert "ZeroDivisionError" in failed.json()["error"]["message"]
            assert failed.status_code == 500
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_an_error_that_nobody_foresaw_is_json(model: Model, monkeypatch: Any) -> None:
    monkeypatch.setattr(request_json, "completion", lambda *_: 1 / 0)
    server = make_app(model, Limits(), Engine(model, 1, 1))
    with TestClient(server, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        answer = client.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "ZeroDivisionError" in answer.json()["error"]["message"]


def test_work_that_nobody_waits_for_is_told_so_and_holds_its_place(model: Model) -> None:
    async def two_that_are_left_and_a_third() -> list[str]:
        engine, noted, end = Engine(model, 1, 1), list[str](), threading.Event()

        def until_left(awaited: Callable[[], bool]) -> None:
            while awaited():
                time.sleep(0.001)
            noted.append("left")
            end.wait(PATIENCE)

        first = [asyncio.create_task(engine.aside(until_left)) for _ in range(2)]
        third = asyncio.create_task(engine.aside(lambda awaited: noted.append(f"third {awaited()}")))
        await asyncio.sleep(0.01)
        for task in first:
            task.cancel()
        await asyncio.wait(first)
        while noted != ["left", "left"]:
            await asyncio.sleep(0.001)
        assert not third.done()
        assert engine.computing
        end.set()
        await third
        async with asyncio.timeout(PATIENCE):  # one of those that were left may end after the third
            while engine.computing:
                await asyncio.sleep(0.001)
        assert not engine.computing
        return noted

    assert asyncio.run(two_that_are_left_and_a_third()) == ["left", "left", "third True"]


def test_a_reply_that_fails_leaves_no_others_waiting(model: Model, monkeypatch: Any) -> None:
    draw, draws = jobs.Sampler.__call__, list[int]()

    def first_fails(sampler: Any, *row: Any) -> int:
        draws.append(1)
        if len(draws) == 1:
            raise BridgeError("no token fits")
        return draw(sampler, *row)

    monkeypatch.setattr(jobs.Sampler, "__call__", first_fails)
    with client_of(model) as client:
        body = {"prompt": "a", "n": 8, "logprobs": 1, "max_tokens": 400, "logit_bias": {"0": -100}}
        answer = client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no token fits")
        assert client.portal is not None
        names = [task.get_coro().__name__ for task in client.portal.call(lambda: list(asyncio.all_tasks()))]
        assert "_timed" not in names


def test_echo_of_no_tokens_has_the_token_that_begins_texts(client: Any, model: Model, monkeypatch: Any) -> None:
    monkeypatch.setattr(model.tokenizer, "bos", 1)
    assert completion(client, prompt=[[]], echo=True, logprobs=1, max_tokens=1)["choices"][0]["text"]


def test_a_page_elsewhere_cannot_ask_by_a_name_of_its_own(model: Model, client: Any) -> None:
    """A name that its owner points at 127.0.0.1 comes in the Host header."""
    answer = client.get("/v1/models", headers={"Host": "evil.example:8080"})
    assert answer.status_code == 403
    assert client.get("/v1/models", headers={"Host": "localhost:8080"}).status_code == 200
    for host in ("[::1]:8080", "LocalHost:8080", "LOCALHOST", "127.0.0.2:1", "[::1]"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200
    for host in ("127.0.0.1.evil.example", "192.168.0.1", "localhost:80:90", "", "[localhost.evil.example]"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 403
    with client_of(model, local=False) as other:
        assert other.get("/v1/models", headers={"Host": "server.example"}).status_code == 200


def test_defaults_of_the_command_line_are_those_of_requests(model: Model, reference: Model) -> None:
    with client_of(model, sampling={"temperature": 0}) as client:
        found = client.post("/v1/completions", json={"prompt": "KING", "max_tokens": 8}).json()
    assert found["choices"][0]["text"] == alone(reference, "KING", 8)


def test_one_process_renders_all_chats_and_another_after_one_that_ran_into_its_limit(monkeypatch: Any) -> None:
    def render(template: str) -> Any:
        return chat_template.render_chats(template, [([{"role": "user", "content": "x"}], True)], {})[0]

    monkeypatch.setattr(chat_template, "CPU_SECONDS", 1)
    chat_template.keep_renderer()
    try:
        (process,) = chat_template._renderers
        assert [render("{{ messages[0].content }}1"), render("{{ nothing }}2"), render("{{ 3 }}")] == ["x1", "2", "3"]
        assert "jinja cannot read it" in str(render("{{"))
        assert process.poll() is None
        assert "runs for more than 1 seconds" in str(render("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3))
        assert process.poll() is not None
        assert render("{{ messages[0].content }}4") == "x4"
    finally:
        chat_template.end_renderer()
    assert chat_template._renderers == []
