"""What a command writes to a terminal: text that cannot steer it, and a line while kernels are compiled.

Also signals that end the program.
"""

import shutil
import sys
import time
from typing import Any

from bridge.system.text import printable


class Terminated(KeyboardInterrupt):
    """The system or another program ends this one by a signal; Ctrl-C is a plain KeyboardInterrupt."""

    def __init__(self, signal: int) -> None:
        super().__init__()
        self.signal = signal


class Printable:
    """A stream that shows control characters instead of sending them; everything else is the stream's."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class StatusLine:
    """A line on standard error, if that is a terminal, that says what takes time; above all, compiling kernels."""

    _EVERY = 0.1  # seconds

    def __init__(self) -> None:
        self._text = ""
        self._drawn = 0.0  # when it was drawn last
        self._over = False

    def say(self, text: str) -> None:
        """Show a text until `end`, or, if empty, none."""
        self._text = text
        self._draw(text)

    def end(self) -> None:
        """Remove the line for good: other text follows, into which it must not come."""
        self.say("")
        self._over = True

    def compiling(self, far: str, more: bool) -> None:
        """Called by `bridge.system.kernels.compiling`: how far compiling is, and whether there is `more` to do."""
        if not more:
            self._draw(self._text)
        elif time.monotonic() - self._drawn >= self._EVERY:
            self._draw(f"compiling kernels for this CPU, once: {far}")

    def _draw(self, text: str) -> None:
        if self._over or not sys.stderr.isatty() or (not text and not self._drawn):
            return
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r{text[:width]:{width}}\r")
        sys.stderr.flush()
        self._drawn = time.monotonic() if text else 0.0


def generated() -> Any:
    """Where a model's text goes: to a file or a program as it is, to a terminal without control characters."""
    return sys.stdout if sys.stdout.isatty() else getattr(sys.stdout, "stream", sys.stdout)
