# ruff: noqa: RUF001 - DeepSeek's marks have wide bars
"""Replies of each family's models: their calls of tools and what they think, read and asked for by grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.gguf_file.special_tokens import CONTROL, NORMAL
from bridge.runtime.chat.formats import FORMATS, HARMONY, JSON, CallFormat, call_format
from bridge.runtime.chat.parser import Parts
from bridge.runtime.chat.reading import read_calls
from bridge.runtime.chat.reply_form import ReplyForm
from bridge.runtime.chat.templates import ChatTemplate

WEATHER = {
    "type": "object", "required": ["city"],
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}},
    },
}  # fmt: skip
TIME: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTIONS = {"get_weather": WEATHER, "time": TIME}
ARGUMENTS = {"city": "Paris", "days": 3, "tags": ["a", "b"]}
TEXT = json.dumps(ARGUMENTS)

# a reply that calls get_weather(ARGUMENTS) and time(), by the name of its format; one call where a reply has one only
REPLIES = {
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{TEXT}",
    "Kimi K2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{TEXT}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "DeepSeek V3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="tags" string="false">["a", "b"]</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n\n<｜DSML｜invoke name="time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "DeepSeek R1, V3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{TEXT}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "DeepSeek V3.1": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{TEXT}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "Gemma 4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>,<|"|>b<|"|>]}<tool_call|>'
    "<|tool_call>call:time{}<tool_call|>",
    "MiniMax M3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris'
    "]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[<tags>]<]minimax[>[<item>a"
    "]<]minimax[>[</item>]<]minimax[>[<item>b]<]minimax[>[</item>]<]minimax[>[</tags>]<]minimax[>[</invoke>\n"
    '\n]<]minimax[>[<invoke name="time">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
    "MiniMax M2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">3</parameter>\n<parameter name="tags">["a", "b"]</parameter>\n</invoke>\n\n'
    '<invoke name="time">\n</invoke>\n</minimax:tool_call>',
    "Seed-OSS": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    '</parameter>\n<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</seed:tool_call>\n'
    "<seed:tool_call>\n<function=time>\n</function>\n</seed:tool_call>",
    "Qwen3-Coder, Qwen3.5, Nemotron 3": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    '<parameter=days>\n3\n</parameter>\n<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=time>\n</function>\n</tool_call>",
    "MiniCPM5": '<function name="get_weather"><param name="city">Paris</param><param name="days">3</param>'
    '<param name="tags">["a", "b"]</param></function>\n<function name="time"></function>',
    "GLM 4.5": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days"
    '</arg_key>\n<arg_value>3</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>["a", "b"]</arg_value>\n</tool_call>\n'
    "<tool_call>time\n</tool_call>",
    "Solar Open": f"<|tool_calls|><|tool_call:begin|>abcdefghi<|tool_call:name|>get_weather<|tool_call:args|>{TEXT}"
    "<|tool_call:end|><|tool_call:begin|>123456789<|tool_call:name|>time<|tool_call:args|>{}<|tool_call:end|>",
    "Mistral Small 3.2": f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{TEXT}"
    "[TOOL_CALLS]time[CALL_ID]123456789[ARGS]{}",
    "Mistral: Devstral, Ministral": f"[TOOL_CALLS]get_weather[ARGS]{TEXT}[TOOL_CALLS]time[ARGS]{{}}",
    "GigaChat 3.1": f'<|function_call|>{{"name": "get_weather", "arguments": {TEXT}}}',
    "GigaChat 3": f'function call<|role_sep|>\n{{"name": "get_weather", "arguments": {TEXT}}}',
    "LFM2": '<|tool_call_start|>[get_weather(city="Paris", days=3, tags=["a", "b"]), time()]<|tool_call_end|>',
    "Olmo 3": '<function_calls>get_weather(city="Paris", days=3, tags=["a", "b"])</function_calls>',
    "Functionary 3.2": f"get_weather\n{TEXT}",
    "Functionary 3.1": f"<function=get_weather>{TEXT}</function>\n<function=time>{{}}</function>",
    "Hermes, Qwen, Granite 4": f'<tool_call>\n{{"name": "get_weather", "arguments": {TEXT}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "Llama 3": f'{{"name": "get_weather", "parameters": {TEXT}}}',
    "Llama 3.2": f'{{"name": "get_weather", "parameters": {TEXT}}}',
    "JSON": f'{{"name": "get_weather", "arguments": {TEXT}}}',
}
_LIST = f'[{{"name": "get_weather", "arguments": {TEXT}}}, {{"name": "time", "arguments": {{}}}}]'
_OTHER_LIST = _LIST.replace('"name"', '"tool_name"').replace('"arguments"', '"parameters"')
REPLIES |= {
    "LFM2.5": REPLIES["LFM2"],
    "DeepSeek V4": REPLIES["DeepSeek V3.2"].replace("function_calls", "tool_calls"),
    "Mistral: Nemo, 7B": f"[TOOL_CALLS]{_LIST}",
    "Nemotron Nano": f"<TOOLCALL>{_LIST}</TOOLCALL>",
    "Command R7B": f"<|START_ACTION|>{_OTHER_LIST}<|END_ACTION|>",
    "Command R": f"Action:\n```json\n{_OTHER_LIST}\n```",
    "Apertus": f"<|tools_prefix|>{_LIST}<|tools_suffix|>",
    "Jamba, Hunyuan, Apriel": f"<tool_calls>{_LIST}</tool_calls>",
    "Phi-4-mini": f"<|tool_call|>{_LIST}<|/tool_call|>",
    "Granite 3": f"<|tool_call|>{_LIST}",
}
ALL = {form.name: form for form in (*FORMATS, JSON)}


class Letters:
    """A vocabulary of single bytes, and of control tokens; token 0 ends a reply."""

    def __init__(self, *control: str):
        self.tokens = ["<end>", *map(chr, range(1, 256)), *control]
        self.types = [CONTROL, *[NORMAL] * 255, *[CONTROL] * len(control)]
        self.stops = frozenset([0])

    def __len__(self) -> int:
        return len(self.tokens)

    def piece(self, token: int, special: bool = False) -> bytes:
        if self.types[token] == CONTROL:
            return self.tokens[token].encode() if special else b""
        return bytes([token])

    def decode(self, tokens: Any, special: bool = False) -> str:
        return b"".join(self.piece(token, special) for token in tokens).decode()

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        ids = []
        while text:
            control = next((n for n in range(256, len(self)) if text.startswith(self.tokens[n])), None)
            ids += [control] if control is not None else text[0].encode()
            text = text[1:] if control is None else text.removeprefix(self.tokens[control])
        return ids


def form_of(form: CallFormat, *control: str, template: str = "") -> ReplyForm:
    letters: Any = Letters(*control)
    return ReplyForm(template, form, letters)


def accepts(form: ReplyForm, grammar: str, reply: str) -> bool:
    """Whether a reply is one of a grammar's, to its end."""
    llguidance = pytest.importorskip("llguidance")
    from bridge.runtime.constraint import _Vocabulary

    letters: Any = form._tokenizer
    vocabulary = _Vocabulary(letters)
    tokens = llguidance.LLTokenizer(vocabulary, eos_token=[0])
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(token) for token in letters.encode(reply)) and matcher.is_accepting()


def read_in_pieces(make: Any, reply: str, size: int) -> Parts:
    parser = make()
    parts = [parser.add(reply[at : at + size]) for at in range(0, len(reply), size)]
    return sum([*parts, parser.add("", last=True)], Parts())


@pytest.mark.parametrize("name", ALL)
def test_calls_of_a_format_are_read_in_pieces_of_any_size(name: str) -> None:
    reply = REPLIES[name]
    form = ALL[name]
    said = "Let me look." if form.begin and not form.answer else ""
    parser = form_of(form).parser
    for size in (1, 3, len(reply) + 99):
        parts = read_in_pieces(lambda: parser([], FUNCTIONS), said + reply if form is not HARMONY else reply, size)
        calls = [(call.name, json.loads(call.arguments)) for call in parts.calls]
        assert calls == [("get_weather", ARGUMENTS), ("time", {})][: reply.count("time") + 1]
        assert parts.content == (said if form is not HARMONY else "")


@pytest.mark.parametrize("name", ALL)
def test_a_grammar_takes_what_its_format_writes_and_nothing_else(name: str) -> None:
    form, reply = ALL[name], REPLIES[name]
    marks = [text for text in form.literals if text and "{" not in text and "\n" not in text]
    for control in ((), marks):
        written = form_of(form, *control)
        grammar = written.grammar([], "", FUNCTIONS, several=True)
        assert accepts(written, grammar, reply)
        assert not accepts(written, grammar, reply.replace("get_weather", "get_letters"))
        assert not accepts(written, grammar, "Let me look.")
        one = written.grammar([], "", FUNCTIONS, several=False)
        assert accepts(written, one, reply) == ("time" not in reply)


@pytest.mark.parametrize("name", [name for name, form in ALL.items() if form_of(form).has_begin and not form.answer])
def test_a_call_that_is_begun_in_any_text_is_one_of_the_functions(name: str) -> None:
    form, reply = ALL[name], REPLIES[name]
    for control in ((), [text for text in form.literals if text and "{" not in text and "\n" not in text]):
        written = form_of(form, *control)
        grammar = written.grammar([], "", FUNCTIONS, several=True, free=True)
        for text in ("Hello, a < b [", reply, "Let me look. " + reply):
            assert accepts(written, grammar, text)
        assert not accepts(written, grammar, "Let me look. " + reply.replace("get_weather", "get_letters"))


# --- what the model thinks ---

THINKS = "{{ '<think>' }}{{ '</think>' }}"
HERMES = ALL["Hermes, Qwen, Granite 4"]
THOUGHTS = {  # the end of the prompt, the reply -> its parts
    ("", "<think>\nHm.\n</think>\n\nYes."): ("Hm.", "Yes."),
    ("<think>\n", "Hm, two\n\nlines.\n</think>\n\nYes."): ("Hm, two\n\nlines.", "Yes."),
    ("<think>\n\n</think>\n\n", "Yes."): ("", "Yes."),
    ("", "Yes, <think> is a mark."): ("", "Yes, <think> is a mark."),
    ("", "<thin"): ("", "<thin"),
    ("<think>", "Not to its end </thi"): ("Not to its end </thi", ""),
    ("", ""): ("", ""),
}


@pytest.mark.parametrize(("prompt", "reply"), THOUGHTS)
def test_what_a_model_thinks_is_apart_from_what_it_says(prompt: str, reply: str) -> None:
    form = form_of(JSON, template=THINKS)
    tokens = Letters().encode(prompt)
    for size in (1, 2, 5, 99):
        parts = read_in_pieces(lambda: form.parser(tokens, None), reply, size)
        assert (parts.reasoning.strip(), parts.content) == THOUGHTS[prompt, reply]


def test_a_call_may_follow_what_a_model_thinks() -> None:
    form = form_of(HERMES, template=THINKS)
    reply = "<think>\nA call: <tool_call> helps.\n</think>\n\nLook:\n" + REPLIES[HERMES.name]
    for size in (1, 4, 999):
        parts = read_in_pieces(lambda: form.parser([], FUNCTIONS), reply, size)
        assert (parts.reasoning.strip(), parts.content) == ("A call: <tool_call> helps.", "Look:")
        assert [call.name for call in parts.calls] == ["get_weather", "time"]


@pytest.mark.parametrize(
    ("prompt", "thought"),
    [("", "<think>\nHm.\n</think>\n\n"), ("", ""), ("<think>\n", "Hm.\n</think>\n\n"), ("<think></think>", "")],
)
def test_a_grammar_lets_a_model_think_first(prompt: str, thought: str) -> None:
    form = form_of(HERMES, template=THINKS)
    tokens = Letters().encode(prompt)
    required = form.grammar(tokens, "", FUNCTIONS, several=False)
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    assert accepts(form, required, thought + call)
    either = form.grammar(tokens, '%json {"type": "boolean"}', FUNCTIONS, several=False)
    assert accepts(form, either, thought + "true")
    assert accepts(form, either, thought + call)
    assert not accepts(form, either, thought + "Yes")


def test_a_model_that_does_not_think_fits_at_once() -> None:
    form = form_of(JSON)
    grammar = form.grammar([], '%json {"type": "boolean"}', None, several=False)
    assert accepts(form, grammar, "true")
    assert not accepts(form, grammar, "<think>Hm.</think>true")


# --- what is no call ---

NO_CALLS = [
    "<tool_call>\nnothing\n</tool_call>",
    '<tool_call>\n{"name": "time", "arguments": {}',  # cut off
    '<tool_call>\n{"name": "time", "arguments": [1]}\n</tool_call>',
    '<tool_call>\n{"arguments": {}}\n</tool_call>',
    "<tool_call>\n\n</tool_call>",
    "<tool_call>",
    "<tool_",
    "<tool_call>" + "[" * 100_000 + "</tool_call>",
]


@pytest.mark.parametrize("reply", NO_CALLS, ids=range(len(NO_CALLS)))
def test_what_cannot_be_read_as_a_call_is_content(reply: str) -> None:
    parser = form_of(HERMES).parser
    for size in (1 if len(reply) < 1000 else 5000, 99_999):
        assert read_in_pieces(lambda: parser([], FUNCTIONS), "So: " + reply, size) == Parts(content="So: " + reply)


def test_without_tools_marks_of_calls_are_content() -> None:
    reply = REPLIES[HERMES.name]
    assert read_in_pieces(lambda: form_of(HERMES).parser([], None), reply, 7) == Parts(content=reply)


def test_an_answer_in_json_is_no_call() -> None:
    parser = form_of(JSON).parser
    for reply in ('{"name": "Paris", "arguments": {}}', "[1, 2]", "{}", '{"name"', "[" * 100_000):
        assert read_in_pieces(lambda: parser([], FUNCTIONS), reply, 9999) == Parts(content=reply)


def test_an_end_in_a_text_of_the_arguments_ends_no_call() -> None:
    arguments = {"city": "</tool_call> or {"}
    reply = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    for size in (1, 3, 999):
        (call,) = read_in_pieces(lambda: form_of(HERMES).parser([], FUNCTIONS), reply, size).calls
        assert json.loads(call.arguments) == arguments


def test_a_functionary_that_answers_everybody_calls_nothing() -> None:
    parser = form_of(ALL["Functionary 3.2"]).parser
    reply = f"all\nLet me look.>>>get_weather\n{TEXT}"
    for size in (1, 3, 999):
        parts = read_in_pieces(lambda: parser([], FUNCTIONS), reply, size)
        assert parts.content == "Let me look."
        assert [call.name for call in parts.calls] == ["get_weather"]


def test_a_call_of_harmony_ends_what_it_reasons() -> None:
    reply = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + REPLIES["harmony"]
    other = reply.replace(
        "<|channel|>commentary to=functions.get_weather", " to=functions.get_weather<|channel|>commentary"
    )
    for text in (reply, other):
        for size in (1, 6, 999):
            parts = read_in_pieces(lambda: form_of(HARMONY).parser([], FUNCTIONS), text, size)
            assert (parts.reasoning, parts.content) == ("Hm.", "")
            assert [call.name for call in parts.calls] == ["get_weather"]


def test_values_have_the_types_of_the_schema() -> None:
    form = ALL["Qwen3-Coder, Qwen3.5, Nemotron 3"]
    schema = {"type": "object", "properties": {"code": {"type": "string"}, "exact": {"type": "boolean"}}}
    section = (
        "<function=f>\n<parameter=code>\n  12\n\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        "<parameter=more>\n{'a': None}\n</parameter>\n</function>"
    )
    (call,) = read_calls(section, form, {"f": schema})
    assert json.loads(call.arguments) == {"code": "  12\n", "exact": True, "more": {"a": None}}


@pytest.mark.parametrize("name", ALL)
def test_a_template_is_known_by_its_marks(name: str) -> None:
    form = ALL[name]
    template = " ".join(["{{ tools }}", *form.marks])
    assert call_format(template, True) == form
    assert call_format(template, False) in (JSON, HARMONY)


# --- what models write beside what they should ---


def calls_of(name: str, reply: str, functions: Any = FUNCTIONS) -> list[tuple[str, Any]]:
    """The calls of a reply, which are the same whatever the pieces that it comes in."""
    form = form_of(ALL[name])
    found = [read_in_pieces(lambda: form.parser([], functions), reply, size) for size in (1, 2, 9999)]
    calls = [[(call.name, json.loads(call.arguments)) for call in parts.calls] for parts in found]
    assert calls[0] == calls[1] == calls[2]
    return calls[0]


@pytest.mark.parametrize("name", ["JSON", "Llama 3"])
def test_a_call_may_stand_in_a_fence_or_after_a_mark(name: str) -> None:
    for reply in (f"```json\n{REPLIES[name]}\n```", f"<|python_tag|>{REPLIES[name]}", f"\n {REPLIES[name]} "):
        assert calls_of(name, reply) == [("get_weather", ARGUMENTS)]
    assert calls_of(name, "```python\nprint(1)\n```") == []


@pytest.mark.parametrize("name", ["Granite 3", "Mistral: Nemo, 7B", "Solar Open", "Mistral: Devstral, Ministral"])
def test_text_after_calls_without_an_end_is_content(name: str) -> None:
    reply = REPLIES[name] + "\nI called it."
    assert [called for called, _ in calls_of(name, reply)] == ["get_weather", "time"]
    assert form_of(ALL[name]).parser([], FUNCTIONS).add(reply, True).content == "I called it."


@pytest.mark.parametrize("name", ["Jamba, Hunyuan, Apriel", "LFM2", "Nemotron Nano", "Granite 3"])
def test_no_calls_are_content(name: str) -> None:
    form = ALL[name]
    for inner in ("", " ", "[]"[: 2 * form.listed]):
        reply = f"Hi {form.begin}{inner}{form.end}"
        assert form_of(form).parser([], FUNCTIONS).add(reply, True) == Parts(content=reply)


def test_a_value_may_have_its_own_end_within() -> None:
    reply = REPLIES["Qwen3-Coder, Qwen3.5, Nemotron 3"].replace("Paris", "a</parameter>b</function>")
    assert calls_of("Qwen3-Coder, Qwen3.5, Nemotron 3", reply)[0][1]["city"] == "a</parameter>b</function>"


def test_a_number_that_no_float_holds_loses_no_call() -> None:
    reply = '<tool_call>\n{"name": "time", "arguments": {"a": 3e999, "b": -1e400}}\n</tool_call>'
    ((_, arguments),) = calls_of("Hermes, Qwen, Granite 4", reply)
    assert arguments == {"a": 1.7976931348623157e308, "b": -1.7976931348623157e308}


def test_a_function_and_keywords_of_python_may_have_any_name() -> None:
    reply = """<|tool_call_start|>[get-weather(from='it"s', to-x=-1.5, all=[True, None, {'a': (1, 2)}], x=true)]"""
    called = calls_of("LFM2", reply + "<|tool_call_end|>")
    assert called == [("get-weather", {"from": 'it"s', "to-x": -1.5, "all": [True, None, {"a": [1, 2]}], "x": True})]


POINT = {"type": "object", "properties": {"x y": {"type": "string"}}, "required": ["x y"]}
PYDANTIC = {  # optional values, another model, a list of them, anything, a tree
    "type": "object", "required": ["name", "at", "all", "more", "mode"], "$defs": {"P": POINT},
    "properties": {
        "name": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "at": {"$ref": "#/$defs/P"},
        "all": {"type": "array", "items": {"$ref": "#/$defs/P"}}, "more": {}, "mode": {"enum": ["a b", 1, None]},
    },
}  # fmt: skip


@pytest.mark.parametrize("value", ["New York", None])
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("Gemma 4", 'name:{},at:{{x y:<|"|>p<|"|>}},all:[{{x y:<|"|>q<|"|>}}],more:{{k:[1,<|"|>z<|"|>]}},'
                    'mode:<|"|>a b<|"|>'),
        ("LFM2", 'name={}, at={{"x y": "p"}}, all=[{{"x y": "q"}}], more={{"k": [1, "z"]}}, mode="a b"'),
    ],
)  # fmt: skip
def test_values_may_be_missing_and_of_other_schemas(name: str, written: str, value: str | None) -> None:
    form, functions = ALL[name], {"f": PYDANTIC}
    quoted = "null" if value is None else f'<|"|>{value}<|"|>' if name == "Gemma 4" else json.dumps(value)
    inner = written.format(quoted)
    reply = f"{form.begin}{f'call:f{{{inner}}}' if name == 'Gemma 4' else f'f({inner})'}{form.end}"
    wanted = {"name": value, "at": {"x y": "p"}, "all": [{"x y": "q"}], "more": {"k": [1, "z"]}, "mode": "a b"}
    assert calls_of(name, reply, functions) == [("f", wanted)]
    grammar = form_of(form).grammar([], "", functions, several=False)
    assert accepts(form_of(form), grammar, reply)
    assert not accepts(form_of(form), grammar, reply.replace("a b", "a c"))


def test_a_tree_contains_itself() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}}}
    grammar = form_of(ALL["Gemma 4"]).grammar([], "", {"f": tree}, several=False)
    for reply in ("call:f{}", "call:f{left:{left:{left:{}}}}"):
        assert accepts(form_of(ALL["Gemma 4"]), grammar, f"<|tool_call>{reply}<tool_call|>")


def test_one_call_is_one_and_other_control_tokens_stay_free() -> None:
    form = form_of(HERMES, "<|content|>")
    grammar = form.grammar([], "", FUNCTIONS, several=False, free=True)
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    for reply in ("<|content|>Hello<|content|>", f"<|content|>So: {call}", f"So: {call} Then?"):
        assert accepts(form, grammar, reply)
    assert not accepts(form, grammar, f"{call}\n{call}")


@pytest.mark.parametrize(
    ("name", "reply"),
    [("Qwen3-Coder, Qwen3.5, Nemotron 3", "<tool_call><function=f><parameter=a>" + "</tool_call>" * 9000),
     ("harmony", "<|channel|>commentary to=functions.f<|message|>" + "x" * 100_000),
     ("harmony", "<|channel|>" + "x" * 100_000), ("JSON", " " * 100_000), (HERMES.name, " " * 100_000)],
    ids=["ends", "call", "header", "spaces before JSON", "spaces"],
)  # fmt: skip
def test_long_replies_in_small_pieces_are_read_in_time(name: str, reply: str) -> None:
    """A quadratic one would take minutes, and the run's limit of time ends it."""
    parts = read_in_pieces(lambda: form_of(ALL[name]).parser([], FUNCTIONS), reply, 1)
    assert parts.content.strip() == ("" if name == "harmony" and "to=" not in reply else reply.strip())


# --- messages and tools in the forms that templates take ---


class Texts:
    """In place of a tokenizer: prompts stay texts."""

    bos = eos = None

    def text(self, token: Any) -> str:
        return ""

    def encode(self, text: str, add_special: bool) -> Any:
        return text


def prompt_of(template: str, messages: list[Any], tools: Any = None) -> Any:
    texts: Any = Texts()
    made = ChatTemplate({"tokenizer.chat_template": template}, Path("m.gguf"))
    return made.tokens(texts, messages, {"tools": tools} if tools else None)


def called(*names: str) -> dict[str, Any]:
    calls = [{"id": name, "function": {"name": name, "arguments": '{"a": "b"}'}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_a_function_has_a_description_and_parameters() -> None:
    template = (
        "{% for tool in tools %}{% set f = tool.function %}{{ f.name + f.description }}{{ f.parameters.properties }}"
        "{% endfor %}"
    )
    user = [{"role": "user", "content": "u"}]
    for given in ({}, {"description": None, "parameters": None}, {"parameters": {}}):
        function = {"name": "f", **given}
        assert prompt_of(template, user, [{"type": "function", "function": function}]) == "f{}"


def test_arguments_are_objects_or_texts_as_a_template_wants_them() -> None:
    for_objects = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    for_texts = for_objects.replace(" | tojson", "")
    adding = for_objects.replace("c.function.arguments | tojson", "'' + c.function.arguments")
    for template in (for_objects, for_texts, adding):
        assert prompt_of("{{ tools }}" + template, [called("f")]) == '{"a": "b"}'


def test_a_template_that_takes_one_call_gets_one_at_a_time() -> None:
    template = (
        "{{ tools }}{% for m in messages %}"
        "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one') }}{% endif %}"
        "{{ m.role }} {{ m.tool_calls[0].id if m.tool_calls else m.content }}\n{% endfor %}"
    )
    talk = [called("f", "g"), {"role": "tool", "tool_call_id": "f", "content": "1"},
            {"role": "tool", "tool_call_id": "g", "content": "2"}, {"role": "user", "content": "u"}]  # fmt: skip
    assert prompt_of(template, talk) == "assistant f\ntool 1\nassistant g\ntool 2\nuser u\n"


def test_tools_are_told_to_a_template_without_them() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    talk = [{"role": "user", "content": "u"}, called("f"), {"role": "tool", "tool_call_id": "f", "content": "1"}]
    prompt = prompt_of(template, talk, [{"type": "function", "function": {"name": "f"}}])
    assert prompt.startswith("user: You can call functions.")
    assert '{"description": "", "name": "f", ' in prompt
    assert prompt.endswith('u\nassistant: {"name": "f", "arguments": {"a": "b"}}\nuser: The function\'s result: 1\n')
