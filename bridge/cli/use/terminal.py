"""What a command writes to a terminal: text that cannot steer it. Also signals that end the program."""

import sys
from typing import Any

from bridge.system.status_line import LINE
from bridge.system.text import printable


class Terminated(KeyboardInterrupt):
    """The system or another program ends this one by a signal; Ctrl-C is a plain KeyboardInterrupt."""

    def __init__(self, signal: int) -> None:
        super().__init__()
        self.signal = signal


class Printable:
    """A stream that shows control characters instead of sending them, where no status line is; everything else is the
    stream's."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        LINE.hide()
        self.stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def generated() -> Any:
    """Where a model's text goes: to a file or a program as it is, to a terminal without control characters."""
    return sys.stdout if sys.stdout.isatty() else getattr(sys.stdout, "stream", sys.stdout)
