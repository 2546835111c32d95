"""Ollama's interface: its own client gets what the model says, and what is not supported is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import bridge
from bridge.runtime.model import Model
from bridge.serve import ollama as ollama_request
from tests.conftest import PATIENCE
from tests.runtime.test_model import changed
from tests.serve.conftest import TEMPLATE, Server, client_of

SAY: list[Any] = [{"role": "user", "content": "Speak."}]
SPOKEN = "user: Speak.\nassistant: "
GREEDY = {"temperature": 0, "num_predict": 12}
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"],
          "additionalProperties": False}  # fmt: skip
PAINT = {"type": "function", "function": {"name": "paint", "parameters": COLOUR}}


def alone(model: Model, prompt: str, limit: int = 12) -> str:
    return "".join(model.generate(prompt, limit, temperature=0))


@pytest.fixture(scope="module")
def ollama(running: Server) -> Any:
    """Ollama's own client."""
    package = pytest.importorskip("ollama")
    return package.Client(running.url, timeout=PATIENCE)


def posted(client: Any, path: str, **body: Any) -> Any:
    answer = client.post(path, json={"model": "small", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(client: Any, path: str, **body: Any) -> list[dict[str, Any]]:
    """The objects of a stream, the default."""
    answer = client.post(path, json={"model": "small", **body})
    assert answer.headers["content-type"] == "application/x-ndjson"
    return list(map(json.loads, answer.text.splitlines()))


def test_ollamas_client_gets_what_the_model_says(ollama: Any, reference: Model) -> None:
    own, prompt = alone(reference, SPOKEN), len(reference.tokenizer.encode(SPOKEN))
    whole = ollama.chat("small", SAY, options=GREEDY)
    assert whole.message.content == own
    assert (whole.model, whole.done_reason, whole.prompt_eval_count, whole.eval_count) == (
        "small:latest", "length", prompt, 12,
    )  # fmt: skip
    assert whole.total_duration == whole.prompt_eval_duration + whole.eval_duration + whole.load_duration
    parts = list(ollama.chat("small", SAY, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == own
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 12
    assert ollama.generate("small", "Speak.", options=GREEDY).response == own
    told = ollama.generate("small", "Speak.", system="Be brief.", options=GREEDY)
    assert told.response == alone(reference, "system: Be brief.\n" + SPOKEN)
    raw = list(ollama.generate("small", "KING", raw=True, options=GREEDY, stream=True))
    assert "".join(part.response for part in raw) == alone(reference, "KING")


def test_ollamas_client_gets_vectors(ollama: Any, reference: Model) -> None:
    found = ollama.embed("small", ["one", "two"])
    expected = reference.embed(["one", "two"])
    assert abs(expected - found.embeddings).max() < 1e-5
    assert found.prompt_eval_count == sum(len(reference.tokenizer.encode(text)) for text in ("one", "two"))
    assert len(ollama.embed("small", "one", dimensions=5).embeddings[0]) == 5
    assert abs(expected[0] - ollama.embeddings("small", "one").embedding).max() < 1e-5


def test_a_text_that_is_too_long_for_a_vector_is_cut_unless_it_must_not_be(client: Any, reference: Model) -> None:
    text = "word " * 800
    found = posted(client, "/api/embed", input=text)["embeddings"][0]
    assert abs(reference.embed([reference.tokenizer.encode(text)[:500]])[0] - found).max() < 1e-5
    refused = client.post("/api/embed", json={"model": "small", "input": text, "truncate": False})
    assert refused.status_code == 400
    assert "the context holds 500" in refused.json()["error"]


def test_ollamas_client_gets_the_one_model(ollama: Any, reference: Model) -> None:
    (listed,) = ollama.list().models
    (loaded,) = ollama.ps().models
    assert listed.model == loaded.model == "small:latest"
    assert listed.size == reference.file.nbytes
    assert loaded.context_length == 500
    shown = ollama.show("small")
    assert (shown.template, shown.details.family) == (TEMPLATE, reference.file.arch)
    assert shown.modelinfo["general.architecture"] == reference.file.arch
    assert shown.modelinfo["tokenizer.ggml.tokens"] is None
    assert shown.modelinfo["general.parameter_count"] == sum(t.raw.size // t.bpw * 8 for t in reference.file.values())
    assert {"completion", "tools", "embedding"} <= set(shown.capabilities)
    assert "thinking" not in shown.capabilities
    assert ollama.show("small:latest").details == listed.details == loaded.details
    with pytest.raises(Exception, match="this server has 'small:latest'") as missing:
        ollama.show("other")
    assert missing.value.status_code == 404


def test_ollamas_client_gets_replies_to_a_schema_and_calls(ollama: Any) -> None:
    pytest.importorskip("llguidance")
    reply = ollama.chat("small", SAY, format=COLOUR, options={"temperature": 2, "num_predict": 100})
    assert json.loads(reply.message.content)["colour"] in ("red", "green")
    assert reply.done_reason == "stop"
    told = ollama.generate("small", "Speak.", format="json", options={"temperature": 0, "num_predict": 300})
    assert told.response.startswith("{")
    wrong = {"type": "object", "not": {}}
    with pytest.raises(Exception, match="format: it has keywords that are not supported: not"):
        ollama.chat("small", SAY, format=wrong)


def test_calls_come_with_objects_as_arguments(client: Any, monkeypatch: Any) -> None:
    """Ollama has no `tool_choice`: the reply is made to call here."""
    pytest.importorskip("llguidance")
    from bridge.serve import request_json

    tools_of = request_json.tools_of
    monkeypatch.setattr(request_json, "tools_of", lambda tools, _, several: tools_of(tools, "required", False))
    body = {"messages": SAY, "tools": [PAINT], "options": {"temperature": 0, "num_predict": 100}}
    (call,) = posted(client, "/api/chat", **body, stream=False)["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"
    assert call["function"]["arguments"]["colour"] in ("red", "green")
    *parts, last = lines(client, "/api/chat", **body)
    (streamed,) = [one for part in parts for one in part["message"].get("tool_calls", ())]
    assert streamed["function"] == call["function"]
    assert (last["done_reason"], last["message"]) == ("stop", {"role": "assistant", "content": ""})


def test_calls_and_results_of_earlier_turns_reach_the_template(path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.content }} {{ m.reasoning_content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}; "
        "{% endfor %}{{ tools }}"
    )
    turns = [
        *SAY,
        {"role": "assistant", "content": "", "thinking": "Hm.",
         "tool_calls": [{"function": {"name": "paint", "arguments": {"colour": "red"}}}]},
        {"role": "tool", "tool_name": "paint", "content": "done", "images": []},
    ]  # fmt: skip
    other = bridge.Model.load(changed(path, path.with_name("calls.gguf"), chat_template=template), context=500)
    expected = 'user  Speak. ; assistant   Hm.paint({"colour": "red"}); tool paint done ; '
    request = ollama_request.chat({"messages": turns}, other, {})
    assert other.chat_text(request.messages) == expected


@pytest.mark.parametrize("chat", [True, False])
def test_what_the_model_thinks_is_no_part_of_what_it_says(chat: bool, path: Path) -> None:
    template = (
        "{{ messages[0].content }}<think>{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
    )
    other = bridge.Model.load(changed(path, path.with_name("thinks.gguf"), chat_template=template), context=500)
    body: dict[str, Any] = {"messages": SAY} if chat else {"prompt": "Speak."}
    url = "/api/chat" if chat else "/api/generate"
    with client_of(other) as client:
        whole = posted(client, url, **body, think=True, options=GREEDY, stream=False)
        parts = lines(client, url, **body, think=True, options=GREEDY)
        off = posted(client, url, **body, think=False, options=GREEDY, stream=False)
    message = whole["message"] if chat else whole
    assert message["thinking"]
    assert (message["content"] if chat else message["response"]) == ""
    texts = [(part["message"] if chat else part).get("thinking", "") for part in parts]
    assert "".join(texts) == message["thinking"]
    assert "thinking" not in (off["message"] if chat else off)


def test_fields_that_ollamas_command_sends_empty_change_nothing(client: Any, model: Model) -> None:
    asked: dict[str, Any] = {"options": None, "truncate": True, "shift": True, "_debug_render_only": False,
                             "top_logprobs": 0, "stream": False}  # fmt: skip
    empty = {"suffix": "", "system": "", "template": "", "context": None, "images": []}
    options = {"temperature": 0, "num_predict": 3}
    plain = posted(client, "/api/generate", prompt="Speak.", options=options, stream=False)["response"]
    assert (
        posted(client, "/api/generate", prompt="Speak.", **{**asked, **empty, "options": options})["response"] == plain
    )
    assert posted(client, "/api/chat", messages=SAY, **{**asked, "options": options})["message"]["content"] == plain
    assert posted(client, "/api/show", name="", system="", template="", options=None)["template"] == TEMPLATE
    call = {"id": "c7", "function": {"index": 0, "name": "paint", "arguments": {}}}
    turn = {"role": "assistant", "tool_calls": [call]}
    (message,) = ollama_request.chat({"messages": [turn]}, model, {}).messages
    assert message["tool_calls"][0]["id"] == "c7"


def test_a_request_without_a_prompt_only_loads(client: Any) -> None:
    for url, body in (("/api/generate", {}), ("/api/chat", {"messages": []}), ("/api/chat", {})):
        found = posted(client, url, **body, keep_alive=-1, stream=False)
        assert (found["done"], found["done_reason"], found["eval_count"]) == (True, "load", 0)
        (only,) = lines(client, url, **body)
        assert only["done_reason"] == "load"


def test_probabilities_are_those_of_chats(client: Any) -> None:
    options = {"temperature": 0, "num_predict": 3}
    theirs = client.post(
        "/v1/chat/completions",
        json={"messages": SAY, "temperature": 0, "max_tokens": 3, "logprobs": True, "top_logprobs": 2},
    ).json()["choices"][0]["logprobs"]["content"]
    for url, body in (("/api/chat", {"messages": SAY}), ("/api/generate", {"prompt": "Speak."})):
        found = posted(client, url, **body, logprobs=True, top_logprobs=2, options=options, stream=False)
        assert found["logprobs"] == theirs
    raw = posted(client, "/api/generate", prompt="KING", raw=True, logprobs=True, options=options, stream=False)
    assert [token["top_logprobs"] for token in raw["logprobs"]] == [[]] * 3


def test_options_are_those_of_the_sampler(client: Any, reference: Model) -> None:
    how = {"seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.2, "repeat_last_n": 8,
           "frequency_penalty": 0.3, "presence_penalty": 0.4, "temperature": 1.1}  # fmt: skip
    loading = {"num_ctx": 200, "num_thread": 2, "num_gpu": 1, "use_mmap": True, "mirostat": 0, "typical_p": 1.0}
    found = posted(client, "/api/generate", prompt="KING", raw=True, options={**how, **loading, "num_predict": 20},
                   stream=False)  # fmt: skip
    own = "".join(reference.generate("KING", 20, **how))
    assert found["response"] == own
    stop = own[5:8]
    cut = posted(client, "/api/generate", prompt="KING", raw=True, stream=False,
                 options={**how, "num_predict": 20, "stop": [stop]})  # fmt: skip
    assert (cut["response"], cut["done_reason"]) == (own[: own.index(stop)], "stop")
    every = {"temperature": 0, "num_predict": -1, "seed": -1, "top_k": -1}
    endless = posted(client, "/api/generate", prompt="KING", raw=True, options=every, stream=False)
    assert endless["eval_count"] > 16 or endless["done_reason"] == "stop"


@pytest.mark.parametrize(
    ("url", "body", "message"),
    [
        (
            "/api/chat",
            {"messages": SAY, "options": {"num_ctx": 5000}},
            "options.num_ctx is 5000; the context holds 500",
        ),
        ("/api/chat", {"messages": SAY, "options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ("/api/chat", {"messages": SAY, "options": {"nonsense": 2}}, "options.nonsense is not supported"),
        ("/api/chat", {"messages": SAY, "options": {"temperature": -1}}, "temperature -1: must be at least 0"),
        ("/api/chat", {"messages": SAY, "options": {"num_predict": "x"}}, "options.num_predict must be an integer"),
        ("/api/chat", {"messages": SAY, "think": True}, "think: the model does not think"),
        ("/api/chat", {"messages": SAY, "think": 5}, "think must be true, false, low, medium or high"),
        ("/api/chat", {"messages": SAY, "format": "xml"}, "format must be json or a JSON schema"),
        ("/api/chat", {"messages": SAY, "stream": "no"}, "stream must be true or false"),
        ("/api/chat", {"messages": ["x"]}, "messages[0] must be a JSON object"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            "messages[0].images is not",
        ),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls[0].function is missing"),
        ("/api/chat", {"messages": [{"role": "user", "content": "word " * 800}]}, "the context holds 500"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        ("/api/generate", {"prompt": "a", "template": "b"}, "template is not supported"),
        ("/api/generate", {"prompt": "a", "context": [1]}, "context is not supported"),
        ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "images is not supported"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, "system needs a chat template"),
        ("/api/generate", {"prompt": "a", "nonsense": 1}, "nonsense is not supported"),
        ("/api/embed", {"input": []}, "input must be"),
        ("/api/embeddings", {"prompt": "a", "options": {"num_ctx": 5000}}, "options.num_ctx is 5000"),
        ("/api/show", {"model": "other"}, "the model 'other' is not served"),
        ("/api/pull", {"model": "other"}, "POST /api/pull: this server has /,"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(url: str, body: Any, message: str, client: Any) -> None:
    answer = client.post(url, json={"model": "small", **body})
    assert answer.status_code in (400, 404)
    assert set(answer.json()) == {"error"}
    assert message in answer.json()["error"]


def test_a_stream_that_fails_ends_with_an_error(model: Model, monkeypatch: Any) -> None:
    from bridge.runtime.decoder.decoder import Decoder

    with client_of(model) as client:
        monkeypatch.setattr(Decoder, "run", lambda *_: 1 / 0)
        (only,) = lines(client, "/api/chat", messages=SAY)
        failed = client.post("/api/chat", json={"messages": SAY, "stream": False})
    assert "ZeroDivisionError" in only["error"]
    assert (failed.status_code, failed.json()) == (500, only)


def test_clients_ask_whether_ollama_is_there(client: Any, model: Model) -> None:
    assert client.head("/").status_code == 200
    assert client.get("/api/version").json()["version"].count(".") == 2
    with client_of(model, key="secret") as other:
        refused = other.get("/api/tags")
        assert (refused.status_code, list(refused.json())) == (401, ["error"])
        assert other.get("/api/tags", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_model_without_a_chat_template_continues_the_prompt(path: Path, reference: Model) -> None:
    with client_of(bridge.Model.load(path.with_name("plain.gguf"), context=500)) as client:
        found = posted(client, "/api/generate", prompt="KING", options=GREEDY, stream=False)
        assert found["response"] == alone(reference, "KING")
        refused = client.post("/api/chat", json={"messages": SAY})
    assert "the model has no chat template" in refused.json()["error"]


def test_replies_stream_over_a_socket(running: Server) -> None:
    body = {"model": "small", "prompt": "KING", "raw": True, "options": GREEDY}
    with httpx.stream("POST", f"{running.url}/api/generate", json=body, timeout=PATIENCE) as answer:
        parts = [json.loads(line) for line in answer.iter_lines()]
    assert len(parts) > 3
    assert parts[-1]["done"]
