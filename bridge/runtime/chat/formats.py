"""How models write calls of tools, by the marks that their chat templates have.

A format describes a section of calls as its text. In `call`, `{name}` stands for the function, `{number}` and `{id}`
for what the model counts or invents, and the arguments for one of these:

    {arguments}   a JSON object
    {json}        a JSON object with the name and the arguments in it; with `listed`, a list of such
    {parameters}  one after another, each written as `parameter`: `{key}`, `{value}` (text as it is, other types as
                  JSON) and perhaps `{text}` (whether the value is a text: true or false)
    {elements}    MiniMax M3's elements, one in another: each begins with `ELEMENT` and <key>, a list's are <item>
    {gemma}       Gemma 4's objects: {key:<|"|>text<|"|>,other:1}
    {keywords}    Python's keyword arguments: key="text", other=1
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallFormat:
    """
    marks    texts that a template of this format has, all of them
    without  texts that it has not
    begin    the text before a section of calls; "": calls are a whole reply
    end      the text after it; "": it ends where the next one begins, or with the reply
    keys     the names of the name and the arguments in {json}
    between  what separates the calls of a section; None: each has a section of its own, or they are a list
    answer   how a reply that is no call begins, where the prompt ends with `begin`
    """

    name: str
    marks: tuple[str, ...]
    begin: str
    call: str
    end: str = ""
    without: tuple[str, ...] = ()
    listed: bool = False
    keys: tuple[str, str] = ("name", "arguments")
    between: str | None = None
    parameter: str = ""
    answer: str = ""

    @property
    def literals(self) -> tuple[str, ...]:
        """All its texts, for the control tokens that they consist of."""
        texts = (self.begin, self.call, self.end, self.parameter)
        return (*texts, GEMMA_QUOTE) if "{gemma}" in self.call else texts


@dataclass(frozen=True)
class Thinking:
    """The marks around what a model thinks before it answers."""

    begin: str
    end: str


GEMMA_QUOTE = '<|"|>'
ELEMENT = "]<]minimax[>["
_CALLS, _CALL = "<\uff5ctool\u2581calls\u2581{}\uff5c>", "<\uff5ctool\u2581call\u2581{}\uff5c>"
_SEP = "<\uff5ctool\u2581sep\uff5c>"
_DSML = "\uff5cDSML\uff5c"
_DSML_CALL = f'\n<{_DSML}invoke name="{{name}}">\n{{parameters}}</{_DSML}invoke>\n'
_DSML_PARAMETER = f'<{_DSML}parameter name="{{key}}" string="{{text}}">{{value}}</{_DSML}parameter>\n'
_TAGS = "\n<function={name}>\n{parameters}</function>\n"
_TAG = "<parameter={key}>\n{value}\n</parameter>\n"

HARMONY = CallFormat(
    "harmony", ("<|channel|>",), "<|channel|>commentary",
    " to=functions.{name} <|constrain|>json<|message|>{arguments}",
)  # fmt: skip

# the first whose marks a template has
FORMATS = (
    HARMONY,
    CallFormat("Kimi K2", ("<|tool_calls_section_begin|>",), "<|tool_calls_section_begin|>",
               "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
               "<|tool_calls_section_end|>", between=""),
    CallFormat("DeepSeek V3.2", (_DSML, "function_calls"), f"<{_DSML}function_calls>", _DSML_CALL,
               f"</{_DSML}function_calls>", parameter=_DSML_PARAMETER, between=""),
    CallFormat("DeepSeek V4", (_DSML,), f"<{_DSML}tool_calls>", _DSML_CALL, f"</{_DSML}tool_calls>",
               parameter=_DSML_PARAMETER, between=""),
    CallFormat("DeepSeek R1, V3", (_CALLS.format("begin"), "```json"), _CALLS.format("begin"),
               f"{_CALL.format('begin')}function{_SEP}{{name}}\n```json\n{{arguments}}\n```{_CALL.format('end')}",
               _CALLS.format("end"), between="\n"),
    CallFormat("DeepSeek V3.1", (_CALLS.format("begin"),), _CALLS.format("begin"),
               f"{_CALL.format('begin')}{{name}}{_SEP}{{arguments}}{_CALL.format('end')}", _CALLS.format("end"),
               between=""),
    CallFormat("Gemma 4", ("<|tool_call>", "<tool_call|>"), "<|tool_call>", "call:{name}{gemma}", "<tool_call|>"),
    CallFormat("MiniMax M3", (ELEMENT,), f"{ELEMENT}<tool_call>",
               f'\n{ELEMENT}<invoke name="{{name}}">{{elements}}{ELEMENT}</invoke>\n', f"{ELEMENT}</tool_call>",
               between=""),
    CallFormat("MiniMax M2", ("<minimax:tool_call>",), "<minimax:tool_call>",
               '\n<invoke name="{name}">\n{parameters}</invoke>\n', "</minimax:tool_call>",
               parameter='<parameter name="{key}">{value}</parameter>\n', between=""),
    CallFormat("Seed-OSS", ("seed:tool_call",), "<seed:tool_call>", _TAGS, "</seed:tool_call>", parameter=_TAG),
    CallFormat("Qwen3-Coder, Qwen3.5, Nemotron 3", ("<tool_call>", "<function=", "<parameter="), "<tool_call>", _TAGS,
               "</tool_call>", parameter=_TAG),
    CallFormat("MiniCPM5", ("<function name=", "<param name="), '<function name="', '{name}">{parameters}',
               "</function>", parameter='<param name="{key}">{value}</param>'),
    CallFormat("GLM 4.5", ("<tool_call>", "<arg_key>"), "<tool_call>", "{name}\n{parameters}", "</tool_call>",
               parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"),
    CallFormat("Solar Open", ("<|tool_call:begin|>",), "<|tool_calls|>",
               "<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>",
               between=""),
    CallFormat("Mistral Small 3.2", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), "[TOOL_CALLS]",
               "{name}[CALL_ID]{id}[ARGS]{arguments}"),
    CallFormat("Mistral: Devstral, Ministral", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "{name}[ARGS]{arguments}"),
    CallFormat("Mistral: Nemo, 7B", ("[TOOL_CALLS]",), "[TOOL_CALLS]", "{json}", listed=True),
    CallFormat("Nemotron Nano", ("<TOOLCALL>",), "<TOOLCALL>", "{json}", "</TOOLCALL>", listed=True),
    CallFormat("Command R7B", ("<|START_ACTION|>",), "<|START_ACTION|>", "{json}", "<|END_ACTION|>", listed=True,
               keys=("tool_name", "parameters")),
    CallFormat("Command R", ("Action:", "```json", "tool_name"), "Action:\n```json\n", "{json}", "\n```", listed=True,
               keys=("tool_name", "parameters")),
    CallFormat("Apertus", ("<|tools_prefix|>",), "<|tools_prefix|>", "{json}", "<|tools_suffix|>", listed=True),
    CallFormat("LFM2", ("<|tool_call_start|>",), "<|tool_call_start|>[", "{name}({keywords})", "]<|tool_call_end|>",
               between=", "),
    CallFormat("LFM2", ("<|tool_list_start|>",), "<|tool_call_start|>[", "{name}({keywords})", "]<|tool_call_end|>",
               between=", "),
    CallFormat("LFM2.5", ("List of tools: [",), "<|tool_call_start|>[", "{name}({keywords})", "]<|tool_call_end|>",
               between=", "),
    CallFormat("Olmo 3", ("<function_calls>",), "<function_calls>", "{name}({keywords})", "</function_calls>",
               between="\n"),
    CallFormat("Functionary 3.2", (">>>all", "recipient"), ">>>", "{name}\n{arguments}", answer="all\n"),
    CallFormat("Functionary 3.1", ("<function=", "</function>"), "<function=", "{name}>{arguments}", "</function>",
               without=("<tool_call>",)),
    CallFormat("GigaChat 3.1", ("<|function_call|>",), "<|function_call|>", "{json}"),
    CallFormat("GigaChat 3", ("function call", "<|role_sep|>"), "function call<|role_sep|>\n", "{json}"),
    CallFormat("Jamba, Hunyuan, Apriel", ("<tool_calls>",), "<tool_calls>", "{json}", "</tool_calls>", listed=True),
    CallFormat("Phi-4-mini", ("<|tool_call|>", "<|/tool_call|>"), "<|tool_call|>", "{json}", "<|/tool_call|>",
               listed=True),
    CallFormat("Granite 3", ("<|tool_call|>",), "<|tool_call|>", "{json}", listed=True),
    CallFormat("Hermes, Qwen, Granite 4", ("<tool_call>",), "<tool_call>", "\n{json}\n", "</tool_call>"),
    CallFormat("Llama 3", ("<|python_tag|>",), "", "{json}", keys=("name", "parameters")),
    CallFormat("Llama 3.2", ('"parameters"',), "", "{json}", keys=("name", "parameters")),
)  # fmt: skip
JSON = CallFormat("JSON", (), "", "{json}")  # what a model is asked for whose template has no tools, or no known marks

THINKING = (
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<mm:think>", "</mm:think>"),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    Thinking("<|inner_prefix|>", "<|inner_suffix|>"),
    Thinking("<|channel>thought\n", "<channel|>"),
    Thinking("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    Thinking("<think>", "</think>"),
)


def call_format(template: str, takes_tools: bool) -> CallFormat:
    """The format of a template's calls; JSON where it has none that is known, or no place for tools."""
    for known in FORMATS if takes_tools else (HARMONY,):
        if all(mark in template for mark in known.marks) and not any(mark in template for mark in known.without):
            return known
    return JSON


def thinking_marks(template: str) -> Thinking:
    """The marks of what a model thinks, by its template; those that most models have, where it has none."""
    return next((marks for marks in THINKING if marks.end in template), THINKING[-1])


def written_calls(functions: Sequence[Mapping[str, Any]], form: CallFormat) -> str:
    """Calls as text, each of a {"name", "arguments"}: in Python where the format is, else as JSON."""
    if "{keywords}" in form.call:
        calls = [
            f"{function['name']}({', '.join(f'{key}={value!r}' for key, value in function['arguments'].items())})"
            for function in functions
        ]
        return form.begin + (form.between or "").join(calls) + form.end
    named = [(form.keys[0], function["name"], form.keys[1], function["arguments"]) for function in functions]
    calls = [json.dumps({a: name, b: arguments}, ensure_ascii=False) for a, name, b, arguments in named]
    return form.begin + (f"[{', '.join(calls)}]" if form.listed else "\n".join(calls)) + form.end
