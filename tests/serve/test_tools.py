"""Replies that call tools, as OpenAI's clients and LangChain ask for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from bridge.runtime.chat.formats import FORMATS, HARMONY, JSON, CallFormat
from bridge.runtime.chat.reply_form import ReplyForm
from bridge.runtime.model import Model
from bridge.runtime.sampling import Sampler
from bridge.serve import jobs
from tests.conftest import PATIENCE
from tests.serve.conftest import Server
from tests.serve.test_endpoints import SAY, chat, events

pytest.importorskip("llguidance")

DICE = {"type": "object", "properties": {"sides": {"enum": [6, 20]}}, "required": ["sides"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "roll_dice", "description": "Roll it.", "parameters": DICE}},
    {"type": "function", "function": {"name": "time"}},
]
CHATS = "/v1/chat/completions"
HERMES = next(form for form in FORMATS if "Hermes" in form.name)
SAID = 'Look:\n<tool_call>\n{"name": "roll_dice", "arguments": {"sides": 6}}\n</tool_call>'


@pytest.fixture
def says(model: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[[CallFormat, str, str], None]:
    """says(form, reply): what the model of such a format answers from now on; `template`: its own."""

    def answer(form: CallFormat, reply: str, template: str = "") -> None:
        monkeypatch.setitem(model.__dict__, "reply_form", ReplyForm(template, form, model.tokenizer))
        sampler = partial(Sampler.of, model.tokenizer, regex=re.escape(reply))
        monkeypatch.setattr(jobs, "_sampler", lambda asked, model, prompt: sampler(asked.logprobs))

    return answer


def test_a_call_is_a_call_and_no_text(client: Any, says: Any) -> None:
    says(HERMES, SAID)
    choice = chat(client, tools=TOOLS, max_tokens=200)["choices"][0]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "Look:", "refusal": None}
    assert call["type"] == "function"
    assert call["function"] == {"name": "roll_dice", "arguments": '{"sides": 6}'}
    assert re.fullmatch("[a-zA-Z0-9]{9}", call["id"])
    assert choice["finish_reason"] == "tool_calls"


def test_a_call_in_a_stream_comes_at_once_with_its_number(client: Any, says: Any) -> None:
    says(HERMES, SAID + SAID.removeprefix("Look:"))
    body = {"messages": SAY, "stream": True, "tools": TOOLS, "max_tokens": 300}
    choices = [c for event in events(client.post(CHATS, json=body).text) for c in event["choices"]]
    assert "".join(c["delta"].get("content", "") for c in choices) == "Look:"
    calls = [call for c in choices for call in c["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert all(json.loads(call["function"]["arguments"]) == {"sides": 6} for call in calls)
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_without_tools_or_with_none_the_text_stays(client: Any, says: Any) -> None:
    says(HERMES, SAID)
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        choice = chat(client, max_tokens=200, **body)["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": SAID, "refusal": None}
        assert choice["finish_reason"] == "stop"


def test_a_reply_that_is_cut_off_ends_with_length(client: Any, says: Any) -> None:
    says(HERMES, SAID)
    choice = chat(client, tools=TOOLS, max_tokens=30)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("Look:\n<tool_call>")
    assert "tool_calls" not in choice["message"]


def test_what_a_model_thinks_is_reasoning_content(client: Any, says: Any) -> None:
    says(JSON, "<think>\nHm.\n</think>\n\nYes.", "</think>")
    message = chat(client, max_tokens=100)["choices"][0]["message"]
    assert (message["reasoning_content"].strip(), message["content"]) == ("Hm.", "Yes.")


def test_harmony_calls(client: Any, says: Any) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.roll_dice <|constrain|>json<|message|>{"sides": 20}'
    says(HARMONY, thought + call)
    message = chat(client, tools=TOOLS, max_tokens=300)["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm."
    assert message["tool_calls"][0]["function"] == {"name": "roll_dice", "arguments": '{"sides": 20}'}


@pytest.mark.parametrize("form", [JSON, HERMES], ids=lambda form: form.name)
def test_a_required_call_is_one_of_the_functions(
    form: CallFormat, client: Any, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(model.__dict__, "reply_form", ReplyForm("", form, model.tokenizer))
    for seed in range(3):
        body = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 400, "temperature": 2, "seed": seed}
        found = chat(client, tool_choice="required", **body)["choices"][0]
        assert found["finish_reason"] == "tool_calls"
        (call,) = found["message"]["tool_calls"]
        wanted = {"roll_dice": ['{"sides": 6}', '{"sides": 20}'], "time": ["{}"]}
        assert call["function"]["arguments"] in wanted[call["function"]["name"]]
        named = chat(client, tool_choice={"type": "function", "function": {"name": "time"}}, **body)["choices"][0]
        assert named["message"]["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}


def test_a_schema_and_tools_let_the_model_choose(client: Any, model: Model) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["six"]}}}
    for seed in range(4):
        body = {"tools": TOOLS, "response_format": wanted, "temperature": 3, "seed": seed, "max_tokens": 200}
        choice = chat(client, **body)["choices"][0]
        assert choice["message"].get("tool_calls") or choice["message"]["content"] == '"six"'


def test_calls_and_results_reach_the_template(client: Any, reference: Model) -> None:
    """The template of these tests writes no calls: they are part of the text."""
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": '{"zone": "é"}'}}
    talk = [*SAY, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "noon"}]  # fmt: skip
    prompt = 'user: Speak.\nassistant: {"name": "time", "arguments": {"zone": "é"}}\ntool: noon\nassistant: '
    found = chat(client, messages=talk, max_tokens=8)["choices"][0]["message"]["content"]
    assert found == "".join(reference.generate(prompt, 8, temperature=0))


REFUSED = [
    ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": ["time"]}}}, "tool_choice"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
        "tools[0].function.parameters",
    ),
    *(
        ({"messages": [*SAY, {"role": "assistant", "content": "", "tool_calls": calls}]}, "messages[1].tool_calls")
        for calls in (5, "a", [None], ["a"], {"a": 1}, [{"function": {"name": "f"}}])
    ),
]


@pytest.mark.parametrize(("body", "field"), REFUSED)
def test_tools_that_make_no_sense_are_refused(body: dict[str, Any], field: str, client: Any) -> None:
    answer = client.post(CHATS, json={"messages": SAY, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_system_messages_are_one(client: Any, reference: Model) -> None:
    talk = [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, *SAY]
    found = chat(client, messages=talk, max_tokens=5)["choices"][0]["message"]["content"]
    prompt = "system: A\n\nB\nuser: Speak.\nassistant: "
    assert found == "".join(reference.generate(prompt, 5, temperature=0))


def test_a_loop_of_openais_client_calls_a_tool_and_goes_on(running: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=PATIENCE)
    messages: list[Any] = [*SAY]
    asked: dict[str, Any] = {"model": "m", "tools": TOOLS, "temperature": 0, "parallel_tool_calls": False}
    for choice in ("required", "none"):
        reply = client.chat.completions.create(messages=messages, tool_choice=choice, max_tokens=60, **asked)
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls or ():
            assert call.function.name in ("roll_dice", "time")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "4"})
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[-1]["content"]
    with client.chat.completions.stream(messages=SAY, tool_choice="required", max_tokens=60, **asked) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.arguments == messages[1]["tool_calls"][0]["function"]["arguments"]


def test_langchain_binds_tools_and_gets_structured_output(running: Server) -> None:
    langchain = pytest.importorskip("langchain_openai")
    from pydantic import create_model  # which comes with it

    model = langchain.ChatOpenAI(base_url=f"{running.url}/v1", api_key="none", model="m", max_tokens=80, temperature=0)
    bound = model.bind_tools(TOOLS, tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke("Speak.").tool_calls
    assert call["name"] in ("roll_dice", "time")
    chunks = [chunk for message in bound.stream("Speak.") for chunk in message.tool_call_chunks]
    assert [chunk["name"] for chunk in chunks] == [call["name"]]
    Number = create_model("Number", number=(int, ...))
    for method in ("function_calling", "json_schema"):
        assert isinstance(model.with_structured_output(Number, method=method).invoke("Speak."), Number)


def test_tools_without_a_grammar_are_left_to_the_model(
    client: Any, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneOf of what may overlap is nothing that llguidance takes; only a call that must be needs it."""
    monkeypatch.setitem(model.__dict__, "reply_form", ReplyForm("", HERMES, model.tokenizer))
    schema = {"type": "object", "properties": {"a": {"oneOf": [{"minimum": 1}, {"maximum": 2}]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert chat(client, tools=tools, max_tokens=4)["choices"][0]["message"]["content"]
    answer = client.post(CHATS, json={"messages": SAY, "tools": tools, "tool_choice": "required"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
