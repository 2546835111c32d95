"""Check and measure everything on a machine with an NVIDIA GPU, in one run of at most 8 minutes.

    python scripts/gpu_check.py [--json gpu_check.json] [--kernels build/kernels] [--models DIR] [--llama-cpp DIR]
    python scripts/gpu_check.py --after gpu_check.jsonl         what an earlier run there did not end, or found wrong

One product comes first, beside a check of each kind: without it, nothing else is tried. Then comes correctness, in
several processes at once, which also compiles the kernels that are timed later: products of all types against float64,
attention, tensors, modules, captured graphs, trellis codes, and the model in tests/data against the CPU runtime. Then
times are measured on replays of CUDA graphs whose weights rotate beyond the L2 cache: read bandwidth, products and
prompts beside torch's, attention, and tokens of a synthetic 8B model. gpu_checks/jobs.py lists all of them. With
--models each GGUF of a folder is checked against the CPU runtime, too: tests/support/gpu/small_models.py makes small
ones of all architectures. Where nvcc is installed and a checkout of llama.cpp is given, its own products of a vector
are compiled and timed beside ours.
Where compute-sanitizer is installed, some checks run again under it in the time that is left. The table comes last.
Jobs for which no time is left are listed as not run.

A job that neither ends nor reports a case for some 40 seconds has failed (runner.py has the limits): its process is
killed, and a new one goes on. If three in a row do so while times are measured, and one product no longer works either,
the rest is not run.

Two files are written, into $OUT where that is set and --json is not given, otherwise into the working directory:

    gpu_check.jsonl  a line of JSON for each case and for each job that has ended, appended at once: what was known
                     when a run was cut short is there. {"machine": ...} begins a run; "cases" counts those of a job
    gpu_check.json   everything with the table, at the end; --json gives it another name, and both another folder

Compiling all kernels takes the better part of an hour of CPU time: tests/support/gpu/carried.py does it on a machine
without a GPU, for a compute capability; what it lacks is compiled here. The exit code is 1 if a result is wrong or
below its bar, or if a check or a bar was not run; 2 if nothing can be checked.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchlib import option, parser

BUDGET = 465.0  # seconds, after which only the table is printed
FOR_FIRST = 100.0  # at most, for what comes first
FOR_CORRECTNESS = 0.6  # at most this share of it
LINES = "gpu_check.jsonl"
HELP = f"write the results to this file, and each as soon as it is known to {LINES} in the same folder"
OPTIONS = (
    option("--seconds", BUDGET, help="limit for the whole run"),
    option("--kernels", Path, "DIR", "a folder of kernels compiled elsewhere"),
    option("--models", Path, "DIR", "a folder of GGUFs of small models, to be checked too"),
    option("--llama-cpp", Path, "DIR", "a checkout of llama.cpp, to be timed too"),
    option("--after", Path, "FILE", f"{LINES} of an earlier run: what was right is kept"),
    option("--anyway", False, help="go on where not even one product works: a rehearsal"),
    option("--jobs", False, help=argparse.SUPPRESS),
)


def main(arguments: Sequence[str] | None = None) -> int:
    out = option("--json", Path(os.environ.get("OUT", ""), "gpu_check.json"), help=HELP)
    options = parser(__doc__, (out, *OPTIONS))
    begun = time.monotonic()
    a = options.parse_args(arguments)
    if a.kernels is not None:
        os.environ["BRIDGE_KERNELS"] = str(a.kernels.resolve())
    if a.models is not None:
        os.environ["BRIDGE_MODELS"] = str(a.models.resolve())
    if a.llama_cpp is not None:
        os.environ["LLAMA_CPP"] = str(a.llama_cpp.resolve())
    if (reason := missing()) is not None:
        print(f"no check: {reason}", file=sys.stderr)
        return 2
    from gpu_checks import jobs, runner

    if a.jobs:
        runner.work(jobs.run)
        return 0
    if a.kernels is not None:
        print(carried(a.kernels), flush=True)
    try:
        before = {} if a.after is None else went_well(a.after.read_text(), machine())
    except (OSError, ValueError) as problem:
        print(f"no check: --after {a.after}: {problem}", file=sys.stderr)
        return 2
    return check(a.json, begun, a.seconds, a.anyway, before)


def went_well(lines: str, on: str) -> dict[str, dict[str, Any]]:
    """The results of an earlier run's LINES that are neither wrong nor missing, if it was on such a machine."""
    reports = [json.loads(line) for line in lines.splitlines()]
    if any(line.get("machine", on) != on for line in reports):
        return {}
    results = {line["job"]: line["result"] for line in reports if "result" in line}
    return {job: result for job, result in results.items() if not result.keys() & {"failed", "late"}
            and not result.get("wrong")}  # fmt: skip


def check(
    out: Path, begun: float, seconds: float, anyway: bool = False, before: Mapping[str, dict[str, Any]] | None = None
) -> int:
    """All jobs, each result appended to LINES beside `out`, the table, and `out` with everything.

    begun    a time.monotonic()
    seconds  from then until only the table is printed
    anyway   go on where not even one product works
    before   results that are taken over; what comes first is run all the same
    """
    from gpu_checks import jobs, report, runner

    from bridge.errors import BridgeError
    from bridge.system.storage.files import expect_regular, write_text

    results: dict[str, Any] = {"machine": machine(), "correctness": {}, "times": {}, "sanitized": {}}
    lines = out.with_name(LINES)

    def save() -> None:
        results["seconds"] = time.monotonic() - begun
        write_text(out, json.dumps(results, indent=1))

    try:
        if out.exists():
            expect_regular(out)
        save()
        with open(lines, "ab"):
            pass
    except (OSError, BridgeError) as problem:
        print(f"no check: {problem}", file=sys.stderr)
        return 2

    def append(**line: Any) -> None:
        try:
            with open(lines, "ab", buffering=0) as file:
                file.write(f"{json.dumps({'seconds': round(time.monotonic() - begun, 2)} | line)}\n".encode())
        except OSError as problem:  # the run goes on, and prints its results
            print(f"{lines}: cannot be written ({problem.strerror})", file=sys.stderr, flush=True)

    def case(job: str, cases: int, wrong: str) -> None:
        append(job=job, cases=cases, **({"wrong": wrong} if wrong else {}))

    def show(job: str, result: dict[str, Any], part: str = "") -> None:
        print(report.shown(job, result), flush=True)
        results[part or ("times" if job.startswith("time/") else "correctness")][job] = result
        append(job=job, result=result)

    print(results["machine"], flush=True)
    append(machine=results["machine"])
    early = runner.at_once([jobs.FIRST, *jobs.EARLY], begun + min(seconds, FOR_FIRST), show, case)
    first = early.pop(jobs.FIRST)
    if "late" not in first and first.get("wrong", True) and not anyway:
        save()
        print(first.get("stderr", ""), end="")
        reason = first.get("failed") or "; ".join(first["wrong"])
        print(f"no more is checked, as not even one product works: {reason}", flush=True)
        return 1
    known = {job: result for job, result in early.items() if "late" not in result}
    earlier = before or {}
    known = {job: earlier[job] for job in jobs.CORRECT if job in earlier} | known
    timed = {job: earlier[job] for job in jobs.TIMES if job in earlier}
    others = [job for job in jobs.CORRECT if job not in known]
    results["correctness"] = known | runner.at_once(others, begun + FOR_CORRECTNESS * seconds, show, case)
    others = [job for job in jobs.TIMES if job not in timed]
    results["times"] = timed | runner.in_turn(others, begun + seconds, show, case, jobs.FIRST)
    if not any(result.get("late") == runner.HANGS for result in results["times"].values()):
        names = {job: f"sanitized {job}" for job in jobs.SANITIZED}
        results["sanitized"] = {name: earlier[name] for name in names.values() if name in earlier}
        others = [job for job, name in names.items() if name not in earlier]
        runner.sanitized(others, begun + seconds, lambda job, result: show(names[job], result, "sanitized"))
    everything = results["correctness"] | results["times"] | results["sanitized"]
    wrong = [line for result in everything.values() for line in result.get("wrong", [])]
    wrong += [f"{job}: {result['failed']}" for job, result in everything.items() if "failed" in result]
    late = [job for job, result in everything.items() if "late" in result]
    table = report.rows(results["times"])
    results.update(seconds=time.monotonic() - begun, wrong=wrong, not_run=late, table=[row._asdict() for row in table])
    print(report.printed(results, table, wrong), flush=True)
    save()
    complete = not results["correctness"].keys() & set(late) and all(row.met for row in table if row.bar)
    return 0 if complete and not wrong else 1


def missing() -> str | None:
    """Why nothing can be checked, in one line; None if it can."""
    try:
        import torch
        from bridge.cuda.toolchain.device import require

        import bridge.runtime.model  # noqa: F401  # with its dependencies
        from bridge.errors import BridgeError
    except ImportError as problem:
        return f"{problem.name or problem} is missing"
    try:
        require("cuda")
    except BridgeError as problem:
        return str(problem)
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} cannot use the GPU"
    return None


def carried(folder: Path) -> str:
    """How many kernels of a folder are for this GPU, in a line."""
    from bridge.cuda.toolchain import compiler
    from bridge.cuda.toolchain.device import require

    capability = require("cuda").capability
    count = compiler.count_elsewhere(capability)
    return f"{folder}: {count} kernels for compute capability {capability[0]}.{capability[1]}; others are compiled here"


def machine() -> str:
    """The GPU and the versions, in one line."""
    import numba
    import numba_cuda
    import torch
    from bridge.cuda.toolchain.device import require

    device = require("cuda")
    return (
        f"{device.name}, compute capability {'.'.join(map(str, device.capability))}, {device.multiprocessors} "
        f"multiprocessors; torch {torch.__version__}, numba {numba.__version__}, numba-cuda {numba_cuda.__version__}"
    )


if __name__ == "__main__":
    sys.exit(main())
