"""The line on standard error that says what a command does, how much of it is done, and since when.

There is one, `LINE`, so that what is seen has one clock. On a terminal and in a notebook it is drawn over itself as
time passes, by a thread of its own; into a file or a pipe it is written seldom, a line each time, and not at all by a
command that is done in less than half a second. The environment variable BRIDGE_PROGRESS=0 turns it off.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from bridge.system.kernels import compiling

_TICK = 0.2  # seconds
_FIRST = 0.4  # seconds until the first line in a file


class StatusLine:
    """`running` lasts while a command does; `show` says what is shown, until `hide`."""

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.RLock()
        self._running = 0  # commands, and bars within them
        self._text: Callable[[], str] | None = None
        self._began = self._due = 0.0  # when `running` did, and when the line is to be drawn next
        self._clock: float | None = None
        self._drawn = ""  # what is seen

    @contextmanager
    def running(self) -> Iterator[None]:
        """The line may be shown meanwhile; within another `running`, it is that one's."""
        if os.environ.get("BRIDGE_PROGRESS") == "0" or sys.stderr is None:
            yield
            return
        with self._lock:
            self._running += 1
            outer = self._running == 1
            if outer:
                self._began = time.monotonic()
                self._due = self._began if _drawn_over(sys.stderr) else self._began + _FIRST
        over, ticker = threading.Event(), None
        try:
            if outer:
                with suppress(RuntimeError):  # the system starts no more threads: the line is drawn less often
                    ticker = threading.Thread(target=self._tick, args=(over,), name="gguf-bridge-line", daemon=True)
                    ticker.start()
            yield
        finally:
            if outer:
                self.hide()
                over.set()
            with self._lock:
                self._running -= 1

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Work that is timed from here to its end; within other such work, it is part of that."""
        outer = self._clock is None
        if outer:
            self._clock = compiling.clock()
        try:
            yield
        finally:
            if outer:
                self._clock = None

    @property
    def elapsed(self) -> float | None:
        """Seconds since the work began, without those that compiling kernels took; None where nothing is timed."""
        return None if (began := self._clock) is None else compiling.clock() - began

    def show(self, text: Callable[[], str]) -> None:
        """Show what `text` returns, now and from time to time; without control characters, which it must not have."""
        with self._lock:
            if self._running:
                self._text = text
                self._draw()

    def hide(self) -> None:
        """Remove the line, until something is shown again: other text follows."""
        if self._text is None:
            return
        with self._lock:
            if self._drawn and not _terminal(sys.stderr):  # a notebook keeps it
                self._due = 0.0
                self._draw()
                self._write("\n")
            elif self._drawn:
                self._write(self.erasing())
            self._text, self._drawn = None, ""

    def print_above(self, text: str) -> None:
        """Print a text on standard error; the line goes on below it."""
        with self._lock:
            if self._drawn:
                self._write(self.erasing())
                self._drawn, self._due = "", 0.0
            print(text, file=sys.stderr)

    def erasing(self) -> str:
        """What removes the line from the screen."""
        return f"\r{' ' * len(self._drawn)}\r" if self._drawn else ""

    def _tick(self, over: threading.Event) -> None:
        while not over.wait(_TICK):
            with self._lock:
                if not over.is_set():
                    self._draw()

    def _draw(self) -> None:
        """Draw the line if it is due."""
        now = time.monotonic()
        if self._text is None or now < self._due:
            return
        text, stream, since = self._text(), sys.stderr, now - self._began
        if compiling.active():
            done, total = compiling.elsewhere()
            far = f"{done} of {total}" if done < total else clock_text(compiling.seconds())
            text = f"compiling kernels for this CPU, once: {far}"
        if not _drawn_over(stream):
            self._write(text + "\n")
            self._due = now + max(10, since / 2)
            return
        width = shutil.get_terminal_size().columns - 1
        text = text[:width]
        if text != self._drawn:
            self._write(f"\r{text:{min(len(self._drawn), width)}}\r")
            self._drawn = text
        self._due = now + (0.1 if _terminal(stream) else max(1, since / 100))  # a notebook stores all that was drawn

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a stream that is closed: the work goes on
            sys.stderr.write(text)
            sys.stderr.flush()


def _terminal(stream: Any) -> bool:
    return bool(getattr(stream, "isatty", bool)())


def _drawn_over(stream: Any) -> bool:
    """Whether a carriage return goes to the line's beginning: on terminals and in notebooks."""
    return _terminal(stream) or type(stream).__module__.partition(".")[0] == "ipykernel"


def clock_text(seconds: float) -> str:
    """Seconds as a clock that runs tells them: "40 s", "12 min 5 s", "3 h 7 min"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


LINE = StatusLine()
