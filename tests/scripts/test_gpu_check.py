"""The check for machines with a GPU, without one: it runs to its end, reports what fails, and keeps to its time."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from tests.conftest import PATIENCE
from tests.support import ptx
from tests.support.gpu import check
from tests.support.gpu.check import contexts, jobs, products, report, runner, small_check, timing, torchs
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


def test_numbers_of_tokens_for_which_int8_takes_less_time_are_in_the_table() -> None:
    found = {
        "int8_16": 1e-5, "halves_16": 2e-5, "bfloat16_16": 4e-5,
        "int8_512": 3e-5, "halves_512": 2e-5, "bfloat16_512": 1e-5,
    }  # fmt: skip
    table = report.rows({f"time/mma_int8/{jobs.OTHERS[-1]}/Q4_K": found})
    (row,) = [row for row in table if row.what == "Q4_K as int8 on tensor cores, 14336x4096"]
    assert row[1:4] == ("", "faster than halves for 16 tokens", None)
    assert row.detail == "16 tokens 10 us, halves 20, torch bf16 40; 512 tokens 30 us, halves 20, torch bf16 10"


# what a process does with the jobs "dies", "hangs" and others; two cases come first in "dies, wrong" and "hangs, wrong"
PROCESS = """
import sys, time
for job in map(str.strip, sys.stdin):
    print("a library says something", end="")
    if job.endswith("wrong"):
        print('\\nCASE ""\\nlibrary\\nCASE "y: error 1"', flush=True)
    if job in ("dies", "dies, wrong"):
        sys.exit("Traceback\\nCudaError: an illegal address")
    if job in ("hangs", "hangs, wrong"):
        time.sleep(600)
    print(f'\\nRESULT ["{job}", {{"seconds": 1}}]', flush=True)
"""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "COMMAND", [sys.executable, "-c", PROCESS])
    monkeypatch.setattr(runner, "_SHORTEST", 0.0)


@pytest.mark.usefixtures("processes")
def test_a_process_that_dies_takes_one_job_with_it_and_no_time_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    found = runner.in_turn(["one", "dies", "two"], time.monotonic() + PATIENCE, lambda job, result: shown.append(job))
    assert shown == ["one", "dies", "two"]
    assert found["one"] == found["two"] == {"seconds": 1}
    assert found["dies"] == {"failed": "exit code 1: Traceback CudaError: an illegal address"}
    found = runner.in_turn(["one", "hangs", "two"], time.monotonic() + 8, lambda job, result: None)
    assert found == {"one": {"seconds": 1}, "hangs": {"late": runner.CUT}, "two": {"late": runner.LATE}}
    monkeypatch.setattr(runner, "PROCESSES", 2)
    many = ["dies", *map(str, range(20)), "dies too"]
    found = runner.at_once(many, time.monotonic() + PATIENCE, lambda job, result: shown.append(job))
    assert list(found) == many
    assert sorted(shown[3:]) == sorted(many)
    assert [job for job, result in found.items() if result != {"seconds": 1}] == ["dies"]
    assert "illegal address" in found["dies"]["failed"]


@pytest.mark.usefixtures("processes")
def test_cases_before_a_job_was_cut_or_has_failed_are_reported() -> None:
    known = {"cases": 2, "wrong": ["y: error 1"]}
    found = runner.in_turn(["dies, wrong", "hangs, wrong"], time.monotonic() + 4, lambda job, result: None)
    assert "illegal address" in found["dies, wrong"].pop("failed")
    assert found == {"dies, wrong": known, "hangs, wrong": {"late": runner.CUT} | known}
    line = "not run: no end in time, after 2 cases; y: error 1"
    assert report.shown("hangs, wrong", found["hangs, wrong"]).endswith(line)


@pytest.mark.usefixtures("processes")
def test_errors_that_compute_sanitizer_finds_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a program of that name, which finds one where the job is "two"."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        '#!/bin/sh\nread job\nshift\necho "$job" | "$@"\n[ "$job" != two ] || { echo "===== Invalid read"; exit 9; }\n'
    )
    tool.chmod(0o755)
    found: dict[str, Any] = {}
    runner.sanitized(["one"], time.monotonic() + PATIENCE, found.__setitem__)
    assert not found  # it is not installed
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    runner.sanitized(["one", "two", "dies"], time.monotonic() + PATIENCE, found.__setitem__)
    assert found["one"] == {"seconds": 1}
    assert found["two"] == {"failed": "exit code 9: Invalid read"}
    assert "illegal address" in found["dies"]["failed"]


@pytest.mark.parametrize("installed", [True, False])
def test_times_leave_compute_sanitizer_a_minute_where_it_is_installed(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    until: list[float] = []

    def noted(wanted: Any, end: float, show: Any) -> dict[str, Any]:
        until.append(end)
        return {name: {"wrong": []} for name in wanted}

    monkeypatch.setattr(check.gpu_check, "missing", lambda: None)
    monkeypatch.setattr(check.gpu_check, "machine", lambda: "a GPU")
    monkeypatch.setattr(runner, "at_once", lambda *_: {})
    monkeypatch.setattr(runner, "in_turn", noted)
    monkeypatch.setattr(runner, "sanitizer", lambda: "/a/compute-sanitizer" if installed else None)
    monkeypatch.setattr(runner, "sanitized", noted)
    monkeypatch.setattr(jobs, "TIMES", [])
    ran(tmp_path)
    first, times, sanitized = until
    assert sanitized == first
    assert sanitized - times == pytest.approx(check.gpu_check.FOR_SANITIZER if installed else 0)


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
    assert "time/torch_product/8x512: exit code 1: RuntimeError('CUDA error: out of memory')" in found["wrong"]
    assert "failed" not in found["times"]["time/product/8x512/Q4_K"]
    out = capsys.readouterr().out
    assert "FAILED time/torch_product/8x512: exit code 1" in out
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
    assert capsys.readouterr().out.endswith("no more is checked, as not even one product works\n")


def test_what_is_known_is_in_the_json_after_each_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(job: str) -> Any:
        if job == "second":
            raise KeyboardInterrupt
        return {"wrong": [], "notes": "fine"}

    monkeypatch.setattr(jobs, "run", killed)
    monkeypatch.setattr(jobs, "CORRECT", ["first", "second"])
    with small_check(), pytest.raises(KeyboardInterrupt):
        check.main(["--json", str(tmp_path / "out.json")])
    known = json.loads((tmp_path / "out.json").read_text())
    assert known["correctness"] == {job: {"wrong": [], "notes": "fine"} for job in (jobs.FIRST, "first")}


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
    assert f"0 of {len(jobs.CORRECT)} right.\nNot run, for lack of time: correct/mmvq, " in out
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
    monkeypatch.setattr(runner, "at_once", lambda *_: checks)
    first = {jobs.FIRST: {"wrong": [], "notes": ""}}
    monkeypatch.setattr(runner, "in_turn", lambda wanted, *_: first if wanted == [jobs.FIRST] else times)
    found_code, found = ran(tmp_path)
    assert (found_code, found["wrong"], found["not_run"]) == (code, [], [late])
    assert {row["met"] for row in found["table"] if row["bar"]} == ({True, None} if job == "time/decode" else {True})
    out = capsys.readouterr().out
    assert f"{2 - (job is None)} of 2 right.\nNot run, for lack of time: {late}." in out


def test_a_folder_that_cannot_be_written_to_is_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "run", lambda job: pytest.fail(job))
    with small_check():
        assert check.main(["--json", str(tmp_path / "missing" / "out.json")]) == 2
    assert capsys.readouterr().err.startswith("no check: [Errno 2] No such file")


def test_kernels_that_other_versions_have_compiled_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be compiled again, for the better part of an hour."""
    from bridge.cuda import compiler

    ran: list[Any] = []
    monkeypatch.setattr(check.gpu_check, "check", lambda *given: ran.append(given) or 0)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "set by the script")
    other = tmp_path / "cubins" / "9.0-of-others"
    other.mkdir(parents=True)
    with small_check():
        assert check.main(["--kernels", str(tmp_path)]) == 2
        assert not ran
        said = capsys.readouterr().err
        assert said.startswith(f"no check: {tmp_path} has no kernels for compute capability 9.0 that the versions of ")
        assert said.endswith(" here have made; compile them with the same, or leave --kernels out\n")
        own = compiler.folder((9, 0))
        assert own is not None
        own.mkdir()
        (own / "digest").touch()
        assert check.main(["--kernels", str(tmp_path)]) == 0
    assert ran


def test_what_is_not_installed_or_cannot_be_used_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridge.cuda import device as devices

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
            assert line.startswith(expected)
            assert re.search(r" \d+\.\d us +\d+\.\d GB/s, +\d+% of reading \(\d+ GB/s\)$", line)
        with pytest.raises(BridgeError, match=r"Q9_K: is neither a GGUF file nor a type \(Q"):
            bench("Q9_K", device="cuda")


def test_shapes_and_model_are_those_of_the_bars() -> None:
    from bridge.cuda import bench

    assert (timing.shape_of(jobs.LARGE), timing.shape_of(jobs.SMALL)) == (bench.LARGE, bench.SMALL)
    file = timing.SyntheticFile
    layer = file.HIDDEN * (2 * file.HIDDEN + 2 * file.HIDDEN // file.HEADS * file.KV_HEADS + 3 * file.INNER)
    weights = file.LAYERS * layer + 2 * file.VOCAB * file.HIDDEN
    assert weights == pytest.approx(8.03e9, rel=1e-3)


@pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))
@pytest.mark.parametrize("job", ["attention", pytest.param("graphs", marks=pytest.mark.exhaustive)])
def test_jobs_whose_kernels_run_here_are_right_and_wrong_where_kernels_do_nothing(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the machine of tests/support/gpu, which computes: captured products, and attention over two tiles."""
    from bridge.cuda.launch import Kernel

    monkeypatch.setattr(torchs, "SHAPE", (6, 256))
    monkeypatch.setattr(torchs, "TOKENS", (1,))
    for name, value in (("HEADS", 2), ("KV_HEADS", 1), ("HEAD_DIM", 32), ("LENGTHS", (128,))):
        monkeypatch.setattr(contexts, name, value)
    run = {"graphs": torchs.check_graphs, "attention": lambda: contexts.check("q8_0")}[job]
    with pretended_gpu(multiprocessors=2, graphs=True):
        assert run()["wrong"] == []
        monkeypatch.setattr(Kernel, "run", lambda *given: None)
        assert len(run()["wrong"]) == {"graphs": 5, "attention": 4}[job]


def test_kernels_that_jobs_launch_are_found_without_a_gpu_and_can_be_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridge.cuda import compiler

    from tests.support.gpu import carried

    for name, value in (("SHAPES", [(3, 512)]), ("SMALL_BLOCKS", []), ("COLUMNS", (1, 5)), ("EPILOGUES", (10, 256))):
        monkeypatch.setattr(products, name, value)
    found = carried.kernels(["correct/one", "correct/products/Q6_K/int8", "time/launches"], (8, 9))
    names = {kernel.name for kernel in found}
    assert {"_product_Q4_0_1_f32_2_1_1_4", "_quantize_bf16_int8", "_product_Q6_K_8_int8_2_1_1_4"} <= names
    assert not any("Q4_K" in name for name in names)  # what has no kernels to check is left out
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(carried, "kernels", lambda *given: found[:1])
    said = carried.compile_into(tmp_path, (8, 9), ["correct/one"])
    assert re.fullmatch(rf"1 of 1 kernels for 8\.9, 0\.\d MB, in {tmp_path}", said)
    if ptx.unavailable() is None:
        found[0].codes.clear()
        assert compiler.known(found[0], (8, 9)) is not None  # from the folder
        assert compiler.known(found[0], (9, 0)) is None or (9, 0) in found[0].codes


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
