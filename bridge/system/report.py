"""What all reports on a command's work have in common: fields, the order in which they are printed, and a JSON file."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.system.storage.files import write_text
from bridge.system.storage.outputs import NOTHING, ProtectedPaths, check_outputs
from bridge.system.text import note_lines, size_text, took_text

Facts = Iterable[tuple[str, str]]  # the name of each, and a sentence
WROTE = "wrote"
_START = b'{\n "checkpoint": '  # of a report's file


@dataclass(repr=False)
class CommandReport:
    """What a command made; the classes that derive from it tell how."""

    outputs: list[Path]  # files, or a folder
    seconds: float  # that it took
    _: KW_ONLY
    compile_seconds: float = 0.0  # that compiling kernels took
    notes: list[str] = field(default_factory=list)
    home: Path | None = None  # the source's folder, with config.json and README.md
    blocks: list[dict[str, Any]] = field(default_factory=list)  # that were calibrated, see `quantize.block_log`

    def __repr__(self) -> str:
        outputs = ", ".join(repr(str(path)) for path in self.outputs) or "nothing written"
        return f"{type(self).__name__}({outputs}, {self._about()})"

    def _about(self) -> str:
        """What it is a report on, in a few words."""
        raise NotImplementedError

    def printed(self, lines: Iterable[str], facts: Facts = (), size: str | None = None, done: str = WROTE) -> str:
        """The text for the terminal: lines about the content, facts, notes, a line with the size, and the outputs with
        what was `done`."""
        about = [*lines, *(f"{name:12}{fact}" for name, fact in facts), *note_lines(self.notes)]
        return "\n".join([*about, *filter(None, [size]), *(f"{done} {path}" for path in self.outputs)])


@dataclass(repr=False)
class FolderReport(CommandReport):
    """A written checkpoint folder. `seconds` leaves out `compile_seconds`; `nbytes` is the size of the new tensors."""

    format: str
    nbytes: int

    def _about(self) -> str:
        return f"{self.format}, {size_text(self.nbytes)}"

    @property
    def out(self) -> Path:
        """The folder."""
        return self.outputs[0]

    def size_and_time(self) -> str:
        """The size of the tensors and the time that they took."""
        return f"{size_text(self.nbytes)} in {took_text(self.seconds, self.compile_seconds)}"


def save_report(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON; an earlier report is replaced. Raises BridgeError where that fails."""
    check_report(path)
    write_text(path, json.dumps(record, indent=1) + "\n")


def check_report(path: Path, protected: ProtectedPaths = NOTHING) -> None:
    """BridgeError unless a report of that name can be made; of files that exist only earlier reports are replaced."""
    check_outputs([path], True, protected)
    try:
        with open(path, "rb") as file:
            start = file.read(len(_START))
    except FileNotFoundError:
        return
    except OSError as problem:
        raise BridgeError(f"{path}: cannot be read ({problem.strerror}); give the report another name") from None
    if start not in (b"", _START):
        raise BridgeError(f"{path}: exists and is not a report; give the report another name")
