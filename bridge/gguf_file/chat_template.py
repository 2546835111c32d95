"""Jinja chat templates, rendered in the same kind of environment as in transformers: sandboxed and immutable."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # marks for training, not part of jinja

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]


class TemplateFailed(Exception):
    """The template cannot be read, or does not accept the conversation."""


def compile_template(template: str, bos: str, eos: str) -> Render:
    """A function (messages as {"role", "content"}, whether to prompt for a reply) -> text.

    bos, eos  texts of the tokens, which templates refer to

    Raises TemplateFailed, and so does the function.
    """
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    try:
        compiled = environment.from_string(_GENERATION.sub("", template))
    except jinja2.TemplateError as error:
        raise TemplateFailed(f"jinja cannot read it: {error}") from error

    def render(messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        try:
            turns, known = [dict(message) for message in messages], {"bos_token": bos, "eos_token": eos}
            return compiled.render(messages=turns, add_generation_prompt=prompt, tools=None, documents=None, **known)
        except Exception as error:  # a template's code may raise anything
            raise TemplateFailed(f"it fails with: {str(error) or type(error).__name__}") from error

    return render
