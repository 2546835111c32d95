"""One pool of threads for the process."""

from __future__ import annotations

import os
import threading

import pytest

from bridge.system.cpu import row_threads
from bridge.system.cpu.row_threads import over_rows


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen threads, of a pool of their own, however many CPUs there are."""
    monkeypatch.setattr(row_threads, "usable_cpus", lambda: 16)
    monkeypatch.setattr(row_threads, "_pool", row_threads._Pool())


def test_every_row_is_worked_on_once_and_no_more_threads_are_started_than_the_first_call_did(sixteen: None) -> None:
    begun = threading.active_count()
    for rows in (1, 15, 16, 1000):
        done = [0] * rows
        for _ in range(20):
            over_rows(rows, lambda part, done=done: done.__setitem__(part, [n + 1 for n in done[part]]))
        assert done == [20] * rows
    assert threading.active_count() - begun <= 15


def test_work_that_divides_its_rows_again_does_not_wait_for_itself(sixteen: None) -> None:
    done: list[int] = []
    over_rows(64, lambda part: over_rows(part.stop - part.start, lambda inner: done.append(inner.stop - inner.start)))
    assert sum(done) == 64


def test_few_rows_are_not_worth_a_thread(sixteen: None) -> None:
    parts: list[slice] = []
    over_rows(100, parts.append, least=50)
    assert len(parts) == 2
    over_rows(49, parts.append, least=50)
    assert parts[2:] == [slice(0, 49)]


def test_an_error_is_raised_when_all_threads_have_ended(sixteen: None) -> None:
    ended: list[int] = []

    def work(part: slice) -> None:
        if part.start in (0, 3):
            raise ValueError(part.start)
        ended.append(part.start)

    for _ in range(2):
        with pytest.raises(ValueError, match="0"):
            over_rows(16, work)
        assert len(ended) == 14
        ended.clear()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_starts_its_own_threads(sixteen: None) -> None:
    over_rows(16, lambda part: None)
    child = os.fork()
    if not child:
        done = [0] * 16
        over_rows(16, lambda part: done.__setitem__(part, [1]))
        os._exit(0 if sum(done) == 16 else 1)
    assert os.waitpid(child, 0)[1] == 0
