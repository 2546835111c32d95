"""The one kind of error a user may see.

A message states the fact, the file or tensor, and the way out, in one line. The command line prints it and exits with
2; anything else that is raised is a defect of ours and shows a traceback. A message that names an argument does so
with `parameter`: `force=True` in Python, `--force` on the command line.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LONGEST, _END = 1000, 300  # characters of a line


class BridgeError(Exception):
    """Something about the input or the machine that the user can mend.

    message  the fact, the file or tensor, and the way out, in one line of at most 1,000 characters
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class BridgeWarning(UserWarning):
    """Something that a run does as asked, and the user will probably want to change."""


def shortened(line: str) -> str:
    """A line for people: where a name or a text out of somebody's file makes it endless, its middle is left out."""
    cut = " ... "
    return line if len(line) <= _LONGEST else line[: _LONGEST - _END - len(cut)] + cut + line[-_END:]


def _in_python(name: str, value: object) -> str:
    return name if value is None else f"{name}={value!r}"


_spelling: Callable[[str, object], str] = _in_python


def parameter(name: str, value: object = None) -> str:
    """An argument as the user gave it or would give it: "force=True", or "--force" on the command line."""
    return _spelling(name, value)


def refused(name: str, value: object, why: str) -> BridgeError:
    """The error of an argument that is refused: as the user gave it, see `parameter`, and why."""
    return BridgeError(f"{parameter(name, value)}: {why}")


def needs_torch(what: str, gpu: bool = False) -> BridgeError:
    """The error of what needs torch, where that is missing; on Linux, PyPI's has CUDA's gigabytes, which only a GPU
    needs."""
    cpu = " --index-url https://download.pytorch.org/whl/cpu" if sys.platform == "linux" and not gpu else ""
    return BridgeError(f"{what} needs torch; pip install torch{cpu}")


@contextmanager
def spelled(spelling: Callable[[str, object], str]) -> Iterator[None]:
    """Have `parameter` answer with `spelling(name, value)` meanwhile."""
    global _spelling
    before, _spelling = _spelling, spelling
    try:
        yield
    finally:
        _spelling = before
