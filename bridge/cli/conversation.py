"""A conversation by a model's chat template: what was said, and the next reply."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from bridge.errors import BridgeError
from bridge.runtime.model import Model


class Conversation:
    """`messages` of system, user and assistant in turn; the model keeps keys and values from one reply to the next."""

    def __init__(self, model: Model, system: str | None = None):
        self.model = model
        self._first = [{"role": "system", "content": system}] if system is not None else []
        self.messages: list[dict[str, str]] = []
        self.clear()

    def check(self) -> None:
        """Raise BridgeError where the model cannot hold a conversation."""
        self.model.chat_tokens([*self._first, {"role": "user", "content": "?"}])

    def clear(self) -> None:
        """Begin again."""
        self.messages = list(self._first)

    def reply(self, text: str, **options: Any) -> Iterator[str]:
        """What the model says to a text, piece by piece; `options` as in Model.generate.

        A reply that is not read to its end is remembered as far as it was. Raises BridgeError where the conversation
        no longer fits the context; the text is then not part of it.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            pieces = self.model.chat(self.messages, **options)
        except BridgeError:
            self.messages.pop()
            raise
        said: list[str] = []
        try:
            for piece in pieces:
                said.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(said)})


def lines() -> Iterator[str]:
    """The messages on standard input, a line each; a line that ends in a backslash goes on in the next."""
    asks = sys.stdin.isatty()
    if asks:
        with suppress(ImportError):
            import readline  # noqa: F401 - input() then edits lines and remembers them
    held = ""
    while True:
        try:
            line = input(("... " if held else "> ") if asks else "")
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeDecodeError as problem:
            raise BridgeError(f"standard input is not UTF-8 (byte {problem.start}); convert it first") from None
        held += line
        if held.endswith("\\"):
            held = held[:-1] + "\n"
            continue
        if held.strip():
            yield held
        held = ""
