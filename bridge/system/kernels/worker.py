"""Processes that compile: Numba compiles one function at a time in each.

Nothing is forked, and the program's own main module is not imported again. A process takes jobs, pickled, and answers
each with what a function makes of it.
"""

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

Job = TypeVar("Job")
Answering = TypeVar("Answering", bound="Worker")


class Worker:
    """A process that answers jobs by a function of a module; if it ends, another one takes its place."""

    def __init__(self, module: str, function: str) -> None:
        self._code = "import gc, sys; gc.set_threshold(100_000, 20, 20); "  # a compiler's objects stay
        self._code += f"sys.path[:] = {sys.path!r}; from {__name__} import work; from {module} import "
        self._code += f"{function}; work({function})"
        self._process = self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-c", self._code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def answer(self, job: Any) -> Any:
        """What the function made of a job. Raises EOFError where the process ended meanwhile."""
        if self._process.poll() is not None:
            self.end()
            self._process = self._started()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(job, self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            self.end()
            raise EOFError(f"its process ended with exit code {self._process.returncode}") from None

    def end(self) -> None:
        """Stop it, also where it is still at work."""
        self._process.kill()
        with suppress(OSError):  # what it was given and has not read
            self._process.communicate()


def share_out(
    workers: Sequence[Answering], jobs: Iterable[Job], answer: Callable[[Answering, Job], None],
    done: Callable[[int, Job], None],
) -> None:  # fmt: skip
    """Call `answer` with each job and a worker that is free, and `done` with how many are done and the last of them.

    The workers are ended, also where one of the two raises.
    """
    idle: SimpleQueue[Answering] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def by_one(job: Job) -> None:
        worker = idle.get()
        try:
            answer(worker, job)
        finally:
            idle.put(worker)

    try:
        with ThreadPoolExecutor(len(workers)) as threads:
            waiting = {threads.submit(by_one, job): job for job in jobs}
            for count, future in enumerate(as_completed(waiting), 1):
                future.result()
                done(count, waiting[future])
    finally:
        for worker in workers:
            worker.end()


def work(function: Any) -> None:
    """What such a process does, until its standard input ends."""
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(function(job), answers)
        answers.flush()
