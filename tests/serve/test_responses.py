"""OpenAI's Responses API: its own client gets what the model says, whole and as typed events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.runtime.chat.parser import Parts
from bridge.runtime.chat.reading import Call
from bridge.runtime.model import Model
from bridge.serve.response_json import Replied, Usage
from bridge.serve.responses_answer import ResponsesAnswer
from bridge.serve.responses_request import responses
from tests.conftest import PATIENCE
from tests.runtime.test_model import changed
from tests.serve.conftest import Server, client_of

SPOKEN = "user: Speak.\nassistant: "
GREEDY = {"temperature": 0, "max_output_tokens": 12}
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"],
          "additionalProperties": False}  # fmt: skip
PAINT = {"type": "function", "name": "paint", "description": "Paint it.", "parameters": COLOUR, "strict": True}


@pytest.fixture(scope="module")
def openai(running: Server) -> Any:
    """OpenAI's own client."""
    package = pytest.importorskip("openai")
    return package.OpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=PATIENCE)


def alone(model: Model, prompt: str, limit: int = 12) -> str:
    return "".join(model.generate(prompt, limit, temperature=0))


def posted(client: Any, **body: Any) -> Any:
    answer = client.post("/v1/responses", json={"input": "Speak.", **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(data: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types and whose numbers ascend."""
    found = []
    for part in data.split("\n\n")[:-1]:
        name, line = part.split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_openais_client_gets_what_the_model_says(openai: Any, reference: Model) -> None:
    own = alone(reference, SPOKEN)
    whole = openai.responses.create(model="small", input="Speak.", **GREEDY)
    assert whole.output_text == own
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    prompt = len(reference.tokenizer.encode(SPOKEN))
    counts = whole.usage
    assert (counts.input_tokens, counts.output_tokens, counts.total_tokens) == (prompt, 12, prompt + 12)
    parts = [{"type": "input_text", "text": "Spe"}, {"type": "input_text", "text": "ak."}]
    told = openai.responses.create(
        model="small",
        input=[{"role": "user", "content": parts}],
        instructions="Be brief.",
        metadata={"a": "b"},
        **GREEDY,
    )
    assert told.output_text == alone(reference, f"system: Be brief.\n{SPOKEN}")
    assert (told.instructions, told.metadata, told.temperature, told.store) == ("Be brief.", {"a": "b"}, 0, False)
    assert told.max_output_tokens == 12


def test_openais_client_gets_events_of_a_text(openai: Any, reference: Model) -> None:
    pytest.importorskip("llguidance")
    form = {"format": {"type": "json_schema", "name": "colour", "schema": COLOUR, "strict": True}}
    with openai.responses.stream(model="small", input="Speak.", text=form, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert json.loads(final.output_text)["colour"] in ("red", "green")
    assert final.status == "completed"
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert deltas > 1


def test_openais_client_gets_calls_and_sends_their_results(openai: Any) -> None:
    pytest.importorskip("llguidance")
    asked: dict[str, Any] = {"model": "small", "tools": [PAINT], "temperature": 0, "max_output_tokens": 100}
    with openai.responses.stream(input="Speak.", tool_choice="required", **asked) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_response().output
    assert kinds[2:-1] == [
        "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done",
    ]  # fmt: skip
    named = {"type": "function", "name": "paint"}
    (call,) = openai.responses.create(input="Speak.", tool_choice=named, **asked).output
    assert (call.type, call.name, call.arguments) == ("function_call", "paint", streamed.arguments)
    assert json.loads(call.arguments)["colour"] in ("red", "green")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    turns = [{"role": "user", "content": "Speak."}, call.model_dump(), result]
    after = openai.responses.create(input=turns, **asked)
    assert after.usage.input_tokens > len("Speak.")
    assert after.output[0].type == "message"


def test_a_schema_of_a_class_comes_back_as_one(openai: Any) -> None:
    import pydantic  # a dependency of openai

    pytest.importorskip("llguidance")
    digit = pydantic.Field(ge=0, le=9)
    kind = pydantic.create_model("Point", x=(int, digit), y=(int, digit))
    found = openai.responses.parse(model="small", input="Speak.", text_format=kind, temperature=0).output_parsed
    assert 0 <= found.x <= 9
    assert 0 <= found.y <= 9


def test_items_of_one_turn_are_one_message(path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.reasoning_content }} {{ m.tool_call_id }}"
        "{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.name }}({{ c.function.arguments | tojson }})"
        "{% endfor %}; {% endfor %}{{ tools }}"
    )
    call = {"type": "function_call", "call_id": "c1", "name": "paint", "arguments": '{"colour": "red"}'}
    turns: list[Any] = [
        {"role": "user", "content": "Speak."},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "Well.", "annotations": []}]},
        call, {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}]},
    ]  # fmt: skip
    paint = 'paint({"colour": "red"})'
    expected = f"user Speak.  ; assistant Well. Hm. c1 {paint}c2 {paint}; tool done  c1; "
    other = bridge.Model.load(changed(path, path.with_name("items.gguf"), chat_template=template), context=500)
    assert other.chat_text(responses({"input": turns}, other, {}).messages) == expected


def test_instructions_and_a_first_message_of_the_developer_are_one_message(model: Model) -> None:
    turns = [{"role": "developer", "content": "No names."}, {"role": "user", "content": "Speak."}]
    messages = responses({"input": turns, "instructions": "Be brief."}, model, {}).messages
    assert messages == [{"role": "system", "content": "Be brief.\n\nNo names."}, {"role": "user", "content": "Speak."}]


def test_what_the_model_thinks_is_an_item_of_its_own(path: Path) -> None:
    template = "{{ messages[0].content }}<think>{% if false %}</think>{% endif %}"
    other = bridge.Model.load(changed(path, path.with_name("thinking.gguf"), chat_template=template), context=500)
    with client_of(other) as client:
        whole = posted(client)
        body = {"input": "Speak.", **GREEDY, "stream": True}
        streamed = events(client.post("/v1/responses", json=body).text)
    (item,) = whole["output"]
    assert (item["type"], item["summary"], item["status"]) == ("reasoning", [], "incomplete")
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    text = "".join(event["delta"] for event in streamed if event["type"] == "response.reasoning_text.delta")
    assert item["content"] == [{"type": "reasoning_text", "text": text}]
    assert streamed[-1]["type"] == "response.incomplete"


def test_events_add_up_to_the_answer(reference: Model) -> None:
    """Of a reply that thinks, speaks and calls, in parts as they come."""
    call = Call("paint", '{"colour": "red"}', "c1")
    parts = [Parts("H"), Parts("m.", "We"), Parts("", "ll."), Parts("", "", (call, call))]
    usage = Usage(3, 9, 1, 0.1, 0.2)

    def answer() -> ResponsesAnswer:
        return ResponsesAnswer("small", reference.tokenizer, {"store": True})

    streamed = answer()
    data = streamed.begin(1)
    for number, part in enumerate(parts):
        data += streamed.part(Replied(0, part, None, "tool_calls" if number + 1 == len(parts) else None))
    found = events((data + streamed.end(usage)).decode())
    last = found[-1]["response"]
    whole = answer().complete([Replied(0, sum(parts, Parts()), None, "tool_calls")], usage)

    def without_ids(response: dict[str, Any]) -> dict[str, Any]:
        output = [{key: value for key, value in item.items() if key != "id"} for item in response["output"]]
        return {**response, "output": output, "id": "", "created_at": 0}

    assert without_ids(last) == without_ids(whole)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][1]["content"][0]["text"] == "Well."
    assert (whole["status"], whole["store"]) == ("completed", True)
    for index, item in enumerate(last["output"]):
        own = [event for event in found if event.get("output_index") == index]
        assert own[0]["item"]["id"] == own[-1]["item"]["id"] == item["id"]
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
        assert own[-1]["item"] == item


def test_a_reply_of_nothing_is_an_empty_message(client: Any) -> None:
    (item,) = posted(client, max_output_tokens=0)["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_probabilities_are_those_of_chats(client: Any) -> None:
    chats = {"messages": [{"role": "user", "content": "Speak."}], "temperature": 0, "max_tokens": 12,
             "logprobs": True, "top_logprobs": 2}  # fmt: skip
    theirs = client.post("/v1/chat/completions", json=chats).json()["choices"][0]["logprobs"]["content"]
    found = posted(client, include=["message.output_text.logprobs"], top_logprobs=2)
    assert found["output"][0]["content"][0]["logprobs"] == theirs


def test_a_failure_is_the_last_event(model: Model, monkeypatch: Any) -> None:
    from bridge.runtime.decoder.decoder import Decoder

    with client_of(model) as client:
        monkeypatch.setattr(Decoder, "run", lambda *_: 1 / 0)
        found = events(client.post("/v1/responses", json={"input": "Speak.", "stream": True}).text)
    assert found[-1]["type"] == "response.failed"
    assert "ZeroDivisionError" in found[-1]["response"]["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"input": None}, "input", "input must be a text or a list of items"),
        ({"input": []}, "input", "and not empty"),
        ({"input": [5]}, "input[0]", "input[0] must be a JSON object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "'item_reference' is not supported"),
        ({"input": [{"role": "user"}]}, "input[0].content", "input[0].content is missing"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]", "takes texts only"),
        ({"input": [{"role": "user", "content": "a", "x": 1}]}, "input[0].x", "input[0].x is not supported"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id", "call_id is missing"),
        ({"input": "word " * 800}, "input", "the context holds 500"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is kept: send all of the conversation"),
        ({"conversation": "x"}, "conversation", "nothing is kept"),
        ({"max_output_tokens": -1}, "max_output_tokens", "between 0 and"),
        ({"temperature": -1}, "temperature", "must be at least 0"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "takes functions alone"),
        ({"tools": ["x"]}, "tools[0]", "must be a JSON object"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text, json_object or json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "schema is missing"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema",
         "text.format.schema: it has keywords that are not supported: not"),
        ({"reasoning": {"x": 1}}, "reasoning.x", "reasoning.x is not supported"),
        ({"include": ["file_search_call.results"]}, "include", "'file_search_call.results' is not supported"),
        ({"truncation": "auto"}, "truncation", "truncation is not supported"),
        ({"background": True}, "background", "background is not supported"),
        ({"nonsense": 1}, "nonsense", "nonsense is not supported"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_its_name(body: Any, field: str, message: str, client: Any) -> None:
    answer = client.post("/v1/responses", json={"input": "Speak.", **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["param"] == field
