"""Chat templates are rendered as transformers does, and end at a limit whatever is in them."""

from __future__ import annotations

import re
import signal
import sys
from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from bridge.errors import BridgeError
from bridge.gguf_file import chat_template
from bridge.gguf_file.chat_template import TemplateFailed, check_template_options, render_chats, thinking_switches

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": " Who's there?\n世界 "},
    {"role": "assistant", "content": "<think>Hm.</think>Nobody.", "tool_calls": [{"name": "f", "arguments": {"b": 1}}]},
]


def rendered(template: str, dated: bool = True) -> str | TemplateFailed:
    (text,) = render_chats(template, [(MESSAGES, True)], TOKENS, dated)
    return text


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n  {{ bos_token }}{{ m.role }} {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}",
        "{{ strftime_now('%d %b %Y') }}{% if strftime_now is defined %}, as today{% endif %}",
        "{% if tools is defined and tools %}{% for t in tools %}{{ t }}{% endfor %}{% else %}no tools{% endif %}",
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.role }}{% break %}{% endfor %}",
        "{{ messages | tojson }}{{ messages[2].tool_calls | tojson(indent=2) }}{{ {'b': 1, 'a': '<é>'} | tojson }}"
        "{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}",
        "{% for m in messages %}a\n{% generation %}\n  {{ m.content }}\n{% endgeneration %}\nb\n{% endfor %}",
        "a  {%- generation -%}  b  {%- endgeneration -%}  c",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ m.role[0] %}{% endfor %}{{ ns.t }}",
        "{% macro f(x) %}[{{ x }}]{{ caller() if caller }}{% endmacro %}{{ f(1) }}{% call f(2) %}in{% endcall %}",
        "{{ messages[1].content.strip().split('\\n')[-1] }}{{ 'a{}'.format(1) }}{{ '%s' % 2 }}{{ messages | length }}",
        "{{ dict(a=1).items() | list }}{{ range(3) | join(',') }}{{ cycler('x', 'y').next() }}{{ undefined_name }}",
    ],
)
def test_a_template_renders_as_in_transformers(template: str) -> None:
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=template, add_generation_prompt=True, **TOKENS)
    assert rendered(template) == expected


def test_a_template_that_counts_its_tools_has_none_to_count() -> None:
    """transformers passes None, which such a template cannot loop over."""
    assert rendered("{% for tool in tools %}{{ tool }}{% endfor %}{% for d in documents %}{% endfor %}none") == "none"


OPTIONS = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    "documents": [{"title": "A", "text": "b"}],
    "enable_thinking": False,
}


def test_options_are_variables_of_the_template_as_in_transformers() -> None:
    template = "{{ tools | tojson }}{{ documents[0].text }}{% if not enable_thinking %}<think></think>{% endif %}"
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=template, **OPTIONS)
    assert render_chats(template, [(MESSAGES, True)], TOKENS, options=OPTIONS) == [expected]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([1], "must be a dict of names and values"),
        ({"messages": []}, "messages is given to the template by the program"),
        ({"tools": {"name": "f"}}, "tools must be a list of objects"),
        ({"documents": ["a"]}, "documents must be a list of objects"),
    ],
)
def test_options_that_are_none_are_refused(options: Any, why: str) -> None:
    assert check_template_options(OPTIONS) == OPTIONS
    with pytest.raises(BridgeError, match=why):
        check_template_options(options)


@pytest.mark.parametrize(
    ("template", "switches"),
    [
        ("{%- if enable_thinking is defined and enable_thinking is false %}x{% endif %}", {"enable_thinking": False}),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", {"thinking": False}),
        ("{{ m.thinking }}{{ m['thinking'] }} thinking", {}),
        ("{%- if thinking_budget == 0 %}x{% endif %}", {"thinking_budget": 0}),
        ("{{" * 1_000_000, {}),  # none of which ends
    ],
    ids=range(5),
)
def test_the_switches_for_thinking_are_the_variables_that_a_template_asks_for(
    template: str, switches: dict[str, Any]
) -> None:
    assert thinking_switches(template) == switches


def test_a_template_without_a_date_takes_its_own() -> None:
    template = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}long ago{% endif %}"
    assert rendered(template, dated=False) == "long ago"
    assert rendered(template) in (str(datetime.now().year), str(datetime.now().year - 1))


def test_each_conversation_has_its_own_text_or_error() -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages | length }}"
    )
    texts = render_chats(template, [(MESSAGES[1:], True), (MESSAGES, True), (MESSAGES[2:], False)], TOKENS)
    assert [str(text) for text in texts] == ["2", "it fails with: no system", "1"]
    assert isinstance(texts[1], TemplateFailed)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 1 seconds"),
        ("{{ 10 ** (10 ** 8) }}", "more than 1 seconds"),
        ("{% set x = 10 ** 8 %}{{ 10 ** x }}", "more than 1 seconds"),
        ("{{ lipsum(n=10 ** 7) }}", "more than (1 seconds|1024 MiB)"),
        ("{{ messages | tojson(indent=10 ** 9) }}", "more than (1 seconds|1024 MiB)"),
        (
            "{% set ns = namespace(t='x') %}{% for i in range(99) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}",
            "more than (1 seconds|1024 MiB)",
        ),
        ("{{ 'x' * 10 ** 10 }}", "more than 1024 MiB"),
        ("{{ 'x' * 17 * 10 ** 6 }}", "a text of 17000000 characters; the most is 16777216"),
        ("{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "cannot read it: maximum recursion depth"),
        ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "cannot read it: too many statically nested blocks"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails with: maximum recursion depth"),
        ("{% for", "jinja cannot read it: "),
    ],
)
def test_a_hostile_template_ends_at_a_limit(template: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 1)
    found = rendered(template)
    assert isinstance(found, TemplateFailed)
    assert re.search(why, str(found))


def test_no_limit_stands_in_the_way_of_a_conversation_that_fills_a_million_tokens() -> None:
    said = {"role": "user", "content": "abcde " * 1_000_000}
    (text,) = render_chats("{% for m in messages %}<{{ m.content }}>{% endfor %}", [([said, said], True)], TOKENS)
    assert text == 2 * f"<{said['content']}>"


def test_messages_that_are_no_plain_data_are_refused() -> None:
    (found,) = render_chats("{{ messages }}", [([{"content": object()}], True)], TOKENS)
    assert str(found).startswith("the messages are not plain data: Object of type object")


def test_a_process_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert str(rendered("x")) == "the process that renders it cannot be started: No such file or directory"


def test_where_the_system_sets_no_limit_the_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2)
    endless = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    assert str(rendered(endless)) == "it runs for more than 0.2 seconds"


def test_a_template_renders_where_no_signal_ends_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has neither limits nor the signal."""
    monkeypatch.delattr(signal, "SIGXCPU")
    assert rendered("{{ messages | length }}") == "3"
    assert re.search("recursion depth", str(rendered("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")))
