"""A reply in its parts as its text comes: what the model thinks, what it says, and which tools it calls."""

import re
from dataclasses import dataclass
from typing import Protocol

from bridge.runtime.chat.formats import CallFormat, Thinking
from bridge.runtime.chat.reading import Call, Functions, first_calls, read_calls
from bridge.runtime.replies.generation import overlap

_CHANNEL, _MESSAGE, _END, _START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
_BEFORE_JSON = ("<|python_tag|>", "```json")
_MOST_SPACES = 256  # characters of white space that are held back, as they may precede a mark
_MOST_TRIES = 16  # ends of a section that may be in texts of the arguments; more are looked at when the reply ends
_BEFORE_BODIES = (_START, _CHANNEL, " to=")  # with which what precedes <|message|> begins


@dataclass(frozen=True)
class Parts:
    """What came of a reply."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def __add__(self, later: "Parts") -> "Parts":
        return Parts(self.reasoning + later.reasoning, self.content + later.content, self.calls + later.calls)


class ReplyParser(Protocol):
    """Takes a reply apart."""

    def add(self, text: str, last: bool = False) -> Parts:
        """What came with a text; `last`: nothing follows. A call comes when all of it is there and can be read."""


class PlainParser:
    """For replies that are not to be taken apart."""

    def add(self, text: str, last: bool = False) -> Parts:
        return Parts(content=text)


class MarkedParser:
    """A reply whose parts have marks around them.

    thinking   the marks of what the model thinks, which stands first
    thinks     whether the prompt ends with the first of them
    form       how calls are written; None: what may be calls is content
    functions  what may be called: `form` without a begin takes nothing else for calls

    What cannot be read as calls is content, with its marks.
    """

    def __init__(self, thinking: Thinking, thinks: bool, form: CallFormat | None, functions: Functions):
        self._thinking, self._form, self._functions = thinking, form, functions
        self._held = ""
        self._read = self._reasoning if thinks else self._first
        self._begin = ""  # of the section of calls that is being read, with the white space before it
        self._searched = 0  # characters of that section where no end of it begins
        self._tries = 0  # of ends of that section that were none
        self._may_call = False  # a reply that is a call if anything

    def add(self, text: str, last: bool = False) -> Parts:
        self._held += text
        parts = Parts()
        while self._held:
            before = self._read, len(self._held)
            parts += self._read(last)
            if (self._read, len(self._held)) == before:
                break
        if last and self._read == self._calls:  # nothing followed the begin of a section
            parts += Parts(content=self._begin)
        return parts

    def _first(self, last: bool) -> Parts:
        """What the model thinks may begin."""
        begin, text = self._thinking.begin, self._held.lstrip()
        if text.startswith(begin):
            self._held, self._read = text[len(begin) :], self._reasoning
        elif last or not begin.startswith(text):
            self._read = self._after_thought
        return Parts()

    def _after_thought(self, last: bool) -> Parts:
        self._read = self._answer if self._form is not None and self._form.answer else self._content
        return Parts()

    def _reasoning(self, last: bool) -> Parts:
        thought, mark, rest = self._held.partition(self._thinking.end)
        if mark:
            self._held, self._read = rest, self._gap
            return Parts(reasoning=thought.rstrip())
        return Parts(reasoning=self._shown(self._thinking.end, last))

    def _gap(self, last: bool) -> Parts:
        """The white space after what the model thinks."""
        self._held = self._held.lstrip()
        if self._held:
            self._read = self._after_thought
        return Parts()

    def _answer(self, last: bool) -> Parts:
        """Whether what the prompt begins are calls, or `answer` follows it."""
        assert self._form is not None
        answer = self._form.answer
        if self._held.startswith(answer):
            self._held, self._read = self._held[len(answer) :], self._content
        elif last or not answer.startswith(self._held):
            self._read = self._calls
        return Parts()

    def _content(self, last: bool) -> Parts:
        if self._form is None:
            text, self._held = self._held, ""
            return Parts(content=text)
        if not self._form.begin:
            return self._whole_reply(last)
        text, mark, rest = self._held.partition(self._form.begin)
        if mark:
            content = text.rstrip()
            self._begin = text[len(content) :] + mark
            self._held, self._read, self._searched = rest, self._calls, 0
            return Parts(content=content)
        return Parts(content=self._shown(self._form.begin, last))

    def _shown(self, mark: str, last: bool) -> str:
        """What is held, but for what may be the begin of a mark, and the white space before it."""
        text = self._held
        if not last:
            text = text[: len(text) - overlap(text, mark)]
            spaces = len(text) - len(text.rstrip())
            text = text[: len(text) - min(spaces, _MOST_SPACES)]
        self._held = self._held[len(text) :]
        return text

    def _whole_reply(self, last: bool) -> Parts:
        """Calls where the reply is nothing else; it is held as long as it may be."""
        assert self._form is not None
        if not last and (self._may_call or _may_begin(self._held)):
            self._may_call = len(self._held) > _MOST_SPACES  # it is long enough to know
            return Parts()
        reply, form = self._held, self._form
        self._held, self._form = "", None
        text = re.sub(r"\A\s*(<\|python_tag\|>|```json)?\s*|\s*```\s*\Z", "", reply)
        try:
            calls = read_calls(text, form, self._functions)
        except ValueError:
            return Parts(content=reply)
        if any(call.name not in self._functions for call in calls):
            return Parts(content=reply)
        return Parts(calls=tuple(calls))

    def _calls(self, last: bool) -> Parts:
        """A section of calls, from its begin."""
        form = self._form
        assert form is not None
        end = form.end or form.begin
        while self._tries < _MOST_TRIES and (start := self._held.find(end, self._searched)) >= 0:
            try:
                calls, rest = self._first_calls(self._held[:start], form)
            except ValueError:
                self._searched = start + 1  # the end may be in a text of the arguments
                self._tries += 1
                continue
            self._held, self._searched, self._tries = self._held[start + len(end) :], 0, 0
            self._read = self._content if form.end else self._calls
            return Parts(content=rest, calls=tuple(calls))
        self._searched = max(self._searched, len(self._held) - len(end) + 1)
        if not last:
            return Parts()
        section, self._held, self._form = self._held, "", None
        self._read = self._content
        try:
            calls, rest = self._first_calls(section, form)
        except ValueError:
            return Parts(content=self._begin + section)
        return Parts(content=rest, calls=tuple(calls))

    def _first_calls(self, section: str, form: CallFormat) -> tuple[list[Call], str]:
        """The calls of a section, and what follows them, where no end mark says that all of it is calls."""
        if form.end:
            return read_calls(section, form, self._functions), ""
        return first_calls(section, form, self._functions)


class HarmonyParser:
    """gpt-oss's replies, whose parts have channels. Such a reply follows `<|start|>assistant`:

        <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>final<|message|>ANSWER
        <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS

    The recipient of a call may precede its channel. A commentary without one is said to the user. Without tools, calls
    are content, as they are but for `<|start|>assistant`; so is a reply without channels.
    """

    def __init__(self, tools: bool):
        self._tools = tools
        self._held = ""  # what may be the begin of a mark, and what precedes <|message|>
        self._reasons: bool | None = None  # of the part that is being read; None between two
        self._header = ""  # of the call that is being read
        self._name = ""  # and its function
        self._searched = 0  # characters of `_held` where no mark that is awaited begins

    def add(self, text: str, last: bool = False) -> Parts:
        self._held += text
        parts = Parts()
        while self._held:
            if self._reasons is None:
                begun, before = self._begin(last)
                parts += Parts(content=before)
                if not begun:
                    break
            if self._name and not last and not self._has(_END):
                break
            body, end, rest = self._held.partition(_END)
            if self._name:
                parts += self._call(body)
                self._held, self._reasons, self._name = rest, None, ""
                continue
            held = 0 if end or last else overlap(body, _END)
            self._held = rest if end else body[len(body) - held :]
            shown = body[: len(body) - held]
            parts += Parts(reasoning=shown) if self._reasons else Parts(content=shown)
            if not end:
                break
            self._reasons = None
        return parts

    def _has(self, mark: str) -> bool:
        """Whether a mark has come; what was looked at before is not again."""
        has = self._held.find(mark, self._searched) >= 0
        self._searched = 0 if has else max(0, len(self._held) - len(mark) + 1)
        return has

    def _call(self, body: str) -> Parts:
        """The call whose arguments these are; content where they are none."""
        form = CallFormat("", (), "", "{name}{arguments}")
        try:
            return Parts(calls=tuple(read_calls(self._name + body, form, {})))
        except ValueError:
            return Parts(content=self._header + body)

    def _begin(self, last: bool) -> tuple[bool, str]:
        """Read what precedes a part's body: whether all of it has come, and what of it is content."""
        held = self._held
        if not any(held.startswith(mark) or (mark.startswith(held) and not last) for mark in _BEFORE_BODIES):
            self._reasons = False
            return True, ""
        if not self._has(_MESSAGE):
            return False, ""
        before, _, self._held = held.partition(_MESSAGE)
        before = before.removeprefix(f"{_START}assistant")
        called = re.search(r" to=(?!assistant\b)(?:functions\.)?([\w./-]+)", before)
        self._reasons = not called and before.rpartition(_CHANNEL)[2].startswith("analysis")
        if called and self._tools:
            self._header, self._name = before + _MESSAGE, called[1]
            return True, ""
        return True, before + _MESSAGE if called else ""


def _may_begin(reply: str) -> bool:
    """Whether a reply may be a call in JSON, perhaps after a mark, by its begin."""
    text = reply.lstrip()
    return not text or text[0] in "{[" or any(text.startswith(m) or m.startswith(text) for m in _BEFORE_JSON)
