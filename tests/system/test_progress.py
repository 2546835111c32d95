"""The line on standard error: what it says, on terminals and in files, and when it tells how long the rest takes."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

import bridge.system.kernels.compiling
from bridge.cli import main
from bridge.system.kernels import compiling
from bridge.system.progress import Bar, say
from bridge.system.status_line import LINE, StatusLine, clock_text
from bridge.system.text import tell, took_text
from tests.conftest import CHECKPOINT, posix
from tests.support.terminal import Terminal as Process
from tests.support.terminal import needs_terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        """What the line said, one text after the other; "" where it was removed."""
        return [part.rstrip(" ") for part in self.getvalue().split("\r")[1::2]]


class Streams:
    """The time in its one item, which nothing else advances, and standard error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO) -> None:
        self.now, self.stderr = 1000.0, stderr
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.delenv("BRIDGE_PROGRESS")
        monkeypatch.setattr(StatusLine, "_tick", lambda line, over: None)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr(sys, "stderr", stderr)

    def wait(self, seconds: float) -> str:
        """What is said when that much time has passed, beyond what was said before."""
        before, self.now = self.stderr.tell(), self.now + seconds
        LINE._draw()
        return self.stderr.getvalue()[before:]


# called by the test itself: between a fixture and its test pytest sets stderr
def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch, Terminal())


def in_a_file(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch, io.StringIO())


def test_compiling_counts_for_no_time(monkeypatch) -> None:
    streams = at_a_terminal(monkeypatch)
    with Bar("converting", unit=" tensors") as bar:
        shown = []
        for done, (seconds, compiled) in enumerate([(0, 0), (52, 50), (52, 50), (2, 0)]):
            streams.now += seconds
            monkeypatch.setattr(
                "bridge.system.kernels.compiling._seconds", bridge.system.kernels.compiling._seconds + compiled
            )
            bar(done, 6, f"blk.{done}")
            shown.append(bar.text())
    assert shown == [
        "converting: 0 of 6 tensors (0%), 0 s; blk.0",  # nothing is done yet
        "converting: 1 of 6 tensors (16%), 2 s, 10 s left; blk.1",
        "converting: 2 of 6 tensors (33%), 4 s, 8 s left; blk.2",
        "converting: 3 of 6 tensors (50%), 6 s, 6 s left; blk.3",
    ]


def test_bars_of_one_operation_have_one_clock(monkeypatch) -> None:
    streams = at_a_terminal(monkeypatch)
    with Bar("quantizing", unit=" layers", timed=False) as layers, Bar("writing") as bar:
        layers(0, 2, "")
        streams.now += 30
        layers(1, 2, "q_proj")
        assert layers.text() == "quantizing: 1 of 2 layers (50%), 30 s; q_proj"
        streams.now += 40
        bar(0, 1 << 20, "")
        assert bar.text() == "writing: 0.0 of 1.0 MB (0%), 1 min 10 s"
    with Bar("measuring", unit=" windows") as bar:  # another operation
        bar(0, 2, "")
        assert bar.text() == "measuring: 0 of 2 windows (0%), 0 s"


@pytest.mark.parametrize(
    ("unit", "total", "count"),
    [
        (" layers", 29, ": 3 of 29 layers (10%)"),
        ("B", 29_000_000, ": 0.0 of 29.0 MB (0%)"),
        ("B", 2_500_000_000, ": 0.00 of 2.50 GB (0%)"),
        (" tensors", 0, ", 0 s"),
    ],
)
def test_bytes_are_told_as_mb_or_gb(monkeypatch, unit, total, count) -> None:
    at_a_terminal(monkeypatch)
    with Bar("working", unit=unit) as bar:
        bar(3, total, "")
        assert bar.text().startswith(f"working{count}")


def test_work_that_does_not_report_is_followed(monkeypatch) -> None:
    streams, read = at_a_terminal(monkeypatch), [0]
    with Bar("reading the prompt", unit=" tokens", follow=lambda: (read[0], 1000)):
        read[0] = 512
        streams.wait(3)
    assert streams.stderr.shown() == [
        "reading the prompt: 0 of 1000 tokens (0%), 0 s", "reading the prompt: 512 of 1000 tokens (51%), 3 s", "",
    ]  # fmt: skip


def test_a_line_says_what_takes_time_and_goes_away(monkeypatch) -> None:
    streams = at_a_terminal(monkeypatch)
    monkeypatch.setattr(compiling, "_elsewhere", (0, 0))
    say("nothing runs")
    tell("above")
    assert streams.stderr.getvalue() == "above\n"
    with LINE.running():
        say("loading \x1b[31m.gguf")
        with compiling.kernels_elsewhere(23) as report:
            report(7)
            streams.wait(1)
            streams.wait(0.01)  # too soon
        with compiling.kernels_elsewhere(2) as report:  # goes on where it was
            report(1)
            streams.wait(1)
        with compiling.kernel():  # in this process
            monkeypatch.setattr(compiling, "_seconds", 75.0)
            streams.wait(1)
        streams.wait(1)
    shown = "compiling kernels for this CPU, once: {} of {}"
    assert streams.stderr.shown() == [
        r"loading \x1b[31m.gguf", shown.format(7, 23), shown.format(24, 25),
        "compiling kernels for this CPU, once: 1 min 16 s", r"loading \x1b[31m.gguf", "",
    ]  # fmt: skip
    say("nothing runs any more")
    assert streams.stderr.shown()[-1] == ""


def test_lines_for_people_stand_above_the_line(monkeypatch) -> None:
    streams = at_a_terminal(monkeypatch)
    with Bar("quantizing", unit=" layers", timed=False) as bar:
        bar(0, 2, "a name that does not fit a narrow terminal".ljust(200, "."))
        bar.say("block 1 of 2")
        streams.wait(0)
    first, removed, line, *_ = streams.stderr.getvalue().split("\n")[0].split("\r")[1:] + [""] * 3
    assert (len(first), removed, line) == (99, "", " " * 99)
    assert streams.stderr.getvalue().split("\n")[0].endswith("\rblock 1 of 2")
    assert streams.stderr.getvalue().split("\n")[1].startswith("\rquantizing: 0 of 2 layers (0%), 0 s; a name")


def test_a_file_gets_few_lines_and_a_short_command_none(monkeypatch) -> None:
    streams = in_a_file(monkeypatch)
    with LINE.running():
        say("loading m.gguf")
        streams.wait(0.3)
    assert streams.stderr.getvalue() == ""
    with Bar("converting", unit=" tensors") as bar:
        for done in range(3601):
            bar(done, 3600, f"blk.{done}")
            streams.wait(1)
    lines = streams.stderr.getvalue().splitlines()
    assert lines[0] == "converting: 0 of 3600 tensors (0%), 1 s; blk.0"
    assert 10 <= len(lines) <= 20
    assert all(line.isprintable() and line.startswith("converting: ") for line in lines)


def test_progress_may_be_turned_off(monkeypatch) -> None:
    streams = at_a_terminal(monkeypatch)
    monkeypatch.setenv("BRIDGE_PROGRESS", "0")
    with LINE.running(), Bar("working") as bar:
        bar(0, 2, "")
        streams.wait(10)
    assert streams.stderr.getvalue() == ""


def test_streams_that_are_no_terminals_or_closed_do_no_harm(monkeypatch) -> None:
    class Plain:
        def write(self, text: str) -> None:
            raise OSError("closed")

        def flush(self) -> None: ...

    streams = in_a_file(monkeypatch)
    for stderr in (Plain(), None):
        monkeypatch.setattr(sys, "stderr", stderr)
        with Bar("working") as bar:
            streams.now += 10
            bar(0, 2, "")


@posix
def test_a_fork_shows_nothing_and_waits_for_nobody(monkeypatch) -> None:
    streams = in_a_file(monkeypatch)
    with LINE.running(), LINE._lock:
        say("loading")
        if (child := os.fork()) == 0:
            say("in the child")
            os._exit(LINE._text is not None)
        assert os.waitpid(child, 0)[1] == 0
        streams.now += 1
        LINE._draw()
    assert streams.stderr.getvalue() == "loading\n"


def test_a_clock_is_told_in_one_form() -> None:
    said = {0: "0 s", 59.9: "59 s", 61: "1 min 1 s", 3599: "59 min 59 s", 3661: "1 h 1 min", 90000: "25 h 0 min"}
    assert {seconds: clock_text(seconds) for seconds in said} == said


def test_what_work_took_is_told_in_the_same_form() -> None:
    assert took_text(0.74, 0.2, " (3.9 MB/s)") == "0.7 s (3.9 MB/s)"
    assert took_text(754, 65.3) == "12 min 34 s, and 1 min 5 s to compile kernels, once on this machine"


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        ("inspect MODEL", ["inspect: starting", "reading MODEL"]),
        ("convert MODEL OUT", ["convert: starting", "reading MODEL", "converting: "]),
        ("verify GGUF MODEL", ["reading MODEL", "verifying: "]),
        ("export GGUF OUT", ["reading GGUF", "exporting: "]),
        ("plan MODEL", ["reading MODEL", "planning: "]),
        ("run GGUF -p KING -n 2", ["run: starting", "loading GGUF", "reading the prompt"]),
        ("run GGUF -p KING -n 2 --logprobs 1", ["loading GGUF", "reading the prompt"]),
        ("perplexity GGUF -f TEXT --length 16 --windows 1", ["loading GGUF", "cutting TEXT into", "measuring: "]),
        ("bench GGUF", ["reading GGUF", "timing: "]),
        ("warmup GGUF", ["loading GGUF"]),
    ],
)
def test_each_command_says_what_it_does(command, texts, tmp_path, monkeypatch) -> None:
    gguf, text = tmp_path / "m.gguf", tmp_path / "text.txt"
    bridge.convert(CHECKPOINT, gguf)
    text.write_text("KING RICHARD: so be it. " * 20)
    names = {"MODEL": str(CHECKPOINT), "OUT": str(tmp_path / "out"), "GGUF": str(gguf), "TEXT": str(text)}
    said: list[str] = []
    monkeypatch.setattr(LINE, "show", lambda text: said.append(text()))
    assert main([names.get(word, word) for word in command.split()]) == 0
    for name, path in names.items():
        said = [line.replace(path, name) for line in said]
    places = [next((i for i, line in enumerate(said) if line.startswith(start)), None) for start in texts]
    assert None not in places, said
    assert places == sorted(places)


@needs_terminal
def test_the_line_on_a_terminal_gives_way_to_the_text(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("BRIDGE_PROGRESS")
    gguf = Path(tmp_path / "m.gguf")
    bridge.convert(CHECKPOINT, gguf)
    terminal = Process("run", gguf, "-p", "KING", "-n", "2", "--temp", "0")
    terminal.until("run: starting")
    terminal.until("\r ")  # removed
    terminal.until("\rKING")
    terminal.until("tokens/s")
    assert terminal.process.wait() == 0
