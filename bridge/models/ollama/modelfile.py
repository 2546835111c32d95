"""An Ollama Modelfile for a converted model.

Ollama's templates are Go templates: literal text with {{ actions }}. This one, made from the parts of a
chat template (`bridge.models.ollama.chat`), ranges over .Messages and puts each between the texts of its
role. There is no line break or space between actions: it would be part of the prompt.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import Keys
from gguf.gguf_writer import GGUFValue

from bridge.models.ollama.chat import DATE, ChatParts, NotUnderstood, split_template
from bridge.models.tokenizer.vocabulary import special_text
from bridge.system.storage.files import without_shard

_TODAY = "currentDate"  # a function of Ollama's templates
_DATED = re.compile(f"({DATE}Y-{DATE}m-{DATE}d|{DATE}.)")
_SLICES = {"Y": "0 4", "y": "2 4", "m": "5 7", "d": "8 10"}
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
# of generation_config.json; the last is Ollama's repeat_penalty
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def modelfile(
    metadata: Mapping[str, GGUFValue], stop: Sequence[str], generation: Mapping[str, Any], files: Sequence[str]
) -> str:
    """The text of a Modelfile for GGUFs in the same folder.

    metadata    of the GGUF
    stop        the texts of the tokens that end a reply
    generation  generation_config.json
    files       names of the language model's GGUF and, if there is one, the vision tower's
    """
    lines = [*(f"FROM ./{name}" for name in files), ""]
    lines += _template_lines(metadata)
    lines += [f"PARAMETER stop {_quote(text)}" for text in stop]
    sampled = generation.get("do_sample") is not False
    for key in _SAMPLING:
        value: Any = generation.get(key)
        if sampled and isinstance(value, (int, float)) and not isinstance(value, bool):
            lines.append(f"PARAMETER {key.replace('repetition', 'repeat')} {value}")
    return "\n".join(lines) + "\n"


def ollama_line(gguf: Path) -> str:
    """The command that makes an Ollama model from the GGUF and the Modelfile in its folder."""
    stem = without_shard(gguf.stem)
    name = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._") or "model"
    return f"ollama create {name} -f {shlex.quote(str(gguf.parent / 'Modelfile'))}"


def _template_lines(metadata: Mapping[str, GGUFValue]) -> list[str]:
    default = Keys.Tokenizer.CHAT_TEMPLATE
    templates = {key: entry.value for key, entry in metadata.items() if key == default or key.startswith(f"{default}.")}
    template = templates.get(default, next(iter(templates.values()), None))
    if not isinstance(template, str):
        return ["# The checkpoint has no chat template: Ollama completes text.", ""]
    bos, eos = (special_text(metadata, key) for key in (Keys.Tokenizer.BOS_ID, Keys.Tokenizer.EOS_ID))
    adds_bos = Keys.Tokenizer.ADD_BOS in metadata and bool(metadata[Keys.Tokenizer.ADD_BOS].value)
    try:
        parts = split_template(template, bos, eos, strip_bos=adds_bos)
        text = go_template(parts)
    except NotUnderstood as reason:
        return [
            f"# No TEMPLATE: the checkpoint's chat template could not be put into Go: {' '.join(str(reason).split())}.",
            "# Ollama uses the template inside the GGUF where it recognizes it.",
            "",
        ]
    lines = ["# From the checkpoint's chat template; tool calls are not translated."]
    if _TODAY in text:
        lines.append("# Its date is Ollama's currentDate, which old versions lack.")
    if parts.layout == "none":
        lines.append("# The checkpoint's chat template has no place for a system message.")
    return [*lines, f"TEMPLATE {_quote(text)}", ""]


def go_template(parts: ChatParts) -> str:
    """The Go template that renders what `parts.render` does; NotUnderstood for a date that Go cannot make."""
    opening, loop = _literal(parts.opening), "{{ range $i, $_ := .Messages }}"
    if opening and parts.layout == "block":
        opening = _if('ne (index .Messages 0).Role "system"', opening)
    last = "{{ $last := eq (len (slice $.Messages $i)) 1 }}"
    before_system, after_system = _literal(parts.before_system), _literal(parts.after_system)
    system = inner = ""
    if parts.layout == "block":
        system = _if('eq .Role "system"', before_system + "{{ .Content }}" + after_system)
    elif parts.layout != "none":  # Ollama gathers the system messages in $.System
        turn = "(le $i 1)" if parts.layout == "first" else "$last"
        inner = _if(f"and $.System {turn}", before_system + "{{ $.System }}" + after_system)
    user = _literal(parts.before_user) + inner + "{{ .Content }}" + _literal(parts.after_user)
    # if a reply is last it will be continued, so it is not ended
    ended = _if("not $last", _literal(parts.after_reply + parts.between_turns))
    reply = _literal(parts.before_reply) + "{{ .Content }}" + ended
    prompt = _if('and $last (ne .Role "assistant")', _literal(parts.prompt))
    turns = system + _if('eq .Role "user"', user) + _if('eq .Role "assistant"', reply) + prompt
    return opening + loop + last + turns + "{{ end }}"


def _if(condition: str, body: str) -> str:
    return "{{ if " + condition + " }}" + body + "{{ end }}" if body else ""


def _literal(text: str) -> str:
    """Text for a Go template; dates, and what the syntax of Go or of the Modelfile would change, become actions."""
    out = []
    for i, between in enumerate(_DATED.split(text)):
        out.append(_date(between) if i % 2 else _undated(between))
    return "".join(out)


def _date(directives: str) -> str:
    """The action for a directive of strftime, or for the date as Ollama has it: 2026-11-23."""
    if len(directives) > 2:
        return "{{ " + _TODAY + " }}"
    directive = directives[-1]
    if directive in _SLICES:
        return "{{ slice " + f"{_TODAY} {_SLICES[directive]}" + " }}"
    if directive not in "Bb":
        raise NotUnderstood(f"Ollama's date cannot be written as %{directive}")
    names = [name if directive == "B" else name[:3] for name in _MONTHS]
    cases = [f'if eq (slice {_TODAY} 5 7) "{number:02}" }}}}{name}' for number, name in enumerate(names, 1)]
    return "{{ " + "{{ else ".join(cases) + "{{ end }}"


def _undated(text: str) -> str:
    out = []
    for piece in _pieces(text):
        plain = all(c.isprintable() or c == "\n" for c in piece) and "{{" not in piece and '"""' not in piece
        out.append(piece if plain else "{{ " + _go_string(piece) + " }}")
    return "".join(out)


def _pieces(text: str) -> list[str]:
    """Runs of characters that need quoting, and of those that do not."""
    pieces: list[str] = []
    odd_before: bool | None = None
    for c in text:
        odd = c in '{}"' or not (c.isprintable() or c == "\n")
        if odd == odd_before:
            pieces[-1] += c
        else:
            pieces.append(c)
        odd_before = odd
    return pieces


def _go_string(text: str) -> str:
    """A Go string literal, in ASCII."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    out = []
    for c in text:
        if c in escapes:
            out.append(escapes[c])
        elif c.isascii() and c.isprintable():
            out.append(c)
        else:
            out.append(f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}")
    return '"' + "".join(out) + '"'


def _quote(text: str) -> str:
    """A value of a Modelfile; strings have no escapes, so one with quotes or line breaks needs triple quotes."""
    return f'"""{text}"""' if '"' in text or "\n" in text or "{{" in text else f'"{text}"'
