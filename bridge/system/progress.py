"""How long work reports its progress, and the bar that commands show it with."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

from bridge.system.kernels.compiling import clock
from bridge.system.status_line import LINE, clock_text
from bridge.system.text import printable, tell

# units done, of how many, and the name of what was just done; first 0 units and no name
Progress = Callable[[int, int, str], None]


def say(what: str) -> None:
    """Show what a command does now, as long as nothing else is shown."""
    text = printable(what)
    LINE.show(lambda: _line(text))


class Bar:
    """What is shown of work that is counted: units done, of how many, the time that passed and that is left.

    unit    what is counted, with a space before it; "B": bytes, shown as MB or GB
    timed   whether the time that is left is told: units take about as long as each other
    follow  returns units done and all, where the work does not call the bar

    Times leave out what compiling kernels took.
    """

    def __init__(
        self, verb: str, unit: str = "B", timed: bool = True, follow: Callable[[], tuple[int, int]] | None = None
    ) -> None:
        self.verb, self.unit, self.timed = verb, unit, timed
        self._follow = follow
        self._count = 0, 0
        self._name = ""
        self._since: tuple[int, float] | None = None  # units done when the first were reported, and when that was
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(LINE.running())
        self._stack.enter_context(LINE.timed())
        if self._follow is not None:
            LINE.show(self.text)
        return self

    def __exit__(self, *_: object) -> None:
        LINE.hide()
        self._stack.close()

    def __call__(self, done: int, total: int, name: str) -> None:
        self._count, self._name = (done, total), printable(name)
        if self._since is None:
            self._since = done, clock()
        LINE.show(self.text)

    def say(self, line: str) -> None:
        """Print a line for people on standard error, above the bar."""
        tell(line)

    def text(self) -> str:
        """What is shown now."""
        done, total = self._count if self._follow is None else self._follow()
        text = f"{self.verb}: {self._amount(done, total)} ({done * 100 // total}%)" if total else self.verb
        return _line(text, self._left(done, total)) + (f"; {self._name}" if self._name else "")

    def _amount(self, done: int, total: int) -> str:
        if self.unit != "B":
            return f"{done} of {total}{self.unit}"
        if total >= 1e9:
            return f"{done / 1e9:.2f} of {total / 1e9:.2f} GB"
        return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB"

    def _left(self, done: int, total: int) -> float | None:
        """Seconds; None: unknown."""
        if not self.timed or self._since is None or done <= self._since[0]:
            return None
        before, then = self._since
        return (clock() - then) / (done - before) * (total - done)


def _line(text: str, left: float | None = None) -> str:
    elapsed = LINE.elapsed
    if elapsed is not None:
        text += f", {clock_text(elapsed)}"
    return text if left is None else f"{text}, {clock_text(left)} left"
