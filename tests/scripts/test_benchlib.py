"""The harness of the measuring scripts: options, turns, what is printed, and what --json gets."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

import bridge
from scripts.benchlib import Lines, bench, head, option, parser, ratio, take_turns
from scripts.speed.bench_model import in_turns

DOC = "Measure nothing.\n\nIn detail."
OPTIONS = (
    *("--threads", "--json"), option("--rounds", 9), option("types", ["Q4_K"], "TYPE"), option("--all", False),
    option("--shape", (2, 3), nargs=2), option("--text", required=True),
)  # fmt: skip


def test_options_have_the_types_of_their_defaults_and_common_ones_their_help() -> None:
    given = parser(DOC, OPTIONS).parse_args(["--text", "a.txt", "--shape", "4", "5"])
    assert (given.threads, given.rounds, given.types, given.all) == (2, 9, ["Q4_K"], False)
    assert given.shape == [4, 5]
    assert given.text == Path("a.txt")
    shown = " ".join(parser(DOC, OPTIONS).format_help().split())
    assert "Measure nothing." in shown
    assert "In detail" not in shown
    assert "--rounds N rounds of measurements; default: 9" in shown
    assert "--text FILE the text that is predicted" in shown


def test_contenders_take_turns_and_ratios_are_of_the_same_turn() -> None:
    order: list[str] = []

    def run(name: str, seconds: list[float]) -> dict[str, float]:
        order.append(name)
        return {"cpu": seconds.pop(0)}

    times = {"ours": [1.0, 2.0, 30.0], "theirs": [2.0, 8.0, 30.0]}
    figures = take_turns({name: lambda name=name: run(name, times[name]) for name in times}, 3)
    assert order == ["ours", "theirs"] * 3
    assert figures == {"ours": {"cpu": [1.0, 2.0, 30.0]}, "theirs": {"cpu": [2.0, 8.0, 30.0]}}
    assert ratio(figures["ours"]["cpu"], figures["theirs"]["cpu"]) == 0.5


def test_a_row_of_speeds_has_medians_and_the_median_of_the_turns_ratios() -> None:
    ours, theirs = {"a": [10.0, 30.0, 20.0], "a cpu": [4.0, 4.0, 4.0]}, {"a": [5.0, 5.0, 5.0], "a cpu": [1.0, 2.0, 8.0]}
    figures = {"ours": ours, "theirs": theirs}
    row = {"what": "A", "unit": "tokens/s", "ours": 20.0, "theirs": 5.0, "ratio": 4.0}
    assert in_turns(figures, "a", "A") == row | {"ratio_cpu": 2.0}
    assert in_turns({side: {"a": values["a"]} for side, values in figures.items()}, "a", "A") == row


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, passes_on: bool = False) -> argparse.Namespace:
    seen: list[argparse.Namespace] = []

    def measure(options: argparse.Namespace) -> Lines:
        seen.append(options)
        if options.rounds < 1:
            raise argparse.ArgumentTypeError("--rounds: must be at least 1")
        yield "Of two tables."
        yield head("a", "b")
        yield 1, "x"
        return {"rows": [1]}

    monkeypatch.setattr("sys.argv", ["bench", "--text", "a.txt", *arguments])
    bench(DOC, OPTIONS, measure, passes_on=passes_on)
    return seen[0]


def test_the_machine_comes_first_and_the_record_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--json", str(tmp_path / "x.json"))
    machine, *lines = capsys.readouterr().out.splitlines()
    assert machine.startswith("Machine: ")
    assert machine.endswith(", 2 threads.")
    assert lines == ["Of two tables.", "", "| a | b |", "|---|---|", "| 1 | x |"]
    record = json.loads((tmp_path / "x.json").read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record.pop("date"))
    assert record.pop("command").endswith(" --text a.txt")  # without --json
    assert record == {
        "version": bridge.__version__, "machine": machine[9:].removesuffix(", 2 threads."), "rows": [1]
    }  # fmt: skip


def test_what_a_script_cannot_use_is_an_error_of_its_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, said in (
        (["--rounds", "0"], "--rounds: must be at least 1"), (["--no-such"], "unrecognized arguments: --no-such")
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            run(monkeypatch, *arguments)
        assert stopped.value.code == 2
        assert capsys.readouterr().err.endswith(f"error: {said}\n")
    assert run(monkeypatch, "--no-such", passes_on=True).rest == ["--no-such"]
