"""Modelfiles for Ollama. The Go templates below were run through Go's text/template: each gave jinja's text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bridge.gguf_file.chat_template import render_chats
from bridge.models.ollama.chat import NotUnderstood, split_template
from bridge.models.ollama.modelfile import go_template, modelfile
from tests.conftest import CHECKPOINT
from tests.support.tiny_vocab import vocab_gguf

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are Q.<|im_end|>\n' }}{% endif %}" + CHATML
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token}}{% endif %}"
    "{% endfor %}"
)
THINKING = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")

LOOP = "{{ range $i, $_ := .Messages }}{{ $last := eq (len (slice $.Messages $i)) 1 }}"
CHATML_GO = (
    LOOP + '{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n{{ end }}'
    '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n{{ end }}'
    '{{ if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}{{ if not $last }}<|im_end|>\n{{ end }}{{ end }}'
    '{{ if and $last (ne .Role "assistant") }}<|im_start|>assistant\n{{ end }}{{ end }}'
)
LLAMA2_GO = (
    LOOP + '{{ if eq .Role "user" }}[INST] '
    "{{ if and $.System (le $i 1) }}<<SYS>>\n{{ $.System }}\n<</SYS>>\n\n{{ end }}{{ .Content }} [/INST]{{ end }}"
    '{{ if eq .Role "assistant" }} {{ .Content }}{{ if not $last }} </s><s>{{ end }}{{ end }}{{ end }}'
)


def test_chatml_becomes_a_range_over_messages() -> None:
    parts = split_template(CHATML, "", "<|im_end|>", False)
    assert parts.layout == "block"
    assert go_template(parts) == CHATML_GO


def test_a_default_system_message_opens_conversations_without_one() -> None:
    parts = split_template(QWEN, "", "", False)
    assert parts.opening == "<|im_start|>system\nYou are Q.<|im_end|>\n"
    opening = '{{ if ne (index .Messages 0).Role "system" }}<|im_start|>system\nYou are Q.<|im_end|>\n{{ end }}'
    assert go_template(parts) == opening + CHATML_GO


def test_the_bos_that_the_runtime_adds_is_left_out() -> None:
    parts = split_template(LLAMA3, "<|begin_of_text|>", "<|eot_id|>", True)
    assert "begin_of_text" not in go_template(parts)
    assert parts.render([("user", "hi")]) == (
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_a_bos_that_nobody_adds_stays_in_the_template() -> None:
    assert split_template(MISTRAL, "<s>", "</s>", False).opening == "<s>"


def test_a_system_message_inside_the_first_turn_is_put_there() -> None:
    parts = split_template(LLAMA2, "<s>", "</s>", True)
    assert parts.layout == "first"
    assert go_template(parts) == LLAMA2_GO
    assert parts.render([("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V")]) == (
        "[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] V [/INST]"
    )


def test_a_system_message_inside_the_last_turn_is_put_there() -> None:
    template = (
        "{% set s = messages[0] if messages[0].role == 'system' %}{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'user' %}{{ '[INST] ' + (s.content + '\n\n' if s and loop.last else '') + m.content }}[/INST]"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
    )
    parts = split_template(template, "<s>", "</s>", True)
    assert parts.layout == "last"
    assert "[INST] {{ if and $.System $last }}{{ $.System }}\n\n{{ end }}{{ .Content }}[/INST]" in go_template(parts)


def test_a_template_that_refuses_system_messages_has_no_place_for_them() -> None:
    parts = split_template(MISTRAL, "<s>", "</s>", True)
    assert parts.layout == "none"
    assert "system" not in go_template(parts)


@pytest.mark.parametrize(
    "template",
    [
        # a last reply ends with another token, as in gpt-oss
        "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
        "{{ '<|return|>' if m.role == 'assistant' and loop.last else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        # turns begin with what ends the last one, as in Apriel 1.6
        "{{ '<|start|>' }}{% for m in messages %}{{ '\n<|' + m.role + '|>\n' + m.content }}"
        "{{ '\n<|end|>' if m.role == 'assistant' and not loop.last }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n<|assistant|>\n' }}{% endif %}",
    ],
)
def test_a_last_reply_may_end_otherwise(template: str) -> None:
    parts = split_template(template, "", "", False)
    messages = [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V")]
    plain = [{"role": role, "content": content} for role, content in messages]
    assert [parts.render(messages)] == render_chats(template, [(plain, True)], {})


def test_a_prompt_that_opens_a_thought_differs_from_a_past_reply() -> None:
    parts = split_template(THINKING, "", "", False)
    assert parts.prompt == "<|im_start|>assistant\n<think>\n"
    assert parts.before_reply == "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[-1].content }}", "appears 0 times"),
        ("{{ messages | length }}{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}", "depends on"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "appears 2 times"),
        ("{{ raise_exception('tools only') }}", "fails with: tools only"),
        ("{% if %}", "jinja cannot read it"),
        ("{{ ''.__class__.__mro__ }}", "fails with"),
    ],
)
def test_what_is_not_the_sum_of_its_turns_is_not_understood(template: str, reason: str) -> None:
    with pytest.raises(NotUnderstood, match=reason):
        split_template(template, "", "", False)


def test_text_that_go_or_the_modelfile_would_change_becomes_an_action() -> None:
    odd = "{% for m in messages %}{{ '{{ \"\"\"' + m.role + '\u200b\t}}' + m.content + '\n' }}{% endfor %}"
    odd += '{% if add_generation_prompt %}{{ \'{{ """assistant\u200b\t}}\' }}{% endif %}'
    text = go_template(split_template(odd, "", "", False))
    assert '{{ "{{" }} {{ "\\"\\"\\"" }}user{{ "\\u200b\\t}}" }}{{ .Content }}' in text
    assert '"""' not in text


# --- the whole file ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copyfile(CHECKPOINT / "tokenizer.json", tmp_path / "tokenizer.json")
    return tmp_path


def text_of(folder: Path, generation: dict[str, Any] | None = None, **settings: Any) -> str:
    settings = {"eos_token": "<|endoftext|>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    outline, _ = vocab_gguf(folder, 2048)
    return modelfile(outline.metadata, outline.stop, generation or {}, ["model.gguf"])


def test_a_modelfile_has_template_stops_and_sampling(folder: Path) -> None:
    generation = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    text = text_of(folder, generation, chat_template=CHATML)
    assert text.startswith("FROM ./model.gguf\n")
    assert f'TEMPLATE """{CHATML_GO}"""\n' in text
    assert 'PARAMETER stop "<|endoftext|>"\n' in text
    for line in ("temperature 0.7", "top_p 0.8", "top_k 20", "repeat_penalty 1.05"):
        assert f"PARAMETER {line}\n" in text


def test_sampling_that_is_switched_off_is_left_out(folder: Path) -> None:
    assert "temperature" not in text_of(folder, {"do_sample": False, "temperature": 0.7})


def test_no_date_stays_in_a_modelfile(folder: Path) -> None:
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}" + CHATML
    assert f'TEMPLATE """{CHATML_GO}"""\n' in text_of(folder, chat_template=dated)


@pytest.mark.parametrize(
    ("format", "go"),
    [
        ("%Y-%m-%d", "{{ currentDate }}"),
        ("%d.%m.%y", "{{ slice currentDate 8 10 }}.{{ slice currentDate 5 7 }}.{{ slice currentDate 2 4 }}"),
        ("%b", '{{ if eq (slice currentDate 5 7) "01" }}Jan{{ else if eq (slice currentDate 5 7) "02" }}Feb'),
        ("%B", '"11" }}November{{ else if eq (slice currentDate 5 7) "12" }}December{{ end }}'),
    ],
)
def test_a_date_that_a_template_needs_is_ollamas(folder: Path, format: str, go: str) -> None:
    text = text_of(folder, chat_template=f"Today is {{{{ strftime_now('{format}') }}}}.\n" + CHATML)
    assert "# Its date is Ollama's currentDate, which old versions lack." in text
    assert f"Today is {go}" in text or go in text


def test_a_time_that_ollama_does_not_have_is_told(folder: Path) -> None:
    text = text_of(folder, chat_template="{{ strftime_now('%H') }}" + CHATML)
    assert "could not be put into Go: Ollama's date cannot be written as %H." in text


def test_a_template_without_end_is_no_template_for_ollama(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.gguf_file.chat_template.CPU_SECONDS", 1)
    text = text_of(
        folder, chat_template="{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    assert "could not be put into Go: it runs for more than 1 seconds." in text


def test_a_model_without_chat_template_says_that_it_completes_text(folder: Path) -> None:
    text = text_of(folder)
    assert "TEMPLATE" not in text
    assert "completes text" in text


def test_a_model_with_named_templates_alone_has_the_first_of_them(folder: Path) -> None:
    named = [{"name": "chat", "template": CHATML}, {"name": "tool_use", "template": LLAMA2}]
    assert f'TEMPLATE """{CHATML_GO}"""\n' in text_of(folder, chat_template=named)


def test_a_template_that_is_not_understood_is_left_out_with_the_reason(folder: Path) -> None:
    text = text_of(folder, chat_template="{{ raise_exception('no\nchat') }}")
    assert "\nTEMPLATE" not in text
    assert "# No TEMPLATE: the checkpoint's chat template could not be put into Go: it fails with: no" in text
