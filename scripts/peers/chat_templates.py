"""Renders a folder of chat templates as a model's is, and by transformers, and compares the texts.

    python scripts/peers/chat_templates.py llama.cpp/models/templates

Prints a line for each template: how many of the conversations transformers renders, how many of these are the same
here, and how many are rendered here alone; and why a template does not become a Modelfile's, where it does not.
"""

import sys
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from bridge.gguf_file.chat_template import TemplateFailed, render_chats
from bridge.models.chat import NotUnderstood, take_apart
from bridge.models.modelfile import go_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "Be <brief> & kind."}
TURNS = [
    {"role": "user", "content": "Who's there?\nTell me."},
    {"role": "assistant", "content": "Nobody."},
    {"role": "user", "content": " 世界 "},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nWell."},
    {"role": "user", "content": "And now?"},
]
CONVERSATIONS: list[Any] = [
    (first + TURNS[:n], prompt) for first in ([], [SYSTEM]) for n in range(1, 6) for prompt in (True, False)
]


def by_transformers(template: str) -> list[str | None]:
    """The texts, None where it fails."""
    texts: list[str | None] = []
    for messages, prompt in CONVERSATIONS:
        try:
            (text,), _ = render_jinja_template(
                [messages], chat_template=template, add_generation_prompt=prompt, **TOKENS
            )
            texts.append(text)
        except Exception as problem:
            print(f"    transformers: {type(problem).__name__}: {problem}"[:160])
            texts.append(None)
    return texts


def in_modelfile(template: str) -> bool:
    """Whether it can be put into Ollama's language; prints why not."""
    try:
        go_template(take_apart(template, TOKENS["bos_token"], TOKENS["eos_token"], strip_bos=True))
    except NotUnderstood as reason:
        print(f"    no Modelfile: {reason}"[:160])
        return False
    return True


def main() -> int:
    counted = ("templates", "all the same", "rendered by transformers", "the same", "only here", "in a Modelfile")
    total = dict.fromkeys(counted, 0)
    for file in sorted(Path(sys.argv[1]).glob("*.jinja")):
        template = file.read_text(encoding="utf-8")
        expected = by_transformers(template)
        own = render_chats(template, CONVERSATIONS, TOKENS)
        pairs = list(zip(own, expected, strict=True))
        rendered = sum(theirs is not None for _, theirs in pairs)
        same = sum(mine == theirs for mine, theirs in pairs)
        alone = sum(theirs is None and not isinstance(mine, TemplateFailed) for mine, theirs in pairs)
        print(f"{file.name}: {rendered} by transformers, {same} of them the same, {alone} only here")
        found = (1, same == rendered, rendered, same, alone, in_modelfile(template))
        for name, number in zip(total, found, strict=True):
            total[name] += number
        for mine, theirs in pairs:
            if theirs is not None and mine != theirs:
                print(f"    here: {str(mine)[:200]!r}\n    there: {theirs[:200]!r}")
                break
    print(total)
    return 0 if total["the same"] == total["rendered by transformers"] else 1


if __name__ == "__main__":
    sys.exit(main())
