"""Jobs in processes of their own: a kernel that goes wrong takes its process with it, and no more than that.

A process is given several jobs and reports each as a line on stdout. Where it dies, the job it was at has failed and
another process goes on with the rest. When time is up it is killed; what it has reported stays, and what is left has
not failed, but was not run.
"""

from __future__ import annotations

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
_SHORTEST = 5.0  # seconds; with less, no process is begun

Result = dict[str, Any]  # what a job found, {"failed": why}, or {"late": why} where it was not run or not to its end
Note = Callable[[str, Result], None]


def work(jobs: Sequence[str], known: Callable[[str], Result]) -> None:
    """What a process does: its jobs, one after the other; the first that fails ends it."""
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
    """Run one process, noting what it reports; what that makes of the job it ended at."""
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
    """Ours; what one process compiles the next one finds, even where there is no home to keep it in."""
    import numba

    import bridge.system.jit  # noqa: F401  # chooses the folder

    return os.environ | {"NUMBA_CACHE_DIR": str(numba.config.CACHE_DIR)}
