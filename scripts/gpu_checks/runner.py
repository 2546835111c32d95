"""Jobs in separate processes: a kernel that crashes ends only its own process.

A process gets several jobs and reports each as a line on stdout. If it dies, its current job has failed and another
process continues with the rest. When time is up it is killed: reported results stay, and the remaining jobs count as
not run, not as failed.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bridge.system.cpus import usable_cpus

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--jobs"]
PROCESSES = max(1, min(12, usable_cpus() - 2))
LATE = "no time was left"
CUT = "no end in time"
_MARK = "RESULT "
_SHORTEST = 5.0  # seconds; with less, no process is started

Result = dict[str, Any]  # of a job, {"failed": why}, or {"late": why} if it was not run to its end
Note = Callable[[str, Result], None]


def work(jobs: Sequence[str], known: Callable[[str], Result]) -> None:
    """A process's work: its jobs, one after the other; the first failure ends it."""
    for job in jobs:
        print(f"\n{_MARK}{json.dumps([job, known(job)])}", flush=True)


def at_once(jobs: Sequence[str], until: float, show: Note) -> dict[str, Result]:
    """Results of jobs, each in a process, several at a time, until time.monotonic() is `until`."""
    with ThreadPoolExecutor(PROCESSES) as pool:
        found = list(pool.map(lambda job: in_turn([job], until, show), jobs))
    return {job: result for results in found for job, result in results.items()}


def in_turn(jobs: Sequence[str], until: float, show: Note) -> dict[str, Result]:
    """Results of jobs, one after the other, in one process as long as none fails."""
    results: dict[str, Result] = {}

    def note(job: str, result: Result) -> None:
        results[job] = result
        show(job, result)

    while left := [job for job in jobs if job not in results]:
        if time.monotonic() + _SHORTEST > until:
            for job in left:
                note(job, {"late": LATE})
            break
        end = process(left, until, note)
        if (next_one := next((job for job in left if job not in results), None)) is not None:
            note(next_one, end)
    return results


def process(jobs: Sequence[str], until: float, note: Note) -> Result:
    """Run one process and note its reports; returns the result of the job at which it ended."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        started = subprocess.Popen(
            [*COMMAND, *jobs], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=_environment()
        )
        timer = threading.Timer(max(0.0, until - time.monotonic()), started.kill)
        timer.start()
        try:
            assert started.stdout is not None
            for line in started.stdout:
                if line.startswith(_MARK) and line.endswith("\n"):  # whole
                    note(*json.loads(line.removeprefix(_MARK)))
            code = started.wait()
        finally:
            timer.cancel()
            started.kill()
            started.wait()
        if time.monotonic() >= until:
            return {"late": CUT}
        errors.seek(0)
        return {"failed": f"exit code {code}: {' '.join(errors.read().split())[-1500:]}"}


def _environment() -> dict[str, str]:
    """Our environment, with a compile cache that all processes share, even without a home folder."""
    import numba

    import bridge.system.jit  # noqa: F401  # chooses the folder

    return os.environ | {"NUMBA_CACHE_DIR": str(numba.config.CACHE_DIR)}
