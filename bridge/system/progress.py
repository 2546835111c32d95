"""How long work reports its progress, and the bar that commands show it with."""

import sys
from collections.abc import Callable
from typing import Any, Self

from bridge.system.kernels.compiling import clock
from bridge.system.text import printable, tell

# units done, of how many, and the name of what was just done; first 0 units and no name
Progress = Callable[[int, int, str], None]


class Bar:
    """A progress bar on standard error, if that is a terminal.

    Speed and remaining time leave out what compiling kernels took.
    """

    def __init__(self, verb: str, unit: str = "B") -> None:
        self.verb, self.unit = verb, unit
        self.bar: Any = None
        self._since = 0, 0.0  # units done at the first call, and when that was

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.close()

    def __call__(self, done: int, total: int, name: str) -> None:
        if self.bar is None:
            self._since = done, clock()
            self.bar = self._new_bar(total)
        self.bar.set_postfix_str(printable(name), refresh=False)
        self.bar.update(done - self.bar.n)

    def say(self, line: str) -> None:
        """Print a line for people on standard error, above the bar."""
        if self.bar is None:
            tell(line)
        else:
            self.bar.write(printable(line), file=sys.stderr)

    def _rate(self, done: int) -> float:
        """Units a second; 0: unknown."""
        before, then = self._since
        return (done - before) / max(clock() - then, 1e-9) if done > before else 0.0

    def _new_bar(self, total: int) -> Any:
        from tqdm import tqdm

        rate_of = self._rate

        class Steady(tqdm):
            @property
            def format_dict(self) -> Any:
                return super().format_dict | {"rate": rate_of(self.n)}

        # bytes become MB; layers and windows are whole
        return Steady(
            total=total, unit=self.unit, unit_scale=self.unit == "B", desc=self.verb, disable=None, leave=False
        )  # fmt: skip
