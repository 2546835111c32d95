"""Kernels compiled by several processes at once: Numba compiles one at a time in each.

A process is this file, run by itself; it takes kernels by the functions that make them and answers with machine code.
Nothing is forked, and the program's own main module is not imported again.
"""

import pickle
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from queue import SimpleQueue

from bridge.cuda import compiler
from bridge.cuda.compiler import Capability, Source

from bridge.system.cpus import usable_cpus
from bridge.system.progress import Progress

_MOST = 8  # processes, of 0.3 GB each


def compile_all(sources: Iterable[Source], capability: Capability, progress: Progress) -> dict[Source, str]:
    """Compile those of the kernels that have not been compiled yet, for a GPU that need not be there.

    Returns why, in a line, for those that failed. Whoever needs one of them compiles it again.
    """
    failed: dict[Source, str] = {}
    missing = [source for source in dict.fromkeys(sources) if compiler.known(source, capability) is None]
    missing.sort(key=lambda source: -len(source.function.__code__.co_code))  # the longest first
    count = min(_MOST, usable_cpus(), len(missing))
    if count < 2 or not sys.executable:
        for done, source in enumerate(missing, 1):
            try:
                compiler.code(source, capability)
            except Exception as problem:
                failed[source] = compiler.failure(problem, f"compiling {source.name}")
            progress(done, len(missing), source.name)
        return failed
    idle: SimpleQueue[_Process] = SimpleQueue()
    processes = [_Process() for _ in range(count)]
    for process in processes:
        idle.put(process)

    def compiled(source: Source) -> None:
        process = idle.get()
        try:
            code = process.code(source, capability)
            if isinstance(code, str):
                failed[source] = code
            else:
                source.codes[capability] = code
        finally:
            idle.put(process)

    try:
        with ThreadPoolExecutor(count) as threads:
            waiting = {threads.submit(compiled, source): source for source in missing}
            for done, future in enumerate(as_completed(waiting), 1):
                future.result()
                progress(done, len(missing), waiting[future].name)
    finally:
        for process in processes:
            process.end()
    return failed


class _Process:
    """A process that compiles; if it ends, another one takes its place."""

    def __init__(self) -> None:
        self._process = self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import work; work()"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def code(self, source: Source, capability: Capability) -> compiler.Code | str:
        """Machine code; where that failed, why, in a line."""
        if self._process.poll() is not None:
            self.end()
            self._process = self._started()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump((source, capability), self._process.stdin)
            self._process.stdin.flush()
            answer: compiler.Code | str = pickle.load(self._process.stdout)
            return answer
        except (OSError, EOFError, pickle.UnpicklingError):
            self.end()
            return f"the process that compiled {source.name} ended with exit code {self._process.returncode}"

    def end(self) -> None:
        """Stop it, also where it is still compiling."""
        self._process.kill()
        with suppress(OSError):  # what it was given and has not read
            self._process.communicate()


def work() -> None:
    """What such a process does, until its standard input ends."""
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr
    while True:
        try:
            source, capability = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: compiler.Code | str
        try:
            answer = compiler.code(source, capability)
        except Exception as problem:
            answer = compiler.failure(problem, f"compiling {source.name}")
        pickle.dump(answer, answers)
        answers.flush()
