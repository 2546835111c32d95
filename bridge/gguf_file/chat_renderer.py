"""The process that renders a chat template: a script, run by `chat_template` and imported by nothing.

A template is a program out of somebody's file. Jinja's sandbox keeps it from everything but its arguments, not from
looping for ever or filling the memory: nested loops, `10 ** 10 ** 8`, a namespace that doubles its text. So it runs
here, where the system ends it at limits that no real template comes near.

    standard input   a line of JSON, {"path": sys.path, "limits": [seconds, bytes]}; then a line for each request: what
                     `chat_template.render_chats` asks for
    standard output  a line of JSON for each: [[true, text] or [false, why it fails], ...], one for each conversation
"""

import json
import math
import sys
import time
from datetime import datetime
from functools import cache
from typing import Any

CPU_SECONDS = 5  # a real template takes a hundredth of one
MEMORY = 1 << 30  # bytes of address space; Python and jinja take a thirtieth
LONGEST = 1 << 24  # characters of a text


def limit(cpu_seconds: int, memory: int) -> None:
    """Have the system end this process at so much time, and refuse it more memory; only POSIX can."""
    try:
        import resource
    except ImportError:
        return
    for kind, most in ((resource.RLIMIT_CPU, cpu_seconds), (resource.RLIMIT_AS, memory)):
        hard = resource.getrlimit(kind)[1]
        try:
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        except ValueError:  # macOS reserves more addresses for a process than that, and limits none
            continue


def environment(dated: bool | str) -> Any:
    """What transformers gives a template: jinja's immutable sandbox, and the functions that templates call.

    dated  whether that includes today's date; a text: put before each directive of the date, in place of its %
    """
    import jinja2
    from jinja2 import ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """{% generation %} ... {% endgeneration %} marks what a model is trained on: here, text like any other."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, Generation]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = raise_exception
    if isinstance(dated, str):
        sandbox.globals["strftime_now"] = lambda format: format.replace("%", dated)
    elif dated:
        sandbox.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return sandbox


def answers(request: dict[str, Any]) -> list[tuple[bool, str]]:
    """For each conversation its text, or the reason why there is none."""
    try:
        compiled = _compiled(request["template"], request["dated"])
    except Exception as error:  # jinja's own, or Python's for what is nested too deeply
        return [(False, f"jinja cannot read it: {_reason(error)}")] * len(request["conversations"])
    results = []
    for messages, prompt in request["conversations"]:
        try:
            text = compiled.render(messages=messages, add_generation_prompt=prompt, **request["variables"])
            too_long = f"it makes a text of {len(text)} characters; the most is {LONGEST}"
            results.append((True, text) if len(text) <= LONGEST else (False, too_long))
        except Exception as error:  # a template's code may raise anything
            results.append((False, f"it fails with: {_reason(error)}"))
    return results


@cache
def _compiled(template: str, dated: bool) -> Any:
    return environment(dated).from_string(template)


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"it takes more than {MEMORY >> 20} MiB of memory"
    return str(error)[:1000] or type(error).__name__


def main() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = settings["path"]
    import jinja2.sandbox  # noqa: F401 - what it takes is the same for all templates, and not theirs

    seconds, memory = settings["limits"]
    for request in sys.stdin.buffer:
        limit(math.ceil(time.process_time()) + seconds, memory)  # of each request
        sys.stdout.write(json.dumps(answers(json.loads(request))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
