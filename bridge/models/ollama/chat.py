"""A jinja chat template, understood by rendering it.

Messages with known texts are rendered, and the parts around them are read off:

    opening                              the start of a conversation without a system message
    before_system S after_system         a system message, in a block of its own ("block")
    before_user U after_user             a turn of the user
    before_reply A after_reply           a turn of the assistant
    prompt                               after the last turn of the user: the start of the next reply

If a system message goes inside the user's first turn ("first") or last ("last"), before_system and
after_system are between before_user and U. A template counts as understood only if these parts, put
together again, give the text that jinja gives, for several conversations.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from bridge.gguf_file.chat_template import TemplateFailed, render_chats

DATE = "\ue000"  # of Unicode's private use
_USERS, _REPLIES = ("Userprobe1", "Userprobe2", "Userprobe3"), ("Replyprobe1", "Replyprobe2")
_TURNS = (
    ("user", _USERS[0]), ("assistant", _REPLIES[0]), ("user", _USERS[1]), ("assistant", _REPLIES[1]),
    ("user", _USERS[2]),
)  # fmt: skip
_SYSTEM = ("system", "Systemprobe0")

Messages = Sequence[tuple[str, str]]  # (role, content)


class NotUnderstood(Exception):
    """The reason why a chat template cannot be taken apart."""


@dataclass(frozen=True)
class ChatParts:
    """The texts around messages, without the BOS that the runtime adds in front of everything."""

    layout: str  # place of a system message: "block", "first", "last" or "none"
    opening: str
    before_system: str
    after_system: str
    before_user: str
    after_user: str
    before_reply: str
    after_reply: str
    prompt: str
    between_turns: str = ""  # after a reply, before the next turn: a BOS if each turn has one

    def render(self, messages: Messages, prompt: bool = True) -> str:
        """The text of a conversation; with `prompt`, up to the start of the next reply."""
        text, system = "", None
        if messages[0][0] != "system" or self.layout != "block":
            text = self.opening
        turns = [i for i, (role, _) in enumerate(messages) if role == "user"]
        bearer = {"first": turns[0], "last": turns[-1]}.get(self.layout)
        for i, (role, content) in enumerate(messages):
            if role == "system" and self.layout == "block":
                text += self.before_system + content + self.after_system
            elif role == "system":
                system = content
            elif role == "user":
                inner = self.before_system + system + self.after_system if i == bearer and system is not None else ""
                text += self.before_user + inner + content + self.after_user
            elif role == "assistant":
                text += self.before_reply + content + self.after_reply
                text += self.between_turns if i + 1 < len(messages) else ""
        return text + self.prompt if prompt and messages[-1][0] != "assistant" else text


def split_template(template: str, bos: str, eos: str, strip_bos: bool) -> ChatParts:
    """The parts of a chat template. A date that it cannot do without is its format, with DATE in place of each %.

    template   jinja
    bos, eos   texts of the tokens, which templates refer to
    strip_bos  leave out the BOS at the start: the runtime adds it

    Raises:
        NotUnderstood: the template fails, or consists of more than these parts.
    """
    try:
        return _split(template, bos, eos, strip_bos, dated=False)
    except NotUnderstood as reason:
        if "'strftime_now' is undefined" not in str(reason):
            raise
        return _split(template, bos, eos, strip_bos, dated=DATE)


def _split(template: str, bos: str, eos: str, strip_bos: bool, dated: bool | str) -> ChatParts:
    render = _renderer(template, bos, eos, dated)
    bos = bos if strip_bos else ""
    parts = _read_parts(render, bos)
    try:
        _verify(parts, render, bos)
    except NotUnderstood:
        if parts.layout != "first":
            raise
        parts = replace(parts, layout="last")
        _verify(parts, render, bos)
    return parts


def _verify(parts: ChatParts, render: Any, bos: str) -> None:
    """Raise NotUnderstood unless the parts give the same text as jinja for conversations of up to three turns."""
    conversations: list[Messages] = [_TURNS[:n] for n in (1, 3, 5)]
    if parts.layout != "none":
        conversations += [(_SYSTEM, *turns) for turns in conversations]
    for messages in conversations:
        if parts.render(messages) != render(messages, True).removeprefix(bos):
            raise NotUnderstood(f"a conversation of {len(messages)} messages is not the sum of its turns")


def _read_parts(render: Any, bos: str) -> ChatParts:
    user, reply = _USERS, _REPLIES
    one, two = _TURNS[:1], _TURNS[:3]
    head, after_first = _cut(render(one, True).removeprefix(bos), user[:1])
    after_user = _cut(render(one, False).removeprefix(bos), user[:1])[1]
    start, to_reply, between, tail = _cut(render(two, True).removeprefix(bos), (user[0], reply[0], user[1]))
    ended = _cut(render(two[:2], False).removeprefix(bos), (user[0], reply[0]))[2]
    same = start == head and tail == after_first
    if not same or not (after_first.startswith(after_user) and to_reply.startswith(after_user)):
        raise NotUnderstood("the prompt for a reply depends on earlier messages")
    if not between.startswith(ended):  # the end of the last reply does not matter: that one is continued
        ended = ""
    before_reply, introduced = to_reply[len(after_user) :], between[len(ended) :]
    layout, before, after = "none", "", ""
    with suppress(NotUnderstood):
        before, after, _ = _cut(render((_SYSTEM, *one), True).removeprefix(bos), (_SYSTEM[1], user[0]))
        layout = "first" if head and before.startswith(head) else "block"
    # where only later turns begin with a BOS or the like, it belongs between turns
    before_user = _common_end([head, introduced, *([after] if layout == "block" else [])])
    turn_start = introduced[: len(introduced) - len(before_user)]
    opening = head[: len(head) - len(before_user)]
    common = (before_user, after_user, before_reply, ended, after_first[len(after_user) :], turn_start)
    if layout == "first":
        return ChatParts(layout, opening, before[len(head) :], after, *common)
    return ChatParts(layout, opening, before, after[: len(after) - len(before_user)], *common)


def _common_end(texts: Sequence[str]) -> str:
    """The longest text that all of them end with."""
    same = takewhile(lambda column: len(set(column)) == 1, zip(*map(reversed, texts), strict=False))
    return texts[0][len(texts[0]) - sum(1 for _ in same) :]


def _cut(text: str, marks: Sequence[str]) -> list[str]:
    """The texts before, between and after the marks, which must occur once each, in this order."""
    pieces = []
    for mark in marks:
        if text.count(mark) != 1:
            raise NotUnderstood(f"a message of the conversation appears {text.count(mark)} times, or out of order")
        piece, _, text = text.partition(mark)
        pieces.append(piece)
    return [*pieces, text]


def _renderer(template: str, bos: str, eos: str, dated: bool | str) -> Callable[[Messages, bool], str]:
    """A function (messages, prompt for a reply) -> text; NotUnderstood if the template fails.

    It knows the conversations of _TURNS, with and without a system message. No template gets today's date, which
    would stay in the parts.
    """
    known = [
        ((*first, *_TURNS[:n]), prompt)
        for first in ((), (_SYSTEM,))
        for n in range(1, len(_TURNS) + 1)
        for prompt in (True, False)
    ]
    entries = [
        ([{"role": role, "content": content} for role, content in messages], prompt) for messages, prompt in known
    ]
    texts = render_chats(template, entries, {"bos_token": bos, "eos_token": eos}, dated)
    text_of = dict(zip(known, texts, strict=True))

    def render(messages: Messages, prompt: bool) -> str:
        text = text_of[tuple(messages), prompt]
        if isinstance(text, TemplateFailed):
            raise NotUnderstood(str(text))
        return text

    return render
