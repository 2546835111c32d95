"""The check for machines with a GPU, without one: it runs to its end, reports what fails, and keeps to its time."""

from __future__ import annotations

import io
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from tests.conftest import PATIENCE, ROOT
from tests.support import ptx
from tests.support.gpu import check
from tests.support.gpu.check import jobs, products, report, runner, small_check, timing, torchs
from tests.support.gpu.device import pretended_gpu

BARS = [
    *(f"{type} matvec, 8192x28672" for type in ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q2_K", "Q3_K", "Q5_K", "Q4_1")),
    "Q4_K matvec, 4096x14336", "Q4_K against torch's f16", "batch 4 against 1, the worst of 8 types",
    "decode, 8B Q4_K, batch 1", "16 and 64 tokens against dequantized weights",
]  # fmt: skip

EXTRA = "time/configurations/8192x28672/Q4_K/1"  # without a bar


def measured() -> dict[str, Any]:
    """Times of a GPU that reads 1e12 bytes a second, every bar met and hardly so."""
    found: dict[str, Any] = {"reading": {"bandwidth": 1e12}}
    for shape, nbytes in ((jobs.LARGE, 100_000_000), (jobs.SMALL, 25_000_000)):
        found[f"torch_product/{shape}"] = {"seconds": 3.01 * nbytes / 0.86e12}
        for type in jobs.TYPES:
            share = 0.61 if shape == jobs.SMALL else 0.86 if report.OF_READING.get(type) == 85 else 0.76
            seconds = nbytes / (share * 1e12)
            times = {"int8": seconds, "int8_4": 1.29 * seconds, "int8_8": 2 * seconds, "f32": seconds}
            found[f"product/{shape}/{type}"] = {"nbytes": nbytes} | times
    for type in jobs.TOKENS:
        found[f"tokens/{jobs.LARGE}/{type}"] = {
            "cores_16": 1e-4,
            "torch_16": 3e-4,
            "cores_64": 2e-4,
            "torch_64": 4.02e-4,
        }
    tokens = {"tokens_per_second": 122.0, "prompt_seconds": 1.0}
    found["decode"] = {"file": 5_000_000_000, "upload": 9.0, "step_seconds": 0.008, "greedy": tokens,
                       "sampled": tokens, "greedy, long prompt": tokens}  # fmt: skip
    found[f"decode/{jobs.MIXTURE}"] = found["decode"]
    return {f"time/{job}": result for job, result in found.items()}


def test_every_bar_is_a_row_and_is_met_where_the_times_say_so() -> None:
    table = report.rows(measured())
    assert [row.what for row in table if row.bar] == BARS
    assert {row.what: row.met for row in table if row.bar} == dict.fromkeys(BARS, True)
    assert table[0][:4] == ("Q4_K matvec, 8192x28672", ">= 85%", "86.0% of reading", True)
    assert [row.bar for row in table[4:12]] == [">= 75%"] * 4 + [">= 60%", ">= 3.0x", "<= 1.3x", ">= 60%"]
    assert [row.measured for row in table[8:12]] == ["61.0% of reading", "3.01x", "1.29x", "61.0% of bandwidth/size"]
    assert (table[12].bar, table[12].measured) == (">= 2.0x", "2.01x")
    assert {row.met for row in table if not row.bar} == {None}
    assert set(measured()) <= set(jobs.TIMES)


@pytest.mark.parametrize(
    ("job", "change", "missed"),
    [
        ("product/8192x28672/Q4_1", {"int8": 1e8 / 0.74e12, "int8_4": 1e8 / 0.74e12}, [BARS[7]]),
        ("product/4096x14336/Q4_K", {"int8": 25e6 / 0.59e12}, [BARS[8]]),
        ("torch_product/8192x28672", {"seconds": 2.99e8 / 0.86e12}, [BARS[9]]),
        ("product/8192x28672/Q2_K", {"int8_4": 1.31e8 / 0.76e12}, [BARS[10]]),
        ("decode", {"greedy": {"tokens_per_second": 119.0, "prompt_seconds": 1.0}}, [BARS[11]]),
        ("tokens/8192x28672/Q6_K", {"torch_16": 1.99e-4}, [BARS[12]]),
        ("tokens/8192x28672/Q8_0", None, [BARS[12]]),
        ("product/4096x14336/Q5_0", {"int8": 1.0}, []),  # no bar
        # what could not be measured
        ("reading", None, [*BARS[:9], BARS[11]]),
        ("product/8192x28672/Q4_K", None, [BARS[0], *BARS[9:11]]),
        ("decode", None, [BARS[11]]),
    ],
)
def test_a_bar_is_missed_by_what_is_slow_and_by_what_has_failed(job: str, change: Any, missed: list[str]) -> None:
    times = measured()
    times[f"time/{job}"] = {"failed": "exit code 1"} if change is None else times[f"time/{job}"] | change
    table = report.rows(times)
    assert [row.what for row in table if row.met is False] == missed
    assert [row.what for row in table if row.bar] == BARS
    assert sum(row.measured == "not measured" for row in table if row.bar) == (len(missed) if change is None else 0)


def test_jobs_of_bars_are_timed_first() -> None:
    times = measured()
    needed = [job for job in times if any(not row.met for row in report.rows(times | {job: {"failed": ""}}) if row.bar)]
    assert len(needed) == 15
    assert set(jobs.TIMES[: len(needed)]) == set(needed)


def test_both_shapes_of_a_feed_forward_layer_are_timed_as_prompts_and_are_in_the_table() -> None:
    times = {}
    for n, shape in enumerate(("14336x4096", "4096x14336"), 1):
        assert {f"time/prompt/{shape}/Q6_K", f"time/mma_int8/{shape}/Q2_K"} <= set(jobs.TIMES)
        times[f"time/prompt/{shape}/Q6_K"] = {"own_512": 1e-4, "float16_512": n * 1e-4, "bfloat16_512": 1e-4}
        times[f"time/mma_int8/{shape}/Q2_K"] = {"int8_16": n * 1e-5, "halves_16": 1.5e-5, "bfloat16_16": 1e-5}
    found = {row.what: row.measured for row in report.rows(times)}
    assert [found[f"prompts in Q6_K against torch's f16, {shape}"] for shape in jobs.MANY] == ["1.00x", "2.00x"]
    assert [found[f"Q2_K as int8 on tensor cores, {shape}"] for shape in jobs.MANY] == [
        "faster than halves for 16 tokens", "faster than halves for no tokens"
    ]  # fmt: skip


def test_numbers_of_tokens_for_which_int8_takes_less_time_are_in_the_table() -> None:
    found = {
        "int8_16": 1e-5, "halves_16": 2e-5, "bfloat16_16": 4e-5,
        "int8_512": 3e-5, "halves_512": 2e-5, "bfloat16_512": 1e-5,
    }  # fmt: skip
    table = report.rows({f"time/mma_int8/{jobs.OTHERS[-1]}/Q4_K": found})
    (row,) = [row for row in table if row.what == "Q4_K as int8 on tensor cores, 14336x4096"]
    assert row[1:4] == ("", "faster than halves for 16 tokens", None)
    assert row.detail == "16 tokens 10 us, halves 20, torch bf16 40; 512 tokens 30 us, halves 20, torch bf16 10"


# what a process does with the jobs "dies", "hangs", "right" and others; two cases come first in "dies, wrong" and
# "hangs, wrong"
PROCESS = """
import os, sys, time
for job in map(str.strip, sys.stdin):
    print("a library says something", end="")
    if job.endswith("wrong"):
        print('\\nCASE ""\\nlibrary\\nCASE "y: error 1"', flush=True)
    if job in ("dies", "dies, wrong"):
        sys.exit("Traceback\\nCudaError: an illegal address")
    if job.startswith("hangs"):
        print("a warning", file=sys.stderr, flush=True)
        time.sleep(600)
    result = '{"wrong": []}' if job == "right" else f'{{"seconds": 1, "process": {os.getpid()}}}'
    print(f'\\nRESULT ["{job}", {result}]', flush=True)
"""
# a job that fails as jobs do
FAILS = """
import sys
sys.path.insert(0, "scripts")
from gpu_checks import runner
def known(job):
    runner.case()
    try:
        raise KeyError("a handle")
    except KeyError:
        raise RuntimeError("CUDA error: " + "no kernel image " * 200)
runner.work(known)
"""


def ignored(job: str, result: Any) -> None:
    pass


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are ample, and those of "hangs/..." short."""
    monkeypatch.setattr(runner, "COMMAND", [sys.executable, "-c", PROCESS])
    monkeypatch.setattr(runner, "_SHORTEST", 0.0)
    monkeypatch.setattr(runner, "FIRST_LIMIT", PATIENCE)
    monkeypatch.setattr(runner, "LIMIT", PATIENCE)
    monkeypatch.setattr(runner, "LIMITS", {f"hangs/{n}": 0.2 for n in range(4)})


@pytest.mark.usefixtures("processes")
def test_a_process_that_dies_takes_one_job_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    found = runner.in_turn(["one", "dies", "two"], time.monotonic() + PATIENCE, lambda job, result: shown.append(job))
    assert shown == ["one", "dies", "two"]
    assert found["one"]["process"] != found["two"]["process"]
    assert found["dies"]["failed"] == "exit code 1: Traceback CudaError: an illegal address"
    monkeypatch.setattr(runner, "PROCESSES", 2)
    many = ["dies", *map(str, range(20)), "dies too"]
    found = runner.at_once(many, time.monotonic() + PATIENCE, lambda job, result: shown.append(job))
    assert list(found) == many
    assert sorted(shown[3:]) == sorted(many)
    assert [job for job, result in found.items() if "seconds" not in result] == ["dies"]
    assert "illegal address" in found["dies"]["failed"]


@pytest.mark.usefixtures("processes")
def test_no_time_cuts_a_job_and_leaves_the_rest_unbegun() -> None:
    found = runner.in_turn(["hangs", "two"], time.monotonic() + 1, ignored)
    assert found == {"hangs": {"late": runner.CUT}, "two": {"late": runner.LATE}}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("run", [runner.in_turn, runner.at_once])
def test_a_job_at_its_limit_is_killed_and_a_new_process_goes_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PROCESSES", 1)
    monkeypatch.setattr(runner, "LIMIT", 0.5)
    found = run(["one", "hangs", "two"], time.monotonic() + PATIENCE, ignored)
    first, second = found["one"]["process"], found["two"]["process"]
    assert first != second
    assert found["hangs"] == {"failed": "not finished within 0.5 s", "limit": 0.5, "stderr": "a warning\n"}
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert report.shown("hangs", found["hangs"]).endswith(" FAILED not finished within 0.5 s")


@pytest.mark.usefixtures("processes")
def test_a_processs_first_job_and_those_of_the_table_have_limits_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FIRST_LIMIT", 0.3)
    found = runner.in_turn(["hangs", "hangs/1/Q4_K"], time.monotonic() + PATIENCE, ignored)
    assert [result["limit"] for result in found.values()] == [0.3, 0.2]


def test_limits_are_those_of_jobs_that_exist() -> None:
    assert runner.FIRST_LIMIT > runner.LIMIT
    assert set(runner.LIMITS) <= {"/".join(job.split("/")[:2]) for job in (*jobs.CORRECT, *jobs.TIMES)}
    assert runner._limit("time/decode/Q4_K_M", False) == runner.LIMITS["time/decode"]


@pytest.mark.usefixtures("processes")
def test_after_three_limits_in_a_row_one_product_decides_whether_the_rest_is_run() -> None:
    shown: list[str] = []
    wanted = ["hangs/1", "hangs/2", "hangs/3", "one", "two"]
    for probe, expected in (("right", {"seconds": 1}), ("hangs/1", {"late": runner.HANGS})):
        found = runner.in_turn(
            wanted, time.monotonic() + PATIENCE, lambda job, result: shown.append(job), runner._unheard, probe
        )
        assert found["one"].items() >= expected.items() <= found["two"].items()
        assert list(found) == wanted
    assert shown == [*wanted[:3], "right, again", *wanted[3:], *wanted[:3], "hangs/1, again", *wanted[3:]]
    shown.clear()
    between = ["hangs/1", "hangs/2", "one", "hangs/3"]
    found = runner.in_turn(
        [*between, "two"], time.monotonic() + PATIENCE, lambda job, result: shown.append(job), runner._unheard, "right"
    )
    assert shown == [*between, "two"]


class Lines:
    """A process's lines, each the given number of seconds after the one before."""

    def __init__(self, *lines: tuple[float, str]) -> None:
        self.lines, self.now = list(lines), 0.0

    def get(self, timeout: float) -> str:
        after, line = self.lines[0]
        self.now += min(after, timeout)
        if after > timeout:
            raise queue.Empty
        del self.lines[0]
        return line


@pytest.mark.parametrize(
    ("limit", "until", "end"),
    [
        (4, 100, {"failed": "not finished within 4 s of its last case", "limit": 4}),
        (4, 12.5, {"late": runner.CUT}),
        (8, 100, {"seconds": 1}),
    ],
)
def test_each_case_begins_the_limit_anew_and_cases_are_reported(
    limit: float, until: float, end: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Lines((3, 'CASE ""\n'), (3, 'CASE "y: error 1"\n'), (3, 'CASE ""\n'), (7, 'RESULT ["a", {"seconds": 1}]\n'))
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: lines.now))
    heard: list[Any] = []
    process: Any = SimpleNamespace(stdin=io.StringIO())
    found = runner._result(process, lines, "a", limit, until, lambda *case: heard.append(case))  # type: ignore[arg-type]
    assert process.stdin.getvalue() == "a\n"
    assert found == (end if "seconds" in end else end | {"cases": 3, "wrong": ["y: error 1"]})
    assert heard == [("a", 1, ""), ("a", 2, "y: error 1"), ("a", 3, "")]
    if "late" in found:
        line = "no result: time was up before its end, after 3 cases; y: error 1"
        assert report.shown("a", found).endswith(line)


@pytest.mark.usefixtures("processes")
def test_cases_before_a_process_died_are_reported() -> None:
    found = runner.in_turn(["dies, wrong"], time.monotonic() + PATIENCE, ignored)["dies, wrong"]
    assert "illegal address" in found["failed"]
    assert (found["cases"], found["wrong"]) == (2, ["y: error 1"])


@pytest.mark.usefixtures("processes")
def test_an_exception_is_named_first_and_its_traceback_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "COMMAND", [sys.executable, "-c", FAILS])
    found = runner.in_turn(["a", "b"], time.monotonic() + PATIENCE, ignored)
    for result in found.values():  # each in a process of its own
        assert result["failed"].startswith("RuntimeError: CUDA error: no kernel image ")
        assert len(result["failed"]) == 1500
        assert result["cases"] == 1
        assert result["stderr"].startswith("Traceback (most recent call last):")
        assert "KeyError: 'a handle'" in result["stderr"]


@pytest.mark.usefixtures("processes")
def test_errors_that_compute_sanitizer_finds_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a program of that name, which finds one where the job is "two"."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        '#!/bin/sh\nread job\nshift\necho "$job" | "$@" || exit\n'
        '[ "$job" != two ] || { echo "===== Invalid read"; exit 9; }\n'
    )
    tool.chmod(0o755)
    found: dict[str, Any] = {}
    runner.sanitized(["one"], time.monotonic() + PATIENCE, found.__setitem__)
    assert not found  # it is not installed
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    runner.sanitized(["one", "two", "dies"], time.monotonic() + PATIENCE, found.__setitem__)
    assert found["one"]["seconds"] == 1
    assert found["two"] == {"failed": "exit code 9: Invalid read"}
    assert "illegal address" in found["dies"]["failed"]
    monkeypatch.setattr(runner, "COMMAND", [sys.executable, "-c", FAILS])
    runner.sanitized(["fails"], time.monotonic() + PATIENCE, found.__setitem__)
    assert found["fails"]["failed"].startswith("exit code 1: RuntimeError: CUDA error: no kernel image ")
    runner.sanitized(["late"], time.monotonic(), found.__setitem__)
    assert found["late"] == {"late": runner.LATE}


@pytest.mark.parametrize("hangs", [True, False])
def test_compute_sanitizer_comes_last_and_gets_the_time_that_is_left(
    hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    until: list[float] = []

    def noted(wanted: Any, end: float, *_: Any) -> dict[str, Any]:
        until.append(end)
        return {name: {"late": runner.HANGS} if name == "time/reading" and hangs else {"wrong": []} for name in wanted}

    monkeypatch.setattr(check.gpu_check, "missing", lambda: None)
    monkeypatch.setattr(check.gpu_check, "machine", lambda: "a GPU")
    monkeypatch.setattr(runner, "at_once", lambda *_: {jobs.FIRST: {"wrong": []}})
    monkeypatch.setattr(runner, "in_turn", noted)
    monkeypatch.setattr(runner, "sanitizer", lambda: "/a/compute-sanitizer")
    monkeypatch.setattr(runner, "sanitized", noted)
    monkeypatch.setattr(jobs, "TIMES", ["time/reading"])
    ran(tmp_path)
    assert until == [until[0]] * (1 if hangs else 2)


def ran(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    code = check.main(["--json", str(tmp_path / "out.json"), *options])
    return code, json.loads((tmp_path / "out.json").read_text())


@pytest.mark.exhaustive  # the tests below run it with some of its jobs
def test_all_of_it_runs_and_ends_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # bars that a clock on the CPU meets
    monkeypatch.setattr(report, "OF_READING", dict.fromkeys(report.OF_READING, 0))
    for bar, easy in (
        ("OF_READING_SMALL", 0),
        ("TIMES_TORCH", 0.0),
        ("BATCH_4", 1e9),
        ("OF_DECODE", 0),
        ("TIMES_DEQUANTIZED", 0.0),
    ):
        monkeypatch.setattr(report, bar, easy)
    with small_check():
        code, found = ran(tmp_path, "--seconds", "inf")
        assert list(found["times"]) == jobs.TIMES
    assert found["wrong"] == []
    assert code == 0
    assert list(found["correctness"]) == jobs.CORRECT
    assert len(jobs.CORRECT) == 5 + len(products.TRIED) + 2 * 14 + 11 + 5 + 6 + 7
    assert "4 of 4 greedy tokens are the CPU's" in found["correctness"]["correct/model"]["notes"]
    assert all(result["wrong"] == [] for result in found["correctness"].values())
    assert found["times"]["time/product/8x512/Q4_K"].keys() == {"nbytes", "int8", "int8_4", "int8_8", "f32"}
    assert len(found["times"]["time/configurations/8x512/Q6_K/4"]["tried"]) == 2
    assert found["times"]["time/decode"]["file"] > 0
    assert found["times"]["time/tokens/8x512/Q8_0"].keys() == {"cores_16", "torch_16", "cores_64", "torch_64"}
    ways = {f"{way}_{n}" for way in ("int8", "halves", "bfloat16") for n in (9, 65)}
    assert found["times"]["time/mma_int8/6x256/Q2_K"].keys() == ways
    assert len([row for row in found["table"] if row["bar"]]) == 13
    assert all(row["met"] in (True, None) and row["measured"] != "not measured" for row in found["table"])
    printed = capsys.readouterr().out.split("\n| what | bar | measured | met | in detail |\n")
    assert len(printed) == 2
    assert printed[1].count("\n| ") == len(found["table"])
    assert f"{len(jobs.CORRECT)} of {len(jobs.CORRECT)} right." in printed[0]


def test_what_is_wrong_or_fails_is_reported_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(shape: str) -> dict[str, Any]:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setitem(jobs._KNOWN["time"], "torch_product", broken)
    with small_check() as computed:
        kept = ("correct/products/Q6_K/f32", "correct/products/Q4_0/int8", "correct/configurations/Q6_K",
                "correct/tokens/Q6_K", "correct/mma_int8/Q6_K")  # fmt: skip
        monkeypatch.setattr(jobs, "CORRECT", list(kept))
        monkeypatch.setattr(jobs, "TIMES", [job for job in jobs.TIMES if "/8x512" in job or "reading" in job][:5])
        computed.wrong = {"Q6_K"}
        code, found = ran(tmp_path)
    assert code == 1
    assert found["correctness"]["correct/products/Q4_0/int8"]["wrong"] == []
    assert len(found["correctness"]["correct/products/Q6_K/f32"]["wrong"]) > 5
    assert any(line.startswith("Q6_K, 4 columns, MatvecShape(") for line in found["wrong"])
    assert len(found["correctness"]["correct/tokens/Q6_K"]["wrong"]) == 5
    assert len(found["correctness"]["correct/mma_int8/Q6_K"]["wrong"]) == 1 + 5 + 2
    assert "time/torch_product/8x512: RuntimeError: CUDA error: out of memory" in found["wrong"]
    assert "failed" not in found["times"]["time/product/8x512/Q4_K"]
    out = capsys.readouterr().out
    assert "FAILED time/torch_product/8x512: RuntimeError" in out
    assert "| Q4_K against torch's f16 | >= 3.0x | not measured | no | 8x512 |" in out
    assert "1 of 5 right." in out


def test_nothing_is_tried_where_not_even_one_product_works_and_the_json_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_check() as computed:
        computed.wrong = {"Q4_0"}
        code, found = ran(tmp_path)
    assert code == 1
    assert list(found["correctness"]) == [jobs.FIRST]
    assert "one product: error" in found["correctness"][jobs.FIRST]["wrong"][0]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no more is checked, as not even one product works: one product: error ")


@pytest.mark.usefixtures("processes")
def test_where_the_first_product_fails_all_that_its_process_said_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "COMMAND", [sys.executable, "-c", FAILS])
    monkeypatch.setattr(check.gpu_check, "missing", lambda: None)
    monkeypatch.setattr(check.gpu_check, "machine", lambda: "a GPU")
    code, found = ran(tmp_path)
    assert code == 1
    assert list(found["correctness"]) == [jobs.FIRST]
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"correct/one +FAILED RuntimeError: CUDA error: no kernel image ", lines[1])
    assert lines[2] == "Traceback (most recent call last):"
    assert "KeyError: 'a handle'" in lines
    assert lines[-1].startswith("no more is checked, as not even one product works: RuntimeError: CUDA error: no ")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("first", "options"), [("right", ()), ("dies", ()), ("dies", ("--anyway",))])
def test_a_check_of_each_kind_is_tried_beside_the_first_product_and_not_again(
    first: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(check.gpu_check, "missing", lambda: None)
    monkeypatch.setattr(check.gpu_check, "machine", lambda: "a GPU")
    for name, value in (("FIRST", first), ("EARLY", ["dies, wrong", "two"]), ("TIMES", []), ("SANITIZED", [])):
        monkeypatch.setattr(jobs, name, value)
    monkeypatch.setattr(jobs, "CORRECT", ["three", "two", "dies, wrong"])
    code, found = ran(tmp_path, *options)
    begun = [line["job"] for line in known(tmp_path / "gpu_check.jsonl") if "result" in line]
    out = capsys.readouterr().out
    assert code == 1
    assert "y: error 1" in out
    if first == "dies" and not options:
        assert sorted(begun) == ["dies", "dies, wrong", "two"]
        assert "no more is checked, as not even one product works: exit code 1: Traceback" in out
    else:
        assert (sorted(begun), begun[-1]) == (sorted(["dies, wrong", first, "three", "two"]), "three")
        assert set(found["correctness"]) == {"three", "two", "dies, wrong"}


@pytest.mark.usefixtures("processes")
def test_what_went_well_in_an_earlier_run_on_such_a_machine_is_kept_and_the_rest_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check.gpu_check, "missing", lambda: None)
    monkeypatch.setattr(check.gpu_check, "machine", lambda: "a GPU")
    for name, value in (("FIRST", "right"), ("EARLY", []), ("TIMES", ["time", "late"]), ("SANITIZED", ["one"])):
        monkeypatch.setattr(jobs, name, value)
    monkeypatch.setattr(jobs, "CORRECT", ["one", "wrong before", "failed before"])
    sanitized: list[str] = []
    monkeypatch.setattr(runner, "sanitized", lambda names, until, show: sanitized.extend(names))
    results = {"one": {"wrong": []}, "wrong before": {"wrong": ["x: error 1"]}, "failed before": {"failed": "why"},
               "time": {"seconds": 2}, "late": {"late": runner.LATE}, "sanitized one": {"wrong": []}}  # fmt: skip
    said: list[dict[str, Any]] = [{"machine": "a GPU"}, {"job": "one", "cases": 1}]
    said += [{"job": job, "result": result} for job, result in results.items()]
    for on, kept in (("a GPU", {"one", "time", "sanitized one"}), ("another GPU", set())):
        said[0]["machine"] = on
        sanitized.clear()
        before = tmp_path / "before.jsonl"
        before.write_text("".join(f"{json.dumps(line)}\n" for line in said))
        (tmp_path / "gpu_check.jsonl").unlink(missing_ok=True)
        _, found = ran(tmp_path, "--after", str(before))
        begun = {line["job"] for line in known(tmp_path / "gpu_check.jsonl") if "result" in line}
        assert begun == {"right", *results} - kept - {"sanitized one"}
        assert sanitized == ([] if kept else ["one"])
        everything = found["correctness"] | found["times"] | found["sanitized"]
        assert set(everything) | {"sanitized one"} == set(results)
        assert all(everything[job] == results[job] for job in kept)
    before.write_text("no lines of a run")
    capsys.readouterr()
    assert check.main(["--after", str(before)]) == 2
    assert capsys.readouterr().err.startswith(f"no check: --after {before}: Expecting value")


# the whole check, of two jobs of PROCESS
CHECK = """
import sys, time
from pathlib import Path
from tests.support.gpu.check import gpu_check, jobs, runner
runner.COMMAND = [sys.executable, "-c", sys.argv[1]]
jobs.FIRST, jobs.CORRECT, jobs.TIMES = "right", ["one", "hangs, wrong"], []
gpu_check.machine = lambda: "a GPU"
gpu_check.check(Path(sys.argv[2]), time.monotonic(), 600)
"""


def known(path: Path) -> list[dict[str, Any]]:
    """The lines of gpu_check.jsonl, without their times."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("seconds") >= 0 for line in lines)
    return lines


def test_what_was_known_when_all_was_killed_is_in_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "gpu_check.jsonl"
    command = [sys.executable, "-c", CHECK, PROCESS, str(tmp_path / "out.json")]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL) as started:
        end = time.monotonic() + PATIENCE
        while not (path.exists() and "y: error 1" in path.read_text() and '"one"' in path.read_text()):
            assert time.monotonic() < end
            assert started.poll() is None
            time.sleep(0.1)
        os.killpg(started.pid, signal.SIGKILL)
    machine, *lines = known(path)
    assert machine == {"machine": "a GPU"}
    assert lines[0] == {"job": "right", "result": {"wrong": []}}
    assert [line["result"]["seconds"] for line in lines if line["job"] == "one"] == [1]
    assert [line for line in lines if line["job"] == "hangs, wrong"] == [
        {"job": "hangs, wrong", "cases": 1},
        {"job": "hangs, wrong", "cases": 2, "wrong": "y: error 1"},
    ]
    assert json.loads((tmp_path / "out.json").read_text())["machine"] == "a GPU"


def test_both_files_are_written_to_out_or_beside_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check.gpu_check, "missing", lambda: None)
    monkeypatch.setattr(check.gpu_check, "machine", lambda: "a GPU")
    names = [("out", "gpu_check.json"), ("named", "mine.json"), (".", "gpu_check.json")]
    for folder, _ in names:
        (tmp_path / folder).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    for options in ([], [], ["--json", "named/mine.json"]):
        assert check.main(["--seconds", "0", *options]) == 1
    monkeypatch.delenv("OUT")
    assert check.main(["--seconds", "0"]) == 1
    for folder, name in names:
        assert {path.name for path in (tmp_path / folder).glob("*.json*")} == {name, "gpu_check.jsonl"}
    lines = known(tmp_path / "out" / "gpu_check.jsonl")
    each = [{"machine": "a GPU"}]
    each += [{"job": job, "result": {"late": runner.LATE}} for job in (jobs.FIRST, *jobs.CORRECT, *jobs.TIMES)]
    assert [line for line in lines if not line.get("job", "").startswith("sanitized")] == each * 2  # runs are appended


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check.gpu_check, "missing", lambda: None)
    monkeypatch.setattr(check.gpu_check, "machine", lambda: "a GPU")
    (tmp_path / "gpu_check.jsonl").symlink_to("/dev/full")
    assert ran(tmp_path, "--seconds", "0")[1]["not_run"][0] == jobs.CORRECT[0]
    said = capsys.readouterr()
    assert f"{tmp_path}/gpu_check.jsonl: cannot be written (No space left on device)\n" in said.err
    assert "| what | bar | measured | met | in detail |" in said.out


def test_each_job_is_in_the_lines_of_json_as_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(job: str) -> Any:
        if job == "second":
            raise KeyboardInterrupt
        return {"wrong": [], "notes": "fine"}

    monkeypatch.setattr(jobs, "run", killed)
    monkeypatch.setattr(jobs, "CORRECT", ["first", "second"])
    with small_check(), pytest.raises(KeyboardInterrupt):
        check.main(["--json", str(tmp_path / "out.json")])
    fine = [{"job": job, "result": {"wrong": [], "notes": "fine"}} for job in (jobs.FIRST, "first")]
    assert known(tmp_path / "gpu_check.jsonl")[1:] == fine


def test_wrong_products_of_modules_and_of_trellis_codes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.runtime import QuantTensor

    multiply = QuantTensor.multiply

    def multiplied_wrongly(tensor: Any, x: Any, y: Any, *options: Any) -> None:
        multiply(tensor, x, y, *options)
        y *= 1.03

    with small_check() as computed:
        computed.wrong = {"mcg"}
        assert jobs.run("correct/trellis/3inst")["wrong"] == []
        wrong = jobs.run("correct/trellis/mcg")["wrong"]
        assert {line.partition(":")[0] for line in wrong} >= {
            f"mcg, {k} bits, {n} tokens" for k in (1, 3) for n in (1, 9)
        }
        monkeypatch.setattr(QuantTensor, "multiply", multiplied_wrongly)
        wrong = jobs.run("correct/linears/Q8_0")["wrong"]
    assert len([line for line in wrong if ", compiled:" in line]) == 2 * 3
    assert not any("gradient" in line for line in wrong)


@pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))
def test_layers_of_experts_are_checked_at_once_captured_and_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_checks import experts

    exact = experts.Layer.exact
    for name, value in (("CHECKED", (3, 64, 32)), ("USED", 2), ("TOKENS", (1, 2))):
        monkeypatch.setattr(experts, name, value)
    with pretended_gpu(graphs=True) as launches:
        assert experts.check("Q4_0")["wrong"] == []
        assert sum("silu_chosen" in name for name in launches.names) == 2 + 1 + 2
        monkeypatch.setattr(experts.Layer, "exact", lambda *given: 1.1 * exact(*given))
        wrong = experts.check("Q4_0")["wrong"]
    assert len(wrong) == 2 * 2 + 2


def test_a_model_is_compared_with_the_cpus_in_prompts_and_in_steps() -> None:
    """Prompts are products and torch's work, and right here; steps have kernels of their own, which do nothing."""
    with small_check(right=False):
        found = jobs.run("correct/model")
    assert [line.partition(": error")[0] for line in found["wrong"]] == [
        "model, f32, tokens after it", "model, int8, tokens after it"
    ]  # fmt: skip


def test_launches_that_overlap_and_make_other_tokens_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(decoder: Any) -> None:
        draw = decoder._decoder.draw
        decoder._decoder.draw = lambda *given, **options: (token + 1 for token in draw(*given, **options))

    monkeypatch.setattr(check.Stepped, "build", build)
    monkeypatch.setattr(check.model, "LIMITS", {"f32": 1e-3})
    with small_check():
        found = jobs.run("correct/model")
    assert len(found["wrong"]) == 2 * len(check.model.WAYS)
    assert all("launches that overlap make other tokens" in line for line in found["wrong"])


def test_without_time_nothing_is_begun_and_the_table_is_printed_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "run", lambda job: pytest.fail(job))
    with small_check():
        code, found = ran(tmp_path, "--seconds", "0")
        everything = found["correctness"] | found["times"]
        assert list(everything) == [*jobs.CORRECT, *jobs.TIMES]
    assert code == 1
    assert all(result == {"late": runner.LATE} for result in everything.values())
    assert found["wrong"] == []
    assert found["not_run"] == list(everything)
    assert [row["measured"] for row in found["table"]] == ["not run"] * len(found["table"])
    out = capsys.readouterr().out
    assert out.count("| not run |  |") == len(found["table"])
    assert f"0 of {len(jobs.CORRECT)} right.\nNo result, as no time was left: correct/mmvq, " in out
    assert "FAILED" not in out


@pytest.mark.parametrize(("job", "code"), [(EXTRA, 0), ("time/decode", 1), (None, 1)])
def test_what_was_not_run_is_no_failure_and_counts_where_it_has_a_bar_or_is_a_check(
    job: str | None, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: a check."""
    times = measured() | {EXTRA: {"tried": [[[2, 1, 1, 4], 1.0]]}}
    checks = {name: {"wrong": [], "notes": ""} for name in ("correct/model", "correct/products/Q4_K/int8")}
    late = job or "correct/model"
    for results in (times, checks):
        if late in results:
            results[late] = {"late": runner.LATE}
    monkeypatch.setattr(check.gpu_check, "missing", lambda: None)
    monkeypatch.setattr(check.gpu_check, "machine", lambda: "a GPU")
    first = {jobs.FIRST: {"wrong": [], "notes": ""}}
    monkeypatch.setattr(runner, "at_once", lambda wanted, *_: first if wanted == [jobs.FIRST] else checks)
    monkeypatch.setattr(runner, "in_turn", lambda *_: times)
    found_code, found = ran(tmp_path)
    assert (found_code, found["wrong"], found["not_run"]) == (code, [], [late])
    assert {row["met"] for row in found["table"] if row["bar"]} == ({True, None} if job == "time/decode" else {True})
    out = capsys.readouterr().out
    assert f"{2 - (job is None)} of 2 right.\nNo result, as no time was left: {late}." in out


def test_a_file_that_cannot_be_written_is_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "run", lambda job: pytest.fail(job))
    with small_check():
        (tmp_path / "file").touch()
        assert check.main(["--json", str(tmp_path / "file" / "out.json")]) == 2
        assert capsys.readouterr().err.startswith(f"no check: {tmp_path}/file/out.json: cannot be written (")
        assert check.main(["--json", os.devnull]) == 2
        assert capsys.readouterr().err.startswith(f"no check: {os.devnull}: is not a regular file; ")
        (tmp_path / "gpu_check.jsonl").mkdir()
        assert check.main(["--json", str(tmp_path / "out.json")]) == 2


@pytest.mark.parametrize("count", [0, 2])
def test_carried_kernels_are_counted_and_what_is_missing_does_not_end_the_check(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(check.gpu_check, "check", lambda *given: ran.append(given) or 0)
    monkeypatch.setenv("BRIDGE_KERNELS", "set by the script")
    for number in range(count):
        (tmp_path / "9.0").mkdir(exist_ok=True)
        (tmp_path / "9.0" / f"digest{number}").touch()
    with small_check():
        assert check.main(["--kernels", str(tmp_path)]) == 0
    assert ran
    said = f"{tmp_path}: {count} kernels for compute capability 9.0; others are compiled here\n"
    assert capsys.readouterr().out == said


def test_what_is_not_installed_or_cannot_be_used_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridge.cuda.toolchain import device as devices

    with small_check(), monkeypatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        assert check.main([]) == 2
    assert re.fullmatch(r"no check: torch \S+ cannot use the GPU\n", capsys.readouterr().err)
    monkeypatch.setattr(devices, "available", lambda: "the NVIDIA driver sees no GPU")
    assert check.main([]) == 2
    assert capsys.readouterr().err == "no check: device 'cuda': the NVIDIA driver sees no GPU\n"
    monkeypatch.setitem(sys.modules, "bridge.runtime.model", None)
    assert check.main([]) == 2
    assert capsys.readouterr().err == "no check: bridge.runtime.model is missing\n"


def test_bench_times_a_type_or_the_matrices_of_a_file_on_a_gpu(tmp_path: Path) -> None:
    from bridge.errors import BridgeError
    from bridge.runtime.bench import bench
    from tests.support.tiny_gguf import write_decoder

    path = write_decoder(tmp_path / "tiny.gguf", types={"": "Q8_0", "output": "F16"})
    with small_check():
        for what, shape, expected in (("q4_0", (8, 96), "Q4_0  8x96 "), (path, None, "Q8_0  64x32 ")):
            title, line = bench(what, shape=shape, device="cuda")
            assert title == "pretended, cuda:0"
            assert str(line).startswith(expected)
            assert re.search(r" \d+\.\d us +\d+\.\d GB/s, +\d+% of reading \(\d+\.\d GB/s\)$", str(line))
        with pytest.raises(BridgeError, match=r"Q9_K: is neither a GGUF file nor a type \(Q"):
            bench("Q9_K", device="cuda")


def test_times_are_of_as_many_launches_as_the_module_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """carried.py lowers the number; with that of a GPU it would multiply on the CPU for hours."""
    from bridge.cuda import bench

    launched: list[int] = []
    with small_check():
        monkeypatch.setattr(bench, "LAUNCHES", 3)
        bench.seconds_from_memory(lambda i: lambda: launched.append(i), 1 << 40)
    assert launched == [0, 1, 0] * 2  # once before they are captured


def test_shapes_and_model_are_those_of_the_bars() -> None:
    from bridge.cuda import bench

    assert (timing.shape_of(jobs.LARGE), timing.shape_of(jobs.SMALL)) == (bench.LARGE, bench.SMALL)
    file = timing.SyntheticFile
    layer = file.HIDDEN * (2 * file.HIDDEN + 2 * file.HIDDEN // file.HEADS * file.KV_HEADS + 3 * file.INNER)
    weights = file.LAYERS * layer + 2 * file.VOCAB * file.HIDDEN
    assert weights == pytest.approx(8.03e9, rel=1e-3)


@pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))
@pytest.mark.parametrize("job", ["attention", "layers", pytest.param("graphs", marks=pytest.mark.exhaustive)])
def test_jobs_whose_kernels_run_here_are_right_and_wrong_where_kernels_do_nothing(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the machine of tests/support/gpu, which computes: captured products, and attention over two tiles."""
    import torch
    from bridge.cuda.toolchain.launch import Kernel
    from gpu_checks import contexts

    monkeypatch.setattr(torchs, "SHAPE", (6, 256))
    monkeypatch.setattr(torchs, "TOKENS", (1,))
    for name, value in (("HEADS", 2), ("KV_HEADS", 1), ("HEAD_DIM", 32), ("LENGTHS", (128,))):
        monkeypatch.setattr(contexts, name, value)
    small = contexts.config(2, 1, 32, "w-", window=30, score_cap=3.0)
    for name, value in (("CONTEXT", 100), ("TOKENS", 3), ("MODELS", {"a cap": small})):
        monkeypatch.setattr(contexts, name, value)
    checks: dict[str, Any] = {
        "graphs": torchs.check_graphs,
        "attention": lambda: contexts.check("q8_0"),
        "layers": lambda: contexts.check_layers("f16"),
    }
    run, empty = checks[job], torch.empty

    def poisoned(*size: Any, **options: Any) -> Any:
        """Memory in which no results of the run before are left."""
        memory = empty(*size, **options)
        return memory.fill_(math.nan) if memory.is_floating_point() else memory

    with pretended_gpu(multiprocessors=2, graphs=True):
        assert run()["wrong"] == []
        monkeypatch.setattr(Kernel, "run", lambda *given: None)
        monkeypatch.setattr(torch, "empty", poisoned)
        assert len(run()["wrong"]) == {"graphs": 5, "attention": 4, "layers": 4}[job]


def test_kernels_that_jobs_launch_are_found_without_a_gpu_and_can_be_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridge.cuda.toolchain import compiler

    from tests.support.gpu import carried

    for name, value in (("SHAPES", [(3, 512)]), ("SMALL_BLOCKS", []), ("COLUMNS", (1, 5)), ("EPILOGUES", (10, 256))):
        monkeypatch.setattr(products, name, value)
    found, early = carried.kernels(["correct/one", "correct/products/Q6_K/int8", "time/launches"], (8, 9))
    assert not early
    names = {kernel.name for kernel in found}
    assert {"_product_Q4_0_1_f32_2_1_1_4", "_quantize_bf16_int8", "_product_Q6_K_8_int8_2_1_1_4"} <= names
    assert not any("Q4_K" in name for name in names)  # what has no kernels to check is left out
    if ptx.unavailable() is not None:
        return
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("BRIDGE_KERNELS", "set by compile_into")
    monkeypatch.setattr(carried, "kernels", lambda *given: (found[:1], []))
    folder = tmp_path / "carried"
    line, wrong = carried.compile_into(folder, (8, 9), ["correct/one"])
    assert re.fullmatch(rf"1 of 1 kernels for 8\.9, 0\.\d MB, in {folder}", line)
    assert not wrong
    found[0].codes.clear()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "another"))
    assert compiler.known(found[0], (8, 9)) is not None  # from the folder
    assert compiler.known(found[0], (9, 0)) is None or (9, 0) in found[0].codes


def test_what_cannot_be_carried_is_said_with_the_first_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridge.cuda.norm import activation_kernel
    from bridge.cuda.toolchain import compiler

    from tests.support.gpu import carried

    def refuse(*given: Any) -> Any:
        raise AttributeError("module 'numpy' has no attribute 'row_stack'")

    def ends(job: str) -> Any:
        raise RuntimeError("no GPU")

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("BRIDGE_KERNELS", "set by compile_into")
    monkeypatch.setattr("sys.argv", ["carried", "8.9", str(tmp_path / "carried")])
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "ptx_of", refuse)
        patch.setattr(carried, "kernels", lambda *given: ([activation_kernel(False)], []))
        activation_kernel(False).codes.clear()
        assert carried.main() == 1
    out, err = capsys.readouterr()
    assert out.startswith("0 of 1 kernels for 8.9, 0.0 MB")
    assert "1 failed, the first: AttributeError: module 'numpy' has no attribute 'row_stack' (compiling _activ" in err
    monkeypatch.setattr(carried.jobs, "run", ends)
    assert carried.kernels(["correct/one"], (8, 9)) == ([], ["correct/one ended early: RuntimeError: no GPU"])


def test_what_compiles_llama_cpps_product_names_its_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_checks import mmvq

    monkeypatch.delenv("LLAMA_CPP", raising=False)
    assert mmvq.check() == {"wrong": [], "notes": "no checkout of llama.cpp was given (--llama-cpp)"}
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    assert mmvq.available() == f"{tmp_path} has no ggml/src/ggml-cuda/mmvq.cu"
    assert mmvq.time((4, 256), "Q4_K") is None
    source = tmp_path / "ggml" / "src" / "ggml-cuda" / "mmvq.cu"
    source.parent.mkdir(parents=True)
    source.touch()
    monkeypatch.setenv("PATH", "/nowhere")
    assert mmvq.available() == "nvcc is not installed"
    line = mmvq.command((9, 0), tmp_path / "out.so")
    assert {"-arch=sm_90", f"-I{source.parent}", str(tmp_path / "out.so")} <= {*line}
    assert Path(line[-1]).is_file()


def test_a_mixture_is_llama_cpps() -> None:
    with small_check():
        types = {name: tensor.type for name, tensor in timing.SyntheticFile("Q4_K_M").tensors.items()}
    assert types["output.weight"] == types["blk.1.attn_v.weight"] == "Q6_K"
    assert types["blk.0.attn_v.weight"] == types["blk.1.attn_q.weight"] == types["token_embd.weight"] == "Q4_K"
