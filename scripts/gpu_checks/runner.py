"""Jobs in separate processes: a kernel that crashes ends only its own process.

A process reads jobs, one a line, and answers each with a line on stdout, and before that with one for each case of the
job. Several share one list, so that none waits while there is something to do. If one fails, dies or reaches its limit,
its process is killed, and a new one goes on with the rest. When time is up all are killed: what was reported stays, of
cases too, and the remaining jobs count as not run, not as failed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from bridge.errors import BridgeError
from bridge.system.cpu.cpus import usable_cpus
from bridge.system.storage import kernel_cache

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--jobs"]
PROCESSES = max(1, min(12, usable_cpus() - 2))

# seconds until a job has ended or reported its next case
FIRST_LIMIT = 90.0  # of a process's first job, which imports what it needs, and may compile
LIMIT = 40.0  # of the others
LIMITS = {
    "correct/mmvq": 240.0,  # nvcc compiles llama.cpp's source
    "correct/model": 180.0,  # compiles every kernel of a model, for two precisions
    "correct/inductor": 120.0,  # torch's compiler
    "correct/load": 90.0,  # imports transformers
    "time/decode": 120.0,  # makes and uploads a model of 5 GB
}

LATE = "no time was left"
CUT = "time was up before its end"
STUCK = 3  # jobs in a row that reach their limit: one more is tried, to see whether the GPU still works
HANGS = f"{STUCK} jobs in a row reached their limit, and then not even one product worked: the GPU hangs"
_MARK, _CASE = "RESULT ", "CASE "
_SANITIZED = 9  # the exit code where compute-sanitizer finds an error
_SHORTEST = 5.0  # seconds; with less, no process is started
_GRACE = 5.0  # seconds until a process that has closed its output, or was killed, is waited for no longer
_SHOWN, _STDERR = 1500, 20_000  # characters of a reason, and of what a failed process has written to stderr

# of a job, {"failed": why}, with what its process wrote to "stderr", and the "limit" in seconds if it was reached; or
# {"late": why} if it was not run to its end; both with the number of "cases" until then, and the "wrong" ones, if any
Result = dict[str, Any]
Note = Callable[[str, Result], None]
Case = Callable[[str, int, str], None]  # a job, the number of its cases so far, and what was wrong with the last, or ""

_working = False  # whether somebody reads what this process prints


def case(wrong: str = "") -> None:
    """Report a case of the current job, and what was wrong."""
    if _working:
        print(f"\n{_CASE}{json.dumps(wrong)}", flush=True)


def work(known: Callable[[str], Result]) -> None:
    """A process's work: jobs from standard input, one after the other; the first failure ends it."""
    global _working
    _working = True
    for line in sys.stdin:
        job = line.strip()
        result = outcome(known, job)
        print(f"\n{_MARK}{json.dumps([job, result])}", flush=True)
        if "failed" in result:
            sys.exit(1)


def outcome(known: Callable[[str], Result], job: str) -> Result:
    """The job's result; of an exception its type and message, and its traceback goes to stderr."""
    try:
        return known(job)
    except Exception as problem:
        traceback.print_exc()
        return {"failed": " ".join(f"{type(problem).__name__}: {problem}".split())[:_SHOWN]}


def _unheard(job: str, cases: int, wrong: str) -> None:
    pass


def at_once(jobs: Sequence[str], until: float, show: Note, case: Case = _unheard) -> dict[str, Result]:
    """Results of jobs by several processes, which begin them in this order, until time.monotonic() is `until`.

    show  is called with each job that has ended, by one thread at a time
    case  is called with each case of a job as it comes, by several threads
    """
    return _results(jobs, until, show, case, PROCESSES)


def in_turn(
    jobs: Sequence[str], until: float, show: Note, case: Case = _unheard, probe: str | None = None
) -> dict[str, Result]:
    """Results of jobs as of at_once, one after the other, in one process as long as none fails.

    probe  a job that is run when STUCK jobs in a row have reached their limit; if that is not right, the rest is not
           begun
    """
    return _results(jobs, until, show, case, 1, probe)


def sanitizer() -> str | None:
    """NVIDIA's compute-sanitizer; None where it is not installed."""
    return shutil.which("compute-sanitizer")


def sanitized(jobs: Sequence[str], until: float, show: Note) -> None:
    """Jobs as in_turn, each in a process under compute-sanitizer; none where that is not installed."""
    tool = sanitizer()
    for job in jobs if tool else []:
        left = until - time.monotonic()
        show(job, _sanitized(str(tool), job, left) if left > _SHORTEST else {"late": LATE})


def _sanitized(tool: str, job: str, seconds: float) -> Result:
    command = [tool, f"--error-exitcode={_SANITIZED}", *COMMAND]
    try:
        done = subprocess.run(
            command, input=f"{job}\n", capture_output=True, text=True, cwd=ROOT, env=_environment(), timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"late": CUT}
    lines = done.stdout.splitlines()
    reports: list[Result] = [json.loads(line.removeprefix(_MARK))[1] for line in lines if line.startswith(_MARK)]
    if reports and not done.returncode:
        return reports[0]
    reasons = [result["failed"] for result in reports if "failed" in result]
    reasons += [line.strip("= ") for line in lines if line.startswith("=====")]
    reason = " ".join(" ".join(reasons).split())[:_SHOWN] or " ".join(done.stderr.split())[-_SHOWN:]
    return {"failed": f"exit code {done.returncode}: {reason}"}


def _results(
    jobs: Sequence[str], until: float, show: Note, case: Case, processes: int, probe: str | None = None
) -> dict[str, Result]:
    left, results, lock, stuck = deque(jobs), dict[str, Result](), threading.Lock(), 0
    again = f"{probe}, again"

    def note(job: str, result: Result) -> None:
        nonlocal stuck
        with lock:
            results[job] = result
            stuck = stuck + 1 if "limit" in result else 0
            show(job, result)

    def serve() -> None:
        reason = LATE
        while left:
            if reason == HANGS or time.monotonic() + _SHORTEST > until:
                with suppress(IndexError):
                    note(left.popleft(), {"late": reason})
            elif probe is not None and stuck >= STUCK:
                process(deque([probe]), until, lambda _, result: note(again, result), case)
                if results[again].get("wrong") != []:
                    reason = HANGS
            else:
                process(left, until, note, case)

    with ThreadPoolExecutor(processes) as pool:
        for served in [pool.submit(serve) for _ in range(processes)]:
            served.result()
    return {job: results[job] for job in jobs}


def process(left: deque[str], until: float, note: Note, case: Case) -> None:
    """Run one process on jobs from the list, and note its reports, until there are none or one has no result."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        pipe = subprocess.PIPE
        started = subprocess.Popen(
            COMMAND, stdin=pipe, stdout=pipe, stderr=errors, text=True, errors="replace", cwd=ROOT, env=_environment()
        )
        lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=_read, args=(started.stdout, lines), daemon=True).start()
        first = True
        try:
            while left:
                try:
                    job = left.popleft()
                except IndexError:  # another process has taken it
                    return
                result = _result(started, lines, job, _limit(job, first), until, case)
                first = False
                if "failed" in result:
                    _end(started)
                    errors.seek(0)
                    result["stderr"] = errors.read()[-_STDERR:]
                    if not result["failed"]:
                        end = " ".join(result["stderr"].split())[-_SHOWN:]
                        result["failed"] = f"exit code {started.returncode}: {end}"
                note(job, result)
                if "failed" in result or "late" in result:
                    return
        finally:
            _end(started)


def _limit(job: str, first: bool) -> float:
    name = "/".join(job.split("/")[:2])
    return LIMITS.get(name, FIRST_LIMIT if first else LIMIT)


def _read(stream: IO[str], lines: "SimpleQueue[str]") -> None:
    """Pass a process's reports on, and "" at their end; what libraries print is left out."""
    with stream:
        for line in stream:
            if line.startswith((_MARK, _CASE)) and line.endswith("\n"):  # whole
                lines.put(line)
    lines.put("")


def _end(started: "subprocess.Popen[str]") -> None:
    """Kill a process that is still there; one that the driver does not let go is left behind."""
    started.kill()
    with suppress(subprocess.TimeoutExpired):
        started.wait(_GRACE)
    assert started.stdin is not None
    with suppress(OSError):
        started.stdin.close()


def _result(
    started: "subprocess.Popen[str]", lines: "SimpleQueue[str]", job: str, limit: float, until: float, case: Case
) -> Result:
    """What a process reports of a job; {"failed": ""} where it ends without."""
    assert started.stdin is not None
    with suppress(OSError):
        print(job, file=started.stdin, flush=True)
    cases, wrong = 0, list[str]()
    ends = time.monotonic() + limit
    ended: Result
    while True:
        try:
            line = lines.get(timeout=max(0.0, min(ends, until) - time.monotonic()))
        except Empty:
            if ends >= until:
                ended = {"late": CUT}
            else:
                of = " of its last case" if cases else ""
                ended = {"failed": f"not finished within {limit:g} s{of}", "limit": limit}
            break
        if line.startswith(_MARK):
            result: Result = json.loads(line.removeprefix(_MARK))[1]
            if "failed" not in result:
                return result
            ended = result
            break
        if not line:
            with suppress(subprocess.TimeoutExpired):
                started.wait(_GRACE)
            ended = {"failed": ""}
            break
        mistake = json.loads(line.removeprefix(_CASE))
        cases, ends = cases + 1, time.monotonic() + limit
        wrong += [mistake] * bool(mistake)
        case(job, cases, mistake)
    return ended | ({"cases": cases} if cases else {}) | ({"wrong": wrong} if wrong else {})


def _environment() -> dict[str, str]:
    """Our environment, with a compile cache that all processes share, even without a home folder: one may be given."""
    try:
        folder = kernel_cache.folder()
    except BridgeError:  # no home folder
        folder = Path(tempfile.mkdtemp(prefix="gguf-bridge-"))
    return {"NUMBA_CACHE_DIR": str(folder)} | os.environ
