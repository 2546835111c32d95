"""Whether calls of tools that chat templates write are read back: of all templates in a folder.

    python -m scripts.check.call_formats llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates

Prints for each template the format that it is known by, the marks of what its model thinks, and whether the same call
comes back; for one with no place for calls, "written" where they are part of the text.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.runtime.chat.formats import HARMONY, JSON, thinking_marks
from bridge.runtime.chat.parser import HarmonyParser, MarkedParser, ReplyParser
from bridge.runtime.chat.templates import ChatTemplate

_SCHEMA = {
    "type": "object", "required": ["city"],
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"},
        "options": {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}}}},
    },
}  # fmt: skip
_ARGUMENTS = {"city": 'Paris "x" <b>', "days": 3, "options": {"tags": ["a", "b"]}}
_QUESTION, _RESULT = "What is the weather?", "Sunshine."


class _Texts:
    """In place of a tokenizer: prompts stay texts."""

    bos = eos = None

    def text(self, token: int | None) -> str:
        return ""

    def encode(self, text: str, add_special: bool) -> Any:
        return text


def read_back(path: Path) -> str:
    """What became of a call."""
    template = ChatTemplate({"tokenizer.chat_template": path.read_text(encoding="utf-8")}, path)
    function = {"name": "get_weather", "description": "The weather.", "parameters": _SCHEMA}
    call = {"name": "get_weather", "arguments": json.dumps(_ARGUMENTS)}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": _RESULT},
    ]
    texts: Any = _Texts()
    prompts: list[Any] = []
    for messages in (talk[:1], talk):
        try:
            prompts.append(template.tokens(texts, messages, {"tools": [{"type": "function", "function": function}]}))
        except BridgeError as failed:
            return f"refused: {str(failed).rpartition(': ')[2]}"
    before, after = (prompt[prompt.rindex(_QUESTION) :] for prompt in prompts)
    form = template.call_format
    begins = [n for n in range(len(after)) if after.startswith(form.begin or "{", n)] if form is not HARMONY else []
    common = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    start = common if form.answer or not begins else begins[0]
    for end in range(len(after), start, -1):  # what follows the call is the template's
        parser: ReplyParser = HarmonyParser(True) if form is HARMONY else MarkedParser(
            thinking_marks(template.text or ""), False, form, {"get_weather": _SCHEMA}
        )  # fmt: skip
        calls = parser.add(after[start:end], last=True).calls
        if calls:
            return "same" if json.loads(calls[0].arguments) == _ARGUMENTS else f"other: {calls[0].arguments}"
    return "lost"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for path in sorted(parser.parse_args().folder.glob("*.jinja")):
        text = path.read_text(encoding="utf-8")
        template = ChatTemplate({"tokenizer.chat_template": text}, path)
        marks = thinking_marks(text)
        thinks = marks.begin.strip() if marks.end in text else "-"
        form = "JSON (asked for)" if template.call_format is JSON else template.call_format.name
        print(f"{path.stem:55} {form:34} {thinks:20} {read_back(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
