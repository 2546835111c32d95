"""The bar: what it counts, and when it tells how long the rest takes."""

from __future__ import annotations

import io
import sys

import pytest

import bridge.system.kernels.compiling
from bridge.system.progress import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def clock_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in its one item. Called by the test itself: between a fixture and its test pytest sets stderr."""
    now = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", Terminal())
    return now


def test_compiling_counts_for_no_speed(monkeypatch) -> None:
    clock = clock_at_a_terminal(monkeypatch)
    with Bar("quantizing", unit=" layers") as bar:
        shown = []
        for done, (seconds, compiling) in enumerate([(0, 0), (52, 50), (52, 50), (2, 0)]):
            clock[0] += seconds
            monkeypatch.setattr(
                "bridge.system.kernels.compiling._seconds", bridge.system.kernels.compiling._seconds + compiling
            )
            bar(done, 6, f"blk.{done}")
            shown.append(str(bar.bar))
    assert "<?," in shown[0]  # nothing is done yet
    for done in (1, 2, 3):  # 2 seconds a layer
        assert f"{done}/6" in shown[done]
        assert f"<00:{2 * (6 - done):02}, " in shown[done]
        assert "0.50 layers/s" in shown[done] or "2.00s/ layers" in shown[done]


@pytest.mark.parametrize(("unit", "count"), [(" layers", "3/29 "), (" windows", "3/29 "), ("B", "3.00/29.0 ")])
def test_only_bytes_are_scaled(monkeypatch, unit, count) -> None:
    clock_at_a_terminal(monkeypatch)
    with Bar("working", unit=unit) as bar:
        bar(0, 29, "")
        bar(3, 29, "a")
        assert f"| {count}" in str(bar.bar)


def test_no_bar_is_drawn_into_a_file(capsys) -> None:
    with Bar("working") as bar:
        bar(0, 2, "")
        bar(1, 2, "a")
    assert capsys.readouterr().err == ""
