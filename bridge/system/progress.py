"""How long work reports its progress, and the bar that commands show it with."""

import sys
from collections.abc import Callable
from typing import Any, Self

from bridge.system.text import printable

Progress = Callable[[int, int, str], None]  # units done, of how many, name of what was just done


class Bar:
    """A progress bar on standard error, if that is a terminal."""

    def __init__(self, verb: str, unit: str = "B") -> None:
        self.verb, self.unit = verb, unit
        self.bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.close()

    def __call__(self, done: int, total: int, name: str) -> None:
        if self.bar is None:
            from tqdm import tqdm

            verb = self.verb
            if sys.stderr.isatty():
                from bridge.system import jit

                verb += " (first run: compiling)" if jit.first_run else ""
            self.bar = tqdm(total=total, unit=self.unit, unit_scale=True, desc=verb, disable=None, leave=False)
        self.bar.set_postfix_str(printable(name), refresh=False)
        self.bar.update(done - self.bar.n)
