# ruff: noqa: RUF001 - DeepSeek's marks have wide bars
"""Replies of each family's models: their calls of tools and what they think, read and asked for by grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bridge.gguf_file.special_tokens import CONTROL, NORMAL
from bridge.runtime.chat.formats import FORMATS, HARMONY, JSON, CallFormat, call_format
from bridge.runtime.chat.parser import Parts
from bridge.runtime.chat.reading import read_calls
from bridge.runtime.chat.reply_form import ReplyForm

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
