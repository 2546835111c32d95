"""Jobs in separate processes: a kernel that crashes ends only its own process.

A process reads jobs, one a line, and answers each with a line on stdout, and before that with one for each case of the
job. Several share one list, so that none waits while there is something to do. If one dies, its current job has failed
and another process goes on with the rest. When time is up they are killed: what was reported stays, of cases too, and
the remaining jobs count as not run, not as failed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from bridge.system.cpus import usable_cpus

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--jobs"]
PROCESSES = max(1, min(12, usable_cpus() - 2))
LATE = "no time was left"
CUT = "no end in time"
_MARK, _CASE = "RESULT ", "CASE "
_SANITIZED = 9  # the exit code where compute-sanitizer finds an error
_SHORTEST = 5.0  # seconds; with less, no process is started

# of a job, {"failed": why}, or {"late": why} if it was not run to its end; the last two also with the number of "cases"
# until then, and those that were "wrong", if there are any
Result = dict[str, Any]
Note = Callable[[str, Result], None]

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
        print(f"\n{_MARK}{json.dumps([job, known(job)])}", flush=True)


def at_once(jobs: Sequence[str], until: float, show: Note) -> dict[str, Result]:
    """Results of jobs by several processes, which begin them in this order, until time.monotonic() is `until`."""
    return _results(jobs, until, show, PROCESSES)


def in_turn(jobs: Sequence[str], until: float, show: Note) -> dict[str, Result]:
    """Results of jobs, one after the other, in one process as long as none fails."""
    return _results(jobs, until, show, 1)


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
    for line in lines:
        if line.startswith(_MARK) and not done.returncode:
            result: Result = json.loads(line.removeprefix(_MARK))[1]
            return result
    said = [line.strip("= ") for line in lines if line.startswith("=====")] or [done.stderr]
    return {"failed": f"exit code {done.returncode}: {' '.join(' '.join(said).split())[-1500:]}"}


def _results(jobs: Sequence[str], until: float, show: Note, processes: int) -> dict[str, Result]:
    left, results, lock = deque(jobs), dict[str, Result](), threading.Lock()

    def note(job: str, result: Result) -> None:
        with lock:
            results[job] = result
            show(job, result)

    def serve() -> None:
        while left:
            if time.monotonic() + _SHORTEST > until:
                with suppress(IndexError):
                    note(left.popleft(), {"late": LATE})
            else:
                process(left, until, note)

    with ThreadPoolExecutor(processes) as pool:
        for served in [pool.submit(serve) for _ in range(processes)]:
            served.result()
    return {job: results[job] for job in jobs}


def process(left: deque[str], until: float, note: Note) -> None:
    """Run one process on jobs from the list, and note its reports, until there are none or it ends."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        pipe = subprocess.PIPE
        started = subprocess.Popen(
            COMMAND, stdin=pipe, stdout=pipe, stderr=errors, text=True, cwd=ROOT, env=_environment()
        )
        timer = threading.Timer(max(0.0, until - time.monotonic()), started.kill)
        timer.start()
        try:
            while left:
                try:
                    job = left.popleft()
                except IndexError:  # another process has taken it
                    return
                cases: list[str] = []
                if (result := _answer(started, job, cases)) is not None:
                    note(job, result)
                    continue
                known: Result = {"cases": len(cases)} if cases else {}
                if wrong := [what for what in cases if what]:
                    known["wrong"] = wrong
                if time.monotonic() >= until:
                    return note(job, {"late": CUT} | known)
                errors.seek(0)
                said = " ".join(errors.read().split())[-1500:]
                return note(job, {"failed": f"exit code {started.wait()}: {said}"} | known)
        finally:
            timer.cancel()
            started.kill()
            started.communicate()


def _answer(started: "subprocess.Popen[str]", job: str, cases: list[str]) -> Result | None:
    """A process's report of a job; None where it ends without. `cases` gets what was wrong with each, or ""."""
    assert started.stdin is not None
    assert started.stdout is not None
    with suppress(OSError):
        print(job, file=started.stdin, flush=True)
    for line in started.stdout:
        if line.startswith(_MARK) and line.endswith("\n"):  # whole
            result: Result = json.loads(line.removeprefix(_MARK))[1]
            return result
        if line.startswith(_CASE) and line.endswith("\n"):
            cases.append(json.loads(line.removeprefix(_CASE)))
    started.wait()
    return None


def _environment() -> dict[str, str]:
    """Our environment, with a compile cache that all processes share, even without a home folder: one may be given."""
    import numba

    import bridge.system.jit  # noqa: F401  # chooses the folder

    return {"NUMBA_CACHE_DIR": str(numba.config.CACHE_DIR)} | os.environ
