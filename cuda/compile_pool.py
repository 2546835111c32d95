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
from typing import Any

from bridge.cuda import compiler
from bridge.cuda.compiler import Capability, Source

from bridge.system.cpus import usable_cpus
from bridge.system.progress import Progress

_MOST = 8  # processes, of 0.3 GB each


def compile_all(sources: Iterable[Source], capability: Capability, progress: Progress) -> None:
    """Compile those of the kernels that have not been compiled yet, for a GPU that need not be there.

    What fails is left to `compiler.code`, which says why.
    """
    missing = [source for source in dict.fromkeys(sources) if compiler.known(source, capability) is None]
    missing.sort(key=lambda source: -len(source.function.__code__.co_code))  # the longest first
    count = min(_MOST, usable_cpus(), len(missing))
    if count < 2 or not sys.executable:
        for done, source in enumerate(missing, 1):
            with suppress(Exception):
                compiler.code(source, capability)
            progress(done, len(missing), source.name)
        return
    idle: SimpleQueue[_Process] = SimpleQueue()
    processes = [_Process() for _ in range(count)]
    for process in processes:
        idle.put(process)

    def compiled(source: Source) -> None:
        process = idle.get()
        try:
            code = process.code(source, capability)
            if code is not None:
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


class _Process:
    """A process that compiles."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import work; work()"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def code(self, source: Source, capability: Capability) -> Any:
        """Machine code; None where that failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump((source, capability), self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):  # it has ended
            return None

    def end(self) -> None:
        """Stop it, also where it is still compiling."""
        self._process.kill()
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
        try:
            code = compiler.code(source, capability)
        except Exception:
            code = None
        pickle.dump(code, answers)
        answers.flush()
